"""Requests that have, together, every field that docs/api.md lists as served or ignored, by route."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FUNCTION = {"name": "get_weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
# Continued by the answer.
OPEN = [USER, {"role": "assistant", "content": "Well, "}]
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}

_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": -1}},
    {"n": 3},
    {"max_tokens": 2},
    {"stop": "friend", "include_stop_str_in_output": True},
    {"stop": ["there", "friend"]},
    {"stop_token_ids": [9], "min_tokens": 1},
    {"ignore_eos": True},
    {"skip_special_tokens": False, "spaces_between_special_tokens": True},
    {"truncate_prompt_tokens": 4},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 3},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
        }
    },
    {"response_format": TAGS},
    {"guided_json": SCHEMA, "guided_decoding_backend": "auto"},
    {"guided_regex": "[a-z]+"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'root ::= "a" | "b"'},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-z]+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"json_object": True}},
    {"service_tier": "auto", "user": "u", "priority": 1},
    {"service_tier": "flex"},
    {"service_tier": "priority"},
)
CHATS: tuple[dict[str, Any], ...] = (
    *_SAMPLED,
    {"max_completion_tokens": 3},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3, "n": 2},
    {"messages": [{"role": "user", "content": "think"}], "logprobs": True, "top_logprobs": 1},
    {"messages": [{"role": "user", "content": "think"}], "include_reasoning": False},
    {"messages": [{"role": "user", "content": "think"}], "reasoning_effort": "low"},
    {"messages": [{"role": "user", "content": "both the weather"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "both the weather"}], "tools": TOOLS, "n": 2, "logprobs": True},
    {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"},
    {"store": False, "metadata": {"a": "b"}, "modalities": ["text"]},
    {"messages": OPEN, "continue_final_message": True, "add_generation_prompt": False, "echo": True},
    {"chat_template_kwargs": {"enable_thinking": False}, "add_special_tokens": False},
)
COMPLETIONS: tuple[dict[str, Any], ...] = (
    *_SAMPLED,
    {"logprobs": 0},
    {"logprobs": 3, "n": 2},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 1, "prompt": ["hello", "you"], "n": 2},
    {"prompt": [[5, 6], [7]], "best_of": 1, "suffix": "", "add_special_tokens": True},
)
RESPONSES: tuple[dict[str, Any], ...] = (
    {"instructions": "be kind", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50},
    {"max_output_tokens": 2},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"include": ["reasoning.encrypted_content"]},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
    {"input": "think", "reasoning": {"effort": "low", "summary": "auto"}},
    {
        "input": [{"role": "user", "content": "both the weather"}],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    },
    {"service_tier": "flex", "priority": 1, "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    {"store": False, "background": False, "truncation": "disabled", "metadata": {"a": "b"}},
    {"user": "u", "safety_identifier": "s"},
)
EMBEDDINGS: tuple[dict[str, Any], ...] = (
    {"dimensions": 3, "encoding_format": "float", "user": "u"},
    {"encoding_format": "base64", "normalize": False, "priority": 1},
    {"truncate_prompt_tokens": 1, "input": ["hello you", "x"]},
    {"input": [5, 6]},
)
MESSAGES: tuple[dict[str, Any], ...] = (
    {"system": "be kind", "temperature": 0.5, "top_p": 0.9, "top_k": 5},
    {"stop_sequences": ["friend"], "metadata": {"user_id": "u"}, "service_tier": "auto"},
    {"max_tokens": 2},
    {
        "messages": [{"role": "user", "content": "think"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    {"thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}},
    {"output_config": {"effort": "low"}},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    {
        "messages": [{"role": "user", "content": "both the weather"}],
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
)
