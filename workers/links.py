"""Links and Peer links: long-lived gRPC streams of msgpack frames, opened by a gateway or by a prefill brain.

One bidirectional gRPC method per kind carries raw frames (no protobuf). The first four frames are the proof
of the cluster secret; then the messages of `workers.messages` follow. gRPC keepalive notices a dead host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import grpc
import grpc.aio

from kvtransfer.errors import PeerGoneError, ProofError, TransferError
from kvtransfer.secret import ClientHandshake, ServerHandshake
from kvtransfer.wire import MAX_FRAME_BYTES

LinkKind = Literal["link", "peer"]

_SERVICE = "tandem.internal.Frames"
_METHOD = {"link": "Link", "peer": "Peer"}
_CONNECT_TIMEOUT_S = 10.0
_STOP_GRACE_S = 1.0
_MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
_ENDED = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reads and writes of a stream raise when it is over."""
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The kernel of a stopped process still acknowledges: only an unanswered ping tells that it is gone.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    ("grpc.so_reuseport", 0),
]

_log = logging.getLogger("tandem.links")

_Handler = Callable[["FrameStream"], Awaitable[None]]


class FrameStream:
    """One side of an open, proven stream. `send` never blocks; frames are written in order by one task.

    A reader that falls `_MAX_QUEUED_BYTES` behind loses the stream, or it would take all memory here.
    """

    def __init__(self, name: str, read: Callable[[], Awaitable[bytes | None]]) -> None:
        self.name = name
        self._read = read
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_queued_bytes = 0
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        return self._end.done()

    def send(self, frame: bytes) -> None:
        """Queue a frame; dropped when the stream is closed (its reader sees the end)."""
        if self.closed:
            return
        self._num_queued_bytes += len(frame)
        self._outgoing.put_nowait(frame)
        if self._num_queued_bytes > _MAX_QUEUED_BYTES:
            _log.error("%s does not read: %d bytes wait for it", self.name, self._num_queued_bytes)
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
            self.close()

    async def receive(self) -> bytes | None:
        """The next frame, or None when the stream has ended (for whatever reason)."""
        if self.closed:
            return None
        read = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait((read, self._end), return_when=asyncio.FIRST_COMPLETED)
            frame = read.result() if read.done() and not read.cancelled() else None
        except _ENDED:
            frame = None
        finally:
            if self.closed:  # it ends with the call: to cancel it would cancel what is still to be written
                read.add_done_callback(_retrieve)
            else:
                read.cancel()
        if frame is None:
            self.close()
        return frame

    def close(self) -> None:
        """End the stream after what was sent; both sides' `receive` return None."""
        if not self.closed:
            self._end.set_result(None)
            self._outgoing.put_nowait(None)

    async def outgoing(self) -> AsyncIterator[bytes]:
        """What to write, until closed (used by the gRPC plumbing)."""
        while (frame := await self._outgoing.get()) is not None:
            yield frame
            self._num_queued_bytes -= len(frame)


async def open_stream(address: str, kind: LinkKind, secret: bytes, name: str) -> FrameStream:
    """Connect to a brain and prove the secret.

    Raises `ProofError` when the other side does not know the secret, `PeerGoneError` when it cannot be
    reached within 10 s.
    """
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    method = channel.stream_stream(f"/{_SERVICE}/{_METHOD[kind]}")
    call: grpc.aio.StreamStreamCall = method()

    async def read() -> bytes | None:
        frame = await call.read()
        return None if frame is grpc.aio.EOF else frame

    stream = FrameStream(address, read)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await _prove_as_client(call, read, secret, name)
    except TransferError:
        await channel.close()
        raise
    except (grpc.RpcError, TimeoutError, asyncio.InvalidStateError) as error:
        await channel.close()
        raise PeerGoneError(f"{address} cannot be reached: {error!r}") from error
    writer = asyncio.create_task(_write_client(call, stream, channel), name=f"link-writer {address}")
    writer.add_done_callback(lambda task: stream.close())
    return stream


class LinkServer:
    """The brain's gRPC server: accepts Links and Peer links and hands each proven stream to its handler.

    A handler runs for the life of its stream; when it returns, the stream closes.
    """

    def __init__(self, secret: bytes, on_link: _Handler, on_peer: _Handler) -> None:
        self._secret = secret
        self._handlers: dict[str, _Handler] = {"link": on_link, "peer": on_peer}
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._rpc_handler(),))
        self.port = 0

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port (a free one when `port` is 0)."""
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return self.port

    async def stop(self) -> None:
        """Take no new streams; those that do not end within a moment are cut."""
        await self._server.stop(grace=_STOP_GRACE_S)

    def _rpc_handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                _METHOD[kind]: grpc.stream_stream_rpc_method_handler(self._behaviour(handler))
                for kind, handler in self._handlers.items()
            },
        )

    def _behaviour(
        self, handler: _Handler
    ) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]:
        async def serve(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            async def read() -> bytes | None:
                frame = await context.read()
                return None if frame is grpc.aio.EOF else frame

            try:
                name = await _prove_as_server(context, read, self._secret)
            except (TransferError, TimeoutError) as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
                return
            stream = FrameStream(name, read)
            writer = asyncio.create_task(_write_server(context, stream), name=f"link-writer {name}")
            handling = asyncio.ensure_future(handler(stream))
            try:
                await asyncio.shield(handling)
            except asyncio.CancelledError:  # the client left: the handler sees the end of its stream
                stream.close()
                await handling
                raise
            finally:
                stream.close()
                await writer

        return serve


async def _prove_as_client(
    call: grpc.aio.StreamStreamCall, read: Callable[[], Awaitable[bytes | None]], secret: bytes, name: str
) -> None:
    handshake = ClientHandshake(secret, name)
    await call.write(handshake.hello())
    await call.write(handshake.answer(_present(await read())))
    handshake.finish(_present(await read()))


async def _prove_as_server(
    context: grpc.aio.ServicerContext, read: Callable[[], Awaitable[bytes | None]], secret: bytes
) -> str:
    handshake = ServerHandshake(secret)
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        await context.write(handshake.challenge(_present(await read())))
        await context.write(handshake.welcome(_present(await read())))
    return handshake.client_name


def _present(frame: bytes | None) -> bytes:
    if frame is None:
        raise ProofError("the other side closed the stream during the proof")
    return frame


async def _write_client(
    call: grpc.aio.StreamStreamCall, stream: FrameStream, channel: grpc.aio.Channel
) -> None:
    try:
        async for frame in stream.outgoing():
            await call.write(frame)
        await call.done_writing()  # to cancel at once would drop what is on its way
        async with asyncio.timeout(_STOP_GRACE_S):
            await call.code()
    except TimeoutError:
        _log.info("%s did not end its side of the stream", stream.name)
    except _ENDED:
        stream.close()
    finally:
        call.cancel()
        await channel.close()


async def _write_server(context: grpc.aio.ServicerContext, stream: FrameStream) -> None:
    try:
        async for frame in stream.outgoing():
            await context.write(frame)
    except _ENDED:
        stream.close()


def _retrieve(read: asyncio.Future[bytes | None]) -> None:
    """Take note of a read's end, whatever it was."""
    if not read.cancelled():
        read.exception()
