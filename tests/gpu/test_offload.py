"""Blocks in host memory beside a device: moves of whole blocks, and attention that reads them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from attention_steps import attend, unrotated
from torch import Tensor

from workers.messages.rank_channel import BlockCopy
from workers.model.attention.choice import candidate_backends
from workers.model.attention.interface import AttentionBackend, SequenceSpan
from workers.model.host_kv import MODES, HostKv, OffloadMode

LAYERS, KV_HEADS, HEADS, BLOCK, HEAD_DIM = 3, 2, 4, 16, 32
WINDOWS = (0, 20, 0)
NUM_DEVICE, NUM_HOST = 14, 6
# Decoding sequences and a chunk; the last shares two blocks with the first.
SPANS = (
    SequenceSpan(70, 1, (0, 1, 2, 3, 4)),
    SequenceSpan(20, 20, (5, 6, 7)),
    SequenceSpan(40, 1, (0, 1, 8)),
)
MOVED = {0: 16, 1: 14, 2: 19, 5: 15}


@pytest.fixture
def kv(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_DEVICE, LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(device)


@pytest.fixture
def host(kv: Tensor) -> Iterator[HostKv]:
    with closing(HostKv(kv, NUM_HOST)) as host:
        synchronize(kv)
        yield host


def synchronize(kv: Tensor) -> None:
    """Let all steps be reported."""
    if kv.is_cuda:
        torch.cuda.synchronize()


def backends(kv: Tensor) -> list[AttentionBackend]:
    """All that serve the device; on a CPU only the one that serves any device."""
    found = candidate_backends(unrotated(HEADS, HEAD_DIM, WINDOWS, kv.device), kv)
    return found if kv.is_cuda else [each for each in found if each.name == "torch"]


def test_blocks_go_both_ways(kv: Tensor, host: HostKv) -> None:
    before = kv.clone()
    inside = BlockCopy(4, 5)
    assert host.copy([BlockCopy(3, 14), inside, BlockCopy(4, 19)]) == [inside]
    synchronize(kv)
    assert torch.equal(host.kv[[0, 5]], before[3:5].cpu())
    assert host.copy([BlockCopy(19, 7)]) == []
    assert torch.equal(kv[7], before[4])
    kv[7] = before[7]
    assert torch.equal(kv, before)


@pytest.mark.parametrize("mode", MODES)
def test_attention_reads_host_memory_as_it_reads_the_device(
    kv: Tensor, host: HostKv, mode: OffloadMode
) -> None:
    """Several steps of one reader, over layers with and without a window."""
    queries = torch.randn((3, 22, HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(2)).to(kv)
    chosen = [each for each in backends(kv) if mode == "in_place" or each.can_stage]
    assert chosen
    expected = [[attend(each, SPANS, [query] * LAYERS) for query in queries] for each in chosen]
    assert host.copy([BlockCopy(block, place) for block, place in MOVED.items()]) == []
    kv[list(MOVED)] = float("nan")
    host.use(mode)
    spans = [
        span._replace(block_ids=tuple(MOVED.get(block, block) for block in span.block_ids)) for span in SPANS
    ]
    for backend, every in zip(chosen, expected, strict=True):
        for query, wanted in zip(queries, every, strict=True):
            found = attend(backend, spans, [query] * LAYERS, host.reader)
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_moves_do_not_wait_for_the_step_that_computes(kv: Tensor, host: HostKv) -> None:
    """What computes after them finds them done."""
    expected = kv[3].cpu()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # a second
    step = torch.cuda.Event()  # type: ignore[no-untyped-call]
    step.record()
    host.copy([BlockCopy(3, 14)])
    kv[3].zero_()  # the next step
    while not torch.equal(host.kv[0], expected):
        assert not step.query(), "the move waited for the step"  # type: ignore[no-untyped-call]
    host.copy([BlockCopy(14, 9)])
    assert torch.equal(kv[9].cpu(), expected)
    assert not kv[3].any()


@pytest.mark.gpu
def test_a_place_that_was_left_is_not_written_before_its_last_step_has_read_it(
    kv: Tensor, host: HostKv
) -> None:
    host.copy([BlockCopy(3, 14)])
    synchronize(kv)
    expected = kv[3].clone()
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # of the step that reads it in place
    read = host.reader.in_place()[0].clone()
    host.copy([BlockCopy(14, 9)])  # with the next step it comes back
    host.copy([BlockCopy(4, 14)])  # with the one after, another block takes its place
    synchronize(kv)
    assert torch.equal(read, expected)
    assert torch.equal(kv[9], expected)
    assert torch.equal(host.kv[0], kv[4].cpu())
