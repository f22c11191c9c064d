"""The JSON objects within requests to the APIs of OpenAI."""

from __future__ import annotations

from typing import Any

from cluster.http.body_decoding import Body
from cluster.http.field_types import Ignored, Refused


class StreamOptions(Body, kw_only=True):
    """The content of a stream besides the output."""

    include_usage: bool | None = None
    # Usage with each chunk.
    continuous_usage_stats: bool | None = None
    # A field about random bytes that hide lengths of chunks, which are not sent here.
    include_obfuscation: Ignored = None


class JsonSchema(Body, kw_only=True):
    """The JSON schema of `response_format`."""

    name: str | None = None
    description: Ignored = None
    schema: dict[str, Any] | bool | None = None
    strict: Ignored = None


class TagStructure(Body, kw_only=True):
    """A part of the output that begins with `begin` and is held to a schema."""

    begin: str
    schema: dict[str, Any] | bool | None = None
    end: str


class ResponseFormat(Body, kw_only=True):
    """The required form of the output, in the words of OpenAI's API."""

    # One of text, json_object, json_schema and structural_tag.
    type: str
    json_schema: JsonSchema | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Body, kw_only=True):
    """The same in the words of vLLM: one of these."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: Ignored = None
    whitespace_pattern: str | None = None


class FunctionDefinition(Body, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Body, kw_only=True):
    """A tool, of which functions are the only kind."""

    type: str
    function: FunctionDefinition | None = None
    custom: Refused = None


class NamedFunction(Body, kw_only=True):
    name: str


class NamedTool(Body, kw_only=True):
    """A tool that is to be called."""

    type: str
    function: NamedFunction | None = None
    name: str | None = None


class CalledFunction(Body, kw_only=True):
    name: str
    arguments: str
    provider_specific_fields: Ignored = None


class PastToolCall(Body, kw_only=True):
    """A tool call of an earlier turn."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: Ignored = None
    provider_specific_fields: Ignored = None


class ContentPart(Body, kw_only=True):
    """A part of a message; only texts are served."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: Ignored = None
    image_url: Refused = None
    input_audio: Refused = None
    file: Refused = None
    video_url: Refused = None
    audio_url: Refused = None


class ChatMessage(Body, kw_only=True):
    """A turn of a chat, also as our own answers and those of other servers have it."""

    # One of system, developer, user, assistant and tool.
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    # The model's reasoning, under either name.
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Ignored = None
    # A field of LiteLLM.
    provider_specific_fields: Ignored = None
    audio: None = None
    function_call: None = None
