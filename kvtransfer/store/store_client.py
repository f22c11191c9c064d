"""The engine core's connection to the node's owner, which it opens and reopens by itself and never waits for.

    `ready_to_connect` -> connect, EngineHello -> StoreWelcome -> requests; end -> `on_lost` -> again

After `on_lost` all earlier requests are void and are not answered any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from kvtransfer.common.clock import Clock
from kvtransfer.common.health import Backoff
from kvtransfer.errors import TransferError, WireError
from kvtransfer.rpc.stream import FrameStream, open_unix
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.engine_session import (
    EngineHello,
    EngineRequest,
    FetchedBlocks,
    FindAnswer,
    FindRequest,
    PutGrant,
    StoreWelcome,
    TierEvents,
    TierPart,
)
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, TO_OWNER_CODEC, FromOwner, expect

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 0.5
_PROBE_S = 1.0
# An owner that does not answer a probe for so long hangs: pending requests are misses.
_SILENT_S = 5.0
# The request number of probes, which are look-ups without keys.
_PROBE = -1
_MAX_UNSENT_BYTES = 32 << 20
_LEAVE_S = 1.0

_log = logging.getLogger("tandem.store")


class StoreEvents(Protocol):
    """Receives the events of the connection, on the engine core's loop."""

    async def ready_to_connect(self) -> None:
        """Return when every rank has finished or dropped its earlier copies: the hello that follows assures
        the owner that nothing of the session's earlier grants is written any more."""

    def on_welcome(self, welcome: StoreWelcome) -> None:
        """Note that the owner accepts requests; called again when its rates have changed."""

    def on_lost(self, reason: str) -> None:
        """Note that the connection has ended; called once for each first welcome."""

    def on_grant(self, grant: PutGrant) -> None: ...

    def on_find(self, answer: FindAnswer) -> None: ...

    def on_fetched(self, fetched: FetchedBlocks) -> None: ...

    def on_tiers(self, events: TierEvents) -> None: ...

    def on_tier_part(self, part: TierPart) -> None: ...


class OwnerClient(Protocol):
    """A connection to the owner: `StoreClient`, or that of a simulation."""

    async def start(self) -> None:
        """Begin to connect; returns at once."""

    async def close(self) -> None:
        """End the connection, without `on_lost`."""

    @property
    def is_up(self) -> bool:
        """Whether the owner has sent its welcome and the connection lives."""

    def send(self, message: EngineRequest) -> bool:
        """Queue a request. False: the owner is away, and there will be no answer."""


class StoreClient:
    """One engine core's connection to the owner at the abstract unix socket `name`."""

    def __init__(
        self,
        name: str,
        trust: Trust,
        hello: EngineHello,
        events: StoreEvents,
        clock: Clock,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`on_error` receives the error of a receiver of events, or of this class, that has ended the
        client."""
        self._name = name
        self._trust = trust
        self._hello = hello
        self._events = events
        self._clock = clock
        self._on_error = on_error
        self._stream: FrameStream | None = None
        # The stream that `close` ends, after what was queued.
        self._leaving: FrameStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._probed_at: float | None = None

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._task = asyncio.create_task(self._keep_connected(), name="store-client")
        self._task.add_done_callback(self._task_ended)

    async def close(self) -> None:
        """End the connection, without `on_lost`. Queued messages are still sent, for a short time."""
        task, self._task = self._task, None
        if task is None:
            return
        stream = self._leaving = self._stream
        self._stream = None
        if stream is not None:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    stream.close()
                    await stream.wait_closed()
            except TimeoutError:  # it does not read
                stream.abort()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    @property
    def is_up(self) -> bool:
        """Whether the owner has sent its welcome and the connection lives."""
        return self._stream is not None

    def send(self, message: EngineRequest) -> bool:
        """Queue a request. False: the owner is away, and there will be no answer."""
        stream = self._stream
        if stream is None:
            return False
        stream.send(TO_OWNER_CODEC.encode(message))
        if stream.num_unsent_bytes > _MAX_UNSENT_BYTES:
            stream.abort()  # it does not read; the task notices the end
        return True

    # ------------------------------------------------------------------------------------- the connection

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._on_error is not None:
            self._on_error(error)

    async def _keep_connected(self) -> None:
        backoff = Backoff(_FIRST_DELAY_S, _MAX_DELAY_S)
        while True:
            await self._events.ready_to_connect()
            try:
                stream = await open_unix(self._name, self._trust, self._hello.replica.replica_id)
            except TransferError as error:
                _log.debug("store: %s", error)
            else:
                if await self._use(stream):
                    backoff.reset()
            await self._clock.sleep(backoff.failed())

    async def _use(self, stream: FrameStream) -> bool:
        """Serve one connection until it ends; return whether the owner had sent its welcome."""
        probing = asyncio.create_task(self._probe(stream), name="store-probe")
        was_welcome = False
        reason = ""
        try:
            stream.send(TO_OWNER_CODEC.encode(self._hello))
            while True:
                message = FROM_OWNER_CODEC.decode_known(await stream.next_frame())
                if message is None:
                    continue
                if not was_welcome:
                    expect(message, StoreWelcome)
                    self._stream, was_welcome = stream, True
                self._deliver(message)
        except TransferError as error:
            reason = str(error)
        finally:
            probing.cancel()
            self._stream = None
            self._probed_at = None
            if stream is not self._leaving:
                stream.abort()
        if was_welcome:
            _log.warning("the connection to the store is lost: %s", reason)
            self._events.on_lost(reason)
        else:
            _log.warning("the store does not accept the connection: %s", reason)
        return was_welcome

    async def _probe(self, stream: FrameStream) -> None:
        """Probe the owner: a stopped process keeps its connections, and only an unanswered probe reveals
        it."""
        probe = TO_OWNER_CODEC.encode(FindRequest(_PROBE, b"", ()))
        while True:
            await self._clock.sleep(_PROBE_S)
            if self._stream is not stream:
                continue
            now = self._clock.now()
            if self._probed_at is None:
                self._probed_at = now
                stream.send(probe)
            elif now - self._probed_at > _SILENT_S:
                stream.abort()

    def _deliver(self, message: FromOwner) -> None:
        if isinstance(message, FindAnswer) and message.number == _PROBE:
            self._probed_at = None
        else:
            deliver(message, self._events)


def deliver(message: FromOwner, events: StoreEvents) -> None:
    """Pass a message of the owner on. `WireError` for one that owners do not send to engine cores."""
    match message:
        case StoreWelcome():
            events.on_welcome(message)
        case PutGrant():
            events.on_grant(message)
        case FindAnswer():
            events.on_find(message)
        case FetchedBlocks():
            events.on_fetched(message)
        case TierEvents():
            events.on_tiers(message)
        case TierPart():
            events.on_tier_part(message)
        case _:
            raise WireError(f"the owner sent {type(message).__name__}")
