"""The one-shot exchange between the ranks of a stage: each writes its part into memory of all others,
raises a flag there, waits for theirs, and adds up all parts in the order of ranks, or keeps them side by
side.

A rank has one buffer, which the others have mapped:

    counts    [MOST_PROGRAMS]      how often each program has run; its own alone
    broken    1 word               why nobody is waited for any more; 0 while all is well
    flags     [tp, MOST_PROGRAMS]  the count at which each rank's program has written its part for this one
    parts     [2, tp, PART_BYTES]  what the ranks have written, used in turn by odd and even counts

Programs are independent: program i of a rank exchanges tile i with program i of the others, so nothing has
to wait for a whole grid, and programs that start in order cannot wait for each other in a circle. Counts
are in the device's memory, so a graph that was recorded once counts on with each replay.

Why two parts suffice: a rank writes its part of count n + 2 when it has seen the others' flags of n + 1,
which they raise in a kernel that began when their kernel of n had ended, and with it all reading of n. A
flag may be one ahead of the count that is awaited, for the same reason never two; the difference is
compared, so counts may wrap.

Order of memory: all threads of a program write their words, meet, and then one thread exchanges the flag
with the semantics of a release to the system. The reader's acquire of the same scope, and the threads'
meeting behind it, make the words visible. Both are read-modify-write operations, on the flags of another
device, too, so devices need native atomics between them, as NVLink has and PCI Express has not.

A program waits until the flag is there, the host has written `control[0]`, or `most_polls` looks have been
in vain. It then writes the reason to `broken`, and to `control[1]` for the host, and every later exchange
ends at once with a result that is worth nothing. Not yet validated on a card."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_PROGRAMS = 128
TILE_BYTES = 4096
# The most that a rank writes in one exchange.
PART_BYTES = MOST_PROGRAMS * TILE_BYTES
# The words of `control`, and the reasons in `broken` and `control[1]`.
ENDED, REASON, NUM_CONTROLS = 0, 1, 2
PEER_ENDED, PEER_SILENT = 1, 2

# Looks between two at the host's word, which lies behind the bus.
_POLLS_PER_LOOK = 32
_NUM_WARPS = 4

_MOST_PROGRAMS = tl.constexpr(MOST_PROGRAMS)
_PART_BYTES = tl.constexpr(PART_BYTES)
_LOOK = tl.constexpr(_POLLS_PER_LOOK)
_PEER_ENDED = tl.constexpr(PEER_ENDED)
_PEER_SILENT = tl.constexpr(PEER_SILENT)
# Words before the flags: the counts, and one line of the cache for `broken`.
_HEADER_WORDS = MOST_PROGRAMS + 32
_FLAGS = tl.constexpr(_HEADER_WORDS)


def buffer_bytes(tp: int) -> int:
    """Return the size of a rank's buffer, which must be zero at first."""
    return _parts_start(tp) + 2 * tp * PART_BYTES


def exchange(
    own: torch.Tensor,
    result: torch.Tensor,
    bases: torch.Tensor,
    rank: int,
    control: torch.Tensor,
    most_polls: int,
    *,
    gathers: bool,
    writes: bool = True,
    reads: bool = True,
) -> None:
    """Exchange `own` [num_elements], at most `PART_BYTES`, with the other ranks, which call this with as many
    elements of the same dtype. `result` [num_elements] becomes the sum, and may be `own`; with `gathers`
    `result` [tp, num_elements] becomes the ranks' parts.

    `bases` are the addresses here of all ranks' buffers, int64 [tp] on the device; `control`, int32
    [NUM_CONTROLS], is memory of the host that the device reads. Sums of floats are computed in float32 and
    rounded once. Tests on one thread split the exchange, all ranks without `reads` and then all without
    `writes`. Only queues work, on the current stream."""
    num_elements, tp = len(own), len(bases)
    assert own.is_contiguous()
    assert result.is_contiguous()
    assert own.nbytes <= PART_BYTES, f"{own.nbytes} bytes in one exchange"
    tile = TILE_BYTES // own.element_size()
    _exchange_kernel[(triton.cdiv(num_elements, tile),)](
        own,
        result,
        num_elements,
        bases,
        rank,
        control,
        most_polls,
        _parts_start(tp),
        TP=tp,
        TILE=tile,
        GATHERS=gathers,
        WRITES=writes,
        READS=reads,
        num_warps=_NUM_WARPS,
    )


