"""What steps came to: batches, tokens, hits, arithmetic and bytes, against sums made one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.common.clock import ManualClock, SystemClock
from workers.messages.link import StageTimes, Submission, TokenDelta
from workers.messages.rank_channel import BatchEntry, StepPlan
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import ATTENTION_PIECE_FLOPS, ModelWork
from workers.rank import probe
from workers.rank.probe import MeasureSizes, device_memory, measure_limits
from workers.replica.step_stats import Capability, StepStats
from workers.scheduler.step import PromptDone, StepOutcome
from workers.stats_record import BATCH_BOUNDS

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"
CONFIG = read_model_config(TINY)


def with_windows(*windows: int) -> ModelConfig:
    return dataclasses.replace(CONFIG, num_layers=len(windows), sliding_windows=windows)


def attended(start: int, num_tokens: int, window: int) -> list[range]:
    """By token of the span: the positions that it sees."""
    return [
        range(max(0, position + 1 - window) if window else 0, position + 1)
        for position in range(start, start + num_tokens)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=3),
    st.lists(st.sampled_from([0, 1, 2, 7, 30]), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_work_is_counted_pair_by_pair(
    spans: list[tuple[int, int]], windows: list[int], num_sampled: int
) -> None:
    config = with_windows(*windows)
    item_bytes = 2
    hidden, head_dim = config.hidden_size, config.head_dim
    layer_weights = hidden * head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer_weights += 3 * hidden * config.intermediate_size
    num_tokens = sum(num for _, num in spans)
    flops = 2 * num_tokens * layer_weights * len(windows) + 2 * num_sampled * hidden * config.vocab_size
    read = (layer_weights * len(windows) + hidden * config.vocab_size) * item_bytes
    for start, num in spans:
        for window in windows:
            seen = attended(start, num, window)
            flops += sum(map(len, seen)) * 4 * config.num_heads * head_dim
            num_read = len(set().union(*seen))
            read += num_read * 2 * config.num_kv_heads * head_dim * item_bytes
    work = ModelWork(config, item_bytes).of(spans, num_sampled)
    assert work.flops == pytest.approx(flops)
    assert work.read_bytes == pytest.approx(read)
    chunks = [span for span in spans if span[1] > 1]
    decodes = [start for start, num in spans if num == 1]
    assert ModelWork(config, item_bytes).of(chunks, num_sampled, decodes) == pytest.approx(work)


def entry(start: int, num_tokens: int, num_sampled: int = 1) -> BatchEntry:
    return BatchEntry(0, start, num_tokens, bytes(4 * num_tokens), tuple(range(num_sampled)))


def plan(*entries: BatchEntry) -> StepPlan:
    return StepPlan(1, entries=entries)


def test_shares_of_the_limits_are_of_the_time_that_steps_took() -> None:
    work = ModelWork(CONFIG, 4)
    stats = StepStats(Capability(work, flop_s=1e12, byte_s=1e10))
    assert (stats.mfu, stats.mbu) == (0.0, 0.0)
    step = StepPlan(1, entries=(entry(0, 64, 0), entry(10, 1)), decodes=bytes(8))
    for _ in range(3):
        stats.add(step, (7, 20), [0.25])
    expected = work.of([(0, 64), (10, 1), (7, 1), (20, 1)], 3)
    assert stats.num_flops == pytest.approx(3 * expected.flops)
    assert stats.num_read_bytes == pytest.approx(3 * expected.read_bytes)
    assert stats.busy_s == pytest.approx(0.75)
    assert stats.mfu == pytest.approx(expected.flops / 0.25 / 1e12)
    assert stats.mbu == pytest.approx(expected.read_bytes / 0.25 / 1e10)


def test_stages_that_work_side_by_side_are_busy_their_mean() -> None:
    stats = StepStats()
    stats.add(plan(entry(0, 1)), (), [0.5, 0.25])
    assert stats.busy_s == pytest.approx(0.375)
    assert (stats.num_flops, stats.peak_flop_s, stats.mfu) == (0.0, 0.0, 0.0)


def test_steps_are_counted_by_their_sequences() -> None:
    stats = StepStats()
    sizes = [1, 2, 3, 4, 5, 512, 513, 1000]
    for size in sizes:
        stats.add(StepPlan(1, decodes=bytes(4 * size)), range(size), [0.1])
    up_to = [sum(size <= bound for size in sizes) for bound in BATCH_BOUNDS]
    counts = stats.num_steps_by_batch
    assert [sum(counts[: index + 1]) for index in range(len(BATCH_BOUNDS))] == up_to
    assert sum(counts) == len(sizes)
    assert stats.num_batched_sequences == stats.num_computed_tokens == sum(sizes)


def test_hits_are_counted_by_where_the_kv_was() -> None:
    stats = StepStats()
    outcome = StepOutcome()
    submission = Submission("r", 1, "", "", 0, b"", b"", (), (), None, None, None)  # type: ignore[arg-type]
    for num_cached, loaded in ((0, {}), (48, {}), (64, {"dram": 16, "nvme": 32})):
        outcome.prompts.append(
            PromptDone(
                "r",
                1,
                submission=submission,
                num_computed_tokens=100,
                num_cached_tokens=num_cached,
                times=StageTimes(),
                decodes_remotely=False,
                all_finished=False,
                samples=(),
                block_ids=(),
                num_loaded_tokens=loaded,
            )
        )
    outcome.tokens.append(TokenDelta("r", 1, 0, 0, bytes(4), (), ""))
    stats.settled(outcome)
    assert stats.num_queried_tokens == 300
    assert stats.num_hit_tokens == {"device": 48 + 16, "dram": 16, "nvme": 32}
    assert stats.num_sampled_tokens == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_in_float32_serve_any_dtype(dtype: torch.dtype) -> None:
    """Where a CPU emulates bf16, the limit of that dtype alone was a fraction of what the engine reaches."""
    found = probe.product_kinds(torch.device("cpu"), dtype)
    assert {probe.ProductKind(torch.float32, False), probe.ProductKind(dtype, False)} <= set(found)
    assert probe.product_kinds(torch.device("cuda"), dtype) == [probe.ProductKind(dtype, False)]


def test_limits_are_of_the_fastest_kind_and_of_its_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kind is tried on a small matrix, takes nine times as long, and is not measured further."""
    both = [probe.ProductKind(torch.float32, False), probe.ProductKind(torch.bfloat16, False)]
    monkeypatch.setattr(probe, "product_kinds", lambda *_: both)

    class Jumping(ManualClock):
        """Each look at it is later than the last by the next of these."""

        steps = [0.0, 1.0, 0.0, 9.0, 9.0, 2.0, 0.5, 1.0, 9.0, 4.0, 2.0, 8.0]
        looks = 0

        def now(self) -> float:
            self.looks += 1
            if self.looks % 2 == 0:
                self.advance(self.steps[self.looks // 2 - 1])
            return super().now()

    found = measure_limits(torch.device("cpu"), torch.bfloat16, Jumping(0.0), MeasureSizes(4, 1024, 3))
    assert found.flop_s == pytest.approx(2 * 4**3 / 0.5)
    assert found.byte_s == pytest.approx(1024 / 2.0)


def test_a_device_has_limits_and_memory() -> None:
    found = measure_limits(torch.device("cpu"), torch.bfloat16, SystemClock(), MeasureSizes(64, 1 << 20, 2))
    assert found.flop_s > 0
    assert found.byte_s > 0
    memory = device_memory(torch.device("cpu"))
    assert 0 < memory.used_bytes < memory.total_bytes


def test_the_largest_piece_is_a_product_the_head_or_a_part_of_the_attention() -> None:
    work = ModelWork(CONFIG, 4)
    widest = 2 * CONFIG.hidden_size * 2 * CONFIG.intermediate_size
    assert work.largest_piece_flops(100, 1, 1, 1) == 100 * widest
    assert work.largest_piece_flops(5000, 1, 1, 2) == 5000 * widest / 2
    assert work.largest_piece_flops(1, 10**6, 1, 1) == 2 * 10**6 * CONFIG.vocab_size * CONFIG.hidden_size
    assert work.largest_piece_flops(5000, 1, 10**9, 1) == ATTENTION_PIECE_FLOPS
