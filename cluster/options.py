"""What a caller of the Python client asks for: a prompt and options, and the message that carries them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.proto import tandem_pb2 as pb

APPLICATION_KEY = "tandem-application"
"""Metadata of `Generate`, where requests are split between applications: to the client, which one answers;
from a client that resumes a stream, which one began it."""


class Turn(NamedTuple):
    """One message of a chat prompt."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Turn]
"""Text, token ids, or a chat for the model's template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The fields of `GenerateRequest` other than the prompt; None leaves the gateway's default."""

    model: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    priority: int = 0
    tenant: str = ""
    request_id: str = ""
    pinned_prefill: str = ""
    pinned_decode: str = ""


_PINS = ("pinned_prefill", "pinned_decode")


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message; `InvalidRequestError` names an option, or the prompt, that does not fit in its field."""
    request = pb.GenerateRequest()
    for option in fields(options):
        if option.name not in _PINS:
            request.MergeFrom(_message(pb.GenerateRequest, option.name, getattr(options, option.name)))
    if options.pinned_prefill or options.pinned_decode:
        request.pins.CopyFrom(pb.Pins(prefill=options.pinned_prefill, decode=options.pinned_decode))
    if isinstance(prompt, str):
        request.MergeFrom(_message(pb.GenerateRequest, "text", prompt))
    elif len(prompt) > 0 and isinstance(prompt[0], Turn):
        request.chat.CopyFrom(chat_messages(prompt))
    else:
        request.token_ids.CopyFrom(_message(pb.TokenIds, "ids", prompt))
    return request


def chat_messages(turns: Sequence[Any]) -> pb.ChatMessages:
    """The message of a chat made of `Turn`s."""
    messages = [{"role": role, "content": content} for role, content in turns]
    chat: pb.ChatMessages = _message(pb.ChatMessages, "messages", messages)
    return chat


def _message(kind: Any, name: str, value: Any) -> Any:
    """A message of this kind with one field set; None leaves it absent."""
    try:
        return kind(**{name: value})
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(FieldViolation(name, str(error))) from error
