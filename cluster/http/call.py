"""A call of `tandem.v1.Inference` that came over HTTP: to the servicer it looks like one that came over gRPC.

POST /v1/... --> HttpCall --> InferenceServicer.Generate --write--> the answer's JSON or events
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

import grpc
from aiohttp import web

from cluster.api.authentication import AUTHORIZATION_KEY
from cluster.errors import RequestError, to_grpc_status
from cluster.identity.certificates import names_of_peer
from cluster.proto.tandem.v1 import inference_pb2 as pb

API_KEY_HEADER = "x-api-key"
# Headers passed on with a request that another application answers, and into traces.
_PASSED_ON = ("traceparent", "tracestate")

Metadata = tuple[tuple[str, str | bytes], ...]
OnEvent = Callable[[pb.GenerateResponse], Awaitable[None]]


class AbortedCall(Exception):
    """The servicer has ended a call with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, message: str, trailing: Metadata = ()) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.trailing = trailing

    @classmethod
    def of(cls, error: RequestError) -> AbortedCall:
        """Return the exception that ends a call with this error."""
        return cls(*to_grpc_status(error))


class HttpCall:
    """The part of `grpc.aio.ServicerContext` that the servicer uses. `on_event` takes each message, and
    returns when the next may come."""

    def __init__(self, request: web.Request, on_event: OnEvent | None = None) -> None:
        self._request = request
        self._on_event = on_event
        # The metadata that gRPC would send before the first message.
        self.initial_metadata: dict[str, str] = {}
        # "" until the request is accepted.
        self.request_id = ""

    def invocation_metadata(self) -> Metadata:
        """Return the metadata that a gRPC client would have sent."""
        headers = self._request.headers
        found: list[tuple[str, str | bytes]] = [
            (name, headers[name]) for name in _PASSED_ON if name in headers
        ]
        if authorization := shown_authorization(headers):
            found.append((AUTHORIZATION_KEY, authorization))
        return tuple(found)

    def time_remaining(self) -> None:
        """Return that there is no deadline: HTTP knows none, and a client that has enough disconnects."""

    def peer(self) -> str:
        """Return where the client is, as gRPC writes it."""
        return peer_of(self._request)

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return the names of the client's certificate, as gRPC does."""
        names = certificate_names(self._request)
        return {"x509_subject_alternative_name": [name.encode() for name in names]} if names else {}

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Keep the headers, to be sent with the first part of the answer."""
        self.initial_metadata.update(metadata)

    async def write(self, response: pb.GenerateResponse) -> None:
        """Pass one message on."""
        assert self._on_event is not None, "only Generate writes"
        if not self.request_id and response.WhichOneof("event") == "accepted":
            self.request_id = response.accepted.request_id
        await self._on_event(response)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call."""
        raise AbortedCall(code, details, tuple(trailing_metadata))


def shown_authorization(headers: Mapping[str, str]) -> str:
    """Return the value of `authorization`, also of a client that sends its key as Anthropic's; "": none."""
    if "Authorization" in headers:
        return headers["Authorization"]
    return f"Bearer {headers[API_KEY_HEADER]}" if headers.get(API_KEY_HEADER) else ""


def certificate_names(request: web.Request) -> tuple[str, ...]:
    """Return the names of the client's certificate, which TLS has verified."""
    connection = request.get_extra_info("ssl_object")
    certificate = connection.getpeercert() if isinstance(connection, ssl.SSLObject) else None
    return names_of_peer(certificate or {})


def peer_of(request: web.Request) -> str:
    """Return where the client is, as gRPC writes it, such as `ipv4:127.0.0.1:40112`."""
    place = request.get_extra_info("peername")
    if not isinstance(place, tuple) or len(place) < 2:
        return ""
    host, port = place[0], place[1]
    return f"ipv6:[{host}]:{port}" if ":" in str(host) else f"ipv4:{host}:{port}"
