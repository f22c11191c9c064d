"""The last resort of both fronts: whatever is raised while a call is served, the call ends with one status.

Errors that are expected are turned into statuses where they arise. What comes here is a fault of the gateway
or of a library: it is logged, and its client gets INTERNAL without its words. Cancellation, and what ends the
process, are no failures of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from cluster.errors import InternalError, is_failure, to_grpc_status

_log = logging.getLogger("tandem.gateway")

_KINDS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class LastResort(grpc.aio.ServerInterceptor):
    """Ends calls of gRPC that nothing else ends: the first interceptor of a server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler, guarded; one that fails where there could be none."""
        method = handler_call_details.method
        try:
            handler = await continuation(handler_call_details)
        except BaseException as error:
            if not is_failure(error):
                raise
            _log.error("%s failed", method, exc_info=error)
            return grpc.stream_stream_rpc_method_handler(_fail)
        return None if handler is None else _guarded(handler, method)


def _guarded(handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
    """Return the handler, which ends with a status whatever the method raises."""
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def end(context: Any, error: BaseException) -> None:
        _log.error("%s failed", method, exc_info=error)
        with contextlib.suppress(grpc.aio.UsageError):  # it has a status already
            await _fail(None, context)

    async def call(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except BaseException as error:
            if _is_an_end(error):
                raise
            await end(context, error)

    async def stream(request: Any, context: Any) -> Any:
        try:
            async for response in behaviour(request, context):
                yield response
        except BaseException as error:
            if _is_an_end(error):
                raise
            await end(context, error)

    if inspect.isasyncgenfunction(behaviour):
        guarded: Any = stream
    elif inspect.iscoroutinefunction(behaviour):
        guarded = call
    else:  # gRPC runs it in a thread, where it answers for itself
        return handler
    make = _KINDS[handler.request_streaming, handler.response_streaming]
    return make(guarded, handler.request_deserializer, handler.response_serializer)


def _is_an_end(error: BaseException) -> bool:
    """Whether the call has ended with this: gRPC handles it. gRPC keeps the error with its call, to which the
    traceback leads back, so the error loses that once it was handled."""
    if is_failure(error) and not isinstance(error, grpc.aio.AbortError):
        return False
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        asyncio.get_running_loop().call_soon(_release, error)
    return True


def _release(error: BaseException) -> None:
    error.__traceback__ = error.__context__ = error.__cause__ = None


async def _fail(request: Any, context: Any) -> None:
    status = to_grpc_status(InternalError())
    await context.abort(status.code, status.message, status.trailing_metadata)
