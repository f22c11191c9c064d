"""Text and token ids: the model's tokenizer, incremental detokenizing and stop strings, per sample.

What is emitted after k tokens depends on those k tokens alone, not on how they were grouped into deltas, so
a resumed stream continues exactly where the text ended.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from workers.errors import CheckpointError

REPLACEMENT = "\ufffd"
# A longer text is worth a thread, so that the event loop goes on.
SHORT_CHARS = 4096
# A character has at most 4 bytes; more waiting tokens than this are no character that is still to come.
_MAX_WAITING_TOKENS = 8
_MAX_WINDOW_TOKENS = 32


class Detokenizer(Protocol):
    """Token ids in, text out, one sample. Never emits half a character."""

    def push(self, token: int) -> str:
        """The text that is certain after this token and was not returned before."""

    def flush(self) -> str:
        """The rest, at the end; incomplete characters as U+FFFD."""


class ModelText:
    """The tokenizer of a model folder. Token ids are uint32 little-endian bytes. Safe to use from threads."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_padding()  # prompts are never padded; `encode_batch` would where the file says so
        self._tokenizer = tokenizer
        self._skipped = {
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._token_bytes = _byte_table(tokenizer) if decoder.get("type") == "ByteLevel" else None
        self._token_to_byte = _byte_tokens(tokenizer)

    @classmethod
    def load(cls, model_dir: Path) -> ModelText:
        """Read `tokenizer.json`; `CheckpointError` when there is none."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the gateway needs the model's fast tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except BaseException as error:
            # The library raises no class of its own, and panics of its Rust code are no `Exception`.
            if isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime":
                raise CheckpointError(f"{path}: unreadable: {error}") from error
            raise
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """With added tokens; the model's own may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """The token ids of `text`; with the tokens that the model expects around it, unless told not to."""
        if len(text) <= SHORT_CHARS:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # unlike `encode`, lets other threads run meanwhile
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        return np.asarray(ids, dtype="<u4").tobytes()

    def decode(self, tokens: bytes, *, keep_special_tokens: bool = False) -> str:
        """The text of all `tokens` at once."""
        ids = np.frombuffer(tokens, dtype="<u4").tolist()
        # Unlike `decode`, lets other threads run meanwhile.
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=not keep_special_tokens)
        return str(text)

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one sample."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, self._skipped)
        return WindowDetokenizer(self._tokenizer, self._skipped, self._token_to_byte)


class ByteDetokenizer:
    """For byte-level vocabularies, where a token is a run of bytes: exactly what decoding at once gives."""

    def __init__(self, token_bytes: Sequence[bytes], skipped: set[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skipped or token >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes a short window twice, without and with the new tokens.

    A character that is spelled in byte tokens waits for its last byte; where there are none, text that ends
    in U+FFFD waits for a few tokens. The text is what decoding at once gives, except that characters stay
    emitted when a later byte makes their run invalid.
    """

    def __init__(self, tokenizer: Any, skipped: set[int], token_to_byte: Mapping[int, bytes]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._token_to_byte = token_to_byte
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        # The first tokens of the window, whose text was returned.
        self._num_emitted = 0

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._window.append(token)
        if self._is_inside_character(token):
            return ""
        text = self._new_text()
        waiting = len(self._window) - self._num_emitted
        might_grow = not text or (not self._token_to_byte and text.endswith(REPLACEMENT))
        if might_grow and waiting < _MAX_WAITING_TOKENS:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._window.clear()
        self._num_emitted = 0
        return text

    def _is_inside_character(self, token: int) -> bool:
        byte = self._token_to_byte.get(token)
        if byte is None:
            self._bytes.reset()
            return False
        self._bytes.decode(byte)
        return bool(self._bytes.getstate()[0])

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._num_emitted])
        after = self._decode(self._window)
        if after.startswith(before):
            return after[len(before) :]
        return self._decode(self._window[self._num_emitted :])

    def _advance(self) -> None:
        """Keep the tokens just emitted as the context of the next ones, if they have text to stand for."""
        latest = self._window[self._num_emitted :]
        if self._decode(latest) or len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = latest
        self._num_emitted = len(self._window)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


class StopMatch(NamedTuple):
    """Text that may be emitted, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStrings:
    """Cuts a growing text before the stop string that completes first (of those, the one that began first).

    Holds back the longest end of the text with which a stop string could begin.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopMatch:
        if not self._stops:
            return StopMatch(text, stopped=False)
        buffer = self._held + text
        starts = [(start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if starts:
            _, start = min(starts)
            self._held = ""
            return StopMatch(buffer[:start], stopped=True)
        num_held = max(_num_possible(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - num_held :]
        return StopMatch(buffer[: len(buffer) - num_held], stopped=False)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class TextStep(NamedTuple):
    """What `SampleText.push` made of a delta: how many of its tokens count, their text, the finish."""

    num_tokens: int
    text: str
    finish: str


class SampleText:
    """The text of one sample as its tokens arrive.

    The text ends before a stop string (`finish` becomes "stop", later tokens do not count) and does not
    contain the end token of a sample that finished with "stop".
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    def push(self, tokens: bytes, finish: str) -> TextStep:
        """`finish` is that of the delta: "" while the sample goes on."""
        ids = np.frombuffer(tokens, dtype="<u4").tolist()
        num_shown = len(ids) - (1 if finish == "stop" and ids else 0)
        text: list[str] = []
        for count, token in enumerate(ids[:num_shown], start=1):
            piece, stopped = self._stops.push(self._detokenizer.push(token))
            text.append(piece)
            if stopped:
                return TextStep(count, "".join(text), "stop")
        if finish:
            piece, stopped = self._stops.push(self._detokenizer.flush())
            text.append(piece)
            if stopped:
                return TextStep(len(ids), "".join(text), "stop")
            text.append(self._stops.flush())
        return TextStep(len(ids), "".join(text), finish)


def _num_possible(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _byte_table(tokenizer: Any) -> list[bytes]:
    """The bytes of each token id; b"" where there is none."""
    char_to_byte = {char: byte for byte, char in _byte_chars().items()}
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if all(char in char_to_byte for char in token):
            table[index] = bytes(char_to_byte[char] for char in token)
        else:
            table[index] = token.encode()
    return table


def _byte_tokens(tokenizer: Any) -> dict[int, bytes]:
    """The tokens `<0x00>` to `<0xFF>` of vocabularies that spell unknown characters in bytes."""
    names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    ids = {tokenizer.token_to_id(name): byte for name, byte in names.items()}
    return {token: byte for token, byte in ids.items() if token is not None}


def _byte_chars() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (as GPT-2 chose them)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
