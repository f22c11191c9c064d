"""From the text of an answer to its parts: content, reasoning, tool calls."""
