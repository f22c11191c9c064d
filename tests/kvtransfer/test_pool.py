"""Host pools and the copies beneath them: compiled for several processors or in numpy, the same result."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler, uses_compiler

from kvtransfer.blocks import runs
from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout, Run
from kvtransfer.blocks.pool import HostPool
from kvtransfer.blocks.runs import ByteRegion, RunTable, copy_runs, sum_runs
from kvtransfer.messages import Shard

# What this machine has, AVX2, plain SSE2 (flags of another architecture do not compile), and no compiler.
PROCESSORS = [
    *(
        pytest.param(flag, marks=needs_compiler)
        for flag in ("-march=native", "-march=haswell", "-march=x86-64")
    ),
    "numpy",
]
pytestmark = uses_compiler
same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(params=PROCESSORS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvtransfer.blocks.runs` works with the code for one of the processors."""
    built = None
    if request.param != "numpy":
        built = runs.load_kernel(request.param)
        if built is None or (request.param == "-march=haswell" and not _has_avx2()):
            pytest.skip(f"not for this processor: {request.param}")
    monkeypatch.setattr(runs, "load_kernel", lambda: built)


@pytest.fixture
def forget_kernel() -> Iterator[None]:
    runs.load_kernel.cache_clear()
    yield
    runs.load_kernel.cache_clear()


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[Run], list[tuple[int, int]], int]:
    """Runs that do not overlap in the target, blocks as (source, target) offsets, and the size of a block."""
    lengths = draw(st.lists(st.integers(1, 40) | st.sampled_from([64, 256, 2048, 4096, 9000]), max_size=6))
    gaps = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=6, max_size=6))
    runs: list[Run] = []
    src = dst = 0
    for length, (src_gap, dst_gap) in zip(lengths, gaps, strict=False):
        runs.append(Run(src + src_gap, dst + dst_gap, length))
        src, dst = src + src_gap + length, dst + dst_gap + length
    block_bytes = max(src, dst, 1)
    order = draw(st.permutations(range(3)))
    shift = draw(st.integers(0, 9))
    return (
        runs,
        [(shift + i * block_bytes, shift + j * block_bytes) for i, j in enumerate(order)],
        block_bytes,
    )


@same_fixture
@given(copies(), st.booleans(), st.integers(0, 70))
@pytest.mark.usefixtures("kernel")
def test_runs_are_copied_and_summed_byte_for_byte(
    plan: tuple[list[Run], list[tuple[int, int]], int], streamed: bool, skew: int
) -> None:
    runs, blocks, block_bytes = plan
    rng = np.random.default_rng(len(runs) + skew)
    source, before = (rng.bytes(skew + 3 * block_bytes + 16) for _ in range(2))
    target, expected = bytearray(before), bytearray(before)
    pieces = []
    for src, dst in blocks:
        parts = [source[skew + src + run.src_offset :][: run.num_bytes] for run in runs]
        for run, part in zip(runs, parts, strict=True):
            expected[dst + run.dst_offset : dst + run.dst_offset + run.num_bytes] = part
        pieces.append(b"".join(parts))
    table, region = RunTable(runs), ByteRegion(memoryview(source)[skew:])
    starts, ends = [src for src, _ in blocks], [dst for _, dst in blocks]
    sums = copy_runs(region, starts, ByteRegion(memoryview(target)), ends, table, streamed=streamed)
    assert target == expected
    assert sums == [checksum(piece) for piece in pieces]
    assert sum_runs(region, starts, table) == sums
    again = bytearray(before)
    assert copy_runs(region, starts, ByteRegion(memoryview(again)), ends, table, sums=False) == []
    assert again == expected


@pytest.mark.usefixtures("kernel")
def test_nothing_outside_the_memory_is_touched() -> None:
    small, large = ByteRegion(memoryview(bytearray(64))), ByteRegion(memoryview(bytearray(1024)))
    table = RunTable([Run(0, 0, 8), Run(32, 40, 16)])
    for src, starts, dst, ends in (
        (large, [0, 1000], large, [0, 64]),
        (large, [-8], large, [0]),
        (large, [0], small, [9]),
        (large, [0], small, [-1]),
    ):
        with pytest.raises(IndexError):
            copy_runs(src, starts, dst, ends, table)
    with pytest.raises(IndexError):
        sum_runs(small, [17], table)
    with pytest.raises(ValueError, match="1 blocks to 2"):
        copy_runs(large, [0], large, [0, 64], table)
    with pytest.raises(ValueError, match="read-only"):
        copy_runs(large, [0], ByteRegion(memoryview(bytes(64))), [0], table)


Range = tuple[int, int]


