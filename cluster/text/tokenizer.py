"""Text and token ids: the model's tokenizer, and incremental detokenizing per sample.

What is emitted after k tokens depends on those k tokens alone, not on how they were grouped into deltas, so
a resumed stream continues exactly where the text ended.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.text.marked_prompt import MarkedPromptEncoder, special_tokens
from kvtransfer.common.clock import SystemClock, let_others_run
from kvtransfer.common.panics import panics_as_errors
from workers.errors import CheckpointError

REPLACEMENT = "\ufffd"
# A longer text is worth a thread, so that the event loop goes on.
SHORT_CHARS = 4096
# Where a short text has taken this time, the model's pattern is such that any may: each gets a thread then.
_SLOW_S = 0.1
# A character has at most 4 bytes; more waiting tokens than this are no character that is still to come.
_MAX_WAITING_TOKENS = 8
_MAX_WINDOW_TOKENS = 32
# Token ids copied before another thread may run.
_NUM_COPIED = 4096


class Detokenizer(Protocol):
    """Token ids in, text out, one sample. Never emits half a character."""

    def push(self, token: int) -> str:
        """Return the text that is certain after this token and was not returned before."""

    def flush(self) -> str:
        """Return the rest, at the end; incomplete characters as U+FFFD."""


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
        # An ordinary token, before which others are seen as within a text.
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        self._num_anchor_chars = len(tokenizer.decode(self._anchor, skip_special_tokens=False))
        self._clock = SystemClock()
        # The length up to which a text may be encoded on an event loop.
        self.short_chars = SHORT_CHARS

    @classmethod
    def load(cls, model_dir: Path) -> ModelText:
        """Read `tokenizer.json`; `CheckpointError` when there is none."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: the gateway needs it, or the tokenizer.model of SentencePiece"
            )
        try:
            with panics_as_errors:
                return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises no class of its own
            raise CheckpointError(f"{path}: unreadable: {error}") from error

    @property
    def vocab_size(self) -> int:
        """The size with added tokens; the model's own may be larger."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def special_tokens(self, template: str, named: Collection[str]) -> frozenset[str]:
        """Return the texts that are commands in a prompt of this chat template; some are `named` so
        elsewhere."""
        return special_tokens(self._tokenizer, template, named)

    def token_ids(self, tokens: Collection[str]) -> dict[str, int]:
        """Return the ids of those of the tokens that the vocabulary has, by their names."""
        found = ((token, self._tokenizer.token_to_id(token)) for token in tokens)
        return {token: token_id for token, token_id in found if token_id is not None}

    def marked_prompt_encoder(self, special: Collection[str]) -> MarkedPromptEncoder:
        """Return an encoder of prompts in which some of these special tokens are plain text."""
        return MarkedPromptEncoder(self._tokenizer, special)

    def token_text(self, token: int) -> str:
        """Return the name of a token in the vocabulary; "" where it has none."""
        return self._tokenizer.id_to_token(token) or ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the token ids of `text`; with the tokens that the model expects around it, unless told not
        to. `InvalidRequestError` where the library fails on it, as its regex engine may on long runs."""
        with self.encoding(len(text)):
            return self._encode(text, add_special_tokens=add_special_tokens)

    @contextlib.contextmanager
    def encoding(self, num_chars: int) -> Iterator[None]:
        """Encode this number of characters within, by whatever calls of the library: their exceptions become
        `InvalidRequestError`."""
        began_at = self._clock.now()
        try:
            with panics_as_errors:
                yield
        except Exception as error:  # the library raises no class of its own
            problem = "the model's tokenizer fails on this text; send another text, or token ids"
            raise InvalidRequestError(FieldViolation("prompt", problem)) from error
        finally:
            if num_chars <= SHORT_CHARS and self._clock.now() - began_at > _SLOW_S:
                self.short_chars = 0

    def _encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        if len(text) <= self.short_chars:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # unlike `encode`, lets other threads run at the same time
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        tokens = np.empty(len(ids), dtype="<u4")
        for start in range(0, len(ids), _NUM_COPIED):
            tokens[start : start + _NUM_COPIED] = ids[start : start + _NUM_COPIED]
            if len(ids) > _NUM_COPIED:
                let_others_run()
        return tokens.tobytes()

    def decode(self, tokens: bytes, *, keep_special_tokens: bool = False) -> str:
        """Return the text of all `tokens` at once; `InvalidRequestError` where the library fails on them."""
        ids = np.frombuffer(tokens, dtype="<u4").tolist()
        try:
            with panics_as_errors:
                # Unlike `decode`, this lets other threads run at the same time.
                (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=not keep_special_tokens)
        except Exception as error:  # the library raises no class of its own
            problem = "the model's tokenizer cannot decode these"
            raise InvalidRequestError(FieldViolation("token_ids", problem)) from error
        return str(text)

    def detokenizer(self, kept: Collection[str] = (), *, keeps_all: bool = False) -> Detokenizer:
        """Return a new detokenizer, for one sample; it leaves out special tokens that are not `kept`."""
        skipped = set() if keeps_all else self._skipped
        if kept and skipped:
            with panics_as_errors:
                skipped = skipped - {self._tokenizer.token_to_id(token) for token in kept}
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, skipped)
        return WindowDetokenizer(self._tokenizer, skipped, self._token_to_byte)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token by itself."""
        if self._token_bytes is not None:
            return self._token_bytes[token] if token < len(self._token_bytes) else b""
        if token in self._token_to_byte:
            return self._token_to_byte[token]
        # Behind another one: at the beginning of a text, some vocabularies leave out a space.
        with panics_as_errors:
            text = str(self._tokenizer.decode([*self._anchor, token], skip_special_tokens=False))
        return text[self._num_anchor_chars :].encode()


class ByteDetokenizer:
    """Detokenizes byte-level vocabularies, where a token is a run of bytes: exactly the result of decoding at
    once."""

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
    """Detokenizes all other vocabularies: decodes a short window twice, without and with the new tokens.

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
        with panics_as_errors:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def _byte_table(tokenizer: Any) -> list[bytes]:
    """Return the bytes of each token id; b"" where there is none."""
    char_to_byte = {char: byte for byte, char in _byte_chars().items()}
    table = [b""] * (max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if all(char in char_to_byte for char in token):
            table[index] = bytes(char_to_byte[char] for char in token)
        else:
            table[index] = token.encode()
    return table


def _byte_tokens(tokenizer: Any) -> dict[int, bytes]:
    """Return the tokens `<0x00>` to `<0xFF>` of vocabularies that spell unknown characters in bytes."""
    names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    ids = {tokenizer.token_to_id(name): byte for name, byte in names.items()}
    return {token: byte for token, byte in ids.items() if token is not None}


def _byte_chars() -> dict[int, str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (as GPT-2 chose
    them)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
