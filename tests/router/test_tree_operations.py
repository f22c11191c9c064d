"""Many random operations leave the invariants of a prefix tree true; masks in both forms are the same."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest
from optional_programs import needs_compiler

from benchmarks import tree_operations
from benchmarks.tree_operations import TreeOperations
from router import radix
from router.holder_masks import CompiledMasks, PlainMasks
from router.key_map import KeyMap, KeySet
from router.native import load_kernel


@pytest.mark.parametrize(
    ("num_operations", "is_compiled"),
    [
        (4000, False),
        pytest.param(4000, True, marks=needs_compiler),
        pytest.param(1_000_000, True, marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_a_tree_stays_valid(num_operations: int, is_compiled: bool) -> None:
    """Little is forgotten at a time, so that replicas leave and come back while others are forgotten."""
    kernel = load_kernel() if is_compiled else None
    assert (kernel is not None) == is_compiled
    with mock.patch.object(tree_operations, "load_kernel", return_value=kernel):
        operations = TreeOperations(1, num_replicas=40, num_prompts=50, prompt_blocks=30)
    most_departed = 0
    with (
        mock.patch.object(radix, "_FORGOTTEN_BY_PART", 2),
        mock.patch.object(radix, "_FORGOTTEN_BY_EVENTS", 2),
        mock.patch.object(radix, "_FORGOTTEN_BY_MATCH", 1),
    ):
        for _ in range(20):
            operations.run(num_operations // 20)
            operations.tree.check()
            most_departed = max(most_departed, len(operations.tree._departed))
        operations.check()
    assert most_departed > 1


@needs_compiler
@pytest.mark.parametrize("num_bits", [8, 200, 4000])
def test_compiled_masks_are_the_plain_ones(num_bits: int) -> None:
    kernel = load_kernel()
    assert kernel is not None
    random, plain, compiled = Random(num_bits), PlainMasks(), CompiledMasks(kernel)
    keys = [random.randbytes(16) for _ in range(150)]
    num_words = -(-num_bits // 64)
    for number in range(600):
        chosen = random.choices(keys, k=random.randrange(30))
        bit = random.randrange(num_bits if number > 50 else 8)
        for masks in (plain, compiled):
            (masks.set_bit if number % 2 else masks.clear_bit)(bit, chosen)
        assert len(plain) == len(compiled)
        if number % 100 == 0:
            assert plain.found(keys) == compiled.found(keys)
            words, num_found = compiled.leading(chosen, num_words)
            found = plain.found(chosen)
            assert num_found == (found.index(0) if 0 in found else len(found))
            stride = 8 * num_words
            for position, mask in enumerate(found[:num_found]):
                packed = bytes(words)[position * stride : (position + 1) * stride]
                assert int.from_bytes(packed, "little") == mask
    assert len(plain) > 0
    for bit in range(num_bits):
        compiled.clear_bit(bit, keys)
    assert len(compiled) == 0


def test_a_large_set_of_keys_has_slices() -> None:
    keys = [number.to_bytes(16, "big") for number in range(40_000)]
    made = KeySet()
    for start in range(0, len(keys), 1000):
        made.set_all(keys[start : start + 1000], None)
    assert len(made.slices) > 1
    assert sorted(made) == keys
    assert made.missing([*keys[:10], b"other"]) == [b"other"]
    assert made.discard_all(keys[:39_990]) == keys[:39_990]
    assert sorted(made) == keys[39_990:]


def test_a_large_map_of_keys_keeps_their_values() -> None:
    keys = [number.to_bytes(16, "big") for number in range(20_000)]
    made: KeyMap[str] = KeyMap()
    made.set_all(keys[:10_000], "a")
    assert len(made.slices) == 1
    made.set_all(keys[3000:], "b")
    assert len(made.slices) > 1
    assert dict(made.items()) == dict.fromkeys(keys[:3000], "a") | dict.fromkeys(keys[3000:], "b")
