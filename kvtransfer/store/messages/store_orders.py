"""Engine core and rank: orders to the store worker of the rank, and its reports."""

from __future__ import annotations

from kvtransfer.codec import Message, Part
from kvtransfer.messages import Shard


class AttachStore(Message, frozen=True):
    """To every rank: connect to the owner at this abstract unix socket and map its arena (again, when the
    owner was restarted). Earlier orders are finished first. Answered by `StoreAttached`."""

    address: str
    session: bytes


class StoreAttached(Message, frozen=True):
    """Answer: the arena that is mapped now, or the reason why none is. Sent again, with an error, when the
    connection to the owner ends."""

    arena: bytes
    error: str = ""


class StoreCopy(Part, frozen=True):
    """Pairs the rank's part of block `block_id` with the record at `offset`. `windows` are the blocks with
    the layers of each group behind the first. With `is_state` the groups are those with states, which have
    records of their own, else those without."""

    block_id: int
    offset: int
    windows: tuple[int, ...] = ()
    is_state: bool = False


class StorePut(Message, frozen=True):
    """To one rank: copy these blocks into their records. Answered by `StorePutDone`."""

    number: int
    arena: bytes
    copies: tuple[StoreCopy, ...]


class StorePutDone(Message, frozen=True):
    """Answer: the payload's checksum of each copy, in order. With an error there are none, and the rank
    writes none of the records any more."""

    number: int
    sums: tuple[int, ...]
    num_bytes: int
    seconds: float
    error: str = ""


class StoreRead(Part, frozen=True):
    """Fill `piece` of block `block_id` from the record of `shard` at `offset`, whose payload of `num_bytes`
    must have this checksum; and that of the block in `windows` of each group behind the first, but for -1.
    The groups are those of `StoreCopy`."""

    block_id: int
    offset: int
    shard: Shard
    piece: Shard
    num_bytes: int
    checksum: int
    windows: tuple[int, ...] = ()
    is_state: bool = False


class StoreGet(Message, frozen=True):
    """To one rank: copy from records into blocks, and verify every record. Answered by `StoreGetDone`."""

    number: int
    arena: bytes
    reads: tuple[StoreRead, ...]


class StoreGetDone(Message, frozen=True):
    """Answer: `bad` are the indices of the reads whose record had a wrong checksum; with an error, all of
    them."""

    number: int
    bad: tuple[int, ...]
    num_bytes: int
    seconds: float
    error: str = ""


StoreOrder = AttachStore | StorePut | StoreGet
StoreReport = StoreAttached | StorePutDone | StoreGetDone
