"""Answers of gateways, made by hand: a cluster where all is well, for tests to break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.doctor.checks import Expected, GatewayReply, Live
from cluster.proto import tandem_pb2 as pb

NOW = 1_800_000_000.0
_DAY_MS = 86_400_000
VERSIONS = {"tandem-serve": "0.1.0", "ray": "2.60.0"}
Change = Callable[[pb.StatusResponse], object]


def replica(name: str, role: str) -> pb.Replica:
    """Ready for a day, half full, nothing wrong."""
    return pb.Replica(
        replica_id=name,
        epoch=int(NOW * 1000) - _DAY_MS,
        pool=role,
        role=role,
        state="ready",
        load=pb.Load(
            num_free_blocks=500,
            num_total_blocks=1000,
            decode_step_ms=10.0,
            prefill_tok_s=1000.0,
            age_s=0.2,
        ),
    )


def status() -> pb.StatusResponse:
    """p0 prefills, d0 decodes; one gateway, a day old, a hundred quick requests."""
    return pb.StatusResponse(
        replicas=[replica("p0", "prefill"), replica("d0", "decode")],
        gateways=[
            pb.GatewayStatus(gateway_id="g0", address="h:1"),
            pb.GatewayStatus(gateway_id="g1", address="h:2"),
        ],
        uptime_s=86_400.0,
        versions=VERSIONS,
        num_finished_requests=1000,
        ready=True,
        pools=[
            pb.Pool(name="prefill", role="prefill", configured=1, desired=1, num_ready=1),
            pb.Pool(name="decode", role="decode", configured=1, desired=1, num_ready=1),
        ],
        wall_time_s=NOW,
        recent=pb.RecentRequests(
            num_requests=100,
            window_s=60.0,
            ttft_p50_ms=100.0,
            ttft_p90_ms=200.0,
            tpot_p50_ms=10.0,
            tpot_p90_ms=20.0,
            slow_ttft_ms=300.0,
            slow_queue_ms=100.0,
            slow_prefill_ms=150.0,
            slow_prompt_tokens=1000,
            slow_cached_tokens=400,
            transfer_p90_ms=5.0,
        ),
    )


def store_node() -> pb.StoreNodeStat:
    return pb.StoreNodeStat(
        member=pb.StoreMember(node_id="n0", epoch=1, host="node-a", process_id=77),
        tiers=[pb.StoreTier(tier="dram", num_bytes=5, capacity_bytes=10)],
        index=pb.StoreIndex(state="up", num_lookups=100, latency_ms=0.4),
    )


def live(
    change: Change = lambda status: None,
    *,
    before: Change | None = None,
    store: Callable[[pb.StoreNodeStat], object] = lambda node: None,
    store_before: Callable[[pb.StoreNodeStat], object] | None = None,
    other: Change | None = None,
    path: Callable[[pb.Path], object] = lambda path: None,
    replies: tuple[GatewayReply, ...] = (),
    **expected: float,
) -> Live:
    """`change` is made to both looks; `before`, where it is given, replaces it for the first. `other` is made
    to what the second gateway says (as `change`, where it is not given)."""
    now, earlier, second = status(), status(), status()
    change(now)
    (before or change)(earlier)
    (other or change)(second)
    written = pb.Path(peer_replica_id="d0", transport="shm", gb_s=5.0, latency_us=3.0, device="memory")
    path(written)
    node, node_before = store_node(), store_node()
    store(node)
    (store_before or store)(node_before)
    settings: dict[str, Any] = Expected.of(None)._asdict() | expected
    return Live(
        status=now,
        before=earlier,
        stores=[node],
        stores_before=[node_before],
        gateways=replies or (GatewayReply("h:1", now), GatewayReply("h:2", second)),
        expected=Expected(**settings),
        version="0.1.0",
        paths=[pb.ReplicaPaths(replica_id="p0", paths=[written])],
    )
