"""How a request over HTTP fails: the one place where gRPC statuses become HTTP statuses, in the shapes of
OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import grpc
import msgspec

from cluster.errors import (
    HTTP_STATUS,
    FieldViolation,
    InvalidRequestError,
    bad_fields,
    error_reason,
    retry_after_s,
    usage_of,
)
from cluster.http.call import AbortedCall
from cluster.proto.tandem.v1 import inference_pb2 as pb

# The status of methods that this version does not serve.
_NOT_SERVED = 501
# The `type` of OpenAI's errors by gRPC status; for other statuses it is the server's.
_TYPES: Mapping[grpc.StatusCode, str] = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request_error",
    grpc.StatusCode.UNAUTHENTICATED: "authentication_error",
    grpc.StatusCode.PERMISSION_DENIED: "permission_error",
    grpc.StatusCode.NOT_FOUND: "invalid_request_error",
    grpc.StatusCode.ALREADY_EXISTS: "invalid_request_error",
    grpc.StatusCode.FAILED_PRECONDITION: "invalid_request_error",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rate_limit_error",
    grpc.StatusCode.UNIMPLEMENTED: "invalid_request_error",
}
_SERVER_ERROR = "server_error"
# The `code` of OpenAI's errors where that has a name of its own; for others it is the reason of ErrorInfo in
# small letters, and for calls without one, which are not ours, the status.
_CODES: Mapping[str, str] = {
    "INVALID_REQUEST": "invalid_value",
    "GRAMMAR": "invalid_grammar",
    "TEMPLATE": "no_chat_template",
    "UNAUTHENTICATED": "invalid_api_key",
    "FORBIDDEN": "insufficient_permissions",
    "UNKNOWN_MODEL": "model_not_found",
    "DUPLICATE_REQUEST": "duplicate_request_id",
    "QUOTA": "rate_limit_exceeded",
    "DEADLINE": "timeout",
    "ABANDONED": "cancelled",
    "INTERNAL": "internal_error",
}
# The `type` of Anthropic's errors by HTTP status.
_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Returns the name over HTTP of a field of a gRPC message.
Rename = Callable[[str], str]


class HttpProblem(Exception):
    """A request ends with this answer; `param` is the path of the bad field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        usage: pb.Usage | None = None,
    ) -> None:
        super().__init__(message)
        # The request's usage by then; None: it was not accepted, or the usage is unknown.
        self.usage = usage
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(math.ceil(retry_after_s))
            self.headers["Retry-After-Ms"] = str(math.ceil(1e3 * retry_after_s))

    @classmethod
    def of_call(cls, call: AbortedCall, rename: Rename = str) -> HttpProblem:
        """Return the failed call's error over HTTP; each bad field has the name that the client knows."""
        reason = error_reason(call.trailing) or call.code.name
        code = _CODES.get(reason, reason.lower())
        message, param = call.message, None
        fields = [FieldViolation(rename(it.field), it.problem) for it in bad_fields(call.trailing)]
        if fields:
            param = fields[0].field
            message = "; ".join(f"{field}: {problem}" for field, problem in fields)
        return cls(
            _NOT_SERVED if call.code is grpc.StatusCode.UNIMPLEMENTED else HTTP_STATUS.get(call.code, 500),
            message,
            kind=_TYPES.get(call.code, _SERVER_ERROR),
            code=code,
            param="model" if code == "model_not_found" else param,
            retry_after_s=retry_after_s(call.trailing),
            usage=usage_of(call.trailing),
        )


def bad_field(field: str, problem: str) -> InvalidRequestError:
    """Return the error of a field that already has its name over HTTP."""
    return InvalidRequestError(FieldViolation(field, problem))


class _Details(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _OpenAIError(msgspec.Struct):
    error: _Details


class _AnthropicDetails(msgspec.Struct):
    type: str
    message: str


class _AnthropicError(msgspec.Struct):
    error: _AnthropicDetails
    type: str = "error"


def openai_error(problem: HttpProblem) -> bytes:
    """Return the error as OpenAI's API has it."""
    details = _Details(problem.message, problem.kind, problem.param, problem.code)
    return msgspec.json.encode(_OpenAIError(details))


def anthropic_error(problem: HttpProblem) -> bytes:
    """Return the error as Anthropic's API has it."""
    kind = _ANTHROPIC_TYPES.get(problem.status)
    if kind is None:
        kind = "invalid_request_error" if problem.status < 500 else "api_error"
    return msgspec.json.encode(_AnthropicError(_AnthropicDetails(kind, problem.message)))
