"""POST /v1/chat/completions: turn the request into a `GenerateRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.http.chat_prompt import add_messages, add_tools, set_tool_choice, template_args
from cluster.http.errors import Rename, bad_field
from cluster.http.field_names import chat_renamer
from cluster.http.sampled_request import sampled_request, session_id
from cluster.http.schemas import ChatRequest
from cluster.proto.tandem.v1 import inference_pb2 as pb

_NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "text": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.tool_choice.name": "tool_choice.function.name",
    "chat.parallel_tool_calls": "parallel_tool_calls",
    "chat.template_args_json": "chat_template_kwargs",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
    "logprobs": "top_logprobs",
}


class Translated(NamedTuple):
    """A request as the servicer takes it: one call for each prompt, and for each the names of its fields for
    errors."""

    calls: list[pb.GenerateRequest]
    renames: list[Rename]


def translate(body: ChatRequest) -> Translated:
    """Return the call that answers the chat; `InvalidRequestError` names fields that it cannot express."""
    request, names = sampled_request(body)
    names.update(_NAMES)
    if body.max_completion_tokens is not None:
        if body.max_tokens is not None:
            raise bad_field("max_tokens", "cannot be combined with max_completion_tokens; keep one of them")
        request.max_tokens = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise bad_field("top_logprobs", "needs logprobs: true")
    if body.store:
        raise bad_field("store", "is served as false only: nothing is kept; remove it")
    if body.modalities not in (None, ["text"]):
        raise bad_field("modalities", 'must be ["text"], or absent')
    if body.add_special_tokens:
        raise bad_field("add_special_tokens", "is served as false only: the chat template brings its own")
    request.session_id = session_id(body.prompt_cache_key)
    if body.include_reasoning is not None:
        request.separate_reasoning = body.include_reasoning
    chat = request.chat
    add_messages(chat, body.messages)
    chat.SetInParent()
    add_tools(chat, body.tools or ())
    set_tool_choice(chat, body.tool_choice)
    if body.parallel_tool_calls is not None:
        chat.parallel_tool_calls = body.parallel_tool_calls
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    chat.continue_final_message = bool(body.continue_final_message)
    chat.template_args_json = template_args(body.chat_template_kwargs, body.reasoning_effort)
    return Translated([request], [chat_renamer(names)])
