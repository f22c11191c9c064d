"""From the text of an answer to what it consists of: content, reasoning, tool calls."""
