"""The exceptions of the service, and the one table from exceptions to gRPC statuses.

ClusterError
├── RequestError              a client's request ends with this; every class has a row in `STATUS_TABLE`
│   ├── InvalidRequestError       the client must change the named fields
│   ├── TemplateError             the model's chat template cannot render this chat: send text instead
│   │   └── TemplateRefusedError  in words of its own, which are not logged
│   ├── GrammarError              the constraint is wrong, unsupported or too complex: simplify it
│   │   └── InvalidToolsError     calls of these tools cannot be demanded: simplify their schemas
│   ├── UnknownModelError         ask for a model that `ListModels` names
│   ├── UnknownRequestError       the request is not among the running and recent ones
│   ├── DuplicateRequestError     the request id is in use: choose another, or resume it
│   ├── UnauthenticatedError      who calls is not known: send a valid key, token or certificate
│   ├── ForbiddenError            the caller may not do this: ask whoever gives out the roles
│   ├── OverloadedError           no capacity now: try again after `retry_after_s`
│   ├── UnattainableError         the prompt alone takes longer than its class allows: name another
│   ├── QuotaError                the tenant has used up its limit: try again after `retry_after_s`
│   ├── SlowClientError           the client did not read its stream: read faster, or ask for less
│   ├── DeadlineError             the deadline passed: allow more time
│   ├── UnavailableError          nothing can serve the request now: try again after `retry_after_s`
│   ├── PoisonRequestError        replicas break when they run the request: do not send it again
│   ├── InternalError             a fault of the gateway, which its log describes
│   ├── OrderError                an operator's order cannot be carried out as things are: the text says why
│   └── AbandonedError            the request was cancelled, or taken over by another call that resumes it
├── CallError                 a call of our own client ended with a gRPC status, as the table says
├── ConfigError               the configuration cannot be used: one line per field, named by its path
├── BenchError                nothing could be measured: the text says why
├── StoreAwayError            a node's store did not do what was asked: the text names it
├── DashboardError            Ray's dashboard did not do what was asked
│   ├── DashboardAwayError        it does not answer, or Serve behind it does not: try again later
│   ├── TokenRefusedError         it wants another Ray token, or one at all
│   ├── UnknownPoolError          the application, or its deployment of this pool, does not run
│   └── ScalerDisabledError       the application was deployed without `external_scaler_enabled`
├── PinError                  a pool could not be pinned or released: the text says why
├── ScaleTimeoutError         a pool has not reached its count yet; Serve continues
├── StartError                the cluster cannot be brought up: the text names what is missing
└── RosterAwayError           the roster's actor cannot be reached now: continue with the last view
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from cluster.proto.tandem.v1 import inference_pb2 as pb


class ClusterError(Exception):
    """Base of all errors of cluster."""


class RequestError(ClusterError):
    """A client's request cannot be served, or not to its end."""

    @property
    def logged(self) -> str:
        """The message for logs, traces and explanations: without words of the prompt."""
        return str(self)


class FieldViolation(NamedTuple):
    """A field of the request, what is wrong with it and what to send instead."""

    field: str
    problem: str


class InvalidRequestError(RequestError):
    """One or more fields of the request are bad."""

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{field}: {problem}" for field, problem in violations))
        self.violations = violations


class AnswerTooLargeError(InvalidRequestError):
    """An answer that is held until it is whole is too large for that."""


class TemplateError(RequestError):
    """The chat template is missing, refused these messages, or broke its bounds."""


class TemplateRefusedError(TemplateError):
    """The chat template failed with words of its own, which may be those of the messages: the caller alone
    reads them."""

    @property
    def logged(self) -> str:
        return "the model's chat template failed"


class GrammarError(RequestError):
    """No grammar can be made of the required form of the output; the text, which may have words of the
    caller, gives the reason."""

    @property
    def logged(self) -> str:
        return "the constraint was refused"


class InvalidToolsError(GrammarError):
    """Calls of these tools cannot be demanded of this model's answers."""


class UnknownModelError(RequestError):
    """The named model is not served here."""


class UnknownRequestError(RequestError):
    """No running or recent request has this id."""


class DuplicateRequestError(RequestError):
    """A running request has this id."""


class UnauthenticatedError(RequestError):
    """The call proves no identity; the text does not help to guess one."""


class ForbiddenError(RequestError):
    """The caller is known, and may not do this."""


