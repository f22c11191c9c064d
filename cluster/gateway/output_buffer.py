"""Output of a request on its way to the client, and all of it that waits in a gateway, with its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from cluster.errors import RequestError, SlowClientError
from cluster.gateway.sample_output import EmbeddingDelta, Output, OutputDelta, PromptLogprobsDelta
from cluster.gateway.write_turns import WriteTurns
from cluster.metrics.ended_request import Summary
from cluster.text.output_parsers.pieces import joined_calls
from kvtransfer.blocks.keys import TOKEN_BYTES

# Tokens, each with its log-probabilities counted too, that one stream holds for a client that does not read.
# A slower client is cut off with RESOURCE_EXHAUSTED; no other stream waits for that client.
MAX_UNREAD = 65536
# The same for waiting output that is sent as one message.
MAX_MERGED = 4096
# The share of the unread output's bound from which on output does not wait for its turn.
_MOST_WAITING = 0.25
# The memory that output takes: a delta without its texts, a log-probability, and an alternative to its token.
_DELTA_BYTES = 176
_LOGPROB_BYTES = 112
_TOP_BYTES = 120
# The memory of a part of a tool call without its arguments.
_CALL_BYTES = 240


class WaitingOutput(Protocol):
    """The output that waits for one client: an `OutputBuffer`, or an answer that is kept until it is
    whole."""

    @property
    def num_unread_bytes(self) -> int:
        """The bytes that are counted now: waiting output, and output that was taken and may not be read
        yet."""

    @property
    def cut_off(self) -> Callable[[], None]:
        """Drops the counted output, and ends the request."""


class UnreadOutput:
    """All output of a gateway that waits for clients to read it, bounded in bytes together: beyond
    `max_bytes` the slowest reader is cut off, the one that has most bytes to read."""

    def __init__(self, max_bytes: float, turns: WriteTurns | None = None) -> None:
        """The output is written in these `turns`; None: at once."""
        self.max_bytes = max_bytes
        self.turns = turns
        self.num_bytes = 0
        self._waiting: set[WaitingOutput] = set()

    @property
    def is_filling(self) -> bool:
        """Whether so much waits that output should be written at once. Whoever waited for a turn might be cut
        off in place of a client that does not read."""
        return self.num_bytes > _MOST_WAITING * self.max_bytes

    @property
    def pause_s(self) -> float:
        """How long output waits for its turn now."""
        return 0.0 if self.turns is None else self.turns.pause_s

    def added(self, output: WaitingOutput, num_bytes: int) -> None:
        """Count bytes that wait from now on."""
        self.num_bytes += num_bytes
        self._waiting.add(output)
        if self.num_bytes > self.max_bytes:
            max(self._waiting, key=lambda it: it.num_unread_bytes).cut_off()

    def removed(self, output: WaitingOutput, num_bytes: int) -> None:
        """Count bytes that were read, or dropped."""
        self.num_bytes -= num_bytes
        if not output.num_unread_bytes:
            self._waiting.discard(output)


class OutputBuffer:
    """Output on its way to the client, which takes its turn with that of all others. The values of the prompt
    that were read come first. Tokens that wait are merged per sample, so a slow reader, or any reader of a
    busy gateway, gets fewer, longer deltas; the end comes last. The output that was taken last counts as
    unread until the next is taken, or the reader is cut off, which ends its work in `reading`."""

    def __init__(self, unread: UnreadOutput, cut_off: Callable[[], None]) -> None:
        """`cut_off` is called when this is the slowest reader, and too much waits."""
        self.cut_off = cut_off
        self._unread = unread
        self._of_prompt: deque[PromptLogprobsDelta | EmbeddingDelta] = deque()
        # By sample: each delta with its weight and its bytes.
        self._waiting: dict[int, deque[tuple[OutputDelta, int, int]]] = {}
        self._end: Summary | RequestError | None = None
        # Set while the reader has its turn, and for ever from the turn on in which the end is there. A reader
        # that was given one early has the turn that it asked for as well, which may find nothing to write.
        self._turn = asyncio.Event()
        self._has_asked = False
        self._has_begun = False
        self._scope: asyncio.Timeout | None = None
        self._num_taken_bytes = 0
        self.num_unread = 0
        self.num_waiting_bytes = 0

    @property
    def num_unread_bytes(self) -> int:
        """The bytes that wait, with those that were taken last."""
        return self.num_waiting_bytes + self._num_taken_bytes

    def put(self, delta: Output) -> None:
        """Append output of one sample, or values of the prompt that were read."""
        num_bytes = _num_bytes(delta)
        if isinstance(delta, OutputDelta):
            weight = _weight(delta)
            queue = self._waiting.get(delta.sample)
            if queue is None:
                queue = self._waiting[delta.sample] = deque()
            queue.append((delta, weight, num_bytes))
            self.num_unread += weight
        else:
            self._of_prompt.append(delta)
        self._ask()
        self.num_waiting_bytes += num_bytes
        self._unread.added(self, num_bytes)
        if self._unread.is_filling:
            self.give_turn()

    def close(self, end: Summary | RequestError) -> None:
        """Append the end; `SlowClientError` drops the output that waits before it, and ends the work in
        `reading`, so that output that was taken is dropped too."""
        if isinstance(end, SlowClientError) and not isinstance(self._end, SlowClientError):
            self.discard()
            self.release()
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())
            self._turn.set()
        self._end = end
        self._ask()

    def give_turn(self) -> None:
        """Let the reader take the next output."""
        self._turn.set()

    def _ask(self) -> None:
        """Ask for a turn; the first output of a stream does not wait."""
        if self._has_asked:
            return
        self._has_asked = True
        if self._unread.turns is None or not self._has_begun:
            self.give_turn()
        else:
            self._unread.turns.ask(self)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read within: when the reader is cut off, the work here ends with `SlowClientError`, also a write
        that waits for the client."""
        is_cut_off = isinstance(self._end, SlowClientError)
        try:
            async with asyncio.timeout(0.0 if is_cut_off else None) as self._scope:
                yield
        except TimeoutError:
            if not isinstance(self._end, SlowClientError):
                raise
            raise _another(self._end) from None
        finally:
            self._scope = None

    def discard(self) -> None:
        """Drop the waiting output: nobody will read it."""
        self._of_prompt.clear()
        self._waiting.clear()
        num_bytes, self.num_waiting_bytes, self.num_unread = self.num_waiting_bytes, 0, 0
        self._unread.removed(self, num_bytes)

    def release(self) -> None:
        """Count the output that was taken last as read."""
        num_bytes, self._num_taken_bytes = self._num_taken_bytes, 0
        self._unread.removed(self, num_bytes)

    async def get(self) -> Output | Summary:
        """Return the next output, at last the summary, or raise the error; the end again and again."""
        self.release()
        while not (self._turn.is_set() and (self._of_prompt or self._waiting or self._end is not None)):
            self._turn.clear()  # of what was taken before its turn came
            await self._turn.wait()
        if self._of_prompt or self._waiting:
            output = self._next()
            self._has_begun = True
            if self._end is None:
                self._turn.clear()
                self._has_asked = False
                if self._of_prompt or self._waiting:
                    self._ask()
            return output
        assert self._end is not None
        if isinstance(self._end, RequestError):
            raise _another(self._end)
        return self._end

    def _next(self) -> Output:
        """Take the output that is read next."""
        if not self._of_prompt:
            return _merged(self._take())
        output = self._of_prompt.popleft()
        self._taken(_num_bytes(output))
        return output

    def _taken(self, num_bytes: int) -> None:
        self.num_waiting_bytes -= num_bytes
        self._num_taken_bytes += num_bytes

    def _take(self) -> list[OutputDelta]:
        """Take the waiting output of the sample whose turn it is, as much as goes into one message."""
        sample = next(iter(self._waiting))
        queue = self._waiting.pop(sample)
        deltas: list[OutputDelta] = []
        weight = num_bytes = 0
        while queue and (not deltas or weight + queue[0][1] <= MAX_MERGED):
            delta, its_weight, its_bytes = queue.popleft()
            deltas.append(delta)
            weight += its_weight
            num_bytes += its_bytes
        if queue:  # the other samples have their turns first
            self._waiting[sample] = queue
        self.num_unread -= weight
        self._taken(num_bytes)
        return deltas


