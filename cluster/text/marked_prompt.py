"""Token ids of a text that has special tokens, some of which are plain text.

Nothing changes where none of them is: the text is encoded as a whole. Else each stretch between two tokens
that count is encoded as if the tokenizer had no special tokens, in the place where it stands.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from cluster.text.special_text import with_plain

# Tokens of the kind <|name|> are commands, whatever a tokenizer says of them.
_COMMAND = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
# A text that a template looks for: `'text' in content`, `content.split('text')`.
_SOUGHT = re.compile(
    r"""(['"])([^'"]+)\1\s+(?:not\s+)?in\b"""
    r"""|\.(?:r?split|r?partition|startswith|endswith)\(\s*(['"])([^'"]+)\3"""
)
_MARK = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def special_tokens(tokenizer: Any, template: str, named: Collection[str]) -> frozenset[str]:
    """Return the tokens whose text is a command in a prompt: those that the tokenizer calls special or that
    are `named` so, those of the form <|name|>, and the marks that the source of the chat template has.

    The others that a tokenizer adds to its vocabulary are text, such as runs of spaces.
    """
    return frozenset(
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content.strip()
        and (
            token.special
            or token.content in named
            or _COMMAND.fullmatch(token.content)
            or (_MARK.fullmatch(token.content) and token.content in template)
        )
    )


def marks_in_answers(template: str) -> frozenset[str]:
    """Return the texts that the source of a chat template looks for in the text of a turn, to take it apart:
    the marks of a notation for reasoning, say, which the text of an answer may have."""
    return frozenset(match[2] or match[4] for match in _SOUGHT.finditer(template))


class _Stretch(NamedTuple):
    """A part of the text between tokens that count, its tokens [start, end) in the encoding, and where the
    texts of special tokens begin in it that do not count."""

    begin: int
    end: int
    start_token: int
    end_token: int
    plain_at: Sequence[int]


class MarkedPromptEncoder:
    """Encodes text in which special tokens are plain text in some places. Safe to use from threads."""

    def __init__(self, tokenizer: Any, special: Collection[str]) -> None:
        """`special` are the texts of all special tokens."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._id_to_text = {token: it.content for token, it in added.items()}
        self._added_ids = np.asarray(sorted(added), dtype=np.int64)
        self._special_ids = {token for token, text in self._id_to_text.items() if text in special}
        # Whether other text than its own may be a special token, as soon as it is normalized.
        self.has_variants = tokenizer.normalizer is not None and any(
            added[token].normalized for token in self._special_ids
        )
        # The same model, with one token of its own: what follows that does not begin a text. Nobody can
        # guess it.
        self._lead = f"\ufdd0{secrets.token_hex(16)}\ufdd1"
        self._plain: Any = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._plain.pre_tokenizer = tokenizer.pre_tokenizer
        self._plain.add_tokens([AddedToken(self._lead, normalized=False, special=False)])
        self._lead_id = self._plain.token_to_id(self._lead)
        # The token that stands for a character that the model does not know is no command.
        unknown = self._plain.encode("\U0010ffff", add_special_tokens=False).ids
        self._command_ids = self._special_ids.difference(unknown)

    def encode(self, text: str, plain_at: Sequence[int], *, add_special_tokens: bool) -> list[int]:
        """Return the ids of the text, where special tokens that begin in `plain_at`, in order, are text."""
        marked = with_plain(text, plain_at)
        (encoding,) = self._tokenizer.encode_batch([marked], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        found: list[int] = []
        num_kept = 0
        for stretch in self._stretches(encoding, marked, plain_at):
            if stretch.plain_at:
                found += ids[num_kept : stretch.start_token]
                found += self._plain_ids(text, stretch)
                num_kept = stretch.end_token
        return found + ids[num_kept:]

    def _stretches(self, encoding: Any, text: str, plain_at: Sequence[int]) -> Iterator[_Stretch]:
        ids, offsets = encoding.ids, encoding.offsets
        # The tokens that the tokenizer puts before and behind the text.
        inside = np.flatnonzero(np.asarray(encoding.special_tokens_mask) == 0)
        if not len(inside):
            return
        begin, start_token = 0, int(inside[0])
        end_token = int(inside[-1]) + 1
        variants: list[int] = []

        def stretch(end: int, last_token: int) -> _Stretch:
            places = plain_at[bisect_left(plain_at, begin) : bisect_left(plain_at, end)]
            return _Stretch(begin, end, start_token, last_token, sorted({*places, *variants}))

        for index in np.flatnonzero(np.isin(ids, self._added_ids)).tolist():
            first, end = offsets[index]
            if not start_token <= index < end_token:
                continue
            if text[first:end].strip() == self._id_to_text[ids[index]].strip():
                yield stretch(first, index)
                begin, start_token, variants = end, index + 1, []
            elif self._is_variant(text[first:end], ids[index]):
                variants.append(first)
        yield stretch(len(text), end_token)

    def _is_variant(self, text: str, token: int) -> bool:
        """Whether the text is another spelling of a special token, not one that the model does not know."""
        if not self.has_variants or token not in self._special_ids:
            return False
        return bool(self._normalized(text) == self._normalized(self._id_to_text[token]))

    def _normalized(self, text: str) -> str:
        return str(self._tokenizer.normalizer.normalize_str(text)).strip()

    def _plain_ids(self, text: str, stretch: _Stretch) -> list[int]:
        ids = self._without_special(text, stretch.begin, stretch.end)
        if self._command_ids.isdisjoint(ids):
            return ids
        # The model itself has the token for this text: its first character stands alone.
        cuts = [stretch.begin, *(place + 1 for place in stretch.plain_at), stretch.end]
        parts = pairwise(cuts)
        found = [token for begin, end in parts for token in self._without_special(text, begin, end)]
        return [token for token in found if token not in self._command_ids]

    def _without_special(self, text: str, begin: int, end: int) -> list[int]:
        lead = self._lead if begin else ""
        (encoding,) = self._plain.encode_batch([lead + text[begin:end]], add_special_tokens=False)
        return [token for token in encoding.ids if token != self._lead_id]
