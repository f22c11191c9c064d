"""How much structure the body of a request may have. Decoding makes an object of every value, in one call
that nothing interrupts, and stacks end somewhere: this is counted before."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from cluster.http.errors import bad_field
from cluster.text.chat_checks import MAX_JSON_BYTES
from cluster.text.validation import MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_STOPS
from workers.messages.sampling import MAX_GRAMMAR_BYTES

# Levels of lists and objects within each other: far fewer than would exhaust a stack.
MAX_DEPTH = 256
# Lists and objects take the most time to make; a chat of the most messages and tools has fewer.
MAX_CONTAINERS = 1 << 16
# Enough for a prompt as token ids, or for the inputs of embeddings together. This number takes some 10 ms to
# make, during which nothing else runs.
MAX_VALUES = 5 << 17
# Limits of fields whose entries hold no text, such as numbers: how many there may be, and what they are.
_MAX_ENTRIES: Mapping[str, tuple[int, str]] = {
    "logit_bias": (MAX_LOGIT_BIASES, "entries"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "tokens"),
}
# A character is at most 12 bytes as JSON; spaces between values are not counted.
_JSON_CHAR_BYTES = 12
_STOP_BYTES = MAX_STOPS * (MAX_STOP_CHARS + 1) * _JSON_CHAR_BYTES
_CONSTRAINT_BYTES = 2 * MAX_GRAMMAR_BYTES
_MAX_BYTES: Mapping[str, int] = {
    "stop": _STOP_BYTES,
    "stop_sequences": _STOP_BYTES,
    **dict.fromkeys(
        (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        ),
        _CONSTRAINT_BYTES,
    ),
    # Definitions of tools without their names and types, and how they are to be used.
    "tools": 2 * MAX_JSON_BYTES,
    "chat_template_kwargs": 2 * MAX_JSON_BYTES,
}
# Bytes counted at once.
_PART_BYTES = 1 << 18

# The meaning of each character: a quote, a comma, or the opening or closing of a level.
_IS_QUOTE, _IS_COMMA, _IS_OPENING = (np.zeros(256, np.uint8) for _ in range(3))
_IS_QUOTE[ord('"')] = _IS_COMMA[ord(",")] = 1
_STEPS = np.zeros(256, np.int8)
for _opening, _closing in ("[]", "{}"):
    _IS_OPENING[ord(_opening)] = 1
    _STEPS[ord(_opening)], _STEPS[ord(_closing)] = 1, -1


def check_shape(body: bytes) -> None:
    """Raise `InvalidRequestError` for a body with too many values, or values that nest too deeply. What it
    counts in a body that is no JSON is of no matter."""
    num_opening = body.count(b"[") + body.count(b"{")
    if num_opening <= MAX_DEPTH and body.count(b",") + num_opening <= MAX_VALUES:
        return
    text = np.frombuffer(_without_escapes(body), dtype=np.uint8)
    num_quotes = depth = num_containers = num_commas = 0
    for start in range(0, len(text), _PART_BYTES):
        part = text[start : start + _PART_BYTES]
        quotes = np.cumsum(_IS_QUOTE[part], dtype=np.uint32)
        structure = part[(quotes + num_quotes) % 2 == 0]
        num_quotes += int(quotes[-1])
        depths = np.cumsum(_STEPS[structure], dtype=np.int32)
        if depth + int(depths.max(initial=0)) > MAX_DEPTH:
            raise bad_field("body", f"is nested more than {MAX_DEPTH} levels deep; flatten it")
        depth += int(depths[-1]) if len(depths) else 0
        num_containers += int(_IS_OPENING[structure].sum(dtype=np.int64))
        if num_containers > MAX_CONTAINERS:
            raise bad_field(
                "body", f"has more than {MAX_CONTAINERS} lists and objects; send several requests"
            )
        # Each value but the last of a list or an object has a comma behind it.
        num_commas += int(_IS_COMMA[structure].sum(dtype=np.int64))
        if num_commas + num_containers > MAX_VALUES:
            raise bad_field("body", f"has more than {MAX_VALUES} values; send several requests")


def check_counts(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise `InvalidRequestError` for a field that has more entries than any request may have: they are
    counted before any is made. Of a list that is not bounded by a number its bytes are."""
    for name, (most, what) in _MAX_ENTRIES.items():
        if name in fields and bytes(fields[name]).count(b",") >= most:
            raise bad_field(name, f"has more than {most} {what}")
    for name, most in _MAX_BYTES.items():
        if name in fields and len(bytes(fields[name])) > most:
            raise bad_field(name, f"has more than {most} bytes; shorten it")


def _without_escapes(body: bytes) -> bytes:
    """Return a body of the same length in which each quote begins or ends a string."""
    return body.replace(rb"\\", b"..").replace(rb"\"", b"..") if b"\\" in body else body
