"""The requests to the APIs of OpenAI: types and fields. A field that is not known is refused by its
name, as it might change the output; `cluster.http.fields` lists all of them, and the effect of each."""

from __future__ import annotations

from typing import Any

from cluster.http.body_decoding import Body
from cluster.http.field_types import Ignored, Int32, TokenId
from cluster.http.request_parts import (
    ChatMessage,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolDefinition,
)


class SampledRequest(Body, kw_only=True):
    """The fields that chats and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    service_tier: str | None = None
    # A field without effect.
    user: Ignored = None
    # Fields of vLLM.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    prompt_logprobs: Int32 | None = None
    echo: bool | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: Ignored = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int32 | None = None
    request_id: str | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    # A field without effect.
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None
    # Fields of vLLM.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class CompletionRequest(SampledRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    suffix: str | None = None


class EmbeddingRequest(Body, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: Int32 | None = None
    # A field without effect.
    user: Ignored = None
    # Fields of vLLM.
    truncate_prompt_tokens: Int32 | None = None
    normalize: bool | None = None
    priority: Int32 | None = None
    request_id: str | None = None


class TokenizeRequest(Body, kw_only=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
