"""The names over HTTP of the fields of a `GenerateRequest`, for errors that name a field."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster.http.errors import Rename

# The names over HTTP of the fields of `GenerateRequest`, by the beginnings of their paths.
NAMES: Mapping[str, str] = {
    "include_stop": "include_stop_str_in_output",
    "keep_special_tokens": "skip_special_tokens",
    "text": "prompt",
    "token_ids": "prompt",
    "service_class": "service_tier",
    "session_id": "prompt_cache_key",
    "separate_reasoning": "include_reasoning",
}


def renamer(names: Mapping[str, str]) -> Rename:
    """Return the function that gives a field of a gRPC message its name over HTTP; the longest beginning that
    is known decides."""

    def rename(field: str) -> str:
        ends = [index for index, char in enumerate(field) if char in ".["]
        for end in (len(field), *reversed(ends)):
            if field[:end] in names:
                return (names[field[:end]] + field[end:]).removeprefix(".")
        return field

    return rename


# A function of a chat's tools or tool calls, whose fields stand one level deeper over HTTP.
_FUNCTION = re.compile(r"^(chat\.(?:tools|messages\[\d+\]\.tool_calls)\[\d+\])\.")


def chat_renamer(names: Mapping[str, str]) -> Rename:
    """Return the same for chats as OpenAI's API has them."""
    rename = renamer(names)

    def rename_in_chat(field: str) -> str:
        return rename(_FUNCTION.sub(r"\1.function.", field)).replace("parameters_json", "parameters")

    return rename_in_chat
