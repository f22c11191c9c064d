"""Every field of OpenAI's, Anthropic's and vLLM's requests, and what it does here."""

from __future__ import annotations

from collections.abc import Mapping

# Fields that exist elsewhere, and what to do without them.
REFUSED: Mapping[str, str] = {
    "functions": "send tools",
    "function_call": "send tool_choice",
}
