"""What the clients of both services share: addresses of several gateways, channels to them, credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
import grpc.aio

from cluster.errors import CallError, bad_fields, error_reason, retry_after_s, usage_of
from kvtransfer.common.clock import Clock, SystemClock

UNARY_TIMEOUT_S = 30.0
_TLS = "tls://"
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The wait for the answer to a ping, else a minute: a stopped gateway is noticed by this alone.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # what an attempt may take: TLS, far away, on a busy host
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    """The identity of the caller, and the authorities that the caller trusts. All of it is optional."""

    # An API key or a JWT, or a function that returns the one to use now: it is called before each call.
    bearer: str | Callable[[], str] = ""
    # PEM of the authorities that gateways at `tls://` are trusted by; by default those that gRPC trusts
    # (GRPC_DEFAULT_SSL_ROOTS_FILE_PATH of the environment, or its own list).
    root_certificate: bytes | None = None
    # PEM of the client's own certificate chain and its key, for gateways that ask for one.
    certificate: bytes | None = None
    private_key: bytes | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        token = self.bearer() if callable(self.bearer) else self.bearer
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a connection with TLS."""
        return grpc.ssl_channel_credentials(self.root_certificate, self.private_key, self.certificate)


class GatewayCaller:
    """Calls one service of several gateways, at the current one. Use it inside one event loop; `async with`
    closes it."""

    # The stub of the service.
    stub_type: ClassVar[type[Any]]

    def __init__(
        self,
        addresses: str | Sequence[str],
        clock: Clock | None = None,
        *,
        credentials: ClientCredentials | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self._addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._addresses:
            raise ValueError("a client needs the address of at least one gateway")
        self._credentials = credentials or ClientCredentials()
        self._current = 0
        self._channels: dict[str, Any] = {}
        self._pauses: set[asyncio.Future[None]] = set()
        self.is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls, those that wait before another try too, with a `CallError` of CANCELLED. No call
        can begin after this."""
        self.is_closed = True
        for pause in self._pauses:
            pause.cancel()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    @property
    def address(self) -> str:
        """The gateway that is called now."""
        return self._addresses[self._current]

    async def sleep(self, seconds: float) -> None:
        """Wait for this time, or until the client is closed, which is a `CallError` of CANCELLED."""
        pause = asyncio.ensure_future(self.clock.sleep(seconds))
        self._pauses.add(pause)
        try:
            await asyncio.wait([pause])
        finally:
            self._pauses.discard(pause)
            pause.cancel()
        if self.is_closed:
            raise closed_error()

    def channel(self) -> Any:
        """Return the channel to the current address."""
        if self.is_closed:
            raise closed_error()
        if self.address not in self._channels:
            self._channels[self.address] = self._open_channel()
        return self._channels[self.address]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each call, which identifies the caller."""
        return self._credentials.metadata()

    def leave_address(self, failed: str) -> None:
        """Continue at the next address, unless another stream has left `failed` already."""
        if self.address == failed:
            self._current = (self._current + 1) % len(self._addresses)

    def stub(self) -> Any:
        """Return a stub of the service at the current address."""
        return self.stub_type(self.channel())

    async def _unary(self, method: str, request: Any, timeout_s: float | None = UNARY_TIMEOUT_S) -> Any:
        try:
            call = getattr(self.stub(), method)
            return await call(request, timeout=timeout_s, metadata=self.metadata())
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error
        except asyncio.CancelledError:
            if not self.is_closed:
                raise
            raise closed_error() from None

    def _open_channel(self) -> Any:
        if not self.address.startswith(_TLS):
            return grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(
            self.address.removeprefix(_TLS),
            self._credentials.channel_credentials(),
            options=_CHANNEL_OPTIONS,
        )


def closed_error() -> CallError:
    """Return the error with which the calls of a closed client end."""
    return CallError(grpc.StatusCode.CANCELLED, "this client was closed")


def call_error(error: Any) -> CallError:
    """Return the `CallError` of an `AioRpcError`."""
    trailing = tuple(error.trailing_metadata() or ())
    return CallError(
        error.code(),
        error.details() or "",
        retry_after_s(trailing),
        bad_fields(trailing),
        usage_of(trailing),
        error_reason(trailing),
    )
