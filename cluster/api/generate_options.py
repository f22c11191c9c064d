"""Represent the request of a caller of the Python client: a prompt, its options, and their message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.proto.enums import names_of, value_of
from cluster.proto.tandem.v1 import inference_pb2 as pb


class Turn(NamedTuple):
    """A message of a chat prompt."""

    role: str
    content: str


# Text, token ids, or a chat for the model's template; a chat with tools or parts is a message.
Prompt = str | Sequence[int] | Sequence[Turn] | pb.ChatPrompt


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
    # "interactive", "standard" or "batch"; empty: the tenant's default.
    service_class: str = ""
    tenant: str = ""
    request_id: str = ""
    pinned_prefill: str = ""
    pinned_decode: str = ""
    # The required form of the output.
    constraint: pb.Constraint | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    include_stop: bool = False
    keep_special_tokens: bool = False
    include_usage: bool = False
    separate_reasoning: bool | None = None
    truncate_prompt_tokens: int | None = None
    # The name of a conversation.
    session_id: str = ""
    # Whether the KV of this request is kept from others, and not stored.
    no_store: bool = False


_APART = ("pinned_prefill", "pinned_decode", "service_class", "no_store")


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Return the message; `InvalidRequestError` names an option, or the prompt, that does not fit in its
    field."""
    request = pb.GenerateRequest(
        service_class=_value("service_class", pb.ServiceClass, options.service_class)
    )
    if options.no_store:
        request.cache_control = pb.CACHE_CONTROL_NO_STORE
    for option in fields(options):
        if option.name not in _APART:
            request.MergeFrom(_message(pb.GenerateRequest, option.name, getattr(options, option.name)))
    if options.pinned_prefill or options.pinned_decode:
        request.pins.CopyFrom(pb.Pins(prefill=options.pinned_prefill, decode=options.pinned_decode))
    if isinstance(prompt, str):
        request.MergeFrom(_message(pb.GenerateRequest, "text", prompt))
    elif isinstance(prompt, pb.ChatPrompt):
        request.chat.CopyFrom(prompt)
    elif len(prompt) > 0 and isinstance(prompt[0], Turn):
        request.chat.CopyFrom(chat_prompt(prompt))
    else:
        request.token_ids.CopyFrom(_message(pb.TokenIds, "ids", prompt))
    return request


def chat_prompt(turns: Sequence[Any]) -> pb.ChatPrompt:
    """Return the message of a chat made of `Turn`s."""
    chat = pb.ChatPrompt()
    for index, (role, content) in enumerate(turns):
        message = chat.messages.add(role=_value(f"chat.messages[{index}].role", pb.Role, role))
        message.content.append(_message(pb.ContentPart, "text", content))
    return chat


def embed_input(item: str | Sequence[int]) -> pb.EmbedInput:
    if isinstance(item, str):
        return pb.EmbedInput(text=item)
    return pb.EmbedInput(token_ids=_message(pb.TokenIds, "ids", item))


def _value(field: str, kind: Any, name: str) -> Any:
    """Return the value of an enum by its short name."""
    try:
        return value_of(kind, name)
    except KeyError:
        known = ", ".join(sorted(filter(None, names_of(kind.DESCRIPTOR).values())))
        raise InvalidRequestError(FieldViolation(field, f"is {name[:100]!r}; use one of {known}")) from None


def _message(kind: Any, name: str, value: Any) -> Any:
    """Return a message of this kind with one field set; None leaves it absent."""
    try:
        return kind(**{name: value})
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(FieldViolation(name, str(error))) from error
