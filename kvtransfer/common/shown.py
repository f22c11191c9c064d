"""How text of another process appears in logs and in errors: on one line, without control characters, and no
longer than is useful."""

from __future__ import annotations

MAX_NAME_CHARS = 100
MAX_REASON_CHARS = 300


def shown(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return the text with escapes for what is not printable, line breaks and marks of direction included,
    cut to `max_chars` with "..." as its end."""
    kept = text[: max_chars + 1]
    escaped = "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in kept)
    return escaped if len(escaped) <= max_chars else escaped[: max(max_chars - 3, 0)] + "..."
