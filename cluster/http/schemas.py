"""The possible contents of requests over HTTP: types and fields. A field that is not known is refused by its
name, as it might change the output; `cluster.http.fields` lists all of them, and the effect of each."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from cluster.errors import InvalidRequestError
from cluster.http.body_shape import check_counts, check_shape
from cluster.http.errors import bad_field

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
# The type of a field that is read and has no effect.
Ignored = Any
# The type of a field that is refused by its type: it is read so that the error names it.
Refused = Any

_PLACE = re.compile(r"^(.*) - at `\$(.*)`$", re.DOTALL)
_FIELD = re.compile(
    r"^Object (missing required|contains unknown) field `([^`]*)`(?: - at `\$([^`]*)`)?$", re.DOTALL
)
_KEY = re.compile(r"[^.\[\]]+")
# The parts served of the objects that name their types; others have fields of their own.
_KINDS_WITH_FIELDS = frozenset(
    (
        *("function", "custom", "message", "function_call", "function_call_output", "reasoning"),
        *("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"),
        *("tool_use", "tool_result", "thinking", "redacted_thinking"),
        *("json_object", "json_schema", "structural_tag"),
        *("auto", "any", "none", "tool", "enabled", "disabled", "adaptive"),
    )
)
# The notation in paths for a value of an object with any keys.
_SOME_VALUE = "[...]"
# Half of a character beyond 16 bits, without the other half.
_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL
)
_HALF_CHARACTER = "it has half of a surrogate pair, which is no character; cut text between characters"
_MAX_PROBLEM_CHARS = 500
# In a shorter body there is too little to matter.
_SHORT_BODY_BYTES = 16 << 10
# Finds the fields without their values.
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of JSON objects with these fields and no other."""


B = TypeVar("B", bound=Body)


def decode(body: bytes, kind: type[B], refused: Mapping[str, str]) -> B:
    """Return the request; `InvalidRequestError` names the bad field by its path. `refused` gives the
    alternatives to fields that exist elsewhere."""
    body = body.removeprefix(codecs.BOM_UTF8)
    check_shape(body)
    if len(body) > _SHORT_BODY_BYTES:
        _check_long(body)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_field("body", f"is not JSON: {_json_problem(body, error)}") from error
    if not isinstance(fields, dict):
        raise bad_field("body", "must be a JSON object")
    known = kind.__struct_encode_fields__
    for name in [name for name in fields if name not in known]:
        if fields.pop(name) is not None:
            raise unknown_field(name, refused)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _invalid(error, kind, fields) from error


def _check_long(body: bytes) -> None:
    """Refuse a long body for excess of values, before a value of it is made."""
    try:
        check_counts(_FIELDS_DECODER.decode(body))
    except msgspec.ValidationError:
        raise bad_field("body", "must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = _HALF_CHARACTER if _SURROGATE.search(body) else _shortened(error)
        raise bad_field("body", f"is not JSON: {problem}") from error


def unknown_field(name: str, refused: Mapping[str, str]) -> InvalidRequestError:
    """Return the error of a field that is not served."""
    remedy = refused.get(name)
    if not name:
        return bad_field("body", "has a field without a name; remove it")
    if remedy is None:
        return bad_field(name[:100], "is not known here; remove it (docs/api.md lists the fields)")
    return bad_field(name, f"is not supported; {remedy}")


def _invalid(error: Exception, kind: type[Body], fields: Mapping[str, Any]) -> InvalidRequestError:
    if named := _field_problem(error, fields):
        return bad_field(*named)
    found = _PLACE.match(str(error))
    if found is None:
        return bad_field("body", _shortened(error))
    problem, path = found[1], found[2].removeprefix(".")
    name, is_value, _ = path.partition(_SOME_VALUE)
    if is_value:
        path = f"{name}[{_bad_key(kind, name, fields[name])}]"
    return bad_field(path[:200] or "body", f"{problem[:1].lower()}{problem[1:_MAX_PROBLEM_CHARS]}")


def _bad_key(kind: type[Body], name: str, values: Mapping[str, Any]) -> str:
    """Return the first key of a field whose value is not of its type."""
    (field,) = (it for it in msgspec.structs.fields(kind) if it.encode_name == name)
    for key, value in values.items():
        try:
            msgspec.convert({key: value}, field.type)
        except msgspec.ValidationError:
            return key
    return ""


def _field_problem(error: Exception, fields: Any) -> tuple[str, str] | None:
    """Return path and problem where a field is missing, or not known."""
    found = _FIELD.match(str(error))
    if found is None:
        return None
    above = (found[3] or "").removeprefix(".")
    path = f"{above}.{found[2]}".removeprefix(".")
    if found[1] == "missing required":
        return path[:200], "is missing"
    for key in _KEY.findall(above):
        fields = fields[int(key) if key.isdecimal() else key]
    kind = fields.get("type", "function")
    if isinstance(kind, str) and kind not in _KINDS_WITH_FIELDS:
        return f"{above}.type"[:200], f"{kind[:50]!r} is not supported; remove it"
    return path[:200], "is not known here; remove it"


def _json_problem(body: bytes, error: Exception) -> str:
    """Return the fault of a body that is not JSON."""
    if _SURROGATE.search(body):
        return _HALF_CHARACTER
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return f"it is not UTF-8 at byte {wrong.start}"
    return _shortened(error)


def _shortened(error: Exception) -> str:
    return str(error)[:_MAX_PROBLEM_CHARS]


# ------------------------------------------------------------------------------------- parts of requests


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


# ---------------------------------------------------------------------------------------------- requests


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
