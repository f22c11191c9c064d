"""What the groups of layers of a replica keep, by name, for its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtransfer.messages import CompatibilityRecord, KvGroup
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool


class LayerGroups:
    """The groups of a replica's layers, with their blocks."""

    def __init__(
        self, compatibility: CompatibilityRecord, pool: BlockPool, group_pools: Sequence[GroupPool]
    ) -> None:
        groups = compatibility.groups
        sizes = compatibility.group_bytes or (compatibility.token_bytes,)
        names = [_name(group, compatibility) for group in groups] or [_full_name(compatibility)]
        states = [group.state_size > 0 for group in groups] or [False]
        reaches = [0 if group.state_size else group.window for group in groups] or [0]
        # The figures that do not change, and the pools of blocks.
        self._token_bytes = {
            name: size for name, size, is_state in zip(names, sizes, states, strict=True) if not is_state
        }
        self._sequence_bytes = {
            name: size * (window or 1)
            for name, size, is_state, window in zip(names, sizes, states, reaches, strict=True)
            if is_state or window
        }
        self._pools: dict[str, BlockPool | GroupPool] = {names[0]: pool}
        self._pools |= dict(zip(names[1:], group_pools, strict=True))

    def statistics(self) -> dict[str, Any]:
        """Return the fields of `ReplicaStats` that are by groups."""
        return {
            "layers_token_bytes": self._token_bytes,
            "layers_sequence_bytes": self._sequence_bytes,
            "num_layers_blocks": {name: pool.num_total for name, pool in self._pools.items()},
            "num_free_layers_blocks": {name: pool.num_free for name, pool in self._pools.items()},
            "num_cached_layers_blocks": {name: pool.num_cached for name, pool in self._pools.items()},
        }


def _name(group: KvGroup, compatibility: CompatibilityRecord) -> str:
    if group.state_size:
        return "state"
    return f"window {group.window}" if group.window else _full_name(compatibility)


def _full_name(compatibility: CompatibilityRecord) -> str:
    return "latent" if compatibility.num_kinds == 1 else "full"
