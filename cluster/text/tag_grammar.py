"""Grammars of free text with tags, each of which is JSON between a beginning and an end.

A tag begins where its trigger comes: as text, or as the special tokens that the tokenizer has for it, which
are no text in a grammar of llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.text.json_schemas import prepared
from cluster.text.output_parsers.grammar_lines import SpecialToken
from kvtransfer.codec import Part

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The notation of special tokens.
_MARKER = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")
_NUM_SHOWN = 100


class Tag(Part, frozen=True):
    """A possible sequel of a trigger in free text: `begin`, JSON by `json_schema`, `end`."""

    begin: str
    json_schema: str
    end: str


class TagError(ValueError):
    """A tag cannot have the demanded form; the text has the reason."""


def tag_markers(tags: Sequence[Tag]) -> set[str]:
    """Return the texts that look like special tokens in the beginnings and ends of tags."""
    return {marker for tag in tags for text in (tag.begin, tag.end) for marker in _MARKER.findall(text)}


def tags_grammar(
    tags: Sequence[Tag],
    triggers: Sequence[str],
    special_token: SpecialToken,
    json_style: JsonCompileOptions,
    *,
    is_bounded: bool = True,
) -> str:
    """Return the grammar; each tag follows the longest trigger that it begins with. Raise `TagError` where it
    begins with none, a trigger begins no tag, or a schema is no object."""
    rules = " | ".join(f"tag_{index}" for index in range(len(tags)))
    lines = ["%llguidance {}", f"start: ({rules})* tag_end", "tag_end: TAG_TEXT", "TAG_TEXT: /(.|\\n)*/"]
    for index, tag in enumerate(tags):
        fitting = [trigger for trigger in triggers if trigger and tag.begin.startswith(trigger)]
        if not fitting:
            raise TagError(f"the tag {tag.begin[:_NUM_SHOWN]!r} begins with none of the triggers")
        trigger = max(fitting, key=len)
        content = f"%json {json.dumps({**_schema(tag, is_bounded), 'x-guidance': json_style})}"
        behind = f"{content} {_spelled(tag.end, special_token)}"
        starts = [f"tag_{index}_trigger {_spelled(tag.begin[len(trigger) :], special_token)}"]
        lines.append(f"tag_{index}_trigger[lazy]: TAG_TEXT {json.dumps(trigger)}")
        found = next(_specials(tag.begin, special_token), None)
        if found is not None and found.start < len(trigger):
            head = "TAG_TEXT"
            if found.start:
                head = f"TAG_{index}_HEAD"
                lines.append(f"{head}: TAG_TEXT {json.dumps(tag.begin[: found.start])}")
            starts.append(f"{head} <[{found.token}]> {_spelled(tag.begin[found.end :], special_token)}")
        lines.append(f"tag_{index}: ({' | '.join(starts)}) {behind}")
    for trigger in triggers:
        if not trigger or not any(tag.begin.startswith(trigger) for tag in tags):
            raise TagError(f"the trigger {trigger[:_NUM_SHOWN]!r} begins no tag; remove it")
    return "\n".join((*lines, ""))


class _Special(NamedTuple):
    """A special token in a text."""

    start: int
    end: int
    token: int


def _specials(text: str, special_token: SpecialToken) -> Iterator[_Special]:
    for match in _MARKER.finditer(text):
        if (token := special_token(match[0])) is not None:
            yield _Special(match.start(), match.end(), token)


def _spelled(text: str, special_token: SpecialToken) -> str:
    """Return the expression that matches the text, with its special tokens."""
    parts, position = [], 0
    for special in _specials(text, special_token):
        parts += [json.dumps(text[position : special.start]), f"<[{special.token}]>"]
        position = special.end
    return " ".join(part for part in (*parts, json.dumps(text[position:])) if part != '""')


def _schema(tag: Tag, is_bounded: bool) -> dict[str, Any]:
    schema = json.loads(tag.json_schema or '{"type": "object"}')
    if not isinstance(schema, dict):
        raise TagError(f"the schema of the tag {tag.begin[:_NUM_SHOWN]!r} is not an object")
    found: dict[str, Any] = prepared(schema, is_bounded=is_bounded)
    return found
