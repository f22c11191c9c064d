"""The output that an answer holds until it is whole, and until its client has taken it: bounded for one
answer, and for all of a gateway together with the output that clients of streams have not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from cluster.errors import AnswerTooLargeError, FieldViolation, SlowClientError
from cluster.gateway.output_buffer import UnreadOutput
from cluster.http.call import AbortedCall
from cluster.http.errors import HttpProblem
from cluster.http.sse import send_whole

# The limit of one answer.
MAX_KEPT_BYTES = 64 << 20


class KeptOutput:
    """Counts the bytes that one answer holds. The answer that holds the most ends where all together are too
    much."""

    def __init__(self, unread: UnreadOutput) -> None:
        self._unread = unread
        self._scope: asyncio.Timeout | None = None
        self._is_cut_off = False
        # The bytes counted now.
        self.num_unread_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Hold so much from now on; raise `AnswerTooLargeError` where that is too much for one answer."""
        if num_bytes > MAX_KEPT_BYTES:
            remedy = "ask for fewer samples, tokens or log-probabilities, or stream a chat"
            raise AnswerTooLargeError(
                FieldViolation("stream", f"the answer has more than {MAX_KEPT_BYTES >> 20} MiB; {remedy}")
            )
        if num_bytes > self.num_unread_bytes and not self._is_cut_off:
            num_new = num_bytes - self.num_unread_bytes
            self.num_unread_bytes = num_bytes
            self._unread.added(self, num_new)

    def cut_off(self) -> None:
        """End the answer; the next answer to grow finds its place free."""
        self._is_cut_off = True
        self.release()
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Hold nothing any more."""
        num_bytes, self.num_unread_bytes = self.num_unread_bytes, 0
        self._unread.removed(self, num_bytes)

    @contextlib.asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """End the work here with an `HttpProblem` when the answer is cut off."""
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if not self._is_cut_off:
                raise
            num_mb = self._unread.max_bytes / 1e6
            what = f"more than {num_mb:g} MB of output wait in this gateway, most of it in this answer"
            error = SlowClientError(f"{what}; stream it, or ask for fewer log-probabilities")
            raise HttpProblem.of_call(AbortedCall.of(error)) from None
        finally:
            self._scope = None


class WholeAnswer(web.Response):
    """An answer that is no stream, and is held until its client has taken it."""

    def __init__(self, body: bytes, kept: KeptOutput, headers: Mapping[str, str]) -> None:
        super().__init__(body=body, content_type="application/json", headers=headers)
        self._kept = kept

    async def send(self, request: web.Request, write_timeout_s: float) -> web.StreamResponse:
        """Send it; `ConnectionError` when the client is gone, takes nothing for too long, or is the slowest
        where clients of this gateway together have too much to take."""
        try:
            async with self._kept.bounded():
                return await send_whole(request, self, write_timeout_s)
        except HttpProblem as cut_off:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(cut_off.message) from cut_off
        finally:
            self._kept.release()
