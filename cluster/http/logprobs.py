"""Log-probabilities as the APIs have them. Where an answer keeps them to its end, each is JSON as soon as it
is here: there may be very many, and the end is then no more work than any other moment."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.tokenizer import Detokenizer

_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
# Bytes of a number or an offset in a list.
_NUMBER_BYTES = 24


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct):
    """The log-probability of a token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class RankedLogprob(msgspec.Struct):
    """vLLM's form of the log-probability of a token of a prompt."""

    logprob: float
    # From 1; null: it is not among those that were asked for.
    rank: int | None
    decoded_token: str


class CompletionLogprobs(msgspec.Struct):
    """The log-probabilities of the tokens of a completion, in lists of the same length."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    # The likeliest tokens and the chosen one, by their texts.
    top_logprobs: list[dict[str, float] | None]


def content_logprobs(items: Iterable[pb.TokenLogprob]) -> list[ContentLogprob]:
    """Return the log-probabilities of output as chats have them."""
    return [
        ContentLogprob(
            token=item.text,
            logprob=item.logprob,
            bytes=list(item.token_bytes),
            top_logprobs=[TopLogprob(top.text, top.logprob, list(top.token_bytes)) for top in item.top],
        )
        for item in items
    ]


class KeptLogprobs(Protocol):
    """Log-probabilities that an answer keeps."""

    num_bytes: int

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""


class NoLogprobs:
    """Keeps nothing, for answers without log-probabilities."""

    num_bytes = 0

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Keep nothing."""


class ContentLogprobs:
    """The log-probabilities of a chat's answer, each a `ContentLogprob` as JSON."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.items: list[Any] = []

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""
        for item in content_logprobs(items):
            self.items.append(_kept(self, item))


class RankedLogprobs:
    """The log-probabilities of a prompt, each `RankedLogprob`s as JSON; the first token has none."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.items: list[Any] = []

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""
        for item in items:
            self.items.append(_kept(self, _ranked(item)) if item.HasField("logprob") else _NULL)


class TextOffsets:
    """Counts where in a growing text its tokens begin, in characters. Tokens that are parts of one character
    begin where that does; one that the text leaves out begins where the next one does."""

    def __init__(self, detokenizer: Detokenizer | None = None) -> None:
        """Without the detokenizer of the text, tokens are what their bytes say."""
        self._detokenizer = detokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def of(self, item: pb.TokenLogprob) -> int:
        """Return where the next token begins."""
        begin = self._num_chars
        if self._detokenizer is not None:
            text = self._detokenizer.push(item.token_id)
        else:
            text = self._decoder.decode(item.token_bytes or item.text.encode())
        self._num_chars += len(text)
        if item.text and len(text) > len(item.text) and text.endswith(item.text):
            return self._num_chars - len(item.text)  # before it, there is the rest of a broken character
        return begin


class LogprobLists:
    """The log-probabilities of a completion, in lists: the entries of `top_logprobs` as JSON."""

    def __init__(self, offsets: TextOffsets | None = None) -> None:
        self.num_bytes = 0
        self._text_offsets = offsets or TextOffsets()
        self._offsets: list[int] = []
        self._logprobs: list[float | None] = []
        self._tokens: list[str] = []
        # Entries as JSON.
        self._top: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""
        for item in items:
            is_there = item.HasField("logprob")
            self._logprobs.append(item.logprob if is_there else None)
            self._tokens.append(item.text)
            self._offsets.append(self._text_offsets.of(item))
            self._top.append(_kept(self, _likeliest(item)) if is_there else _NULL)
            self.num_bytes += 2 * _NUMBER_BYTES + len(item.text)

    def extend(self, others: LogprobLists, offset: int = 0) -> None:
        """Append those that are kept elsewhere, of a text that begins at this offset."""
        self._offsets += [offset + it for it in others._offsets]
        self._logprobs += others._logprobs
        self._tokens += others._tokens
        self._top += others._top

    def lists(self, num_chars: int | None) -> CompletionLogprobs:
        """Return the lists; tokens that a stop string cut off begin at the end of the text, which has this
        many characters (None: not known yet)."""
        offsets = self._offsets if num_chars is None else [min(it, num_chars) for it in self._offsets]
        return CompletionLogprobs(offsets, self._logprobs, self._tokens, self._top)


def _kept(kept: KeptLogprobs, value: object) -> msgspec.Raw:
    """Return a value as JSON, and count it."""
    text = _encode(value)
    kept.num_bytes += len(text)
    return msgspec.Raw(text)


def _ranked(item: pb.TokenLogprob) -> dict[str, RankedLogprob]:
    ranked = {
        str(top.token_id): RankedLogprob(top.logprob, rank, top.text) for rank, top in enumerate(item.top, 1)
    }
    ranked.setdefault(str(item.token_id), RankedLogprob(item.logprob, None, item.text))
    return ranked


def _likeliest(item: pb.TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens; the chosen token is included, also where it is none of them."""
    chosen = next((top.logprob for top in item.top if top.token_id == item.token_id), item.logprob)
    found = {item.text: chosen}
    for top in item.top:  # of those that look the same, the likelier comes first
        found.setdefault(top.text, top.logprob)
    return found
