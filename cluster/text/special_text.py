"""Special tokens that users spell out, found in their text and kept apart from those of a chat template.

The text of a special token is a command to the tokenizer: it ends a turn, or opens one. In a rendered prompt
nobody can tell who wrote it. So the first character of each one in users' text is replaced, before the
template sees it, by a stand-in: one character that occurs nowhere else in the chat. Lengths and positions
stay what they are, and wherever the template puts the text, the stand-in says that the user wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from kvtransfer.codec import Part

# Letters without case, so that no filter of a template changes them: of the scripts Yi and Egyptian
# hieroglyphs, and Hangul.
_STAND_INS = (range(0xA000, 0xA48D), range(0x13000, 0x13430), range(0xAC00, 0xD7A4))
# A code point that is no character.
_NO_BEGINNING = "\ufdd0"


class StandInError(ValueError):
    """The text has every character that could be a stand-in."""


class SpecialText(Part, frozen=True):
    """The special tokens that are text in users' input, as regular expressions. `whole` matches each of them,
    and `cut` the beginning of one, at the end of a text: the template might write the rest. In the
    assistant's turns `allowed` tokens keep their meaning, since an answer has them."""

    whole: str
    cut: str
    allowed: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokens: Collection[str], allowed: Iterable[str] = ()) -> SpecialText | None:
        """Return the expressions for these tokens; None where there are none."""
        tree: _Tree = {}
        for token in tokens:
            node = tree
            for char in token:
                node = node.setdefault(char, {})
            node[""] = {}
        if not tree:
            return None
        return cls(_whole(tree), _cut(tree), tuple(sorted(set(allowed) & set(tokens))))


class StandIns:
    """The stand-ins of one chat."""

    def __init__(self, special: SpecialText, texts: Iterable[str], source: str = "") -> None:
        """Choose them for the texts of a chat, and the source of the template that puts them together. Raise
        `StandInError` where all characters are taken."""
        self._special = special
        self._char_to_stand_in: dict[str, str] = {}
        listed = list(texts)
        firsts = {text[place] for text in listed for place in special_places(special, text)}
        taken = set(source).union(*listed) if firsts else set()
        free = (char for code in _STAND_INS for char in map(chr, code) if char not in taken)
        for first in sorted(firsts):
            stand_in = next(free, "")
            if not stand_in:
                raise StandInError("it has too many different characters")
            self._char_to_stand_in[first] = stand_in
        self._stand_in_to_char = {ord(it): char for char, it in self._char_to_stand_in.items()}

    def __bool__(self) -> bool:
        return bool(self._char_to_stand_in)

    def __contains__(self, char: str) -> bool:
        return ord(char) in self._stand_in_to_char

    def put(self, value: Any, *, is_answer: bool = False) -> Any:
        """Return a value of JSON with stand-ins in all of its texts; `is_answer`: the model wrote it."""
        match value:
            case str():
                return self._put(value, self._special.allowed if is_answer else ())
            case dict():
                return {self._put(key, ()): self.put(it) for key, it in value.items()}
            case list() | tuple():
                return [self.put(it) for it in value]
            case _:
                return value

    def taken_out(self, text: str) -> tuple[str, tuple[int, ...]]:
        """Return the text as it was, and where special tokens begin in it that a user wrote."""
        if not self._stand_in_to_char:
            return text, ()
        stand_ins = re.compile(f"[{''.join(map(chr, self._stand_in_to_char))}]")
        places = [match.start() for match in stand_ins.finditer(text)]
        text = text.translate(self._stand_in_to_char)
        whole = _compiled(self._special.whole)
        return text, tuple(place for place in places if whole.match(text, place))

    def _put(self, text: str, allowed: Collection[str]) -> str:
        places = special_places(self._special, text, allowed)
        if not places:
            return text
        chars = list(text)
        for place in places:
            chars[place] = self._char_to_stand_in[chars[place]]
        return "".join(chars)


def special_places(special: SpecialText, text: str, allowed: Collection[str] = ()) -> list[int]:
    """Return where special tokens begin in a text, also one within another, and where the last one may."""
    found = [
        match.start()
        for match in _compiled(f"(?=({special.whole}))").finditer(text)
        if match[1] not in allowed
    ]
    return found + [match.start() for match in _compiled(f"(?={special.cut})").finditer(text)]


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts of a value of JSON, with the keys of objects."""
    match value:
        case str():
            yield value
        case dict():
            for key, it in value.items():
                yield key
                yield from texts_of(it)
        case list() | tuple():
            for it in value:
                yield from texts_of(it)


# The possible continuations by the next character; "" where a token may end.
_Tree = dict[str, "_Tree"]


def _whole(tree: Mapping[str, _Tree]) -> str:
    """Return an expression for the tokens of a tree, which tries no two ways with the same beginning."""
    ways = [re.escape(char) + _whole(inner) for char, inner in sorted(tree.items()) if char]
    if not ways:
        return ""
    return f"(?:{'|'.join(ways)}){'?' if '' in tree else ''}"


def _cut(tree: Mapping[str, _Tree]) -> str:
    """Return an expression for proper beginnings of tokens at the end of a text."""
    ways = [
        re.escape(char) + _beginning(inner)
        for char, inner in sorted(tree.items())
        if char and inner != {"": {}}
    ]
    return rf"(?:{'|'.join(ways)})\Z" if ways else "(?!)"


def _beginning(tree: Mapping[str, _Tree]) -> str:
    ways = [
        re.escape(char) + _beginning(inner)
        for char, inner in sorted(tree.items())
        if char and inner != {"": {}}
    ]
    return f"(?:{'|'.join(ways)})?" if ways else ""


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def with_plain(text: str, places: Collection[int]) -> str:
    """Return the text with a character that begins no special token in these places."""
    if not places:
        return text
    chars = list(text)
    for place in places:
        chars[place] = _NO_BEGINNING
    return "".join(chars)