def _another(error: RequestError) -> RequestError:
    """Return an error like this one. A buffer that raised the one that it keeps would be in a cycle with it:
    the traceback leads back here, and to the output that was taken last."""
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    return again


def _weight(delta: OutputDelta) -> int:
    num_tokens = len(delta.tokens) // TOKEN_BYTES
    return num_tokens + sum(1 + len(it.top) for it in delta.logprobs) if delta.logprobs else num_tokens


def _num_bytes(delta: Output) -> int:
    if isinstance(delta, PromptLogprobsDelta):
        return _DELTA_BYTES + delta.logprobs.num_bytes
    if isinstance(delta, EmbeddingDelta):
        return _DELTA_BYTES + len(delta.vector)
    text_bytes = sys.getsizeof(delta.text) + sys.getsizeof(delta.reasoning)
    num_bytes = _DELTA_BYTES + len(delta.tokens) + text_bytes
    if delta.logprobs:
        num_top = sum(len(it.top) for it in delta.logprobs)
        num_bytes += len(delta.logprobs) * _LOGPROB_BYTES + num_top * _TOP_BYTES
    if delta.tool_calls:
        num_bytes += sum(_CALL_BYTES + sys.getsizeof(call.arguments) for call in delta.tool_calls)
    return num_bytes


def _merged(deltas: list[OutputDelta]) -> OutputDelta:
    if len(deltas) == 1:
        return deltas[0]
    return OutputDelta(
        sample=deltas[0].sample,
        first_index=deltas[0].first_index,
        tokens=b"".join(delta.tokens for delta in deltas),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
        finish=deltas[-1].finish,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=joined_calls(call for delta in deltas for call in delta.tool_calls),
        matched_stop=deltas[-1].matched_stop,
    )
