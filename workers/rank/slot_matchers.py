"""Matchers of the slots whose output must follow a grammar: which tokens may come next, and why one ended.

The tokens that a slot may take next depend on its last one, so masks are made between the two halves of a
step (`StepRunner`). On a CPU the last tokens are at the host by then. On a device that runs behind the host
they are on their way (`TokensUnderWay`), and are waited for while the device computes the next step.

A matcher that fails ends its request alone. Its row is sampled without a mask, and is reported as failed."""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import GrammarRefusedError
from workers.messages.rank_channel import FailedEntry, RowMask, SlotSample, SlotStart
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.device_queue import CopiedOut
from workers.rank.grammar_check_child import error_of
from workers.rank.input_batch import PlannedRows
from workers.rank.logits import Slots

_ALL = np.uint32(0xFFFFFFFF)
# The number of rows of a step from which on masks are made in parallel.
_LEAST_PARALLEL = 4
_DIGEST_BYTES = 8

Masks = NDArray[np.uint32]


class MatcherFailure(NamedTuple):
    """The reason why a slot's output cannot go on. `code` as in `FailedEntry`."""

    reason: str
    code: str


_PANICKED = MatcherFailure(
    "its output could not follow the grammar: the library for grammars failed", "grammar"
)


class StepMasks(NamedTuple):
    """The tokens that a step's rows may sample. `masks` [num_samples, ceil(vocab_size / 32)], in memory that
    the next step's overwrite; `digests` are those of rows with a grammar."""

    masks: Masks
    digests: tuple[RowMask, ...]
    failed: tuple[FailedEntry, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    """The matcher of a slot, which has taken all its `tokens`; None until the slot samples, for its grammar
    may be compiled while its prompt is computed."""

    grammar: bytes
    sample: SlotSample
    # The number of tokens before which its end tokens may not come, and the words of these in a mask.
    min_tokens: int
    end_words: Masks
    matcher: LLMatcher | None = None
    tokens: list[int] = field(default_factory=list)
    # Whether it shares its lexer with no other slot.
    is_separate: bool = False
    has_ended: bool = False
    failure: MatcherFailure | None = None


@dataclass(slots=True, eq=False)
class TokensUnderWay:
    """Tokens that a device has sampled, or will have, for `rows` of a step."""

    copied: CopiedOut
    rows: PlannedRows
    is_taken: bool = False
    failed: tuple[FailedEntry, ...] = ()


class SlotMatchers:
    """The matchers of a rank's slots: `start` and `free` follow the plans, `masks` says what the rows of a
    step may sample, `advance` takes what they have sampled."""

    def __init__(
        self, grammars: CompiledGrammars, max_slots: int, num_threads: int, lift: Callable[[int], None]
    ) -> None:
        """`lift` is called with a slot whose text can only end, although it has fewer than its `min_tokens`:
        its end tokens must be possible from now on."""
        self._grammars = grammars
        self._lift = lift
        self._num_words = -(-grammars.vocab_size // 32)
        self._slots: dict[int, _Slot] = {}
        self._is_bound: NDArray[np.bool_] = np.zeros(max_slots, np.bool_)
        self._buffer: Masks = np.empty((0, self._num_words), np.uint32)
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        self._under_way: deque[TokensUnderWay] = deque()

    def start(self, start: SlotStart) -> None:
        """Take the slots of samples that begin, with the output that they have."""
        if not start.grammar:
            return
        sampling = start.sampling
        end_words = np.zeros(self._num_words, np.uint32)
        for token in {*self._grammars.end_ids, *sampling.stop_token_ids}:
            if 0 <= token < self._grammars.vocab_size:
                end_words[token // 32] |= np.uint32(1 << token % 32)
        for sample in start.samples:
            self._slots[sample.slot] = _Slot(start.grammar, sample, sampling.min_tokens, end_words)
            self._is_bound[sample.slot] = True

    def free(self, slot: int) -> None:
        """Forget a slot, with or without a grammar."""
        if self._is_bound[slot]:
            self.take_all()
            self._is_bound[slot] = False
            del self._slots[slot]

    def bind(self, slots: Slots) -> bool:
        """Return whether any of these slots has a grammar."""
        return bool(self._is_bound[slots].any())

    def masks(self, rows: PlannedRows) -> StepMasks | None:
        """Return what the rows of a step may sample; None where all may sample anything."""
        slots = rows.sample_slots
        if not self.bind(slots):
            return None
        self.take_all()
        if len(self._buffer) < len(slots):
            self._buffer = np.empty((len(slots), self._num_words), np.uint32)
        masks = self._buffer[: len(slots)]
        masks.fill(_ALL)
        places = [
            (row, slot)
            for row, number in enumerate(slots.tolist())
            if (slot := self._slots.get(number)) is not None and not slot.has_ended
        ]
        for _, slot in places:
            if slot.matcher is None and slot.failure is None:
                slot.failure = self._begin(slot)
        failed: list[FailedEntry] = []
        alive = [(row, slot) for row, slot in places if slot.failure is None]
        self._fill([(slot, row) for row, slot in alive], masks)
        for row, slot in places:
            if slot.failure is not None:
                masks[row] = _ALL
                failed.append(_failed(rows, row, slot.failure))
        digests = tuple(
            RowMask(int(rows.sample_rows[row]), self._digest(masks[row]))
            for row, slot in alive
            if slot.failure is None
        )
        for row, slot in alive:
            if slot.failure is None and self._leaves_nothing(slot, masks[row]):
                slot.min_tokens = 0
                self._lift(int(slots[row]))
        return StepMasks(masks, digests, tuple(failed))

    def advance(self, rows: PlannedRows, tokens: NDArray[np.integer]) -> tuple[FailedEntry, ...]:
        """Take the tokens [num_samples] that rows have sampled. Returns those that have failed."""
        if not self.bind(rows.sample_slots):
            return ()
        failed: list[FailedEntry] = []
        for row, (number, token) in enumerate(zip(rows.sample_slots.tolist(), tokens.tolist(), strict=True)):
            slot = self._slots.get(number)
            if slot is None or slot.has_ended or slot.failure is not None:
                continue
            slot.failure = self._consume(slot, [token])
            if slot.failure is not None:
                failed.append(_failed(rows, row, slot.failure))
        return tuple(failed)

    # ---------------------------------------------------------------------- tokens that stay on a device

    def expect(self, copied: CopiedOut, rows: Sequence[PlannedRows]) -> tuple[TokensUnderWay, ...]:
        """Expect the tokens of a step's rows from the device, where their slots have grammars."""
        under_way = tuple(TokensUnderWay(copied, part) for part in rows if self.bind(part.sample_slots))
        self._under_way += under_way
        return under_way

    def take(self, parts: Sequence[TokensUnderWay]) -> tuple[FailedEntry, ...]:
        """Take tokens that are expected, and all before them. Returns the rows that have failed."""
        for part in parts:
            while not part.is_taken:
                self._take_next()
        return tuple(failed for part in parts for failed in part.failed)

    def take_all(self) -> None:
        """Take all tokens that are expected."""
        while self._under_way:
            self._take_next()

    def _take_next(self) -> None:
        under_way = self._under_way.popleft()
        under_way.copied.event.synchronize()
        tokens = under_way.copied.host.numpy()[under_way.rows.sample_rows]
        under_way.failed = self.advance(under_way.rows, tokens)
        under_way.is_taken = True

    # ------------------------------------------------------------------------------------------ private

    def _begin(self, slot: _Slot) -> MatcherFailure | None:
        """Make a slot's matcher, and let it take the output that the sample has. The mask before the last
        token must be that of the replica where the output comes from."""
        try:
            slot.matcher = self._grammars.matcher(slot.grammar)
        except PanicError:
            return _PANICKED
        except GrammarRefusedError as error:
            return MatcherFailure(f"its grammar: {error}", "grammar")
        sample = slot.sample
        output = np.frombuffer(sample.output, dtype="<u4").tolist()
        if not output:
            return None
        failure = self._consume(slot, output[:-1])
        if failure is None and sample.mask_digest:
            mask = np.empty((1, self._num_words), np.uint32)
            self._fill([(slot, 0)], mask)
            failure = slot.failure
            if failure is None and self._digest(mask[0]) != sample.mask_digest:
                reason = "its grammar allows other tokens here than where its output comes from"
                failure = MatcherFailure(reason, "internal")
        return failure or self._consume(slot, output[-1:])

    def _fill(self, places: Sequence[tuple[_Slot, int]], masks: Masks) -> None:
        """Write what slots may sample to rows of `masks`, or why they fail to the slots."""
        num_bytes, address = 4 * self._num_words, masks.ctypes.data
        matchers = [(slot.matcher, row) for slot, row in places if slot.matcher is not None]
        is_filled = False
        if self._executor is not None and len(matchers) >= _LEAST_PARALLEL:
            # Where one matcher panics, each is asked by itself, for only that one must fail.
            with contextlib.suppress(PanicError), panics_as_errors:
                self._executor.unsafe_compute_mask_ptr(matchers, address, num_bytes, len(masks))
                is_filled = True
        for slot, row in places:
            try:
                with panics_as_errors:
                    slot.failure = self._filled(slot, address + row * num_bytes, num_bytes, is_filled)
            except PanicError:
                slot.failure = _PANICKED

    def _filled(self, slot: _Slot, address: int, num_bytes: int, is_filled: bool) -> MatcherFailure | None:
        """Write what a slot may sample to an address, where it is not there. Returns why that failed, if
        so."""
        if slot.matcher is None:
            return slot.failure
        if not is_filled:
            slot.matcher.unsafe_compute_mask_ptr(address, num_bytes)
        if not slot.matcher.is_error():
            return slot.failure
        failure = self._separate(slot)
        if failure is None and slot.matcher is not None:
            slot.matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if slot.matcher.is_error():
                failure = _cannot_follow(slot.matcher)
        return failure

    def _consume(self, slot: _Slot, tokens: list[int]) -> MatcherFailure | None:
        """Advance a slot's matcher. Returns why that failed, if so."""
        try:
            with panics_as_errors:
                return self._consumed(slot, tokens)
        except PanicError:
            return _PANICKED

    def _consumed(self, slot: _Slot, tokens: list[int]) -> MatcherFailure | None:
        if not tokens:
            return None
        slot.has_ended = tokens[-1] in self._grammars.end_ids
        inner = tokens[:-1] if slot.has_ended else tokens
        assert slot.matcher is not None
        if not slot.matcher.consume_tokens(inner):
            failure = self._separate(slot)
            if failure is not None:
                return failure
            if not slot.matcher.consume_tokens(inner):
                return _cannot_follow(slot.matcher)
        if slot.has_ended and not slot.matcher.is_accepting():
            return MatcherFailure("its output ended before the grammar allowed it", "grammar")
        slot.tokens += tokens
        return None

    def _separate(self, slot: _Slot) -> MatcherFailure | None:
        """Give a slot whose matcher has failed one of its own: the lexer of the first one is shared with
        others, and may have failed through them. Returns why that is not possible, if so."""
        assert slot.matcher is not None
        if slot.is_separate or not self._grammars.is_worn(slot.grammar):
            return _cannot_follow(slot.matcher)
        slot.is_separate = True
        try:
            slot.matcher = self._grammars.separate_matcher(slot.grammar)
        except GrammarRefusedError as error:
            return MatcherFailure(f"its grammar: {error}", "grammar")
        if not slot.matcher.consume_tokens(slot.tokens):
            return _cannot_follow(slot.matcher)
        return None

    @staticmethod
    def _leaves_nothing(slot: _Slot, mask: Masks) -> bool:
        """Whether a slot that must not end yet may only end."""
        return len(slot.tokens) < slot.min_tokens and not (mask & ~slot.end_words).any()

    @staticmethod
    def _digest(mask: Masks) -> bytes:
        return hashlib.sha256(mask.data).digest()[:_DIGEST_BYTES]


class NoMatchers(SlotMatchers):
    """Stands for the matchers at ranks that do not sample, or have no grammars."""

    def __init__(self, max_slots: int) -> None:
        self._slots = {}
        self._is_bound = np.zeros(max_slots, np.bool_)
        self._under_way = deque()

    def start(self, start: SlotStart) -> None:
        """Do nothing: a slot without a matcher may sample anything."""


def _failed(rows: PlannedRows, row: int, failure: MatcherFailure) -> FailedEntry:
    return FailedEntry(int(rows.indices[rows.sample_sources[row]]), failure.reason, failure.code)


def _cannot_follow(matcher: LLMatcher) -> MatcherFailure:
    return MatcherFailure(f"its output could not follow the grammar: {error_of(matcher)}", "grammar")
