"""Rank and owner: the arena that the rank maps."""

from __future__ import annotations

from kvtransfer.codec import Message


class RankHello(Message, frozen=True):
    """Rank to owner, first, over the node's unix socket. With `arena` the rank offers an arena that it mapped
    before the owner started, and whose descriptor follows with the next byte: the owner adopts it if it has
    none."""

    protocol: int
    session: bytes
    rank: int
    # The id of the arena; b"": none.
    arena: bytes


class ArenaGrant(Message, frozen=True):
    """Owner to rank: the arena to map. Its descriptor follows with the next byte, unless it is the one that
    the rank offered (`is_yours`). The connection stays open as long as the rank has the arena mapped: its end
    proves that the rank writes no more."""

    arena: bytes
    num_bytes: int
    is_yours: bool