@st.composite
def shards(draw: st.DrawFn) -> tuple[BlockLayout, Shard]:
    """A layout with blocks of any size, odd ones too, and a piece of it."""

    def cut(start: int, end: int) -> Range:
        first = draw(st.integers(start, end - 1))
        return first, draw(st.integers(first + 1, end))

    layers, heads = cut(0, 5), cut(0, 5)
    layout = BlockLayout(
        Shard(*layers, *heads),
        draw(st.integers(1, 5) | st.just(32)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 4])),
    )
    return layout, Shard(*cut(*layers), *cut(*heads))


def piece_of(data: np.ndarray, layout: BlockLayout, piece: Shard) -> np.ndarray:
    """A view [blocks, layers, 2, heads, bytes] of the piece in blocks [blocks, block_bytes]."""
    shard = layout.shard
    shape = (len(data), shard.layer_end - shard.layer_start, 2, shard.head_end - shard.head_start, -1)
    layers = slice(piece.layer_start - shard.layer_start, piece.layer_end - shard.layer_start)
    heads = slice(piece.head_start - shard.head_start, piece.head_end - shard.head_start)
    return data.reshape(shape)[:, layers, :, heads]


def make_pool(layout: BlockLayout, num_blocks: int, seed: int) -> tuple[HostPool, np.ndarray]:
    """A pool of random bytes and its content, uint8 [num_blocks, block_bytes]."""
    memory = KvMemory.allocate(num_blocks * layout.block_bytes)
    content = np.random.default_rng(seed).integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)
    memory.buffer[:] = content.tobytes()
    return HostPool(layout, memory), content


@same_fixture
@given(shards(), st.permutations(range(6)), st.integers(0, 6))
@pytest.mark.usefixtures("kernel")
def test_pieces_are_packed_summed_and_unpacked(
    shape: tuple[BlockLayout, Shard], order: list[int], num_taken: int
) -> None:
    layout, piece = shape
    ids = order[:num_taken]
    pool, content = make_pool(layout, 6, 1)
    other, expected = make_pool(layout, 6, 2)
    packed = [block.tobytes() for block in piece_of(content, layout, piece)[ids]]
    assert pool.piece_bytes(piece) * num_taken == sum(map(len, packed))
    staging = pool.allocate_staging(num_taken * pool.piece_bytes(piece) + 1)
    sums = pool.gather(ids, piece, staging)
    assert bytes(staging[:-1]) == b"".join(packed)
    assert sums == pool.sums(ids, piece) == [checksum(block) for block in packed]
    other.scatter(ids, piece, staging)
    piece_of(expected, layout, piece)[ids] = piece_of(content, layout, piece)[ids]
    assert bytes(other.memory.buffer) == expected.tobytes()
    assert bytes(pool.memory.buffer) == content.tobytes()
    for each in (pool, other):
        each.close()


def test_blocks_and_pieces_that_are_not_there_are_refused() -> None:
    layout = BlockLayout(Shard(0, 2, 0, 2), head_dim=4, block_tokens=2, item_bytes=2)
    pool, content = make_pool(layout, 3, 1)
    staging = pool.allocate_staging(3 * layout.block_bytes)
    calls: list[Callable[[list[int], Shard], object]] = [
        pool.sums,
        lambda ids, piece: pool.gather(ids, piece, staging),
        lambda ids, piece: pool.scatter(ids, piece, staging),
    ]
    for call in calls:
        for ids in ([3], [-1], [0, 99]):
            with pytest.raises(IndexError, match="of the pool"):
                call(ids, layout.shard)
        with pytest.raises(ValueError, match="not part of"):
            call([0], Shard(0, 3, 0, 2))
    for copy in (pool.gather, pool.scatter):
        with pytest.raises(IndexError):
            copy([0, 1, 2], layout.shard, staging[:-1])
    assert bytes(pool.memory.buffer) == content.tobytes()
    pool.close()
    pool.close()


def test_memory_that_is_not_whole_blocks_is_refused() -> None:
    layout = BlockLayout(Shard(0, 1, 0, 1), head_dim=4, block_tokens=2, item_bytes=2)
    memory = KvMemory.allocate(layout.block_bytes + 1)
    with pytest.raises(ValueError, match="blocks of 32 bytes"):
        HostPool(layout, memory)
    memory.close()


@needs_compiler
@pytest.mark.usefixtures("forget_kernel")
def test_a_compiler_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert runs.load_kernel() is not None
    runs.load_kernel.cache_clear()
    monkeypatch.setattr(runs, "_FLAGS", ("--no-such-flag",))
    assert runs.load_kernel() is None
    assert "numpy is used" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"tandem-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    runs.load_kernel.cache_clear()
    assert runs.load_kernel() is None
    assert "only this user" in caplog.text


def _has_avx2() -> bool:
    return "avx2" in Path("/proc/cpuinfo").read_text().split()
