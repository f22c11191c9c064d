"""Every field of the requests of OpenAI's, Anthropic's and vLLM's APIs, and its effect here.

Requests are decoded by the classes of `cluster.http`; a test holds this table to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# served: as there; served in part: some values are refused by name; ignored: changes no output there or here;
# refused: a request that has it is answered with 400, and the field's name.
Effect = Literal["served", "served in part", "ignored", "refused"]


class FieldEntry(NamedTuple):
    """A field of a request; `notes` give the differences, or the alternative to it."""

    name: str
    effect: Effect
    notes: str = ""
    # It is vLLM's, not of the API that the route speaks.
    is_vllm: bool = False


def _served(*names: str) -> tuple[FieldEntry, ...]:
    return tuple(FieldEntry(name, "served") for name in names)


def _vllm(name: str, notes: str = "", effect: Effect = "served") -> FieldEntry:
    return FieldEntry(name, effect, notes, is_vllm=True)


def _ignored(*names: str) -> tuple[FieldEntry, ...]:
    return tuple(FieldEntry(name, "ignored") for name in names)


def _refused(**remedies: str) -> tuple[FieldEntry, ...]:
    return tuple(FieldEntry(name, "refused", remedy) for name, remedy in remedies.items())


_MODEL = FieldEntry("model", "served", "absent: the model that is served")
_TEMPERATURE = FieldEntry("temperature", "served", "default 1; 0 is greedy")
_OUTPUT_CONFIG = FieldEntry(
    "output_config", "served", "format: json_schema; effort goes to the chat template"
)
_PRIORITY = _vllm(
    "priority", "as over gRPC: higher goes first (in vLLM lower does); cut to the caller's max_priority"
)
_REQUEST_ID = _vllm("request_id", "default: the header X-Request-Id, else drawn; it must be new")
_SERVICE_TIER = FieldEntry(
    "service_tier",
    "served in part",
    "auto, default: the tenant's class; flex: batch; priority: interactive; others are refused",
)
_CACHE_KEY = FieldEntry(
    "prompt_cache_key",
    "served",
    "where prefixes do not decide, the same key leads to the same replicas",
)
_TEXT_ALONE = "the model reads text alone; other parts of content are refused by their types"
_STREAM_OPTIONS = FieldEntry(
    "stream_options",
    "served",
    "include_usage, vLLM's continuous_usage_stats; include_obfuscation: ignored",
)

_SAMPLED: tuple[FieldEntry, ...] = (
    _MODEL,
    _STREAM_OPTIONS,
    _TEMPERATURE,
    *_served("stream", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"),
    FieldEntry("n", "served", "at most gateway.max_samples"),
    FieldEntry(
        "max_tokens",
        "served",
        "1 or more, in completions also 0 with echo; default: gateway.default_max_tokens; more than the "
        "context has room for is cut, and usage.capped_max_tokens says so",
    ),
    FieldEntry("stop", "served", "at most 16 strings of 256 characters"),
    FieldEntry("seed", "served", "the same request with the same seed has the same output; drawn if absent"),
    FieldEntry("response_format", "served", "text, json_object, json_schema, and vLLM's structural_tag"),
    _SERVICE_TIER,
    *_ignored("user"),
    _vllm("top_k", "0 and -1: off"),
    _vllm("min_p"),
    _vllm("repetition_penalty"),
    _vllm("min_tokens"),
    _vllm("stop_token_ids"),
    _vllm("include_stop_str_in_output"),
    _vllm("ignore_eos"),
    _vllm("skip_special_tokens"),
    _vllm("spaces_between_special_tokens", "true only", "served in part"),
    _vllm("truncate_prompt_tokens"),
    _vllm("prompt_logprobs"),
    _vllm("guided_json"),
    _vllm("guided_regex"),
    _vllm("guided_choice"),
    _vllm("guided_grammar"),
    _vllm("guided_decoding_backend", effect="ignored"),
    _vllm("structured_outputs", "json, regex, choice, grammar, json_object or structural_tag"),
    _PRIORITY,
    _REQUEST_ID,
)

_NO_TOOL_OF_OURS = "run it yourself, and offer it as a function in tools"
_REFUSED_SAMPLING = _refused(
    allowed_token_ids="use structured_outputs",
    bad_words="use logit_bias",
    cache_salt="tenants share no prefixes; use a key of another tenant",
    chat_template="the model's own template is used; see chat_template_kwargs",
    documents="put them into a message",
    guided_whitespace_pattern="use guided_grammar",
    kv_transfer_params="the cluster moves KV by itself",
    length_penalty="there is no beam search; use n",
    logits_processors="use logit_bias",
    mm_processor_kwargs=_TEXT_ALONE,
    return_token_ids="tandem.v1.Inference/Generate has token ids",
    return_tokens_as_token_ids="tandem.v1.Inference/Generate has token ids",
    use_beam_search="use n",
)

FIELDS: Mapping[str, tuple[FieldEntry, ...]] = {
    "/v1/chat/completions": (
        FieldEntry("messages", "served", _TEXT_ALONE),
        *_SAMPLED,
        FieldEntry("max_completion_tokens", "served", "as max_tokens, of which one may be there"),
        *_served("logprobs", "top_logprobs"),
        FieldEntry("tools", "served in part", "functions; others are refused by their types"),
        FieldEntry("tool_choice", "served", "auto, none, required, or a function"),
        *_served("parallel_tool_calls"),
        FieldEntry("reasoning_effort", "served", "the chat template gets it as a variable of this name"),
        _CACHE_KEY,
        FieldEntry("store", "served in part", "false only: nothing is kept"),
        FieldEntry("modalities", "served in part", '["text"] only'),
        *_ignored("metadata", "safety_identifier", "prompt_cache_retention"),
        _vllm("add_generation_prompt"),
        _vllm("continue_final_message"),
        _vllm("chat_template_kwargs"),
        _vllm("include_reasoning", "false: thoughts stay in the content"),
        _vllm("echo", "what the last message says comes first, where it is the assistant's"),
        _vllm("add_special_tokens", "false only: the template brings its own", "served in part"),
        *_refused(
            audio=_TEXT_ALONE,
            function_call="send tool_choice",
            functions="send tools",
            moderation="moderate the texts yourself",
            prediction="leave it out",
            verbosity="ask for it in a message",
            web_search_options=_NO_TOOL_OF_OURS,
        ),
        *_REFUSED_SAMPLING,
    ),
    "/v1/completions": (
        FieldEntry("prompt", "served", "text, token ids, or a list of one of them (gateway.http.max_inputs)"),
        *_SAMPLED,
        *_served("logprobs", "echo"),
        FieldEntry("best_of", "served in part", "equal to n only"),
        FieldEntry("suffix", "served in part", "empty only"),
        _vllm("add_special_tokens", "true only: send token ids without them", "served in part"),
        *_refused(prompt_embeds="send text or token ids"),
        *_REFUSED_SAMPLING,
    ),
    "/v1/responses": (
        FieldEntry(
            "input", "served in part", "messages, thoughts, function calls and their outputs, as text"
        ),
        _MODEL,
        _TEMPERATURE,
        *_served("instructions", "stream", "top_p", "top_logprobs", "parallel_tool_calls"),
        FieldEntry("stream_options", "ignored", "the last event has the usage"),
        FieldEntry(
            "max_output_tokens",
            "served",
            "default: gateway.default_max_tokens; more than the context has room for is cut, and "
            "usage.capped_max_tokens says so",
        ),
        FieldEntry(
            "include",
            "served in part",
            "message.output_text.logprobs; there is no reasoning.encrypted_content",
        ),
        FieldEntry("tools", "served in part", "functions; others are refused by their types"),
        FieldEntry("tool_choice", "served", "auto, none, required, or a function"),
        FieldEntry("text", "served in part", "format: text, json_object, json_schema; verbosity: medium"),
        FieldEntry("reasoning", "served in part", "effort goes to the chat template; the summary is empty"),
        _SERVICE_TIER,
        _CACHE_KEY,
        FieldEntry("store", "served in part", "false only, which is the default here: nothing is kept"),
        FieldEntry("background", "served in part", "false only"),
        FieldEntry("previous_response_id", "refused", "no answer is kept: send all of the input"),
        FieldEntry("truncation", "served in part", "disabled only"),
        FieldEntry("metadata", "served", "returned as it is"),
        *_ignored("user", "safety_identifier", "prompt_cache_retention"),
        _PRIORITY,
        _REQUEST_ID,
        *_refused(
            context_management="send less input",
            conversation="send all of the input",
            max_tool_calls=_NO_TOOL_OF_OURS,
            moderation="moderate the texts yourself",
            prompt="send instructions and input",
        ),
    ),
    "/v1/messages": (
        FieldEntry(
            "messages",
            "served",
            f"{_TEXT_ALONE}; the assistant's text that comes last is continued; the result of a tool that "
            "is_error begins with 'Error: '",
        ),
        _MODEL,
        _TEMPERATURE,
        *_served("system", "stream", "stop_sequences", "top_p", "top_k"),
        FieldEntry(
            "max_tokens",
            "served",
            "more than the context has room for is cut, and usage.capped_max_tokens says so",
        ),
        FieldEntry("tools", "served in part", "custom tools; others are refused by their types"),
        *_served("tool_choice"),
        FieldEntry(
            "thinking", "served in part", "the chat template gets enable_thinking; budgets are ignored"
        ),
        FieldEntry("service_tier", "served in part", "auto and standard_only, which are the same here"),
        _OUTPUT_CONFIG,
        *_ignored("metadata", "cache_control"),
        *_refused(
            container=_NO_TOOL_OF_OURS,
            context_management="send fewer messages",
            inference_geo="the cluster is where it is",
            mcp_servers=_NO_TOOL_OF_OURS,
            output_format="send output_config.format",
        ),
    ),
    "/v1/messages/count_tokens": (
        *_served("messages", "system", "tools", "tool_choice", "thinking"),
        _MODEL,
        _OUTPUT_CONFIG,
        *_ignored("cache_control"),
    ),
    "/v1/embeddings": (
        FieldEntry("input", "served", "text, token ids, or a list of one of them (gateway.http.max_inputs)"),
        _MODEL,
        *_served("encoding_format", "dimensions"),
        *_ignored("user"),
        _vllm("truncate_prompt_tokens"),
        _vllm("normalize", "default true"),
        _PRIORITY,
        _REQUEST_ID,
    ),
    "/tokenize": (
        _MODEL,
        *(
            _vllm(name)
            for name in (
                "prompt",
                "messages",
                "tools",
                "add_special_tokens",
                "add_generation_prompt",
                "continue_final_message",
                "chat_template_kwargs",
            )
        ),
        *_refused(return_token_strs="detokenize them one by one"),
    ),
    "/detokenize": (_MODEL, _vllm("tokens"), _vllm("skip_special_tokens", "default true")),
}


def refused(route: str) -> dict[str, str]:
    """Return the alternatives to the fields that this route refuses by name."""
    return {entry.name: entry.notes for entry in FIELDS[route] if entry.effect == "refused"}
