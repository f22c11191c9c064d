"""Predicted times of steps, against those that were measured on a card, and against their own limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planning.device_profile import device_profile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import PlannedModel, planned_model
from cluster.planning.step_times import StepTimes

ONE = DeviceSplit(1)


@pytest.fixture(scope="module")
def llama() -> PlannedModel:
    return planned_model("llama-3.1-8b", "auto", "auto")


def times(model: PlannedModel, gpu: str = "H100", split: DeviceSplit = ONE) -> StepTimes:
    return StepTimes(model, device_profile(gpu), split)


# benchmarks/README.md, "On a card": batch, context, milliseconds.
MEASURED = [(1, 1024, 6.41), (32, 1024, 8.08), (256, 1024, 21.2), (1, 30_000, 7.58), (8, 30_000, 16.8)]


@pytest.mark.parametrize(("batch", "context", "ms"), MEASURED)
def test_decode_on_an_h100(llama: PlannedModel, batch: int, context: int, ms: float) -> None:
    assert 1e3 * times(llama).decode_s(batch, context) == pytest.approx(ms, rel=0.03)


def test_prefill_on_an_h100_and_an_h200(llama: PlannedModel) -> None:
    assert 1e3 * times(llama).prefill(4096).latency_s == pytest.approx(97.3, rel=0.03)
    assert 1e3 * times(llama, "H200").prefill(4096).latency_s == pytest.approx(91.4, rel=0.06)


@pytest.mark.parametrize(("batch", "ms", "error"), [(1, 4.66, 0.03), (32, 6.56, 0.12), (256, 16.9, 0.04)])
def test_decode_on_an_h200(llama: PlannedModel, batch: int, ms: float, error: float) -> None:
    assert 1e3 * times(llama, "H200").decode_s(batch, 1024) == pytest.approx(ms, rel=error)


@given(st.integers(1, 500), st.integers(1, 8000), st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b"]))
def test_more_sequences_and_longer_ones_take_longer(batch: int, context: int, name: str) -> None:
    of_model = times(planned_model(name, "auto", "auto"))
    step_s = of_model.decode_s(batch, context)
    assert of_model.decode_s(batch + 1, context) > step_s
    assert of_model.decode_s(batch, context + 1000) > step_s
    # But a sequence the less, the more there are.
    assert of_model.decode_s(2 * batch, context) < 2 * step_s


@pytest.mark.parametrize("split", [DeviceSplit(2), DeviceSplit(8), DeviceSplit(1, 2), DeviceSplit(4, 2)])
def test_more_devices_compute_prompts_sooner_but_not_so_many_times_sooner(
    llama: PlannedModel, split: DeviceSplit
) -> None:
    one, several = times(llama).prefill(8192), times(llama, split=split).prefill(8192)
    assert one.latency_s / split.num_devices <= several.latency_s < one.latency_s
    assert several.busy_s <= several.latency_s


def test_a_chosen_few_experts_are_read() -> None:
    """One token reads 8 of 128 experts, many read nearly all."""
    of_model = times(planned_model("qwen3-30b-a3b", "auto", "auto"))
    read_all_s = 61.1e9 / (2990e9 * 0.85)
    assert of_model.decode_s(1, 100) < 0.2 * read_all_s
    assert of_model.decode_s(256, 100) > 0.95 * read_all_s


def test_a_latent_is_read_by_each_rank() -> None:
    model = planned_model("deepseek-v3", "auto", "auto")
    near, far = 1000, 101_000
    of_context = [
        times(model, "H200", split).decode_s(1, far) - times(model, "H200", split).decode_s(1, near)
        for split in (DeviceSplit(1), DeviceSplit(8))
    ]
    assert of_context[0] == pytest.approx(of_context[1], rel=0.25)
    assert of_context[1] > 0.99 * (far - near) * 61 * 1152 / 4214e9


def test_kv_of_the_last_chunk_follows_the_prompt(llama: PlannedModel) -> None:
    of_model = times(llama)
    assert of_model.token_bytes == 131_072
    assert of_model.transfer_s(512) == pytest.approx(512 * 131_072 / 12.5e9)
    assert of_model.transfer_s(10_000) == of_model.transfer_s(2048)
    assert times(llama, split=DeviceSplit(4)).transfer_s(512) == pytest.approx(of_model.transfer_s(512) / 4)


def test_a_step_of_decodes_alone_and_of_chunks_alone(llama: PlannedModel) -> None:
    of_model = times(llama)
    assert of_model.step_s(32, 1024) == of_model.decode_s(32, 1024)
    assert of_model.step_s(0, 0, [(0, 2048)]) == pytest.approx(of_model.prefill(2048).latency_s, rel=0.001)
    assert of_model.step_s(0, 0) == 0.0
    # Later chunks attend to earlier ones.
    assert of_model.step_s(0, 0, [(30_000, 2048)]) > 1.3 * of_model.step_s(0, 0, [(0, 2048)])


@given(st.integers(1, 200), st.integers(1, 8000), st.integers(1, 2048))
def test_one_step_for_decodes_and_a_chunk_saves_reading_the_weights_twice(
    decodes: int, context: int, num_tokens: int
) -> None:
    of_model = times(planned_model("llama-3.1-8b", "auto", "auto"))
    alone = of_model.step_s(decodes, context), of_model.step_s(0, 0, [(0, num_tokens)])
    mixed = of_model.step_s(decodes, context, [(0, num_tokens)])
    assert max(alone) < mixed < sum(alone)


def test_stages_have_a_part_of_the_sequences_each(llama: PlannedModel) -> None:
    of_stages = times(llama, split=DeviceSplit(1, 4))
    assert of_stages.decode_s(64, 1024) == of_stages.step_s(16, 1024)


@pytest.mark.parametrize("split", [ONE, DeviceSplit(2, 2)])
def test_a_cached_prefix_is_not_computed(llama: PlannedModel, split: DeviceSplit) -> None:
    of_model = times(llama, split=split)
    whole, suffix = of_model.prefill(8192), of_model.prefill(8192, 6144)
    # The rest attends to what is cached, so it takes more than a prompt of its length alone.
    assert of_model.prefill(2048).busy_s < suffix.busy_s < 0.4 * whole.busy_s
    assert of_model.prefill(8192, 8192) == of_model.prefill(8192, 8191)


@pytest.mark.parametrize(("batch", "ratio"), [(1, 1.0), (64, 1.0), (256, 1.4)])
def test_steps_of_five_tokens_a_sequence_take_longer_where_they_multiply(
    llama: PlannedModel, batch: int, ratio: float
) -> None:
    """As docs/planning.md has it of drafts that are verified."""
    of_model = times(llama)
    verified_s = of_model.step_s(0, 0, [(1019, 5)] * batch)
    assert verified_s / of_model.decode_s(batch, 1024) == pytest.approx(ratio, abs=0.05)