def _parts_start(tp: int) -> int:
    return 4 * (_HEADER_WORDS + tp * MOST_PROGRAMS)


@triton.jit
def _await_flag(flag, count, broken, polls, control, most_polls):
    """Wait for a flag of this count. Returns (broken, polls) after it."""
    lead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
    while (lead < 0) & (broken == 0):
        polls += 1
        if polls % _LOOK == 0:
            broken = tl.where(tl.load(control, volatile=True) != 0, _PEER_ENDED, 0)
        if polls >= most_polls:
            broken = tl.where(broken != 0, broken, _PEER_SILENT)
        lead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count
        if lead >= 0:  # it came at last
            broken = 0
    return broken, polls


@triton.jit(do_not_specialize=["rank"])
def _exchange_kernel(
    own, result, num_elements, bases, rank, control, most_polls, parts_start,
    TP: tl.constexpr, TILE: tl.constexpr, GATHERS: tl.constexpr, WRITES: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """Exchange one tile: programs [num_tiles]."""
    program = tl.program_id(0)
    elements = program * TILE + tl.arange(0, TILE)
    inside = elements < num_elements
    words = tl.load(bases + rank).to(tl.pointer_type(tl.int32))
    count = tl.load(words + program) + 1
    broken = tl.load(words + _MOST_PROGRAMS, volatile=True)
    turn = (count & 1).to(tl.int64) * TP
    values = tl.load(own + elements, mask=inside)
    if WRITES:
        # Nothing is written for a rank that has ended: its memory may be no longer mapped.
        is_written = inside & (broken == 0)
        for peer in tl.static_range(TP):
            start = tl.load(bases + peer) + parts_start + (turn + rank) * _PART_BYTES
            part = tl.multiple_of(start.to(tl.pointer_type(own.dtype.element_ty)), 16)
            tl.store(part + elements, values, mask=is_written & (peer != rank))
        tl.debug_barrier()
        for peer in tl.static_range(TP):
            flags = tl.load(bases + peer).to(tl.pointer_type(tl.int32)) + _FLAGS
            is_raised = (peer != rank) & (broken == 0)
            tl.atomic_xchg(
                flags + rank * _MOST_PROGRAMS + program, count, mask=is_raised, sem="release", scope="sys"
            )
    if READS:
        polls = 0
        for peer in tl.static_range(TP):
            if peer != rank:
                flag = words + _FLAGS + peer * _MOST_PROGRAMS + program
                broken, polls = _await_flag(flag, count, broken, polls, control, most_polls)
        if broken != 0:
            tl.store(words + _MOST_PROGRAMS, broken)
            tl.store(control + 1, broken)
        tl.debug_barrier()
        for peer in tl.static_range(TP):
            start = tl.load(bases + rank) + parts_start + (turn + peer) * _PART_BYTES
            part = tl.multiple_of(start.to(tl.pointer_type(own.dtype.element_ty)), 16)
            theirs = tl.load(part + elements, mask=inside & (peer != rank), volatile=True)
            theirs = tl.where(peer == rank, values, theirs)
            if GATHERS:
                tl.store(result + peer * num_elements + elements, theirs, mask=inside)
            else:
                if own.dtype.element_ty.is_floating():
                    theirs = theirs.to(tl.float32)
                if peer == 0:
                    total = theirs
                else:
                    total += theirs
        if not GATHERS:
            if own.dtype.element_ty.is_floating():
                total = total.to(own.dtype.element_ty)
            tl.store(result + elements, total, mask=inside)
        tl.store(words + program, count)
