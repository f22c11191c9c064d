"""Read recorded conversations from a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.api.generate_options import Turn
from cluster.bench.json_items import json_items
from cluster.errors import BenchError

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}


class _Message(msgspec.Struct):
    """A message, as ShareGPT has it (from, value) or as OpenAI has it (role, content)."""

    sender: str = msgspec.field(name="from", default="")
    value: str = ""
    role: str = ""
    content: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Message] = []
    messages: list[_Message] = []


class QuestionAnswer(NamedTuple):
    """What a user says, with the system prompt before the first, and the answer."""

    asked: list[Turn]
    answer: str


def read_conversations(path: Path) -> Iterator[list[QuestionAnswer]]:
    """Yield the exchanges of each conversation of a file of JSON lines, or of one JSON array; those in which
    nobody answers a user are passed over."""
    decoder = msgspec.json.Decoder(_Conversation)
    for number, item in json_items(path):
        try:
            found = decoder.decode(item)
            exchanges = _exchanges(found.conversations or found.messages)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BenchError(f"{path}, line {number}: {error}") from error
        if exchanges:
            yield exchanges


def _exchanges(messages: Sequence[_Message]) -> list[QuestionAnswer]:
    """Return the exchanges up to where user and assistant no longer take turns."""
    turns = []
    for message in messages:
        name = message.sender or message.role
        if name not in _ROLES:
            raise ValueError(f"a message is from {name[:80]!r}; expected one of {', '.join(_ROLES)}")
        turns.append(Turn(_ROLES[name], message.value or message.content))
    first = next((index for index, turn in enumerate(turns) if turn.role == "user"), len(turns))
    system = [turn for turn in turns[:first] if turn.role == "system"]
    exchanges: list[QuestionAnswer] = []
    for asked, answer in zip(turns[first::2], turns[first + 1 :: 2], strict=False):
        if (asked.role, answer.role) != ("user", "assistant") or not answer.content:
            break
        exchanges.append(QuestionAnswer([*(() if exchanges else system), asked], answer.content))
    return exchanges
