"""The JSON objects of requests to Anthropic's API."""

from __future__ import annotations

from typing import Any

from cluster.http.body_decoding import Body
from cluster.http.field_types import Ignored, Int32, Refused


class ContentBlock(Body, kw_only=True):
    """A part of a message, also as our own answers have it."""

    type: str
    text: str | None = None
    # A field of tool_use.
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    # A field of tool_result.
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    # A field of thinking.
    thinking: str | None = None
    signature: Ignored = None
    data: Ignored = None
    # A field without effect.
    cache_control: Ignored = None
    citations: Ignored = None
    caller: Ignored = None
    source: Refused = None
    title: Refused = None
    context: Refused = None


class TurnMessage(Body, kw_only=True):
    """A turn of a chat."""

    role: str
    content: str | list[ContentBlock]


class OfferedTool(Body, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None


class ChosenTool(Body, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body, kw_only=True):
    """Whether the model is to think first, where its chat template can say so."""

    type: str
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Body, kw_only=True):
    """A schema that the output must follow."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Body, kw_only=True):
    """The required form of the output, and the effort of the model for it."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[TurnMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # A field without effect.
    cache_control: Ignored = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int32
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    service_tier: str | None = None
    # A field without effect.
    metadata: Ignored = None
