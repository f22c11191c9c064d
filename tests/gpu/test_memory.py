"""The memory of a rank on CUDA, and what happens when it lacks. Needs a CUDA device: only its allocator
reports and refuses memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.errors import CapacityError
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.rank.containment import Containment
from workers.rank.memory_profile import largest_steps
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import AutoKv, CheckpointFolder, ComputeSettings, RankCapacity

pytestmark = pytest.mark.gpu

BLOCK = 64
MAX_SEQUENCES = 64
NUM_ROWS = 2048
MANY = 1 << 40
_SHARE_BYTES = 8 << 30


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps take megabytes: wide layers, and a vocabulary of 32k."""
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(
        path, "llama", seed=3, hidden_size=1024, intermediate_size=4096, vocab_size=32768,
        max_position_embeddings=8192,
    )  # fmt: skip
    return path


def make(model_dir: Path, device: torch.device, share: float) -> ModelRunner:
    return ModelRunner(
        CheckpointFolder(model_dir),
        ComputeSettings(torch.bfloat16, device, num_threads=1),
        RankCapacity(BLOCK, MANY, MAX_SEQUENCES, auto_kv=AutoKv(share, NUM_ROWS)),
        SystemClock(),
    )


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def test_the_largest_steps_fit_beside_all_the_kv(model_dir: Path, device: torch.device) -> None:
    """KV fills what the profile leaves of a share of the device. The steps that were measured, and all
    graphs, then fit, and the rank stays within its share."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    runner = make(model_dir, device, _SHARE_BYTES / total_bytes)
    runner.warm_up(NUM_ROWS)
    started, *steps, freed = largest_steps(NUM_ROWS, MAX_SEQUENCES, 8192, BLOCK)
    for plan in (started, *steps, freed):
        report = runner.steps.run(plan)
        assert not report.failed
    left = torch.cuda.mem_get_info(device)[0]
    assert free_bytes - left <= _SHARE_BYTES, "no more than its share"
    kv_bytes = runner.kv.nbytes
    assert kv_bytes > _SHARE_BYTES // 2, "and most of that is KV"
    runner.close()


def test_a_share_that_holds_only_the_weights_is_refused(model_dir: Path, device: torch.device) -> None:
    torch.cuda.empty_cache()
    with pytest.raises(CapacityError, match="kv_tokens: auto leaves space for 0 blocks"):
        make(model_dir, device, 0.001)


def test_a_chunk_for_which_memory_lacks_fails_and_the_decodes_beside_it_do_not(
    model_dir: Path, device: torch.device
) -> None:
    """The allocator is limited to little more than what is in use: a chunk's layers do not fit, two tokens'
    do."""
    runner = ModelRunner(
        CheckpointFolder(model_dir),
        ComputeSettings(torch.float32, device, num_threads=1),
        RankCapacity(BLOCK, 200 * BLOCK, 4),
        SystemClock(),
    )
    runner.warm_up(16)
    starts = tuple(SlotStart(SamplingParams(), (SlotSample(slot, slot, 3),)) for slot in (0, 1, 2))
    tables = (
        TableChange(0, 0, packed([0])),
        TableChange(1, 0, packed([1])),
        TableChange(2, 0, packed(list(range(2, 130)))),
    )
    firsts = tuple(BatchEntry(slot, 0, 1, packed([3]), (slot,)) for slot in (0, 1))
    runner.steps.run(StepPlan(1, starts=starts, tables=tables, entries=firsts))
    expected = [runner.steps.run(StepPlan(2, decodes=packed([0, 1]))).tokens for _ in range(3)]
    again = tuple(SlotStart(SamplingParams(), (SlotSample(slot, slot, 3),)) for slot in (0, 1))
    runner.steps.run(StepPlan(3, free_slots=(0, 1), starts=again, tables=tables[:2], entries=firsts))
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.mem_get_info(device)[1]
    limit = torch.cuda.memory_reserved(device) + (40 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total_bytes, device)
    try:
        chunk = BatchEntry(2, 0, 8000, packed([3] * 8000), (2,))
        report = runner.steps.run(StepPlan(4, entries=(chunk,), decodes=packed([0, 1])))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert [entry.index for entry in report.failed] == [0]
    assert "OutOfMemoryError" in report.failed[0].reason
    assert report.tokens[4:] == expected[0]
    frees: tuple[tuple[int, ...], ...] = ((2,), ())
    tokens = [
        runner.steps.run(StepPlan(5, free_slots=slots, decodes=packed([0, 1]))).tokens for slots in frees
    ]
    assert tokens == expected[1:]
    runner.close()


def test_memory_that_a_failed_attempt_held_can_be_had_again(device: torch.device) -> None:
    """The error's traceback holds the attempt's tensors until it is dropped."""
    containment = Containment(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)

    def attempt() -> bool:
        held = [torch.empty(256 << 20, dtype=torch.uint8, device=device) for _ in range(4)]
        return bool(held) and bool(torch.empty(MANY, dtype=torch.uint8, device=device).numel())

    assert containment.attempt(attempt) is None
    assert torch.cuda.memory_reserved(device) <= before
