"""Log-probabilities as the APIs have them. Where an answer keeps them to its end, each is JSON as soon as it
is here: there may be very many, and the end is then no more work than any other moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from cluster.proto.tandem.v1 import inference_pb2 as pb

_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
# A number or an offset in a list.
_NUMBER_BYTES = 24


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct):
    """Of a token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class RankedLogprob(msgspec.Struct):
    """vLLM's: of a token of a prompt."""

    logprob: float
    # From 1; null: it is not among those that were asked for.
    rank: int | None
    decoded_token: str


class CompletionLogprobs(msgspec.Struct):
    """Of the tokens of a completion, in lists of the same length."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    # By their texts: the likeliest tokens, and the one that was chosen.
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
    """For answers without any."""

    num_bytes = 0

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Keep nothing."""


class ContentLogprobs:
    """Those of a chat's answer, each a `ContentLogprob` as JSON."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.items: list[Any] = []

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""
        for item in content_logprobs(items):
            self.items.append(_kept(self, item))


class RankedLogprobs:
    """Those of a prompt, each `RankedLogprob`s as JSON; the first token has none."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.items: list[Any] = []

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""
        for item in items:
            self.items.append(_kept(self, _ranked(item)) if item.HasField("logprob") else _NULL)


class LogprobLists:
    """Those of a completion, in lists: what stands in `top_logprobs` as JSON."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._logprobs: list[float | None] = []
        self._tokens: list[str] = []
        # Each as JSON.
        self._top: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, items: Iterable[pb.TokenLogprob]) -> None:
        """Append those of further tokens."""
        for item in items:
            is_there = item.HasField("logprob")
            self._logprobs.append(item.logprob if is_there else None)
            self._tokens.append(item.text)
            self._top.append(_kept(self, _likeliest(item)) if is_there else _NULL)
            self.num_bytes += 2 * _NUMBER_BYTES + len(item.text)

    def extend(self, others: LogprobLists) -> None:
        """Append those that are kept elsewhere."""
        self._logprobs += others._logprobs
        self._tokens += others._tokens
        self._top += others._top

    def lists(self, offset: int) -> CompletionLogprobs:
        """Return the lists; the text of the first token begins at `offset`."""
        offsets = []
        for token in self._tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogprobs(offsets, self._logprobs, self._tokens, self._top)

    @property
    def num_chars(self) -> int:
        """The length of all tokens together."""
        return sum(map(len, self._tokens))


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
    """The likeliest tokens; the one that was chosen is there, also where it is none of them."""
    found = {top.text: top.logprob for top in item.top}
    found.setdefault(item.text, item.logprob)
    return found
