"""Blocks in host memory: attention reads them, in both ways, as it reads those of the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from attention_steps import attend, make_backend, unrotated
from compiled_kernels import backend_cases
from local_engine import BLOCK
from runner_parts import ON_CPU
from torch import Tensor

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import Shard
from workers.messages.rank_channel import BlockCopy
from workers.model import native
from workers.model.attention.interface import HostReader, LayerRead, SequenceSpan, StepInput
from workers.model.attention.torch_backend import TorchAttention
from workers.model.host_kv import MODES, HostKv, OffloadMode, streaming_bytes
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

CPU = torch.device("cpu")
LAYERS, KV_HEADS, HEADS, HEAD_DIM = 5, 2, 4, 16
WINDOWS = (0, 20, 20, 0, 0)
NUM_DEVICE, NUM_HOST = 30, 12
# Decoding sequences and a chunk; the last shares two blocks with the first.
SPANS: tuple[SequenceSpan, ...] = (
    SequenceSpan(95, 1, tuple(range(6))),
    SequenceSpan(70, 20, tuple(range(6, 12))),
    SequenceSpan(30, 1, (12, 13)),
    SequenceSpan(40, 1, (0, 1, 14)),
)
MOVED = {0: 37, 1: 31, 2: 33, 6: 30, 7: 41, 12: 36}


@pytest.fixture
def device_kv() -> Tensor:
    return _numbers(torch.float32)


def _numbers(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_DEVICE, LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def _move(kv: Tensor, mode: OffloadMode) -> HostKv:
    host = HostKv(kv, NUM_HOST)
    assert host.copy([BlockCopy(block, host_id) for block, host_id in MOVED.items()]) == []
    for block in MOVED:
        kv[block] = float("nan")
    host.use(mode)
    return host


def _attend(name: str, kv: Tensor, query: Tensor, host: HostKv | None) -> list[Tensor]:
    spans = SPANS
    if host is not None:
        spans = tuple(
            span._replace(block_ids=tuple(MOVED.get(block, block) for block in span.block_ids))
            for span in SPANS
        )
    reader = host.reader if host is not None else None
    backend = make_backend(name, unrotated(HEADS, HEAD_DIM, WINDOWS), kv)
    return attend(backend, spans, [query] * LAYERS, reader)


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    backend_cases(
        itertools.product(MODES, [torch.float32, torch.bfloat16, torch.float16]),
        itertools.product(["in_place"], [torch.float32, torch.bfloat16]),
    ),
)
def test_it_equals_attention_on_the_device(name: str, mode: OffloadMode, dtype: torch.dtype) -> None:
    """Several steps of one reader, over layers with and without a window."""
    kv = _numbers(dtype)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn((3, 23, HEADS, HEAD_DIM), generator=generator).to(dtype)
    expected = [_attend(name, kv, query, None) for query in queries]
    host = _move(kv, mode)
    for query, wanted in zip(queries, expected, strict=True):
        found = _attend(name, kv, query, host)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    host.close()


def test_a_window_brings_only_what_it_sees(device_kv: Tensor) -> None:
    class Reader(HostReader):
        def begin(self, reads: Sequence[LayerRead]) -> None:
            self.layer_to_ids = [read.ids for read in reads]

        def layer(self, layer: int) -> Tensor:
            raise NotImplementedError

        def in_place(self) -> Tensor:
            raise NotImplementedError

        def done(self, layer: int) -> None:
            raise NotImplementedError

        def close(self) -> None:
            raise NotImplementedError

    reader = Reader(NUM_DEVICE)
    spans = [SequenceSpan(95, 1, (37, 31, 33, 3, 4, 5))]
    TorchAttention(unrotated(HEADS, HEAD_DIM, WINDOWS), device_kv).plan(StepInput.of(spans, BLOCK, reader))
    assert list(reader.layer_to_ids) == [(31, 33, 37), (), (), (31, 33, 37), (31, 33, 37)]


def test_copies_go_both_ways_and_those_on_the_device_are_left(device_kv: Tensor) -> None:
    before = device_kv.clone()
    host = HostKv(device_kv, NUM_HOST)
    inside = BlockCopy(4, 5)
    assert host.copy([BlockCopy(3, 30), inside, BlockCopy(4, 41)]) == [inside]
    assert torch.equal(host.kv[[0, 11]], before[3:5])
    assert host.copy([BlockCopy(41, 7)]) == []
    assert torch.equal(device_kv[7], before[4])
    device_kv[7] = before[7]
    assert torch.equal(device_kv, before)
    host.close()


# ---------------------------------------------------------------------------------------- the runner


class _Clock(ManualClock):
    """Time passes while steps read in the slow way."""

    def __init__(self, slow: OffloadMode) -> None:
        super().__init__(5.0)
        self.slow = slow
        self.runner: ModelRunner | None = None

    def now(self) -> float:
        host = self.runner.host if self.runner is not None else None
        if host is not None and host.mode == self.slow:
            self.advance(1.0)
        return super().now()


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    num_threads = torch.get_num_threads()
    write_random_checkpoint(tmp_path, "llama", seed=3)
    yield tmp_path
    torch.set_num_threads(num_threads)


def _runner(model_dir: Path, clock: ManualClock, num_blocks: int, num_offload_tokens: int) -> ModelRunner:
    return ModelRunner(
        CheckpointFolder(model_dir),
        ON_CPU,
        RankCapacity(BLOCK, num_blocks * BLOCK, num_offload_tokens=num_offload_tokens),
        clock,
    )


@pytest.mark.parametrize(("slow", "taken"), [("stream", "in_place"), ("in_place", "stream")])
def test_the_warm_up_takes_the_faster_way(
    model_dir: Path, slow: OffloadMode, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain torch; the kernels read in place."""
    monkeypatch.setattr(native, "serves", lambda device, dtype: False)
    clock = _Clock(slow)
    clock.runner = runner = _runner(model_dir, clock, 8, 10 * BLOCK)
    runner.warm_up()
    assert runner.host is not None
    assert runner.host.mode == taken
    runner.close()


def test_a_device_of_one_block_is_warmed_up_beside_host_memory(model_dir: Path) -> None:
    runner = _runner(model_dir, ManualClock(5.0), 1, 3 * BLOCK + 1)
    runner.warm_up()
    fields = runner.ready_fields
    assert (fields.num_blocks, fields.num_offload_blocks) == (1, 3)
    assert fields.max_context_tokens == 4 * BLOCK
    runner.close()


def test_without_offload_tokens_there_is_no_host_memory(model_dir: Path) -> None:
    runner = _runner(model_dir, ManualClock(5.0), 2, 0)
    assert runner.host is None
    assert runner.ready_fields.num_offload_blocks == 0
    assert runner.ready_fields.max_context_tokens == 2 * BLOCK
    runner.close()


def test_streaming_takes_what_is_left_out_of_kv(device_kv: Tensor) -> None:
    """A layer of all blocks, twice, as the buffers are."""
    layout = BlockLayout(Shard(0, LAYERS, 0, KV_HEADS), HEAD_DIM, BLOCK, device_kv.itemsize)
    assert layout.block_bytes == device_kv[0].nbytes
    assert streaming_bytes(layout, NUM_HOST) == 2 * NUM_HOST * device_kv[0, 0].nbytes
