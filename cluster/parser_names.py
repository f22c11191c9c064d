"""The names of the parsers of answers, as configurations have them."""

from __future__ import annotations

from typing import Literal

ToolParserName = Literal[
    "auto",
    "none",
    "hermes",
    "llama3",
    "mistral",
    "qwen3_coder",
    "seed_oss",
    "glm45",
    "glm4",
    "granite",
    "phi4",
    "apertus",
    "olmo3",
    "gemma3",
    "gemma4",
    "cohere2",
    "harmony",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "think",
    "mistral",
    "seed_oss",
    "granite",
    "granite32",
    "apertus",
    "gemma4",
    "cohere2",
    "harmony",
]
