"""The piece checksum against its definition in plain Python, and what it must notice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.checksum import Checksummer, checksum
from kvtransfer.blocks.layout import Run
from kvtransfer.blocks.runs import ByteRegion, RunTable, sum_runs
from kvtransfer.blocks.torch_checksum import checksum_torch

MODULUS = 1 << 64
WORDS = st.lists(st.integers(0, MODULUS - 1) | st.integers(0, 3), min_size=2, max_size=40)


def slow_mix(word: int) -> int:
    word = (word ^ (word >> 32)) * 0xFF51AFD7ED558CCD % MODULUS
    word = (word ^ (word >> 32)) * 0xC4CEB9FE1A85EC53 % MODULUS
    return word ^ (word >> 32)


def slow_checksum(data: bytes) -> int:
    padded = data + bytes(-len(data) % 8)
    total = 0
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[index * 8 : index * 8 + 8], "little")
        total += slow_mix((word + (index + 1) * 0x9E3779B97F4A7C15) % MODULUS)
    return slow_mix((total + slow_mix(len(data))) % MODULUS)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_all_implementations_agree_on_any_bytes_in_any_parts(data: bytes, cuts: list[int]) -> None:
    expected = slow_checksum(data)
    edges = [0, *sorted(min(each, len(data)) for each in cuts), len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(edges)]
    assert Checksummer().sum(parts) == expected
    assert checksum(data) == expected
    assert checksum_torch(as_tensor(data)) == expected
    runs = RunTable([Run(start, 0, end - start) for start, end in itertools.pairwise(edges)])
    assert sum_runs(ByteRegion(memoryview(data)), [0], runs) == [expected]


@pytest.mark.parametrize("num_bytes", [1 << 17, (1 << 17) + 5, (1 << 20) + 8, (3 << 20) - 3])
def test_across_the_edges_of_chunks_and_tables(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    expected = slow_checksum(data)
    assert checksum(data) == expected
    third = num_bytes // 3
    assert Checksummer().sum([data[:third], data[third:]]) == expected
    assert checksum_torch(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == expected


def test_one_checksummer_serves_many_pieces() -> None:
    checksummer = Checksummer()
    for number in range(5):
        data = bytes([number]) * (100 * number + 3)
        assert checksummer.sum([data]) == slow_checksum(data)


def test_it_never_changes() -> None:
    """The format on NVMe depends on it."""
    for data, expected in ((b"abc", 0x195ACE35FFD5AE5E), (bytes(range(256)), 0x14B9A9CB01380E13)):
        assert checksum(data) == slow_checksum(data) == expected


@given(WORDS, st.data())
def test_any_flipped_bit_changes_it(words: list[int], data: st.DataObject) -> None:
    raw = bytearray(np.array(words, dtype="<u8").tobytes())
    before = checksum(raw)
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert checksum(raw) != before


@given(WORDS, st.data())
def test_swapping_two_different_words_changes_it(words: list[int], data: st.DataObject) -> None:
    one = data.draw(st.integers(0, len(words) - 1))
    two = data.draw(st.integers(0, len(words) - 1))
    before = checksum(np.array(words, dtype="<u8").tobytes())
    words[one], words[two] = words[two], words[one]
    same = words[one] == words[two]
    assert (checksum(np.array(words, dtype="<u8").tobytes()) == before) is same


def test_length_counts_even_when_the_padding_is_equal() -> None:
    sums = {checksum(bytes(length)) for length in range(40)}
    assert len(sums) == 40


def test_many_structured_swaps_do_not_collide() -> None:
    """Words that differ in one bit only, exchanged: the weak spot of a mix with a single multiplication."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, MODULUS, 64, dtype=np.uint64)
    before = checksum(data.tobytes())
    for bit in range(64):
        for _ in range(50):
            one, two = rng.choice(64, 2, replace=False)
            changed = data.copy()
            changed[two] = changed[one] ^ np.uint64(1 << bit)
            swapped = changed.copy()
            swapped[[one, two]] = swapped[[two, one]]
            assert checksum(changed.tobytes()) != checksum(swapped.tobytes())
            assert checksum(changed.tobytes()) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_device_version_takes_tensors_of_any_type_and_stride(dtype: torch.dtype) -> None:
    tensor = torch.arange(210).reshape(5, 6, 7).to(dtype)
    part = tensor[:, 1:4]
    expected = slow_checksum(part.contiguous().view(torch.uint8).numpy().tobytes())
    assert checksum_torch(part) == expected
