"""POST /v1/embeddings, /tokenize and /detokenize: calls that have one answer."""

from __future__ import annotations

import base64

import msgspec
import numpy as np

from cluster.http.answers import encode
from cluster.http.chat_prompt import add_messages, add_tools, template_args
from cluster.http.completions import inputs
from cluster.http.errors import bad_field
from cluster.http.field_names import chat_renamer, renamer
from cluster.http.schemas import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import let_others_run

rename_embed = renamer({"inputs": "input"})
rename_tokenize = chat_renamer(
    {
        "text": "prompt",
        "input": "prompt",
        "prompt": "messages",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.template_args_json": "chat_template_kwargs",
        "chat.add_generation_prompt": "add_generation_prompt",
        "chat.continue_final_message": "continue_final_message",
    }
)
rename_detokenize = renamer({"token_ids": "tokens"})
_ENCODINGS = ("float", "base64")
# Token ids copied before another thread may run.
_NUM_COPIED = 4096


class _Embedding(msgspec.Struct):
    index: int
    # Numbers, or 32-bit floats in base64, little-endian.
    embedding: list[float] | str
    object: str = "embedding"


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    model: str
    usage: _EmbeddingUsage
    object: str = "list"


class _Tokens(msgspec.Struct):
    """The answer to vLLM's /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


def embed_request(body: EmbeddingRequest, max_inputs: int) -> pb.EmbedRequest:
    """Return the call that answers the request."""
    if body.encoding_format not in (None, *_ENCODINGS):
        raise bad_field("encoding_format", f"must be one of {', '.join(_ENCODINGS)}")
    call = pb.EmbedRequest(
        model=body.model or "", priority=body.priority or 0, request_id=body.request_id or ""
    )
    for name in ("normalize", "dimensions", "truncate_prompt_tokens"):
        if (value := getattr(body, name)) is not None:
            setattr(call, name, value)
    for given in inputs(body.input, "input", max_inputs):
        if isinstance(given, str):
            call.inputs.add(text=given)
        else:
            call.inputs.add(token_ids=pb.TokenIds(ids=given))
    return call


def embedding_answer(body: EmbeddingRequest, reply: pb.EmbedResponse, model: str) -> bytes:
    """Return the answer as JSON."""
    as_text = body.encoding_format == "base64"
    data = [
        _Embedding(index, _base64(item.values) if as_text else list(item.values))
        for index, item in enumerate(reply.embeddings)
    ]
    num_tokens = reply.usage.prompt_tokens
    return encode(_Embeddings(data, model, _EmbeddingUsage(num_tokens, num_tokens)))


def tokenize_request(body: TokenizeRequest) -> pb.TokenizeRequest:
    """Return the call that answers the request."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "or messages must be there, and not both")
    call = pb.TokenizeRequest(model=body.model or "")
    if body.add_special_tokens is not None:
        call.add_special_tokens = body.add_special_tokens
    if body.prompt is not None:
        call.text = body.prompt
        return call
    chat = call.chat
    add_messages(chat, body.messages or ())
    add_tools(chat, body.tools or ())
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    chat.continue_final_message = bool(body.continue_final_message)
    chat.template_args_json = template_args(body.chat_template_kwargs, None)
    chat.SetInParent()
    return call


def tokenize_answer(reply: pb.TokenizeResponse, max_context_tokens: int) -> bytes:
    """Return the answer as JSON."""
    tokens: list[int] = []
    for start in range(0, len(reply.token_ids), _NUM_COPIED):
        tokens += reply.token_ids[start : start + _NUM_COPIED]
        if len(reply.token_ids) > _NUM_COPIED:
            let_others_run()
    return encode(_Tokens(len(tokens), max_context_tokens, tokens))


def detokenize_request(body: DetokenizeRequest) -> pb.DetokenizeRequest:
    """Return the call that answers the request."""
    keeps = body.skip_special_tokens is False
    return pb.DetokenizeRequest(model=body.model or "", token_ids=body.tokens, keep_special_tokens=keeps)


def detokenize_answer(reply: pb.DetokenizeResponse) -> bytes:
    """Return the answer as JSON."""
    return encode(_Text(reply.text))


def _base64(values: object) -> str:
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()