class RetryableError(RequestError):
    """A later or repeated call may succeed; `retry_after_s` is the time until then."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryableError):
    """All replicas refused the request for lack of capacity."""


class UnattainableError(RequestError):
    """The prompt alone takes longer to compute than the objective of its class allows."""


class QuotaError(RetryableError):
    """The request's tenant has used up one of its limits, the field `limit` of `TenantLimits`."""

    def __init__(self, reason: str, retry_after_s: float, limit: str) -> None:
        super().__init__(reason, retry_after_s)
        self.limit = limit


class SlowClientError(RetryableError):
    """More unread output than the gateway is willing to hold for one stream."""


class UnavailableError(RetryableError):
    """No replica can take the request, or all attempts failed."""


class DeadlineError(RequestError):
    """The request's deadline passed before it finished, or its prompt alone takes longer."""


class PoisonRequestError(RequestError):
    """Two replicas broke while they ran this request; the text names them and why."""


class InternalError(RequestError):
    """The gateway itself, or a library in it, failed while it served the call; only its log says how."""

    def __init__(self) -> None:
        super().__init__("something went wrong in the gateway; its log says what")


class OrderError(RequestError):
    """The cluster cannot do what an operator has ordered: the text names the necessary change."""


class AbandonedError(RequestError):
    """The caller no longer waits for this call."""


class CallError(ClusterError):
    """A call ended with a gRPC status other than OK."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        retry_after_s: float | None = None,
        fields: tuple[FieldViolation, ...] = (),
        usage: pb.Usage | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        # From RetryInfo; None: the gateway does not suggest trying again.
        self.retry_after_s = retry_after_s
        # The bad fields of an INVALID_ARGUMENT.
        self.fields = fields
        # What an accepted request used before it failed; None: it was not accepted, or nobody said.
        self.usage = usage
        # From ErrorInfo, for programs, such as "UNKNOWN_MODEL"; "": none was given.
        self.reason = reason

    @property
    def is_refusal(self) -> bool:
        """Whether the cluster, or a quota, does not allow the request now, and says when to try again."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and bool(self.retry_after_s)


class ConfigError(ClusterError):
    """The configuration cannot be used; each line begins with the file and the field's path."""


class BenchError(ClusterError):
    """Not one request of a benchmark finished."""


class StoreAwayError(ClusterError):
    """One or more nodes' stores did not answer or are damaged; each line names one."""


class DashboardError(ClusterError):
    """Ray's dashboard did not carry out the request; the text gives a remedy."""


class DashboardAwayError(DashboardError):
    """No answer from the dashboard, or from Ray Serve behind it."""


class TokenRefusedError(DashboardError):
    """The Ray token is missing, or is not that of this Ray cluster."""


class UnknownPoolError(DashboardError):
    """No deployment of this application has this name now."""


class ScalerDisabledError(DashboardError):
    """Ray Serve lets nobody scale this application from outside."""


class PinError(ClusterError):
    """No gateway pinned the pool, or released it."""


class ScaleTimeoutError(ClusterError):
    """The count was ordered and stays so, but was not reached within the time that the caller waits."""


class StartError(ClusterError):
    """The pools cannot be brought up: a resource is missing, or a replica cannot serve its model."""


class RayEndedError(ClusterError):
    """The Ray cluster that this process had started was ended from outside."""


class RosterAwayError(ClusterError):
    """The roster cannot be reached now; its last view stays in force."""


STATUS_TABLE: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    AnswerTooLargeError: grpc.StatusCode.INVALID_ARGUMENT,
    TemplateError: grpc.StatusCode.INVALID_ARGUMENT,
    TemplateRefusedError: grpc.StatusCode.INVALID_ARGUMENT,
    GrammarError: grpc.StatusCode.INVALID_ARGUMENT,
    InvalidToolsError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    DuplicateRequestError: grpc.StatusCode.ALREADY_EXISTS,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnattainableError: grpc.StatusCode.FAILED_PRECONDITION,
    QuotaError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowClientError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    PoisonRequestError: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
    OrderError: grpc.StatusCode.FAILED_PRECONDITION,
    AbandonedError: grpc.StatusCode.CANCELLED,
}

# The same over HTTP: the statuses that gRPC's own gateways use.
HTTP_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 412,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_MAX_MESSAGE_CHARS = 1000
_MAX_VIOLATIONS = 12
# Statuses travel in HTTP/2 headers, of which a peer accepts 8 KiB by default.

