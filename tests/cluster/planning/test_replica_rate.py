"""The rate that replicas hold, against a queue that is simulated, and in what it must obey."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Role
from cluster.planning.device_profile import device_profile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import planned_model
from cluster.planning.replica_rate import MISSES, CapacityFinder, PlannedLoad, ReplicaCapacity, waited_s
from cluster.planning.step_times import StepTimes

LLAMA = planned_model("llama-3.1-8b", "auto", "auto")
ONE = DeviceSplit(1)
WORKLOAD = PlannedLoad(1024, 256, ttft_s=0.5, tpot_s=0.03)


def capacity(
    load: PlannedLoad, role: Role, split: DeviceSplit = ONE, gpu: str = "H100"
) -> ReplicaCapacity | None:
    return CapacityFinder(LLAMA, device_profile(gpu), load).find(split, role)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_waits_are_those_of_a_queue(load: float) -> None:
    """Arrivals at random at one server, whose times are exponential."""
    source = random.Random(7)
    now = free_at = 0.0
    waits = []
    for _ in range(200_000):
        now += source.expovariate(load)
        waits.append(max(0.0, free_at - now))
        free_at = max(free_at, now) + source.expovariate(1.0)
    exceeded = sorted(waits)[round((1 - MISSES) * len(waits))]
    assert waited_s(load, 1.0) == pytest.approx(exceeded, rel=0.1)


def test_nobody_waits_where_few_come() -> None:
    assert waited_s(MISSES, 1.0) == 0.0


@given(
    st.integers(64, 8000),
    st.integers(16, 1000),
    st.floats(0.2, 5.0),
    st.floats(0.01, 0.1),
    st.sampled_from(["prefill", "decode", "both"]),
)
def test_what_is_found_keeps_the_objectives_and_no_more_would(
    num_input: int, num_output: int, ttft_s: float, tpot_s: float, role: Role
) -> None:
    load = PlannedLoad(num_input, num_output, ttft_s, tpot_s)
    finder = CapacityFinder(LLAMA, device_profile("H100"), load)
    found = finder.find(DeviceSplit(1), role)
    if found is None:
        assert finder.at(DeviceSplit(1), role, 1e-3) is None
        return
    assert found.ttft_s <= ttft_s * (role != "decode")
    assert found.tpot_s <= tpot_s * (role != "prefill")
    num_tokens = found.batch * (num_input + num_output)
    assert num_tokens <= found.memory.kv_tokens
    assert finder.at(DeviceSplit(1), role, 1.001 * found.rate) is None
    # Beside prompts, steps are as long as the objective lets them be, and sequences stay for longer.
    tpot_s *= 2 if role != "both" else 1
    longer = capacity(load._replace(ttft_s=2 * ttft_s, tpot_s=tpot_s), role)
    assert longer is not None
    assert longer.rate >= 0.999 * found.rate


def test_the_sequences_are_those_that_arrive_while_one_decodes() -> None:
    found = capacity(WORKLOAD, "decode")
    assert found is not None
    step_s = found.mean_batch / found.rate / WORKLOAD.output_tokens
    assert step_s == pytest.approx(0.0268, rel=0.05)
    assert found.bound == "memory for KV"
    assert found.batch * (1024 + 256) == pytest.approx(found.memory.kv_tokens, rel=0.001)


def test_what_bounds_a_replica() -> None:
    prefill = capacity(WORKLOAD, "prefill")
    assert prefill is not None
    assert prefill.bound == "TTFT"
    patient = capacity(WORKLOAD._replace(ttft_s=60), "prefill")
    assert patient is not None
    assert patient.bound == "time for prompts"
    both = capacity(WORKLOAD, "both")
    assert both is not None
    assert both.bound == "TTFT"
    assert both.chunk is not None
    assert both.chunk.step_s == pytest.approx(WORKLOAD.tpot_s, rel=0.01)


def test_a_replica_of_both_roles_computes_prompts_in_the_time_that_decoding_leaves() -> None:
    found = capacity(WORKLOAD, "both")
    assert found is not None
    assert found.chunk is not None
    times = StepTimes(LLAMA, device_profile("H100"), ONE)
    chunk = 1024 - round(found.chunk.num_tokens)
    step_s = times.step_s(found.mean_batch, WORKLOAD.mean_context, [(chunk // 2, 1024 - chunk)])
    assert step_s == pytest.approx(found.chunk.step_s, rel=0.01)
    assert found.busy == pytest.approx(found.rate * 1024 / found.chunk.num_tokens * step_s, rel=0.01)
    # Little's law: sequences stay for 256 steps, of which that share has prompts.
    alone_s = times.decode_s(found.mean_batch, WORKLOAD.mean_context)
    stay_s = 256 * (found.busy * step_s + (1 - found.busy) * alone_s)
    assert found.mean_batch == pytest.approx(found.rate * stay_s, rel=0.01)


def test_no_memory_and_no_time() -> None:
    big = planned_model("llama-3.3-70b", "auto", "auto")
    finder = CapacityFinder(big, device_profile("H100"), WORKLOAD)
    assert finder.find(DeviceSplit(2), "both") is None, "141 GB of weights do not fit two devices"
    assert capacity(WORKLOAD._replace(tpot_s=0.006), "decode") is None, "one sequence takes 6.4 ms"
    assert capacity(WORKLOAD._replace(tpot_s=0.007), "decode") is not None
