"""The interface of answers to generating requests, and the facts that all of them state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from cluster.http.errors import HttpProblem
from cluster.proto.tandem.v1 import inference_pb2 as pb

FINISH_NAMES: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
    pb.FINISH_REASON_ABORT: "stop",
}

encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """Makes the body of one answer from the output of its calls of `Generate`. A request with several prompts
    has one call for each; `number` counts them."""

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        """Take a message; return the events that it makes in a stream."""

    def last(self) -> bytes:
        """Return the events that end the stream, after the last message of all calls."""

    def failed(self, problem: HttpProblem) -> bytes:
        """Return the events of a stream that breaks off."""

    def whole(self) -> bytes:
        """Return the body of an answer that is no stream."""

    @property
    def num_kept_bytes(self) -> int:
        """The bytes that the answer holds of its calls' output."""


class Maker(msgspec.Struct):
    """The facts that an answer states about itself."""

    # "" until the request is accepted.
    request_id: str
    created: int
    model: str
