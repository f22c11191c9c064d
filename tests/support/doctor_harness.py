"""Machines made of files below a folder, configurations, and answers of gateways, for the doctor to
check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig, parse_config
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import CheckResult, Severity
from cluster.doctor.live_cluster import Expected, GatewayReply, Live
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.serve.machine import KernelClock, Machine
from cluster.serve.resource_needs import ClusterNeed, needs_of
from kvtransfer.common.clock import Clock, SystemClock

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"
_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             63000                63000                processes
Max open files            1024                 1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
_MEMORY = """MemTotal:       67108864 kB
MemAvailable:   60000000 kB
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
_MOUNTS = """22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
40 22 0:40 / /shared rw - nfs4 host:/export rw
41 22 0:41 / /memory rw - tmpfs tmpfs rw
42 22 259:1 / /fast rw - xfs /dev/nvme0n1 rw
43 22 0:43 / /layer rw - overlay overlay rw
"""
_HEALTHY = {
    "proc/self/limits": _LIMITS,
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-15\n",
    "proc/self/mountinfo": _MOUNTS,
    "proc/meminfo": _MEMORY,
    "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n",
    "sys/devices/system/node/node0/cpulist": "0-15\n",
    "sys/dev/block/8:2/queue/rotational": "0\n",
    "sys/dev/block/259:1/queue/rotational": "0\n",
    "dev/shm/nothing": "",
}


class FakeMachine:
    """A root with the files of a machine where all is well; `files` replace or add, None leaves one out.
    `commands` maps the beginning of a command line to what it prints."""

    def __init__(
        self, root: Path, files: Mapping[str, str | None] = {}, commands: Mapping[str, str] = {}
    ) -> None:
        self.root = root
        self.commands = dict(commands)
        self.asked: list[str] = []
        for name, text in {**_HEALTHY, **files}.items():
            if text is not None:
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

    def view(
        self,
        programs: Iterable[str] = ("c++",),
        clock: KernelClock | None = None,
        product_rates: Mapping[str, float] | None = None,
    ) -> Machine:
        """Return the view of a machine. Products are measured only where their rates are given, by dtype."""
        known = set(programs)
        return Machine(
            root=self.root,
            run=self._run,
            find_program=lambda name: f"/usr/bin/{name}" if name in known else None,
            home=self.root / "root",
            kernel_clock=lambda: clock,
            product_rates=lambda dtypes: {name: (product_rates or {})[name] for name in dtypes},
        )

    def _run(self, command: Sequence[str]) -> str | None:
        line = " ".join(command)
        self.asked.append(line)
        return next((text for start, text in self.commands.items() if line.startswith(start)), None)


def config_of(model: Path = TINY, pools: Sequence[Mapping[str, Any]] = (), **sections: Any) -> ClusterConfig:
    """Return a configuration with one prefill and one decode pool unless `pools` says otherwise."""
    default = ({"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"})
    return parse_config({"model": str(model), "pools": list(pools or default), **sections}, "test")


def context_of(
    machine: Machine,
    config: ClusterConfig | None = None,
    *,
    needs: ClusterNeed | None = None,
    environment: Mapping[str, str] = {},
    ray_address: str = "local",
    is_running: bool = False,
    clock: Clock | None = None,
) -> CheckContext:
    config = config or config_of()
    return CheckContext(
        machine=machine,
        config=config,
        needs=needs or needs_of(config),
        environment=environment,
        clock=clock or SystemClock(),
        ray_address=ray_address,
        is_running=is_running,
    )


def said(look: Callable[[Any], Iterable[CheckResult]], context: Any) -> list[tuple[Severity, str]]:
    """Return a check's results as (severity, observation)."""
    return [(result.severity, result.seen) for result in look(context)]


def only(look: Callable[[Any], Iterable[CheckResult]], context: Any) -> CheckResult:
    """Return the one result of a check; each that is not well has a reason and a remedy."""
    (result,) = look(context)
    if result.severity in (Severity.WARNING, Severity.ERROR):
        assert result.why
        assert result.remedy
    return result


NOW = 1_800_000_000.0
_DAY_MS = 86_400_000
VERSIONS = {"tandem-serve": "0.1.0", "ray": "2.60.0"}
Change = Callable[[admin_pb.StatusResponse], object]


def replica(name: str, role: str) -> admin_pb.Replica:
    """Return a replica that has been ready for a day, half full, nothing wrong."""
    return admin_pb.Replica(
        replica_id=name,
        epoch=int(NOW * 1000) - _DAY_MS,
        pool=role,
        role=value_of(admin_pb.ReplicaRole, role),
        state=admin_pb.REPLICA_STATE_READY,
        load=admin_pb.Load(
            num_free_blocks=500,
            num_total_blocks=1000,
            decode_step_ms=10.0,
            prefill_tok_s=1000.0,
            age_s=0.2,
        ),
    )


def status() -> admin_pb.StatusResponse:
    """Return a status in which p0 prefills and d0 decodes; one gateway, a day old, a hundred quick
    requests."""
    return admin_pb.StatusResponse(
        replicas=[replica("p0", "prefill"), replica("d0", "decode")],
        gateways=[
            admin_pb.GatewayStatus(gateway_id="g0", address="h:1", admin="h:11"),
            admin_pb.GatewayStatus(gateway_id="g1", address="h:2", admin="h:12"),
        ],
        uptime_s=86_400.0,
        versions=VERSIONS,
        num_finished_requests=1000,
        ready=True,
        authentication="required",
        pools=[
            admin_pb.Pool(
                name="prefill", role=admin_pb.REPLICA_ROLE_PREFILL, configured=1, desired=1, num_ready=1
            ),
            admin_pb.Pool(
                name="decode", role=admin_pb.REPLICA_ROLE_DECODE, configured=1, desired=1, num_ready=1
            ),
        ],
        wall_time_s=NOW,
        recent=admin_pb.RecentRequests(
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


def store_node() -> admin_pb.StoreNodeStat:
    return admin_pb.StoreNodeStat(
        member=admin_pb.StoreMember(node_id="n0", epoch=1, host="node-a", process_id=77),
        tiers=[admin_pb.StoreTier(tier="dram", num_bytes=5, capacity_bytes=10)],
        index=admin_pb.StoreIndex(state="up", num_lookups=100, latency_ms=0.4),
    )


def live(
    change: Change = lambda status: None,
    *,
    before: Change | None = None,
    store: Callable[[admin_pb.StoreNodeStat], object] = lambda node: None,
    store_before: Callable[[admin_pb.StoreNodeStat], object] | None = None,
    other: Change | None = None,
    path: Callable[[admin_pb.Path], object] = lambda path: None,
    replies: tuple[GatewayReply, ...] = (),
    **expected: float,
) -> Live:
    """Return two looks at a cluster. `change` is made to both; `before`, where it is given, replaces it for
    the first. `other` is made to the second gateway's answer (as `change`, where it is not given)."""
    now, earlier, second = status(), status(), status()
    change(now)
    (before or change)(earlier)
    (other or change)(second)
    written = admin_pb.Path(peer_replica_id="d0", transport="shm", gb_s=5.0, latency_us=3.0, device="memory")
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
        paths=[admin_pb.ReplicaPaths(replica_id="p0", paths=[written])],
    )
