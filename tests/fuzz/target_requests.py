"""Requests of clients: any bytes as a message of each method, through every check up to what replicas get."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from gateway_harness import TEMPLATE, write_model
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from cluster.api.json_text import as_dict
from cluster.errors import RequestError, to_grpc_status
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.chat_template import Chat, ChatTemplate, ChatTurn, RenderOrder, render
from cluster.text.tokenizer import ModelText
from cluster.text.validation import (
    ServingLimits,
    check_detokenize,
    check_request,
    check_tokenize,
    check_values,
    max_tokens_of,
    sampling_of,
)
from tests.fuzz.mutation import EDGE_FLOATS, EDGE_INTS, any_text, mutate_bytes
from tests.fuzz.target import Target, outcome

LIMITS = ServingLimits(
    model_name="m",
    vocab_size=320,
    max_context_tokens=128,
    max_samples=4,
    default_max_tokens=16,
    allow_pins=True,
)
_MAX_DEPTH = 4


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return a target for the message of each method, and that of chat templates."""
    text = ModelText.load(write_model(folder / "model"))
    messages = {
        method.input_type.name: GetMessageClass(method.input_type)
        for api in (pb, admin_pb)
        for service in api.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    return [
        *(
            Target(f"gRPC {name}", partial(_request, kind, text), 60)
            for name, kind in sorted(messages.items(), key=lambda item: item[0])
        ),
        Target("chat template's input", _render, 60),
    ]


def _request(kind: type[Message], text: ModelText, rng: Random) -> str:
    drawn = kind()
    _fill(rng, drawn, rng.choice((0.1, 0.2, 0.5)), 0)
    data = drawn.SerializeToString()
    if rng.random() < 0.4:
        data = mutate_bytes(rng, data)
    return outcome(lambda: _take(kind.FromString(data), text), DecodeError, RequestError)


def _take(request: Any, text: ModelText) -> None:
    """Do with a request what a gateway does; every refusal has a status."""
    as_dict(request)
    try:
        match request:
            case pb.GenerateRequest():
                check_values(request)
                check_request(request, LIMITS)
                tokens = b"\0\0\0\0" * len(request.token_ids.ids) or text.encode(request.text or "chat")
                sampling_of(request, max_tokens_of(request, len(tokens) // 4, LIMITS))
            case pb.TokenizeRequest():
                check_tokenize(request, LIMITS)
                text.encode(request.text)
            case pb.DetokenizeRequest():
                check_detokenize(request, LIMITS)
                text.decode(b"".join(token.to_bytes(4, "little") for token in request.token_ids))
    except RequestError as error:
        to_grpc_status(error)
        raise


def _fill(rng: Random, message: Any, share: float, depth: int) -> None:
    """Set a share of the message's fields, also to values that no client sends."""
    descriptor: Descriptor = message.DESCRIPTOR
    for field in descriptor.fields:
        if rng.random() > share or depth > _MAX_DEPTH:
            continue
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            for _ in range(rng.randrange(3)):
                target[_scalar(rng, key)] = _scalar(rng, value)
        elif field.is_repeated and field.message_type is not None:
            for _ in range(rng.randrange(3)):
                _fill(rng, target.add(), 0.7, depth + 1)
        elif field.is_repeated:
            target.extend(_scalar(rng, field) for _ in range(rng.randrange(4)))
        elif field.message_type is not None:
            target.SetInParent()
            _fill(rng, target, 0.7, depth + 1)
        else:
            setattr(message, field.name, _scalar(rng, field))


def _scalar(rng: Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return any_text(rng) if rng.random() < 0.5 else rng.choice(("m", "user", "a", "the quick fox"))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(EDGE_FLOATS) if rng.random() < 0.3 else rng.random()
    value = rng.choice(EDGE_INTS) if rng.random() < 0.3 else rng.randrange(20)
    if kind == FieldDescriptor.CPPTYPE_UINT32:
        return value % (1 << 32)
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return value % (1 << 64)
    half = 1 << (31 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM) else 63)
    return (value + half) % (2 * half) - half


def _render(rng: Random) -> str:
    """What a chat holds changes nothing but the text."""
    turns = tuple(ChatTurn(any_text(rng), any_text(rng)) for _ in range(rng.randrange(4)))
    chat = Chat(turns, add_generation_prompt=rng.random() < 0.5)
    order = RenderOrder(ChatTemplate(TEMPLATE, {"eos_token": "<|end|>"}), chat, 0.0, 4096)
    result = render(order)
    return type(result).__name__