# The trailing metadata in which gRPC carries a google.rpc.Status.
# Of the reasons in ErrorInfo.
DOMAIN = "tandem"
DETAILS_KEY = "grpc-status-details-bin"

Detail: TypeAlias = (
    error_details_pb2.RetryInfo | error_details_pb2.BadRequest | error_details_pb2.ErrorInfo | pb.Usage
)
D = TypeVar(
    "D", error_details_pb2.RetryInfo, error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, pb.Usage
)


def is_failure(error: BaseException) -> bool:
    """Whether the error is a failure of the call in which it was raised, and not the cancellation of the
    running task, or the end of the process. A `CancelledError` in a task that nobody cancels is that of
    something else, and a failure."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


@contextlib.contextmanager
def failures_logged(log: logging.Logger, what: str) -> Iterator[None]:
    """Log exceptions that are raised within, and go on: for work whose failure does not matter to the call
    that it is done for."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        log.error("%s", what, exc_info=error)


@contextlib.contextmanager
def own_cancellations() -> Iterator[None]:
    """Take back the effect of a task group within on the running task when one of its tasks failed: in Python
    3.11 the task counts as cancelled from then on, and `is_failure` would take it for that."""
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        yield
    except BaseExceptionGroup:
        while task.cancelling() > num_before:
            task.uncancel()
        raise


class GrpcStatus(NamedTuple):
    """The arguments of `context.abort`."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def to_grpc_status(error: RequestError, usage: pb.Usage | None = None) -> GrpcStatus:
    """Return the status of `error`, with BadRequest or RetryInfo packed into its details, and the usage of a
    request that failed after it was accepted."""
    code = STATUS_TABLE[type(error)]
    details: list[any_pb2.Any] = []
    if isinstance(error, InvalidRequestError):
        details.append(_packed(_bad_request(error.violations)))
    elif isinstance(error, TemplateError):
        details.append(_packed(_bad_request((FieldViolation("chat", str(error)),))))
    elif isinstance(error, GrammarError):
        field = "chat.tools" if isinstance(error, InvalidToolsError) else "constraint"
        details.append(_packed(_bad_request((FieldViolation(field, str(error)),))))
    elif isinstance(error, RetryableError):
        nanos = math.ceil(error.retry_after_s * 1e9)
        delay = duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    details.append(_packed(error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)))
    if usage is not None:
        details.append(_packed(usage))
    message = str(error)[:_MAX_MESSAGE_CHARS]
    status = status_pb2.Status(code=code.value[0], message=message, details=details)
    return GrpcStatus(code, message, ((DETAILS_KEY, status.SerializeToString()),))


def reason_of(error: RequestError) -> str:
    """Return the reason of an error for programs: UNKNOWN_MODEL for `UnknownModelError`."""
    words: list[str] = re.findall("[A-Z][a-z]*", type(error).__name__.removesuffix("Error"))
    return "_".join(words).upper()


def error_reason(trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> str:
    """Return the reason that a failed call gives to programs; "" where it gives none."""
    found = _unpacked(trailing_metadata, error_details_pb2.ErrorInfo)
    return next((str(info.reason) for info in found if info.domain == DOMAIN), "")


def retry_after_s(trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> float | None:
    """Return the delay of a RetryInfo in the trailing metadata of a failed call; None when it has none."""
    for info in _unpacked(trailing_metadata, error_details_pb2.RetryInfo):
        seconds: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
        return seconds
    return None


def bad_fields(trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> tuple[FieldViolation, ...]:
    """Return the fields that a failed call's BadRequest names."""
    return tuple(
        FieldViolation(item.field, item.description)
        for request in _unpacked(trailing_metadata, error_details_pb2.BadRequest)
        for item in request.field_violations
    )


def usage_of(trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> pb.Usage | None:
    """Return the usage of a failed call; None where its status does not say."""
    return next(_unpacked(trailing_metadata, pb.Usage), None)


def _unpacked(trailing_metadata: tuple[tuple[str, str | bytes], ...], kind: type[D]) -> Iterator[D]:
    """Yield the details of this kind from the statuses in the metadata."""
    for key, value in trailing_metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(found := kind()):
                    yield found


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=field, description=problem)
            for field, problem in violations[:_MAX_VIOLATIONS]
        ]
    )


def _packed(message: Detail) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
