"""Who may call which gRPC method: checked before a call's message is read.

call --> Authentication --> Authenticator.identify --> METHOD_ACCESS --> CallReading --> the method, which
         (interceptor)      (key, token, certificate)                    (message)       finds the caller by
                                                                                         `caller_identity`
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cluster.api.call_reading import CallReading
from cluster.api.json_text import as_dict
from cluster.api.message_fields import SHORT_MESSAGE_BYTES, check_fields
from cluster.errors import (
    FieldViolation,
    ForbiddenError,
    InvalidRequestError,
    RequestError,
    UnauthenticatedError,
    to_grpc_status,
)
from cluster.identity.access_control import AccessControl
from cluster.identity.audit import NOBODY, AuditEntry
from cluster.identity.authenticator import Credentials, require
from cluster.identity.certificates import names_of_auth_context
from cluster.identity.identity import Identity, Role
from cluster.proto import RELAYED_CERTIFICATE_KEY
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

AUTHORIZATION_KEY = "authorization"

# grpc.aio.ServicerContext, which has no types.
Context = Any
# Names a method for which an identity is enough, whatever its roles; and one for everybody.
MethodAccess = Role | Literal["identified", "open"]

_INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_ADMIN = admin_pb.DESCRIPTOR.services_by_name["Admin"].full_name
_ADMIN_PREFIX = f"/{_ADMIN}/"
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

# What each method needs. One without an entry is refused.
METHOD_ACCESS: Mapping[str, MethodAccess] = {
    f"/{_INFERENCE}/Generate": "user",
    f"/{_INFERENCE}/Embed": "user",
    f"/{_INFERENCE}/Score": "user",
    f"/{_INFERENCE}/Tokenize": "user",
    f"/{_INFERENCE}/Detokenize": "user",
    f"/{_INFERENCE}/ListModels": "user",
    f"/{_INFERENCE}/Explain": "user",
    f"/{_INFERENCE}/ListRequests": "user",
    f"/{_ADMIN}/Status": "viewer",
    f"/{_ADMIN}/Paths": "viewer",
    f"/{_ADMIN}/Explain": "viewer",
    f"/{_ADMIN}/ListRequests": "viewer",
    f"/{_ADMIN}/Recording": "viewer",
    f"/{_ADMIN}/StoreStat": "viewer",
    f"/{_ADMIN}/StoreList": "viewer",
    f"/{_ADMIN}/StoreVerify": "operator",
    f"/{_ADMIN}/StorePurge": "operator",
    f"/{_ADMIN}/Scale": "operator",
    f"/{_ADMIN}/Release": "operator",
    f"/{_ADMIN}/Traffic": "operator",
    **{f"/{_HEALTH.full_name}/{method.name}": "open" for method in _HEALTH.methods},
    **{f"/{_REFLECTION.full_name}/{method.name}": "identified" for method in _REFLECTION.methods},
}

# The type of the messages that the methods of this project take.
_METHOD_TO_KIND: Mapping[str, Any] = {
    f"/{service.full_name}/{method.name}": method.input_type
    for file in (pb.DESCRIPTOR, admin_pb.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}

_caller: ContextVar[Identity] = ContextVar("caller")
_arrived_at: ContextVar[float] = ContextVar("arrived_at", default=0.0)


def caller_identity() -> Identity:
    """Return the identity that makes the call that this task serves."""
    return _caller.get()


def headers_arrived_at() -> float:
    """Return when the headers of the call that this task serves were there; 0: it did not come through
    `Authentication`."""
    return _arrived_at.get()


def set_caller(identity: Identity, arrived_at: float) -> None:
    """Set the caller that makes the call that this task serves, and the time when its headers were there,
    where the call did not come through `Authentication`."""
    _caller.set(identity)
    _arrived_at.set(arrived_at)


def claim(request: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest, identity: Identity) -> None:
    """Give the request to its caller: replace its tenant, and cut its priority to the caller's highest."""
    if identity.names_tenants:
        return
    request.tenant = identity.tenant
    request.priority = min(request.priority, identity.max_priority)


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses calls whose caller is not known, or lacks the role; gives the others an identity. Refusals, and
    what is called of `Admin`, are in the audit log."""

    def __init__(self, access: AccessControl, reading: CallReading) -> None:
        self._reading = reading
        self._authenticator = access.authenticator
        self._relays = access.relays
        self._audit = access.audit
        self._clock = access.clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler that serves the call: the method's own, or one that refuses."""
        _arrived_at.set(self._clock.now())
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        access = METHOD_ACCESS.get(method)
        if handler is None or access == "open":
            return handler
        if access is None:
            return self._refusal(method, None, ForbiddenError("nobody may call this method"))
        identity: Identity | None = None
        try:
            shown, request_id = self._shown(handler_call_details.invocation_metadata or ())
            if not (shown.authorization or shown.certificate_names) and self._sees_certificates:
                return self._by_certificate(handler, method, access)
            identity = self._authenticator.identify(shown)
            _check(identity, access)
        except RequestError as error:
            return self._refusal(method, identity, error)
        if request_id is not None:
            handler = self._of_request(handler, method, identity, request_id)
        return self._with_identity(handler, method, identity)

    @property
    def _sees_certificates(self) -> bool:
        return self._authenticator.config.certificates is not None

    def _shown(self, metadata: Any) -> tuple[Credentials, str | None]:
        """Return the credentials in the metadata: the caller's, or those that a relaying gateway vouches for,
        with the id of the request for which it does; None: for any."""
        found = [value for key, value in metadata if key == AUTHORIZATION_KEY]
        if len(found) > 1:
            raise UnauthenticatedError("there is more than one `authorization` in the metadata")
        if found:
            return Credentials(authorization=str(found[0])), None
        relayed = [value for key, value in metadata if key == RELAYED_CERTIFICATE_KEY]
        caller = self._relays.caller(str(relayed[0])) if relayed else None
        if caller is None:
            return Credentials(), None
        return Credentials(certificate_names=caller.certificate_names), caller.request_id

    def _by_certificate(
        self, handler: grpc.RpcMethodHandler, method: str, access: MethodAccess
    ) -> grpc.RpcMethodHandler:
        """Return a handler that looks at the certificate of the connection before it reads a message: the
        interceptor itself does not see the connection."""

        async def call(requests: Any, context: Context) -> None:
            identity: Identity | None = None
            try:
                shown = Credentials(certificate_names=names_of_auth_context(context.auth_context()))
                identity = self._authenticator.identify(shown)
                _check(identity, access)
            except RequestError as error:
                self._record_refusal(method, identity, error, context)
                await abort(context, error)
            _caller.set(identity)
            if not handler.request_streaming:
                await self._serve(handler, method, identity, context)
                return
            async for response in _behaviour(handler)(requests, context):
                await context.write(response)

        deserializer = handler.request_deserializer if handler.request_streaming else None
        return grpc.stream_stream_rpc_method_handler(call, deserializer, handler.response_serializer)

    def _of_request(
        self, handler: grpc.RpcMethodHandler, method: str, identity: Identity, request_id: str
    ) -> grpc.RpcMethodHandler:
        """Return the handler, for the request of this id alone."""
        behaviour = _behaviour(handler)
        error = UnauthenticatedError("the gateway that relays this call vouches for another request")

        async def call(request: Any, context: Context) -> Any:
            if not request_id or getattr(request, "request_id", "") != request_id:
                self._record_refusal(method, identity, error, context)
                await abort(context, error)
            return await behaviour(request, context)

        if handler.request_streaming:
            return self._refusal(method, identity, error)
        return _remade(handler, call)

    def _with_identity(
        self, handler: grpc.RpcMethodHandler, method: str, identity: Identity
    ) -> grpc.RpcMethodHandler:
        """Return the handler, with this caller."""
        _caller.set(identity)  # gRPC awaits the handler in this task, in this context
        if handler.request_streaming:
            return handler

        async def call(_: Any, context: Context) -> None:
            await self._serve(handler, method, identity, context)

        return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)

    async def _serve(
        self, handler: grpc.RpcMethodHandler, method: str, identity: Identity, context: Context
    ) -> None:
        """Read the message of a call within its caller's bounds, and answer it."""
        with contextlib.ExitStack() as ends:
            try:
                hold = ends.enter_context(self._reading.call(identity, context.peer()))
                message = await self._reading.read_message(context, hold)
                if len(message) > SHORT_MESSAGE_BYTES and method in _METHOD_TO_KIND:
                    await check_fields(message, _METHOD_TO_KIND[method], self._reading.max_values)
                request = _parsed(handler, message)
                del message
            except RequestError as error:
                await abort(context, error)
            try:
                with self._recorded(method, identity, request, context):
                    response = await _behaviour(handler)(request, context)
            except grpc.aio.AbortError as aborted:
                # gRPC keeps it in what its own frames refer to: a cycle, in which the request would stay.
                _forget_frames(aborted)
                del request
                raise
            if not handler.response_streaming:
                await context.write(response)

    def _refusal(self, method: str, identity: Identity | None, error: RequestError) -> grpc.RpcMethodHandler:
        """Return a handler that ends every call with this error, without reading a message.

        An asyncio client of Python that is still sending messages at that moment may report INTERNAL in place
        of the status that it has received (grpc/grpc#36066). No unary request is concerned, nor a client that
        waits for an answer before it sends more.
        """

        async def refuse(requests: Any, context: Context) -> None:
            self._record_refusal(method, identity, error, context)
            await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _record_refusal(
        self, method: str, identity: Identity | None, error: RequestError, context: Context
    ) -> None:
        self._audit.record(
            AuditEntry(
                who=identity.name if identity else NOBODY,
                tenant=identity.tenant if identity else "",
                method=method,
                peer=context.peer() or "",
                result=to_grpc_status(error).code.name,
                detail=str(error),
                kind="refusal",
            )
        )

    @contextlib.contextmanager
    def _recorded(self, method: str, identity: Identity, request: Any, context: Context) -> Iterator[None]:
        """Record the call of `Admin` that is served within, and its end."""
        if not method.startswith(_ADMIN_PREFIX):
            yield
            return
        unset = grpc.StatusCode.UNKNOWN
        try:
            yield
            unset = grpc.StatusCode.OK
        except asyncio.CancelledError:
            unset = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._audit.record(
                AuditEntry(
                    who=identity.name,
                    tenant=identity.tenant,
                    method=method,
                    what=as_dict(request),
                    peer=context.peer() or "",
                    result=(context.code() or unset).name,
                    detail=context.details() or "",
                    kind="read" if METHOD_ACCESS[method] == "viewer" else "order",
                )
            )


def _parsed(handler: grpc.RpcMethodHandler, message: bytes) -> Any:
    try:
        return handler.request_deserializer(message)
    except DecodeError as error:
        raise InvalidRequestError(FieldViolation("request", f"cannot be decoded: {error}")) from error


def _forget_frames(error: BaseException) -> None:
    """Clear the frames through which an error and those before it came."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__context__


def _remade(handler: grpc.RpcMethodHandler, call: Callable[[Any, Context], Any]) -> grpc.RpcMethodHandler:
    """Return a handler of the same kind (one message in, one or a stream out) that calls `call` instead."""
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(call, handler.request_deserializer, handler.response_serializer)


def _check(identity: Identity, access: MethodAccess) -> None:
    if access not in ("identified", "open"):
        require(identity, access)  # type: ignore[arg-type]  # a role


async def abort(context: Context, error: RequestError, usage: pb.Usage | None = None) -> NoReturn:
    """End the call with the status of the error, and the usage of the request."""
    status = to_grpc_status(error, usage)
    await context.abort(status.code, status.message, status.trailing_metadata)
    raise AssertionError("abort does not return")


def _behaviour(handler: grpc.RpcMethodHandler) -> Any:
    """Return the method itself, which is under another name for each kind."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
