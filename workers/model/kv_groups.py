"""The groups of a model's layers whose KV has blocks and tables apart, and how many blocks each gets. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtransfer.messages import STATE_ITEM_BYTES, STATE_WINDOW, KvGroup
from workers.model.kv_form import KvForm
from workers.model.model_config import ModelConfig


def kv_groups(config: ModelConfig) -> tuple[KvGroup, ...]:
    """Return the groups of the layers that have KV: those without a window, then those of each window, or
    those with a recurrent state. None where all layers are alike, or where no layer sees all tokens; a window
    that holds the whole context is none."""
    if (state := config.state) is not None:
        attending = tuple(layer for layer in range(config.num_layers) if config.has_attention(layer))
        size = state.part_size(config.num_kv_heads)
        return KvGroup(attending, 0), KvGroup(state.layers, STATE_WINDOW, size)
    own = config.sliding_windows[: config.kv_cells.num_layers]
    reaches = [window if window < config.max_context_tokens else 0 for window in own]
    if 0 not in reaches or not any(reaches):
        return ()
    return tuple(
        KvGroup(tuple(layer for layer, its in enumerate(reaches) if its == window), window)
        for window in sorted(set(reaches))
    )


class WindowCapacity(NamedTuple):
    """What decides how many blocks a group with a window gets: as many as `max_sequences` sequences need, and
    a part of as many again that are on their way here or away; the chunks that are computed at once, at each
    stage `max_batch_tokens`; but no more than layers without a window have."""

    block_tokens: int
    max_sequences: int
    max_batch_tokens: int
    num_stages: int = 1

    def most_blocks(self, window: int) -> int:
        """Return the most blocks that are of use."""
        # A window begins within a block and ends within one, and one more is written ahead.
        of_sequence = -(-window // self.block_tokens) + 2
        num_sequences = self.max_sequences + -(-self.max_sequences // 2)
        num_chunk_blocks = -(-self.max_batch_tokens // self.block_tokens)
        return num_sequences * of_sequence + self.num_stages * num_chunk_blocks


class StateCapacity(NamedTuple):
    """What decides how many blocks a group with a recurrent state gets: two for each of `max_sequences`
    sequences, which keep the state at the last border that they passed, and a part of as many again for
    those that cross a border, and that are on their way here or away; one for each chunk of a prompt that is
    computed at once, at each stage; and `snapshots` (None: as many as take a quarter of the memory that
    layers without a window have)."""

    max_sequences: int
    num_stages: int = 1
    snapshots: int | None = None

    @property
    def num_working(self) -> int:
        """The blocks that are not for snapshots."""
        return 2 * (self.max_sequences + -(-self.max_sequences // 2)) + self.num_stages + 1


# The bytes of snapshots for each byte of KV of layers without a window.
_SNAPSHOT_SHARE = 0.25


class GroupLimit(NamedTuple):
    """The most blocks that are of use in a group behind the first: `num_fixed`, and `share` of as many as the
    first has; but no more than that has. A sequence needs two states where it crosses a border."""

    num_fixed: int
    share: float = 0.0
    has_states: bool = False

    def most_blocks(self, num_blocks: int) -> int:
        """Return the blocks beside `num_blocks` of the first group."""
        most = min(num_blocks, self.num_fixed + int(self.share * num_blocks))
        return 2 if self.has_states and most == 1 else most


def group_limits(
    config: ModelConfig,
    groups: Sequence[KvGroup],
    form: KvForm,
    windows: WindowCapacity | None,
    states: StateCapacity,
    block_tokens: int,
) -> list[GroupLimit]:
    """Return the limit of each group behind the first, the same at all ranks of a replica."""
    limits: list[GroupLimit] = []
    for group in groups[1:]:
        if not group.state_size:
            assert windows is not None
            limits.append(GroupLimit(windows.most_blocks(group.window)))
        elif states.snapshots is not None:
            limits.append(GroupLimit(states.num_working + states.snapshots, has_states=True))
        else:
            cells = config.kv_cells
            layer_bytes = cells.num_kinds * cells.num_cells * block_tokens * form.head_bytes(cells.width)
            state_bytes = len(group.layers) * config.num_kv_heads * group.state_size * STATE_ITEM_BYTES
            share = _SNAPSHOT_SHARE * len(groups[0].layers) * layer_bytes / state_bytes
            limits.append(GroupLimit(states.num_working, share, has_states=True))
    return limits


class GroupBytes(NamedTuple):
    """The bytes of a block of each group, the first without a window, and the limits of the others."""

    block_bytes: Sequence[int]
    limits: Sequence[GroupLimit] = ()

    @staticmethod
    def sum(parts: Sequence[GroupBytes]) -> GroupBytes:
        """Return the bytes of blocks that several ranks of a replica have together."""
        if not parts:
            return GroupBytes([0])
        of_groups = zip(*(part.block_bytes for part in parts), strict=True)
        return GroupBytes([sum(of_group) for of_group in of_groups], parts[0].limits)

    def bytes_of(self, num_blocks: int) -> int:
        """Return the bytes of `num_blocks` blocks of layers without a window, and of the others beside
        them."""
        return num_blocks * self.block_bytes[0] + sum(self._bytes_beside(num_blocks))

    def state_bytes(self, num_blocks: int) -> int:
        """Return the bytes of states beside `num_blocks` blocks of layers without a window."""
        beside = zip(self.limits, self._bytes_beside(num_blocks), strict=True)
        return sum(its for limit, its in beside if limit.has_states)

    @property
    def states_of_sequence(self) -> int:
        """The bytes of the states behind one token."""
        beside = zip(self.limits, self.block_bytes[1:], strict=False)
        return sum(each for limit, each in beside if limit.has_states)

    def saved_bytes(self, num_blocks: int) -> int:
        """Return the bytes that windows save beside `num_blocks` blocks of layers without one."""
        beside = zip(self.limits, self.block_bytes[1:], self._bytes_beside(num_blocks), strict=True)
        return sum(num_blocks * each - its for limit, each, its in beside if not limit.has_states)

    def fitting_blocks(self, num_bytes: int) -> int:
        """Return the most blocks of layers without a window that fit with the others into `num_bytes`."""
        least, most = 0, num_bytes // max(1, min(filter(None, self.block_bytes), default=1))
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.bytes_of(middle) <= num_bytes else (least, middle - 1)
        return least

    def _bytes_beside(self, num_blocks: int) -> list[int]:
        """Return the bytes of each group behind the first."""
        beside = zip(self.limits, self.block_bytes[1:], strict=True)
        return [limit.most_blocks(num_blocks) * its for limit, its in beside]
