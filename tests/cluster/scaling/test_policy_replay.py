"""The live policy over simulated clusters: a ramp, a burst, a decode-heavy shift, heavy tails, noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_harness import config, evenly, poisson, pool
from typer.testing import CliRunner

from cluster.bench.scaling_bench import read_arrivals
from cluster.cli.main import cli
from cluster.errors import BenchError
from cluster.scaling.config import PoolLimits
from cluster.scaling.measured_rates import StepCost
from cluster.scaling.other_policies import TargetQueue, keep_counts
from cluster.scaling.scaling_replay import Replayed, replay
from cluster.scaling.simulation import Arrival, ReplayedCluster, ServiceModel

MODEL = ServiceModel(
    prefill_tok_s=8000.0,
    step=StepCost(0.012, 0.0004),
    kv_tokens=400_000,
    block_tokens=64,
    max_sequences=64,
    start_s=20.0,
)
# Of a replica with the largest batch, whose steps (37.6 ms) are within the objective of 50 ms.
DECODE_TOK_S = 64 / (0.012 + 64 * 0.0004)
PAIR = (pool("prefill"), pool("decode"))


def fixed_sizes(prompt: int, output: int) -> Callable[[np.random.Generator, float], tuple[int, int]]:
    return lambda generator, at: (prompt, output)


def counts_at(run: Replayed, at: float) -> dict[str, int]:
    """Desired at the last look before that time."""
    return [counts for seen_at, counts in run.counts if seen_at <= at][-1]


def by_demand(per_s: float, prompt: int, output: int) -> dict[str, int]:
    """From first principles: tokens a second over three quarters of what a replica does."""
    return {
        "prefill": math.ceil(per_s * prompt / (0.75 * MODEL.prefill_tok_s)),
        "decode": math.ceil(per_s * output / (0.75 * DECODE_TOK_S)),
    }


# ------------------------------------------------------------------------------------------- the ramp


def test_a_ramp_has_the_counts_of_its_demand_and_the_forecast_leads_it() -> None:
    """From 2 to 9.5 requests/s in 10 minutes, then level: 4 for prefill (19,000 tok/s), 2 for decode."""
    arrivals = poisson(lambda at: min(9.5, 2.0 + at / 80), 900.0, fixed_sizes(2000, 200))
    run = replay(arrivals, PAIR, MODEL, config())
    assert counts_at(run, 890.0) == by_demand(9.5, 2000, 200) == {"prefill": 4, "decode": 2}
    upward = [change for change in run.changes if change.after > change.before and change.at < 700]
    assert [change.after for change in upward if change.pool == "prefill"] == [2, 3, 4]
    by_forecast = [change for change in upward if change.reason.startswith("forecast: ")]
    assert len(by_forecast) >= len(upward) - 1
    # Each comes before the demand fills the pool as it was: what it replaces would be at most 85 % busy.
    for change in by_forecast:
        if change.pool == "prefill":
            rate = 2.0 + change.at / 80
            assert rate * 2000 <= 0.85 * change.before * MODEL.prefill_tok_s
    assert run.ttft_share > 0.97
    assert run.itl_share == 1.0


# ------------------------------------------------------------------------------------------ the burst


def test_a_burst_grows_both_pools_and_they_come_back_one_by_one() -> None:
    """3 requests/s, for 60 s 15 a second: the queue grows the pools long before the forecast knows."""
    arrivals = poisson(lambda at: 15.0 if 300 <= at < 360 else 3.0, 1000.0, fixed_sizes(1500, 200), seed=1)
    run = replay(arrivals, PAIR, MODEL, config(down_cool_down_s=60.0, forecast_s=120.0))
    before = counts_at(run, 299.0)
    assert before == by_demand(3.0, 1500, 200) == {"prefill": 1, "decode": 1}
    first = next(change for change in run.changes if change.at >= 300)
    assert first.pool == "prefill"
    assert first.at <= 315.0
    by_queue = [
        each for each in run.changes if "prompt tokens wait" in each.reason and each.reason[:5] == "now: "
    ]
    assert by_queue
    assert by_queue[0].at <= 330.0
    peak = {name: max(counts[name] for _, counts in run.counts) for name in before}
    assert peak["prefill"] >= by_demand(15.0, 1500, 200)["prefill"]
    downward = [change for change in run.changes if change.after < change.before]
    assert all(change.before - change.after == 1 for change in downward)
    assert all("60 s" in change.reason for change in downward)
    assert counts_at(run, 995.0) == before
    assert all(job.end_at is not None for job in run.jobs)


# --------------------------------------------------------------------------- decode is the bottleneck


def test_longer_outputs_grow_decode_and_leave_prefill_alone() -> None:
    """4 requests/s with 1000 tokens; from 300 s on they want 1300 tokens each instead of 100."""
    arrivals = poisson(lambda at: 4.0, 900.0, lambda generator, at: (1000, 100 if at < 300 else 1300), seed=2)
    run = replay(arrivals, PAIR, MODEL, config())
    assert counts_at(run, 299.0) == {"prefill": 1, "decode": 1}
    assert counts_at(run, 890.0) == by_demand(4.0, 1000, 1300) == {"prefill": 1, "decode": 5}
    assert {change.pool for change in run.changes} == {"decode"}


def test_prefill_stays_while_its_prompts_wait_for_decode() -> None:
    """Decode has no free KV blocks and may not grow: the queue is long, more prefill would not help."""
    model = MODEL._replace(kv_tokens=40_000)
    arrivals = evenly(3.0, 300.0, 2000, 600)
    short = (pool("prefill"), pool("decode", limits=PoolLimits(min=1, max=1)))
    run = replay(arrivals, short, model, config(forecast_s=600.0))
    assert run.changes == []
    assert any("prefill does not grow for its queue" in note for _, note in run.notes)
    assert any("decode stays at 1, its limit" in note for _, note in run.notes)
    # With leave to grow, decode does, and the same demand is served.
    free = replay(arrivals, PAIR, model, config(forecast_s=600.0))
    assert {change.pool for change in free.changes[:2]} == {"decode"}
    assert "wait for free KV blocks" in free.changes[1].reason
    assert free.ttft_share > run.ttft_share + 0.3
    # A target for each queue by itself grows prefill, to no end.
    plain = replay(arrivals, short, model, config(forecast_s=600.0), TargetQueue(2.0, 48.0))
    assert any(change.pool == "prefill" for change in plain.changes)
    assert plain.ttft_share < 0.1
    assert plain.total_replica_s > 1.3 * run.total_replica_s


# ---------------------------------------------------------------------------------------- heavy tails


def test_heavy_tails_keep_more_prefill_than_even_prompts_of_the_same_mean() -> None:
    def heavy(generator: np.random.Generator, at: float) -> tuple[int, int]:
        return (20_500 if generator.random() < 0.05 else 550, 50)

    three = (pool("prefill", 3), pool("decode"))
    calm = config(down_cool_down_s=60.0)
    few_huge = poisson(lambda at: 3.0, 600.0, heavy, seed=3)
    uneven = replay(few_huge, three, MODEL, calm)
    even = replay(poisson(lambda at: 3.0, 600.0, fixed_sizes(1548, 50), seed=3), three, MODEL, calm)
    assert counts_at(even, 590.0)["prefill"] == by_demand(3.0, 1548, 50)["prefill"] == 1
    assert counts_at(uneven, 590.0)["prefill"] >= 2
    alone = replay(few_huge, PAIR, MODEL, calm, keep_counts)
    assert uneven.ttft_share > 0.9 > alone.ttft_share


# ---------------------------------------------------------------------------------------- steadiness


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    per_s=st.floats(1.0, 12.0),
    prompt=st.integers(200, 4000),
    output=st.integers(20, 400),
    seed=st.integers(0, 1000),
)
def test_a_steady_load_moves_each_pool_once_at_most_and_never_back(
    per_s: float, prompt: int, output: int, seed: int
) -> None:
    """Poisson arrivals with sizes that vary by a third; the pools start where the demand puts them."""

    def sizes(generator: np.random.Generator, at: float) -> tuple[int, int]:
        shares = generator.uniform(0.67, 1.33, 2)
        return max(1, round(prompt * shares[0])), max(1, round(output * shares[1]))

    need = by_demand(per_s, prompt, output)
    pools = (pool("prefill", need["prefill"]), pool("decode", need["decode"]))
    run = replay(poisson(lambda at: per_s, 600.0, sizes, seed), pools, MODEL, config())
    moves = [change for change in run.changes if change.at < 600]
    for name in need:
        own = [change for change in moves if change.pool == name]
        assert len(own) <= 1, [(change.at, change.before, change.after, change.reason) for change in own]


def test_a_replay_is_the_same_again() -> None:
    arrivals = poisson(lambda at: 6.0, 120.0, fixed_sizes(2500, 200))
    runs = [replay(arrivals, PAIR, MODEL, config()) for _ in range(2)]
    assert runs[0].changes == runs[1].changes != []
    assert runs[0].ttfts_s == runs[1].ttfts_s


# ------------------------------------------------------------------------------------- roles, one pool


def test_an_idle_prefill_replica_helps_decode_and_is_called_back() -> None:
    """Few prompts with long outputs, then many prompts: three prefill replicas, decode may not grow."""
    long = evenly(1.2, 300.0, 200, 2500)
    short = [arrival._replace(at=arrival.at + 450) for arrival in evenly(10.0, 120.0, 2000, 2)]
    fixed = (pool("prefill", 3, limits=None), pool("decode", limits=None))
    lending = config(autoscale=False, change_roles=True, itl_slo_s=0.03)
    run = replay(long + short, fixed, MODEL, lending)
    role_changes = [text for _, text in run.role_changes if text.startswith("RoleAssignment prefill-")]
    recalls = [text for _, text in run.role_changes if text.startswith("RoleReturn prefill-")]
    assert 1 <= len(role_changes) <= 2  # one stays
    assert "while decode is short" in role_changes[0]
    assert len(recalls) == len(role_changes)
    assert run.changes == []
    alone = replay(long + short, fixed, MODEL, lending, keep_counts)
    assert run.itl_share > alone.itl_share + 0.2
    assert run.ttft_share >= alone.ttft_share - 0.02


def test_one_pool_that_does_both_follows_the_demand_too() -> None:
    arrivals = poisson(lambda at: 6.0, 500.0, fixed_sizes(1500, 150), seed=4)
    run = replay(arrivals, (pool("both"),), MODEL, config())
    busy = 6 * 1500 / 8000 + 6 * 150 / DECODE_TOK_S
    assert counts_at(run, 490.0) == {"both": math.ceil(busy / 0.75)}
    assert all(job.end_at is not None for job in run.jobs)


# -------------------------------------------------------------------------------------- the simulator


def test_a_prompt_alone_takes_its_tokens_over_the_rate() -> None:
    run = replay([Arrival(0.0, 4000, 101)], PAIR, MODEL, config(), keep_counts)
    (job,) = run.jobs
    assert job.first_at is not None
    assert job.end_at is not None
    assert job.first_at == pytest.approx(4000 / 8000)
    assert job.end_at - job.first_at == pytest.approx(100 * (0.012 + 0.0004), abs=0.3)
    assert run.num_gaps == pytest.approx(100, abs=10)


def test_everything_that_was_held_is_given_back() -> None:
    """With preemptions and replicas that leave on the way."""
    model = MODEL._replace(kv_tokens=12_000)
    cluster = ReplayedCluster((pool("prefill", 2), pool("decode", 2)), model, 2.0, 0.05)
    for _ in range(40):
        cluster.submit(Arrival(0.0, 700, 900))
    for tick in range(40_000):
        cluster.advance()
        if tick == 100:
            cluster.scale("decode", 1)
            cluster.scale("prefill", 1)
        if cluster.is_idle:
            break
    assert cluster.is_idle
    assert cluster.outcomes.num_preemptions > 0
    assert all(job.end_at is not None for job in cluster.outcomes.jobs)
    assert [(each.pool, each.used_tokens) for each in cluster.replicas] == [
        ("prefill", 0.0),
        ("decode", pytest.approx(0.0, abs=1e-3)),
    ]


def test_new_replicas_take_their_time_and_are_paid_from_the_order() -> None:
    cluster = ReplayedCluster(PAIR, MODEL, 2.0, 0.05)
    cluster.scale("decode", 3)
    ready = []
    for _ in range(250):
        ready.append(cluster.take_sample().num_ready("decode"))
        cluster.advance()
    assert ready.index(3) == 200
    assert cluster.outcomes.replica_s["decode"] == pytest.approx(75.0)


# -------------------------------------------------------------------------------- traces, the command


def test_a_trace_is_read_at_its_speed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 10, "output_length": 2, "hash_ids": [1]} for at in (4000, 0, 9000)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert read_arrivals(trace, speed=2.0, last_s=3.0) == [Arrival(0.0, 10, 2), Arrival(2.0, 10, 2)]
    trace.write_text('{"timestamp": 1, "input_length": 10}\n')
    with pytest.raises(BenchError, match=r"line 1: .*output_length"):
        read_arrivals(trace)
    with pytest.raises(BenchError, match="cannot read"):
        read_arrivals(tmp_path / "none")


def test_the_command_compares_the_policy_with_plainer_ones(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 250 * n, "input_length": 6000, "output_length": 100, "hash_ids": []} for n in range(400)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ["bench", "scaling", "--trace", str(trace), "--prefill-tok-s", "8000", "--start-s", "5"]
    result = CliRunner().invoke(cli, [*options, "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["scheme"].split(" ")[0] for row in rows] == ["policy", "fixed,", "fixed,", "queue"]
    assert all(row["num_requests"] == 400 for row in rows)
    policy, _, peak, _ = rows
    assert policy["peak_replicas"] == peak["peak_replicas"]
    assert policy["peak_replicas"]["prefill"] >= 4  # 24,000 tok/s at 75 % of 8000
    assert sum(policy["replica_s"].values()) < sum(peak["replica_s"].values())
    result = CliRunner().invoke(cli, [*options, "--moves"])
    assert "forecast: " in result.stdout or "now: " in result.stdout
    assert "queue target" in result.stdout
