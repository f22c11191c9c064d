"""The table of `tandem status` of what groups of layers keep, and how often prompts could use it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from cluster.cli.store_tables import size
from cluster.cli.terminal import NONE, made_table
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb


def layers_parts(replicas: Iterable[admin_pb.Replica]) -> list[Table]:
    """Return the table, if layers of a replica form several groups, or have latents."""
    shown = [replica for replica in replicas if _is_shown(replica.load)]
    if not shown:
        return []
    numbers = "a token", "at most\na sequence", "used", "cached", "blocks"
    table = made_table(
        "groups of layers", "replica", "layers", numbers=(*numbers, "began at\nits cache", "tokens\nagain")
    )
    for replica in shown:
        load = replica.load
        num_prompts = load.num_snapshot_hits + load.num_snapshot_misses
        for row, name in enumerate(sorted(load.num_layers_blocks)):
            num_blocks = load.num_layers_blocks[name]
            num_cached = load.num_cached_layers_blocks.get(name, 0)
            table.add_row(
                NONE if row else replica.replica_id,
                name,
                _size(load.layers_token_bytes.get(name, 0)),
                _size(load.layers_sequence_bytes.get(name, 0)),
                str(num_blocks - load.num_free_layers_blocks.get(name, 0)),
                str(num_cached),
                str(num_blocks),
                NONE if row or not num_prompts else f"{load.num_snapshot_hits}/{num_prompts}",
                NONE if row or not num_prompts else str(load.num_recomputed_tokens),
            )
    return [table]


def _is_shown(load: admin_pb.Load) -> bool:
    return len(load.num_layers_blocks) > 1 or "latent" in load.num_layers_blocks


def _size(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else NONE
