"""What people are shown: progress without a terminal, tables in 80 columns, notes of what should not be."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from cluster.cli.calls import explain_view, status_view
from cluster.cli.demo import DemoRow, demo_table
from cluster.cli.layers_table import layers_parts
from cluster.cli.progress_report import progress_to, stages
from cluster.cli.store_tables import size
from cluster.cli.terminal import NONE
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import StartingReplica
from cluster.serve.launcher import StartProgress, starting_text
from kvtransfer.common.clock import ManualClock


def shown(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_without_a_terminal_every_stage_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=20, force_terminal=False)
    with stages(console, "starting") as report:
        for stage in ("loading: decode 0 of 2", "loading: decode 0 of 2", "loading: decode 1 of 2"):
            report(stage)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["starting", "loading: decode 0 of 2", "loading: decode 1 of 2"]


def test_without_a_terminal_the_detail_of_a_long_stage_is_said_now_and_then() -> None:
    console, clock = Console(file=io.StringIO(), width=20, force_terminal=False), ManualClock()
    with stages(console, "starting", clock) as report:
        show = progress_to(report)
        for number in range(25):
            show(StartProgress("loading", {"decode": (0, 1)}, f"decode-0: layer {number} [of 25]"))
            clock.advance(1.0)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "starting",
        "loading: decode 0 of 1",
        "loading: decode 0 of 1; decode-0: layer 10 [of 25]",
        "loading: decode 0 of 1; decode-0: layer 20 [of 25]",
    ]


def test_what_starts_is_shown_of_two_replicas_and_counted_of_the_others() -> None:
    replicas = [StartingReplica(f"decode-{n}", "decode", f"layer {n}") for n in range(4)]
    assert starting_text([]) == ""
    assert starting_text(replicas[:1]) == "decode-0: layer 0"
    assert starting_text(replicas) == "decode-0: layer 0; decode-1: layer 1; 2 more"


@pytest.mark.parametrize("alone", [False, True])
def test_the_demos_table_is_whole_in_80_columns(alone: bool) -> None:
    prefill = "decode-abcd1234" if alone else "prefill-abcd1234"
    table = shown(demo_table([DemoRow(prefill, "decode-abcd1234", 1488, 1352, 1053.2, 105.4, 12.38, "shm")]))
    for cell in (prefill, "decode-abcd1234", "1352 of 1488", "1053.2", "105.4", "12.38 shm", "GB/s"):
        assert cell in table
    assert ("the same replica twice" in table) == alone


def test_the_demo_says_what_the_store_gave() -> None:
    row = DemoRow("p", "d", 1488, 1352, 1.0, 1.0, 0.0, "", {"dram": 1024, "nvme": 0, "remote": 64})
    table = shown(demo_table([row]))
    assert "1352 of 1488" in table
    assert "1024 dram, 64 remote" in table


def tier(name: str, **figures: Any) -> admin_pb.StoreTier:
    return admin_pb.StoreTier(tier=name, **figures)


def test_the_tiers_of_every_node_are_whole_in_80_columns_with_what_should_not_be() -> None:
    large = {"num_bytes": 123_456_789_012, "capacity_bytes": 900_000_000_000, "num_records": 1_234_567}
    full = admin_pb.StoreNodeStat(
        member=admin_pb.StoreMember(node_id="0123456789ab", address="127.0.0.1:1"),
        tiers=[
            tier("dram", num_hits=999, num_misses=1, num_quarantined=2, **large),
            tier("nvme", num_checksum_failures=3, num_io_errors=4, note="read-only", **large),
            tier("remote"),
        ],
        index=admin_pb.StoreIndex(state="slow", note="away since 3 s"),
    )
    gone = admin_pb.StoreNodeStat(
        member=admin_pb.StoreMember(node_id="ba9876543210", address="127.0.0.1:2"), error="not reached"
    )
    text = shown(status_view(status(0.2), [full, gone]))
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("0123456789ab")]
    assert rows[0][:7] == ["0123456789ab", "dram", "123.5", "GB", "900.0", "GB", "1234567"]
    assert rows[0][7:] == ["100%", "slow"]
    assert rows[2] == ["0123456789ab", "remote", "0", "B", "-", "0", "-"]
    for note in (
        "index of node 0123456789ab: away since 3 s",
        "dram of node 0123456789ab: 2 slots in quarantine",
        "nvme of node 0123456789ab: read-only",
        "nvme of node 0123456789ab: 3 records had a wrong checksum",
        "nvme of node 0123456789ab: 4 reads or writes failed",
        "store of node ba9876543210 at 127.0.0.1:2: not reached",
    ):
        assert note in text
    assert "store" not in shown(status_view(status(0.2)))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e9, "2.5 GB"), (3e16, "30000.0 TB")],
)
def test_sizes_are_short(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def status(age_s: float) -> admin_pb.StatusResponse:
    load = admin_pb.Load(num_free_blocks=1024, num_total_blocks=1024, age_s=age_s)
    replica = admin_pb.Replica(
        replica_id="prefill-abcd1234",
        role=admin_pb.REPLICA_ROLE_PREFILL,
        state=admin_pb.REPLICA_STATE_CONNECTING,
        load=load,
    )
    return admin_pb.StatusResponse(model=pb.Model(name="m"), replicas=[replica], num_cancelled_requests=7)


def test_status_notes_a_replica_that_does_not_report() -> None:
    assert "prefill-abcd1234: its last report is 9 s old" in shown(status_view(status(9.1)))
    quiet = shown(status_view(status(0.2)))
    assert "report" not in quiet
    assert "7 cancelled" in quiet
    assert "prefill-abcd1234 prefill connecting" in quiet


def path(rank: int, peer: str, transport: str, gb_s: float, instead_of: str = "") -> admin_pb.Path:
    device = "memory" if transport == "shm" else "127.0.0.1"
    return admin_pb.Path(
        peer_replica_id=peer,
        rank=rank,
        transport=transport,
        device=device,
        gb_s=gb_s,
        latency_us=10 * rank,
        instead_of=instead_of,
    )


def test_shapes_and_the_matrix_of_paths_are_whole_in_80_columns() -> None:
    targets = [f"decode-{number}-abcd1234" for number in range(7)]
    writer = admin_pb.Replica(
        replica_id="prefill-abcd1234",
        role=admin_pb.REPLICA_ROLE_PREFILL,
        state=admin_pb.REPLICA_STATE_READY,
        tp=2,
        ep=2,
        stage_layers=[2, 4],
        load=admin_pb.Load(
            num_free_blocks=1024, num_total_blocks=1024, prefill_tok_s=12345, decode_step_ms=123.4
        ),
    )
    paths = [path(rank, target, "shm", 5.5 + rank) for target in targets[:-1] for rank in range(2)]
    paths += [path(1, targets[-1], "shm", 3.25), path(0, targets[-1], "tcp", 0.75, "shm is 0.1 GB/s")]
    written = admin_pb.ReplicaPaths(replica_id=writer.replica_id, paths=paths)
    reader = admin_pb.Replica(
        replica_id="decode-0-abcd1234",
        role=admin_pb.REPLICA_ROLE_DECODE,
        state=admin_pb.REPLICA_STATE_READY,
        tp=1,
        stage_layers=[6],
    )
    text = shown(status_view(admin_pb.StatusResponse(replicas=[writer, reader]), paths=[written]))
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for cell in ("2x2 ep 2 (2+4)", "1024/1024", "12345", "123.4", *targets):
        assert cell in text
    assert "1x1" not in text
    assert text.count("shm memory x2") == text.count("5.50 GB/s 10 us") == 6
    assert text.count("rows write to columns") > 1  # one table would be too wide
    assert "shm memory x1" in text
    assert "tcp 127.0.0.1 x1" in text
    assert "0.75 GB/s 10 us" in text
    assert f"rank 0 writes to {targets[-1]} rank 0 over tcp" in text


def test_a_missing_path_is_shown_with_its_reason() -> None:
    missing = admin_pb.Path(
        peer_replica_id="decode-abcd1234", instead_of="shm: 4 GB/s is below the floor of 9 GB/s"
    )
    replica = admin_pb.Replica(
        replica_id="prefill-abcd1234", role=admin_pb.REPLICA_ROLE_PREFILL, state=admin_pb.REPLICA_STATE_READY
    )
    written = admin_pb.ReplicaPaths(replica_id=replica.replica_id, paths=[missing])
    text = shown(status_view(admin_pb.StatusResponse(replicas=[replica]), paths=[written])).split(
        "paths (", 1
    )
    assert "prefill-abcd1234: cannot write to decode-abcd1234: shm: 4 GB/s" in text[0]
    assert text[1].split("prefill-abcd1234")[1].split()[0] == "none"


def test_status_has_the_kv_of_a_replica_of_each_pool() -> None:
    def replica(pool: str, num_blocks: int) -> admin_pb.Replica:
        return admin_pb.Replica(
            replica_id=f"{pool}-{num_blocks}", pool=pool, load=admin_pb.Load(num_total_blocks=num_blocks)
        )

    replicas = [replica("p", 10), replica("d", 40), replica("d", 30), replica("new", 0)]
    message = admin_pb.StatusResponse(model=pb.Model(block_tokens=64), replicas=replicas)
    assert "KV tokens of a replica: d 1920 to 2560, p 640\n" in shown(status_view(message))
    assert "KV tokens" not in shown(status_view(admin_pb.StatusResponse(replicas=replicas[-1:])))


def test_groups_of_layers_are_whole_in_80_columns_with_what_could_not_be_used() -> None:
    load = admin_pb.Load(
        layers_token_bytes={"full": 49_152, "window 4096": 196_608},
        layers_sequence_bytes={"window 4096": 805_306_368, "state": 75_497_472},
        num_layers_blocks={"full": 131_072, "window 4096": 16_384, "state": 64},
        num_free_layers_blocks={"full": 100_000, "window 4096": 384, "state": 63},
        num_cached_layers_blocks={"full": 50_000, "state": 60},
        num_snapshot_hits=1200,
        num_snapshot_misses=34,
        num_recomputed_tokens=56_789,
    )
    plain = admin_pb.Load(num_layers_blocks={"full": 64})
    replicas = [admin_pb.Replica(replica_id=name, load=it) for name, it in (("d-1", load), ("d-2", plain))]
    text = shown(layers_parts(replicas)[0])
    lines = [line.split() for line in text.splitlines()]
    assert ["d-1", "full", "49.2", "kB", NONE, "31072", "50000", "131072", "1200/1234", "56789"] in lines
    assert [NONE, "state", NONE, "75.5", "MB", "1", "60", "64", NONE, NONE] in lines
    assert [NONE, "window", "4096", "196.6", "kB", "805.3", "MB", "16000", "0", "16384", NONE, NONE] in lines
    assert "d-2" not in text
    assert not layers_parts(replicas[1:])
    latent = admin_pb.Replica(load=admin_pb.Load(num_layers_blocks={"latent": 64}))
    assert "latent" in shown(layers_parts([latent])[0])


def test_a_transfer_that_is_explained_has_what_is_sent_once() -> None:
    prefill = pb.Candidate(replica_id="p0", side="prefill", transfer_s=0.0101, once_s=0.0202)
    explained = pb.ExplainResponse(request_id="r", decisions=[pb.Decision(candidates=[prefill])])
    console = Console(file=io.StringIO(), width=140)
    console.print(explain_view(explained))
    assert "30.3" in console.file.getvalue()  # type: ignore[attr-defined]


def test_why_blocks_were_computed_is_said_in_words() -> None:
    place = pb.BlockPlace(replica_id="p0", tier="device")
    missed = [
        pb.MissedBlocks(
            first=1,
            num_blocks=2,
            fate=pb.BLOCK_FATE_REMOVED,
            places=[place],
            reason="space",
            least_age_s=2.0,
            most_age_s=9.5,
        ),
        pb.MissedBlocks(first=3, num_blocks=1, fate=pb.BLOCK_FATE_ELSEWHERE, places=[place]),
        pb.MissedBlocks(first=4, num_blocks=6, fate=pb.BLOCK_FATE_NEW),
    ]
    reuse = pb.PromptReuse(
        num_tokens=161,
        num_cached_tokens=16,
        num_relative_tokens=90,
        num_shared_tokens=64,
        relative_id="earlier",
        block_tokens=16,
    )
    explained = pb.ExplainResponse(
        request_id="r",
        decisions=[pb.Decision(decode="d0", missed=missed, achievable_tokens=64)],
        prompt=reuse,
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(explain_view(explained))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "161 tokens, 16 cached (10%); 64 (40%) with a cache without a limit" in text
    assert "earlier, 90 tokens; 64 are the same, and they part between tokens 64 and 80" in text
    assert "evicted: space was needed" in text
    assert "p0 (device), 2.0 to 9.5 s before" in text
    assert "64 to 160" in text
    assert "never seen" in text


def test_the_goodput_of_tenants_is_that_of_all_gateways() -> None:
    def gateway(name: str, **num_requests: int) -> admin_pb.GatewayStatus:
        outcomes = [
            admin_pb.TenantOutcomes(tenant="acme", num_requests=num_requests),
            admin_pb.TenantOutcomes(tenant="gone", num_requests={"cancelled": 1}),
        ]
        return admin_pb.GatewayStatus(
            gateway_id=name, admission=admin_pb.AdmissionStatus(), outcomes=outcomes
        )

    gateways = [gateway("g0", good=8, late=1), gateway("g1", good=1, refused=2, cancelled=5)]
    text = shown(status_view(admin_pb.StatusResponse(gateways=gateways)))
    assert "goodput" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["acme", "cancelled", "5,", "good", "9,", "late", "1,", "refused", "2", "75%"] in lines
    assert ["gone", "cancelled", "2", NONE] in lines


def test_stores_are_shown_as_processes_and_as_tiers() -> None:
    member = admin_pb.StoreMember(node_id="n0", host="node-a", address="10.0.0.1:5000", process_id=4711)
    node = admin_pb.StoreNodeStat(member=member, tiers=[admin_pb.StoreTier(tier="dram", num_records=77)])
    text = shown(status_view(admin_pb.StatusResponse(stores=[member]), [node]))
    processes, tiers = text.split("stores", 1)[1].split("store ", 1)
    assert processes.split()[-4:] == ["n0", "node-a", "10.0.0.1:5000", "4711"]
    assert "dram" in tiers
    assert "77" in tiers


def test_a_long_name_folds_and_is_not_cut_off() -> None:
    name = "a-pool-with-quite-a-long-name-for-a-name-abcd1234"
    replica = admin_pb.Replica(
        replica_id=name,
        role=admin_pb.REPLICA_ROLE_BOTH,
        state=admin_pb.REPLICA_STATE_CONNECTING,
        load=admin_pb.Load(num_cached_blocks=77),
    )
    text = shown(status_view(admin_pb.StatusResponse(replicas=[replica])))
    assert "…" not in text
    firsts = [line.split()[0] for line in text.splitlines() if line.split()]
    assert "".join(first for first in firsts if first in name) == name
    assert "77" in text


def test_what_tenants_use_of_their_limits_is_shown_while_one_does() -> None:
    quota = admin_pb.TenantQuota(
        tenant="acme",
        used={"requests_per_s": 1.02, "concurrent_tokens": 0.25},
        num_refused={"requests_per_s": 7},
    )
    text = shown(status_view(admin_pb.StatusResponse(quotas=[quota])))
    for part in ("acme", "requests_per_s 102%", "concurrent_tokens 25%", "7 by requests_per_s"):
        assert part in " ".join(text.split())
    assert "limits of tenants" not in shown(status_view(admin_pb.StatusResponse()))


def test_classes_and_tenants_have_their_shares_of_all_gateways_in_80_columns() -> None:
    def admission(name: str, tenants: dict[str, float]) -> admin_pb.GatewayStatus:
        batch = pb.SERVICE_CLASS_BATCH
        refusing = admin_pb.ClassStatus(
            service_class=batch, num_waiting=3, num_released=12345, num_refused={"late": 7, "shed": 2}
        )
        idle = admin_pb.ClassStatus(service_class=pb.SERVICE_CLASS_INTERACTIVE)
        flows = [
            admin_pb.FlowStatus(tenant=tenant, service_class=batch, served_s=served_s)
            for tenant, served_s in tenants.items()
        ]
        stats = admin_pb.AdmissionStatus(rung_name="normal", classes=[idle, refusing], flows=flows)
        return admin_pb.GatewayStatus(gateway_id=name, admission=stats)

    gateways = [admission("g0", {"acme": 30.0, "b": 10.0}), admission("g1", {"acme": 30.0, "[/c]": 10.0})]
    lines = [
        line.split() for line in shown(status_view(admin_pb.StatusResponse(gateways=gateways))).split("\n")
    ]
    assert ["interactive", NONE, "0", "0.0", "0", "0%", "0"] in lines
    assert ["batch", "late", "14,", "shed", "4", "6", "0.0", "24690", "100%", "18"] in lines
    assert ["acme", "batch", "75%", "75%"] in lines
    assert ["[/c]", "batch", "12%", "12%"] in lines

    many = [admission("g0", {f"t{number:02}": 30.0 - number for number in range(22)})]
    text = shown(status_view(admin_pb.StatusResponse(gateways=many)))
    assert "t19" in text
    assert "t20" not in text
    assert "2 more" in text
    assert "served" not in shown(status_view(admin_pb.StatusResponse(gateways=[admission("g0", {})])))
