"""Symptoms of a running cluster: each check says well of a good one, and what ails a bad one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from doctor_harness import live, only, replica, said

from cluster.cli.doctor import cluster_checks, run_checks
from cluster.doctor import hit_rate, kv_transfers, serving
from cluster.doctor.checks import CheckResult, Severity
from cluster.doctor.live_cluster import GatewayReply
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

OK, NOTE, WARNING, ERROR = Severity


def test_a_good_cluster_has_no_symptom() -> None:
    found = run_checks(cluster_checks(), live())
    assert {finding.severity for finding in found} == {OK}
    assert {"route", "ttft", "decode-pace", "paths", "stores", "store-index", "replicas"} <= {
        finding.check for finding in found
    }


def test_no_route_is_an_error_that_names_the_states() -> None:
    def broken(status: admin_pb.StatusResponse) -> None:
        status.ready = False
        status.replicas[1].state = admin_pb.REPLICA_STATE_CONNECTING

    result = only(serving.route, live(broken))
    assert result.severity is ERROR
    assert "d0 connecting" in result.seen


# --------------------------------------------------------------------------------- time to first token


def slow(**parts: float) -> Callable[[admin_pb.StatusResponse], None]:
    """The slowest took 4 s to the first token."""

    def change(status: admin_pb.StatusResponse) -> None:
        figures = {
            "ttft_p90_ms": 3000,
            "slow_ttft_ms": 4000,
            "slow_queue_ms": 0,
            "slow_prefill_ms": 0,
            **parts,
        }
        for name, value in figures.items():
            setattr(status.recent, name, value)

    return change


def ttft_result(*changes: Callable[[admin_pb.StatusResponse], object]) -> CheckResult:
    def change(status: admin_pb.StatusResponse) -> None:
        for each in changes:
            each(status)

    def silent(status: admin_pb.StatusResponse) -> None:
        status.recent.CopyFrom(admin_pb.RecentRequests())

    results = list(serving.ttft(live(change, other=silent)))
    assert results[1].severity is NOTE  # the other gateway has seen too few requests
    return results[0]


def test_a_queue_at_prefill_is_distinguished_from_a_lack_of_blocks_at_decode() -> None:
    def backlog(status: admin_pb.StatusResponse) -> None:
        status.replicas[0].load.num_waiting = 7
        status.replicas[0].load.num_backlog_tokens = 9000

    def full(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_free_blocks = 80
        status.replicas[1].load.num_waiting_landings = 3

    queueing = ttft_result(slow(slow_queue_ms=3500), backlog)
    assert queueing.figures["cause"] == "prompts queue at prefill"
    assert "7 requests wait there, with 9000 tokens" in queueing.why
    landing = ttft_result(slow(slow_queue_ms=3500), backlog, full)
    calm = ttft_result(slow(slow_queue_ms=3500))
    assert calm.why.endswith("none waits there at this moment")
    assert landing.figures["cause"] == "prompts wait for free blocks at the decode replicas"
    assert "d0 has 8% free, 3 landings wait" in landing.why
    assert "decode=N" in landing.remedy


def test_slow_transfers_that_hold_landings_open_are_the_cause() -> None:
    def waiting(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_waiting_landings = 1

    result = ttft_result(slow(slow_queue_ms=3500, transfer_p90_ms=2500), waiting)
    assert "slow transfers" in str(result.figures["cause"])
    assert "2500 ms" in result.why


def test_computing_retries_and_the_gateway_are_distinguished() -> None:
    assert "computing" in str(ttft_result(slow(slow_prefill_ms=3000)).figures["cause"])
    assert "600 of 1000 tokens" in ttft_result(slow(slow_prefill_ms=3000)).why
    assert "attempts" in str(ttft_result(slow(num_retried=60)).figures["cause"])
    assert "outside" in str(ttft_result(slow(num_retried=3)).figures["cause"])


def test_the_target_is_the_configurations() -> None:
    assert {severity for severity, _ in said(serving.ttft, live(ttft_slo_s=0.1))} == {WARNING}
    assert {severity for severity, _ in said(serving.decode_pace, live(itl_slo_s=0.01))} == {WARNING}


# ----------------------------------------------------------------------------------------------- decode


def test_slow_decoding_is_put_down_to_offloading_first() -> None:
    def offloading(status: admin_pb.StatusResponse) -> None:
        status.recent.tpot_p90_ms = 500
        status.replicas[1].load.num_offloaded_blocks = 40

    result = next(iter(serving.decode_pace(live(offloading))))
    assert result.severity is WARNING
    assert result.figures["cause"] == "offloading is active"
    assert "40 blocks of d0" in result.why
    assert only(serving.offloading, live(offloading)).severity is NOTE
    assert not said(serving.offloading, live())


def test_uneven_ranks_are_a_warning_that_names_the_hottest_expert() -> None:
    def loaded(rank_imbalance: float, num_copies: int = 0) -> Callable[[admin_pb.StatusResponse], None]:
        def change(status: admin_pb.StatusResponse) -> None:
            load = status.replicas[1].load
            load.expert_imbalance, load.expert_rank_imbalance = 3.5, rank_imbalance
            load.hottest_expert_layer, load.hottest_expert, load.hottest_expert_share = 3, 17, 0.375
            load.num_expert_copies, load.expert_uncopied_imbalance = num_copies, 3.25

        return change

    uneven = only(serving.expert_load, live(loaded(2.25)))
    assert uneven.severity is WARNING
    assert "d0: the busiest rank has 2.2 times" in uneven.seen
    assert uneven.seen.endswith("experts are unevenly loaded")
    assert "layer 3 sends 38% of its tokens to expert 17" in uneven.why
    assert uneven.figures["rank_imbalance"] == 2.25
    assert uneven.remedy.startswith("a higher engine.expert_copies")
    assert "copies" not in uneven.seen
    assert only(serving.expert_load, live(loaded(2.0))).severity is OK
    copied = only(serving.expert_load, live(loaded(1.125, 5)))
    assert copied.severity is OK
    assert "with 5 copies of experts, without which the busiest rank would have 3.2 times" in copied.seen
    assert (copied.figures["num_expert_copies"], copied.figures["uncopied_imbalance"]) == (5, 3.25)
    assert not said(serving.expert_load, live()), "a model without experts has no such finding"


def test_prompts_that_cannot_use_their_cached_kv_are_a_warning() -> None:
    def missed(
        num_hits: int, num_misses: int, num_evicted_tokens: int = 0, layers: str = "state"
    ) -> Callable[[admin_pb.StatusResponse], None]:
        def change(status: admin_pb.StatusResponse) -> None:
            load = status.replicas[1].load
            load.num_snapshot_hits, load.num_snapshot_misses = num_hits, num_misses
            load.num_recomputed_tokens, load.num_evicted_snapshot_tokens = 4096, num_evicted_tokens
            load.num_layers_blocks.update({"full": 100, layers: 50})

        return change

    never = only(serving.snapshots, live(missed(2, 1, 1000)))
    assert never.severity is WARNING
    assert never.seen.startswith("d0: 2 of 3 prompts with cached KV began behind all of it")
    assert "4096 cached tokens" in never.seen
    assert never.why.startswith("for 3096 of the 4096 tokens no snapshot of the states was kept")
    assert never.remedy.startswith("an engine.snapshot_every_tokens of 4096,")
    assert never.figures == {
        "num_hits": 2,
        "num_misses": 1,
        "num_recomputed_tokens": 4096,
        "num_evicted_snapshot_tokens": 1000,
    }
    assert "snapshot_every_tokens of 1024," in only(serving.snapshots, live(missed(2, 3))).remedy
    evicted = only(serving.snapshots, live(missed(2, 1, 3000)))
    assert "were there for 3000 of the 4096 tokens, and were evicted" in evicted.why
    assert evicted.remedy.startswith("more engine.state_snapshots, or a larger store")
    windows = only(serving.snapshots, live(missed(2, 1, layers="window 128")))
    assert windows.remedy == "more engine.kv_tokens, or a larger store"
    assert only(serving.snapshots, live(missed(3, 1))).severity is OK
    assert not said(serving.snapshots, live()), "a model whose layers all see all tokens has no such finding"


def test_other_causes_of_slow_decoding() -> None:
    def pace(change: Callable[[admin_pb.StatusResponse], object], before: bool = True) -> CheckResult:
        def now(status: admin_pb.StatusResponse) -> None:
            status.recent.tpot_p90_ms = 500
            change(status)

        seen = live(now, before=None if before else lambda status: None)
        return next(iter(serving.decode_pace(seen)))

    def preempted(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_preemptions = 5

    def mixed(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_backlog_tokens = 500

    def batch(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_running = 64

    def away(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].state = admin_pb.REPLICA_STATE_CONNECTING

    assert pace(preempted, before=False).figures["cause"] == "sequences are preempted"
    assert pace(preempted).figures["cause"] == "steps take that long"  # none of them just now
    assert pace(mixed).figures["cause"] == "decode replicas compute prompts beside"
    assert "with 64 sequences" in pace(batch).why
    assert "look again under load" in pace(lambda status: None).why
    assert pace(away).figures["cause"] == "no decode replica is ready"


def test_what_grows_now_is_distinguished_from_what_grew_once() -> None:
    def preempted(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_preemptions = 5

    def failed(status: admin_pb.StatusResponse) -> None:
        status.num_failed_requests = 4

    def bad_sums(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].load.num_checksum_failures = 2

    clean: Callable[[admin_pb.StatusResponse], object] = lambda status: None  # noqa: E731
    assert only(serving.preemptions, live(preempted, before=clean)).severity is WARNING
    assert not said(serving.preemptions, live(preempted))
    assert only(serving.failures, live(failed, before=clean)).severity is ERROR
    assert only(serving.failures, live(failed)).severity is NOTE
    assert only(kv_transfers.checksums, live(bad_sums, before=clean)).severity is ERROR
    assert only(kv_transfers.checksums, live(bad_sums)).severity is WARNING


def test_a_counter_of_a_replica_that_is_new_has_not_grown() -> None:
    def replaced(status: admin_pb.StatusResponse) -> None:
        status.replicas[1].epoch += 1
        status.replicas[1].load.num_preemptions = 5

    assert not said(serving.preemptions, live(replaced, before=lambda status: None))


# ------------------------------------------------------------------------------------------------ reuse


def reused(**figures: int) -> Callable[[admin_pb.StatusResponse], None]:
    """A hundred prompts of 1000 tokens each."""
    whole = {
        "num_prompts": 100,
        "num_prompt_tokens": 100_000,
        "num_finished_tokens": 100_000,
        "diverge_at": 128,
        "num_diverging": 90,
        "num_tokens_behind": 78_000,
    }

    def change(status: admin_pb.StatusResponse) -> None:
        status.prefixes.add(tenant="acme", **{**whole, **figures})

    return change


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        (
            {"num_finished_known_tokens": 12_800, "num_cached_tokens": 12_000, "num_repeated_behind": 70_000},
            "diverging",
        ),
        ({"num_finished_known_tokens": 90_000, "num_cached_tokens": 10_000}, "evicted"),
        ({"num_finished_known_tokens": 12_800, "num_cached_tokens": 12_800}, "little in common"),
    ],
)
def test_a_low_hit_rate_has_one_of_three_causes(figures: dict[str, int], cause: str) -> None:
    result = next(iter(hit_rate.hit_rate(live(reused(**figures)))))
    assert result.figures["cause"] == cause
    assert result.severity is (NOTE if cause == "little in common" else WARNING)
    assert "acme" in result.seen


def test_prompts_that_diverge_name_the_token_and_what_is_lost() -> None:
    change = reused(num_finished_known_tokens=12_800, num_cached_tokens=12_000, num_repeated_behind=70_200)
    result = next(iter(hit_rate.hit_rate(live(change))))
    assert "90 of 100 prompts diverge" in result.seen
    assert "at token 128; about 90% of the 867 tokens behind" in result.seen
    assert "near token 128" in result.remedy


def test_a_good_hit_rate_and_few_prompts_need_no_look() -> None:
    good = reused(num_finished_known_tokens=90_000, num_cached_tokens=85_000)
    assert {severity for severity, _ in said(hit_rate.hit_rate, live(good))} == {OK}
    assert not said(hit_rate.hit_rate, live(reused(num_prompts=5)))


def test_an_older_gateway_that_reports_less_breaks_nothing() -> None:
    """Without the fields that came later, and before anything happened."""

    def bare(status: admin_pb.StatusResponse) -> None:
        status.CopyFrom(admin_pb.StatusResponse(ready=True, replicas=[replica("b0", "both")]))

    seen = live(bare, replies=(GatewayReply("h:1", admin_pb.StatusResponse(ready=True)),))
    for check in cluster_checks():
        assert all(severity in (OK, NOTE) for severity, _ in said(check.look, seen)), check.name
