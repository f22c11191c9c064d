"""Writing an answer: as a whole, or as server-sent events. The next event is taken only when the client has
taken those before, so that output that a slow client does not read waits in the request's `OutputBuffer`,
with its bounds. A client that takes nothing for too long loses its connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

# The bytes that the transport holds before a write waits.
_MAX_WAITING_BYTES = 64 << 10
DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Server": "tandem",
    "X-Content-Type-Options": "nosniff",
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


def event(payload: bytes) -> bytes:
    """Return an event without a name, as OpenAI's APIs send them."""
    return b"data: %b\n\n" % payload


def named_event(name: str, payload: bytes) -> bytes:
    """Return an event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


class EventStream:
    """The answer to one request. Its status and headers go out with the first event, so that a request which
    fails before it is answered with a status of its own."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._response: web.StreamResponse | None = None
        self._beginning = asyncio.Lock()
        # Returns the headers that are sent before the first event.
        self.headers: Callable[[], Mapping[str, str]] = dict

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._response is not None

    async def send(self, events: bytes) -> None:
        """Send events, and return when the next may be sent; `ConnectionError` when the client is gone, or
        has taken nothing for too long."""
        if not events:
            return
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        if self._response is None:
            await self._begin()
        assert self._response is not None
        is_behind = self._request.protocol.writing_paused
        if not is_behind and len(events) + transport.get_write_buffer_size() <= _MAX_WAITING_BYTES:
            await self._response.write(events)
            return
        async with _taken_in_time(self._request, self._write_timeout_s):
            # If aiohttp's own wait were cancelled, so would be every later one of this connection.
            await asyncio.shield(self._write(self._response, events))

    async def end(self, last: bytes) -> web.StreamResponse:
        """Send the last events, and end the answer."""
        await self.send(last)
        assert self._response is not None, "an answer has at least one event"
        async with _taken_in_time(self._request, self._write_timeout_s):
            await self._response.write_eof()
        return self._response

    async def _write(self, response: web.StreamResponse, events: bytes) -> None:
        await response.write(events)
        await self._request.writer.drain()

    async def _begin(self) -> None:
        """Send status and headers, once for the several calls that one answer may have."""
        async with self._beginning:
            if self._response is None:
                response = web.StreamResponse(headers={**_HEADERS, **self.headers()})
                await response.prepare(self._request)
                self._response = response


async def send_whole(
    request: web.Request, answer: web.Response, write_timeout_s: float
) -> web.StreamResponse:
    """Send an answer that is no stream, in parts; `ConnectionError` when the client is gone, or has taken
    nothing for too long."""
    body = answer.body if isinstance(answer.body, bytes) else b""
    if len(body) <= _MAX_WAITING_BYTES:
        async with _taken_in_time(request, write_timeout_s):
            await answer.prepare(request)
            await answer.write_eof()
        return answer
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(body)
    if answer.keep_alive is False:
        response.force_close()
    await response.prepare(request)
    for start in range(0, len(body), _MAX_WAITING_BYTES):
        async with _taken_in_time(request, write_timeout_s):
            await response.write(body[start : start + _MAX_WAITING_BYTES])
            await request.writer.drain()
    async with _taken_in_time(request, write_timeout_s):
        await response.write_eof()
    return response


@contextlib.asynccontextmanager
async def _taken_in_time(request: web.Request, write_timeout_s: float) -> AsyncIterator[None]:
    """End the connection of a client that does not take in time the output that is written here."""
    try:
        async with asyncio.timeout(write_timeout_s):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client takes nothing") from None
