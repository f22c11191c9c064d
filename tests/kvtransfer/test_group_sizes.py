"""What groups of layers keep and move, and what of it names the records of a store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import STATE_WINDOW, CompatibilityRecord, KvGroup, MovedBytes, Shard
from kvtransfer.store.record import space_id, stored_form

PLAIN = CompatibilityRecord(8, b"model", "bfloat16", "bfloat16", 16, 6, 4, 32)
WHOLE = Shard(0, 6, 0, 4)
WINDOWED = replace(PLAIN, groups=(KvGroup((1, 4), 0), KvGroup((0, 2), 100), KvGroup((3, 5), 300)))
# Layer 5 has neither KV nor a state.
STATEFUL = replace(PLAIN, groups=(KvGroup((1, 4), 0), KvGroup((0, 2, 3), STATE_WINDOW, 50)))


@pytest.mark.parametrize("compatibility", [PLAIN, WINDOWED, STATEFUL])
def test_bytes_are_those_of_blocks(compatibility: CompatibilityRecord) -> None:
    groups = compatibility.groups
    layouts = [BlockLayout.of(compatibility, WHOLE, group) for group in range(len(groups) or 1)]
    sizes = [layout.block_bytes // layout.block_tokens for layout in layouts]
    assert compatibility.group_bytes == tuple(sizes[: len(groups)])
    kv = [size for size, layout in zip(sizes, layouts, strict=True) if not layout.is_state]
    assert compatibility.token_bytes == sum(kv)
    assert compatibility.state_bytes == sum(sizes) - sum(kv)


def test_what_moves_is_kv_of_all_tokens_of_windows_and_a_state() -> None:
    layer_bytes = 2 * 4 * 32 * 2
    assert PLAIN.moved_bytes == MovedBytes(6 * layer_bytes, 0, 0, 0)
    assert WINDOWED.moved_bytes == MovedBytes(2 * layer_bytes, 4 * layer_bytes, 300, 0)
    assert STATEFUL.moved_bytes == MovedBytes(2 * layer_bytes, 0, 0, 3 * 4 * 50 * 4)


def test_windows_are_no_part_of_a_record_and_states_are() -> None:
    assert stored_form(WINDOWED) == PLAIN
    assert stored_form(STATEFUL) == STATEFUL
    spaces = [stored_form(it) for it in (PLAIN, WINDOWED, STATEFUL)]
    assert space_id(spaces[0]) == space_id(spaces[1]) != space_id(spaces[2])
    groups = *WINDOWED.groups[:2], replace(STATEFUL.groups[1], layers=(3, 5))
    assert stored_form(replace(PLAIN, groups=groups)).groups == (KvGroup((0, 1, 2, 4), 0), groups[2])
    longer = replace(STATEFUL.groups[1], state_size=51)
    assert space_id(replace(STATEFUL, groups=(STATEFUL.groups[0], longer))) != space_id(STATEFUL)


def test_kv_that_the_store_quantizes_is_other_kv() -> None:
    """Than that of a device in 8 bits, and than that of devices without; states stay as they are."""
    stored = stored_form(STATEFUL, "stored-int8", 4)
    on_device = stored_form(replace(STATEFUL, kv_dtype="int8", scale_bytes=4))
    assert len({space_id(it) for it in (stored, on_device, STATEFUL)}) == 3
    assert stored.token_bytes == on_device.token_bytes == STATEFUL.token_bytes * (32 + 4) // (32 * 2)
    assert stored.state_bytes == STATEFUL.state_bytes
    assert stored.groups == STATEFUL.groups
