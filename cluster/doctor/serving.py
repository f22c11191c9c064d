"""Symptoms of serving and their causes: time to first token, pace of decoding, failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.doctor.live_cluster import Live
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

GROUP = "serving"
# Fewer say nothing about a rate or a percentile.
_MIN_REQUESTS = 10
_LARGE_SHARE = 0.5
# A decode replica whose free share is within this of the growth reserve grants hardly any landing.
_NEAR_RESERVE = 0.05


class Cause(NamedTuple):
    """Represents a reason why requests are slow, and its remedy."""

    name: str
    why: str
    remedy: str


def route(live: Live) -> Iterator[CheckResult]:
    status = live.status
    if status.ready:
        num_ready = sum(item.state == admin_pb.REPLICA_STATE_READY for item in status.replicas)
        yield ok(f"requests can be served; {num_ready} replicas are ready")
        return
    states = [f"{it.replica_id} {name_of(admin_pb.ReplicaState, it.state)}" for it in status.replicas]
    yield error(
        f"no request can be served: {', '.join(states) or 'no replica is known'}",
        "a request needs a ready replica that decodes",
        "see the replicas' notes here and their worker-*.err logs; while a model loads, wait",
    )


def ttft(live: Live) -> Iterator[CheckResult]:
    """Check the time to first token, whose parts are measured for each request."""
    for gateway, recent in _recents(live):
        slo_ms = 1e3 * live.expected.ttft_slo_s
        seen = (
            f"{gateway}time to first token: {recent.ttft_p50_ms:.0f} ms median, {recent.ttft_p90_ms:.0f} ms "
            f"for 90 % of {recent.num_requests} requests (target {slo_ms:.0f} ms)"
        )
        figures: Figures = {
            "p50_ms": round(recent.ttft_p50_ms, 1),
            "p90_ms": round(recent.ttft_p90_ms, 1),
            "target_ms": slo_ms,
            "slow_queue_ms": round(recent.slow_queue_ms, 1),
            "slow_prefill_ms": round(recent.slow_prefill_ms, 1),
        }
        if recent.num_requests < _MIN_REQUESTS:
            yield note(f"{gateway}{recent.num_requests} requests in the last ten minutes: too few to judge")
        elif recent.ttft_p90_ms <= slo_ms:
            yield ok(seen, **figures)
        else:
            cause = ttft_cause(live, recent)
            yield warning(f"{seen}: {cause.name}", cause.why, cause.remedy, cause=cause.name, **figures)


def ttft_cause(live: Live, recent: admin_pb.RecentRequests) -> Cause:
    """Return the cause by the largest part of the slow requests' time; waiting for a landing counts as
    queueing."""
    whole = max(recent.slow_ttft_ms, 1e-9)
    queue, prefill = recent.slow_queue_ms / whole, recent.slow_prefill_ms / whole
    parts = f"of the slowest {recent.slow_ttft_ms:.0f} ms, {recent.slow_queue_ms:.0f} ms were queueing and "
    parts += f"{recent.slow_prefill_ms:.0f} ms computing"
    if queue >= _LARGE_SHARE:
        full = _full_decoders(live)
        if full and recent.transfer_p90_ms >= _LARGE_SHARE * recent.slow_queue_ms:
            return Cause(
                "prompts wait for landings, which slow transfers hold open",
                f"{parts}; moving a prompt's KV takes {recent.transfer_p90_ms:.0f} ms (90 %)",
                "find the slow path in `tandem status`; see the findings on paths",
            )
        if full:
            return Cause(
                "prompts wait for free blocks at the decode replicas",
                f"{parts}; {', '.join(full)}: a prompt is computed after its landing is granted",
                "`tandem scale decode=N` with more replicas, more engine.kv_tokens, or engine.offload_tokens",
            )
        waiting = sum(item.load.num_waiting for item in live.of_role("prefill", "both"))
        backlog = sum(item.load.num_backlog_tokens for item in live.of_role("prefill", "both"))
        now = f"now {waiting} requests wait there, with {backlog} tokens to compute"
        return Cause(
            "prompts queue at prefill",
            f"{parts}; {now if waiting else 'none waits there at this moment'}",
            "`tandem scale prefill=N` with more replicas, or tp; or a higher hit rate (see hit-rate)",
        )
    if prefill >= _LARGE_SHARE:
        computed = max(recent.slow_prompt_tokens - recent.slow_cached_tokens, 0)
        return Cause(
            "computing the prompts takes that long",
            f"{parts}; {computed} of {recent.slow_prompt_tokens} tokens were computed for each",
            "more tp for the prefill pool, a faster device, or a higher hit rate (see hit-rate)",
        )
    if recent.num_retried >= _LARGE_SHARE * recent.num_requests:
        return Cause(
            "requests need several attempts",
            f"{parts}; {recent.num_retried} of {recent.num_requests} were placed more than once",
            "`tandem explain ID` names each failed attempt's reason",
        )
    return Cause(
        "the time is spent outside the replicas",
        f"{parts}; the rest is the gateway's (tokenizing, routing, waiting for a replica) and the network's",
        "more gateways where a gateway's process uses a whole processor; `tandem explain ID` has the times",
    )


def decode_pace(live: Live) -> Iterator[CheckResult]:
    """Check the time per token after the first, and find the cause: offloading is the first suspect."""
    for gateway, recent in _recents(live):
        slo_ms = 1e3 * live.expected.itl_slo_s
        if recent.num_requests < _MIN_REQUESTS:
            continue
        seen = (
            f"{gateway}time per token: {recent.tpot_p50_ms:.1f} ms median, {recent.tpot_p90_ms:.1f} ms "
            f"for 90 % (target {slo_ms:.0f} ms)"
        )
        figures: Figures = {
            "p50_ms": round(recent.tpot_p50_ms, 2),
            "p90_ms": round(recent.tpot_p90_ms, 2),
            "target_ms": slo_ms,
        }
        if recent.tpot_p90_ms <= slo_ms:
            yield ok(seen, **figures)
            continue
        cause = decode_cause(live)
        yield warning(f"{seen}: {cause.name}", cause.why, cause.remedy, cause=cause.name, **figures)


def decode_cause(live: Live) -> Cause:
    decoders = live.of_role("decode", "both")
    offloaded = {item.replica_id: item.load.num_offloaded_blocks for item in decoders}
    if any(offloaded.values()):
        listed = ", ".join(f"{count} blocks of {name}" for name, count in offloaded.items() if count)
        return Cause(
            "offloading is active",
            f"{listed} lie in host memory and are brought to the device in every step",
            "more decode replicas or engine.kv_tokens; engine.offload_tokens: 0 has preemptions instead",
        )
    if preempted := live.growth(lambda load: load.num_preemptions):
        listed = ", ".join(f"{name} {count} times" for name, count in preempted.items())
        return Cause(
            "sequences are preempted",
            f"just now {listed}: each is computed again before it continues",
            "more engine.kv_tokens, more decode replicas, or engine.offload_tokens",
        )
    mixed = [item.replica_id for item in decoders if item.load.num_backlog_tokens]
    if mixed:
        return Cause(
            "decode replicas compute prompts beside",
            f"{', '.join(mixed)} have prompts to compute, whose chunks lengthen every step",
            "more prefill replicas, a lower router.skip_prefill_tokens, or smaller engine.chunk_tokens",
        )
    slowest = max(decoders, key=lambda item: item.load.decode_step_ms, default=None)
    if slowest is None:
        return Cause("no decode replica is ready", "streams wait for one", "see the findings on members")
    load = slowest.load
    return Cause(
        "steps take that long",
        f"one of {slowest.replica_id} takes {load.decode_step_ms:.1f} ms with {load.num_running} sequences"
        if load.num_running
        else "nothing decodes at this moment: look again under load, for batches and preemptions",
        "more decode replicas make batches smaller; more tp, or a faster device, makes the step shorter",
    )


def offloading(live: Live) -> Iterator[CheckResult]:
    for replica in live.status.replicas:
        if replica.load.num_offloaded_blocks:
            yield note(
                f"{replica.replica_id}: {replica.load.num_offloaded_blocks} blocks of running sequences "
                "are in host memory",
                "each of its steps brings them to the device: contexts fit that would not, more slowly",
                "where that is not wanted: more engine.kv_tokens, more replicas, or engine.offload_tokens: 0",
                num_blocks=replica.load.num_offloaded_blocks,
            )


def preemptions(live: Live) -> Iterator[CheckResult]:
    for name, count in live.growth(lambda load: load.num_preemptions).items():
        yield warning(
            f"{name}: {count} sequences were preempted while we looked",
            "no blocks are free for their growth: what they had is loaded or computed again",
            "more engine.kv_tokens or replicas, engine.offload_tokens, a larger transfer.growth_reserve",
            num_preemptions=count,
        )


# The tokens of the busiest rank over those of the mean one, above which the others wait for it too long.
_UNEVEN = 2.0


def expert_load(live: Live) -> Iterator[CheckResult]:
    """Check the loads of ranks that hold different experts, which are those of the last minute."""
    for replica in live.status.replicas:
        load = replica.load
        if not load.expert_imbalance:
            continue
        seen = (
            f"{replica.replica_id}: the busiest rank has {load.expert_rank_imbalance:.1f} times the tokens "
            f"of the mean rank, the busiest expert {load.expert_imbalance:.1f} times those of the mean expert"
        )
        figures: Figures = {
            "rank_imbalance": round(load.expert_rank_imbalance, 2),
            "expert_imbalance": round(load.expert_imbalance, 2),
            "num_idle_experts": load.num_idle_experts,
        }
        if load.num_expert_copies:
            seen += (
                f", with {load.num_expert_copies} copies of experts, without which the busiest rank would "
                f"have {load.expert_uncopied_imbalance:.1f} times the tokens"
            )
            figures["num_expert_copies"] = load.num_expert_copies
            figures["uncopied_imbalance"] = round(load.expert_uncopied_imbalance, 2)
        if load.expert_rank_imbalance <= _UNEVEN:
            yield ok(seen, **figures)
            continue
        yield warning(
            f"{seen}: experts are unevenly loaded",
            f"ranks wait for the busiest one in every layer; layer {load.hottest_expert_layer} sends "
            f"{load.hottest_expert_share:.0%} of its tokens to expert {load.hottest_expert}",
            "a higher engine.expert_copies, so that ranks with less work compute some of its tokens, or a "
            "smaller ep of the pool, so that more ranks share each expert; requests of other kinds on the "
            "same replicas spread the tokens as well",
            **figures,
        )


# The part of prompts with cached KV that may compute some of it again.
_MISSED = 0.25
# Snapshots that are nearer to each other cost more than they save.
_LEAST_EVERY = 256


def snapshots(live: Live) -> Iterator[CheckResult]:
    """Check whether prompts can begin behind their cached KV, where layers have windows or states."""
    for replica in live.status.replicas:
        load = replica.load
        num_prompts = load.num_snapshot_hits + load.num_snapshot_misses
        if not num_prompts:
            continue
        seen = (
            f"{replica.replica_id}: {load.num_snapshot_hits} of {num_prompts} prompts with cached KV began "
            f"behind all of it, the others computed {load.num_recomputed_tokens} cached tokens again"
        )
        figures: Figures = {
            "num_hits": load.num_snapshot_hits,
            "num_misses": load.num_snapshot_misses,
            "num_recomputed_tokens": load.num_recomputed_tokens,
            "num_evicted_snapshot_tokens": load.num_evicted_snapshot_tokens,
        }
        if load.num_snapshot_misses <= _MISSED * num_prompts:
            yield ok(seen, **figures)
            continue
        why, remedy = _why_snapshots_miss(load)
        yield warning(seen, why, remedy, **figures)


def _why_snapshots_miss(load: admin_pb.Load) -> tuple[str, str]:
    """Return why prompts cannot begin behind their cached KV, and the remedy."""
    if "state" not in load.num_layers_blocks:
        return (
            "KV of the prefix is there, but no longer that of the windows where the prompts leave it",
            "more engine.kv_tokens, or a larger store",
        )
    num_evicted, num_tokens = load.num_evicted_snapshot_tokens, load.num_recomputed_tokens
    if num_evicted >= _LARGE_SHARE * num_tokens:
        return (
            f"snapshots of states were there for {num_evicted} of the {num_tokens} tokens, and were evicted "
            "before the prompts came",
            "more engine.state_snapshots, or a larger store; if engine.snapshot_every_tokens is set, raise "
            "it or set it to 0, since these snapshots displace those that are used more",
        )
    mean = num_tokens // load.num_snapshot_misses
    every = max(_LEAST_EVERY, 1 << max(0, mean.bit_length() - 1))
    return (
        f"for {num_tokens - num_evicted} of the {num_tokens} tokens no snapshot of the states was kept where "
        "the prompts leave their cached KV",
        f"an engine.snapshot_every_tokens of {every}, since a prompt now computes {mean} tokens again; raise "
        "engine.state_snapshots with it, or the additional snapshots displace those that are used more",
    )


def failures(live: Live) -> Iterator[CheckResult]:
    """Check the counters of failed requests of the gateway at the given address."""
    num_failed = live.status.num_failed_requests - live.before.num_failed_requests
    total = live.status.num_failed_requests
    if num_failed > 0:
        yield error(
            f"{num_failed} requests failed while we looked, {total} since the gateway started",
            "their clients got an error",
            "`tandem explain ID` and the gateway's access log name the reasons",
            num_failed=num_failed,
        )
    elif total:
        num_finished = live.status.num_finished_requests
        yield note(
            f"{total} requests failed and {num_finished} finished since the gateway started; none just now"
        )
    else:
        yield ok(f"no request failed of {live.status.num_finished_requests} since the gateway started")


def _recents(live: Live) -> Iterator[tuple[str, admin_pb.RecentRequests]]:
    """Yield the recent requests of every gateway that answers, with its address where there are several."""
    replies = [reply for reply in live.gateways if reply.status is not None]
    for reply in replies:
        assert reply.status is not None
        yield (f"{reply.address}: " if len(replies) > 1 else ""), reply.status.recent


def _full_decoders(live: Live) -> list[str]:
    """Return the decode replicas at which landings wait, or soon will."""
    full = []
    for replica in live.of_role("decode", "both"):
        load = replica.load
        free = load.num_free_blocks / max(load.num_total_blocks, 1)
        if load.num_waiting_landings or free < live.expected.growth_reserve + _NEAR_RESERVE:
            full.append(
                f"{replica.replica_id} has {free:.0%} free, {load.num_waiting_landings} landings wait"
            )
    return full


CHECKS = (
    Check("route", GROUP, "Whether any request can be served", route),
    Check(
        "ttft",
        GROUP,
        "Time to first token, and whether queue, landing, transfer or computing takes most of it",
        ttft,
    ),
    Check(
        "decode-pace",
        GROUP,
        "Time per token, and whether offloading, preemption or batches take most of it",
        decode_pace,
    ),
    Check("offloading", GROUP, "Blocks of running sequences in host memory", offloading),
    Check("preemptions", GROUP, "Sequences preempted just now", preemptions),
    Check(
        "expert-load", GROUP, "Whether some ranks have much more work for experts than others", expert_load
    ),
    Check(
        "snapshots",
        GROUP,
        "Whether prompts can begin behind cached KV, where layers have windows or recurrent states",
        snapshots,
    ),
    Check("failures", GROUP, "Requests that failed", failures),
)
