"""Read the file of a SentencePiece model, `tokenizer.model`: a message of protobuf, of which only the fields
that change how a text is cut into tokens are read.

The file comes with the weights and may be hostile. Sizes are bounded before anything is made of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvtransfer.common.os_errors import os_reason
from workers.errors import CheckpointError
from workers.model.piece_tokenizer import MAX_TOKENS, NORMAL, UNKNOWN, PieceVocabulary

UNIGRAM, BPE = 1, 2
_KIND_NAMES = {UNIGRAM: "unigram", BPE: "bpe", 3: "word", 4: "char"}
# Those of models with 256,000 pieces have 4 MB.
_MAX_FILE_BYTES = 16 << 20
_MAX_PIECE_BYTES = 512
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_REMEDY = (
    "save the tokenizer as tokenizer.json beside it (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
)

_Value: TypeAlias = int | bytes


class SentencePieceModel(NamedTuple):
    """The pieces, and how a text is brought into their form. Ids are -1 where there is no such token."""

    vocabulary: PieceVocabulary
    kind: int
    byte_fallback: bool
    charsmap: bytes
    adds_dummy_prefix: bool
    collapses_spaces: bool
    bos_id: int
    eos_id: int
    pad_id: int

    @property
    def unknown_id(self) -> int:
        """The id of what is in no piece."""
        return list(self.vocabulary.kinds).index(UNKNOWN)


def read_sentencepiece_model(file: Path) -> SentencePieceModel:
    """Read the file. Raises `CheckpointError` for one that is no model of SentencePiece, or of a kind that is
    not supported."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {os_reason(error, has_path=False)}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise CheckpointError(
            f"{file}: has more than {_MAX_FILE_BYTES >> 20} MiB, and no SentencePiece model has; {_REMEDY}"
        )
    try:
        return _model(data)
    except ValueError as error:  # UnicodeDecodeError as well
        raise CheckpointError(f"{file}: not a supported SentencePiece model ({error}); {_REMEDY}") from error


def _model(data: bytes) -> SentencePieceModel:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for number, value in _fields(data):
        if number == 1:
            if len(pieces) == MAX_TOKENS:
                raise ValueError(f"it has more than {MAX_TOKENS} pieces")
            pieces.append(_piece(_bytes(value)))
        elif number == 2:
            trainer |= _fields(_bytes(value))
        elif number == 3:
            normalizer |= _fields(_bytes(value))
    vocabulary = _checked(pieces)
    kind = _int32(trainer.get(3, UNIGRAM))
    if kind not in (UNIGRAM, BPE):
        raise ValueError(f"its model_type is {_KIND_NAMES.get(kind, kind)}, neither unigram nor bpe")
    if _int32(trainer.get(24, 0)):
        raise ValueError("it marks spaces at the end of words: treat_whitespace_as_suffix is set")
    if not _int32(normalizer.get(5, 1)):
        raise ValueError("it keeps spaces as they are: escape_whitespaces is off")
    return SentencePieceModel(
        vocabulary,
        kind,
        byte_fallback=bool(_int32(trainer.get(35, 0))),
        charsmap=_charsmap(_bytes(normalizer.get(2, b""))),
        adds_dummy_prefix=bool(_int32(normalizer.get(3, 1))),
        collapses_spaces=bool(_int32(normalizer.get(4, 1))),
        bos_id=_int32(trainer.get(41, 1)),
        eos_id=_int32(trainer.get(42, 2)),
        pad_id=_int32(trainer.get(43, -1)),
    )


def _charsmap(data: bytes) -> bytes:
    """Return the table of characters once it is of the form that its reader expects: the size of a double
    array, the array, and texts."""
    if not data:
        return data
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 + size or size % 4:
        raise ValueError("its precompiled_charsmap is damaged")
    data[4 + size :].decode()
    return data


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    text, score = _bytes(fields.get(1, b"")), _bytes(fields.get(2, bytes(4)))
    if not 0 < len(text) <= _MAX_PIECE_BYTES or len(score) != 4:
        raise ValueError("it has a piece without a text, or a damaged one")
    (number,) = struct.unpack("<f", score)
    if not math.isfinite(number):
        raise ValueError("it has a piece whose score is not finite")
    return text.decode(), number, _int32(fields.get(3, NORMAL))


def _checked(pieces: list[tuple[str, float, int]]) -> PieceVocabulary:
    if not pieces:
        raise ValueError("it has no pieces")
    texts, scores, kinds = zip(*pieces, strict=True)
    if len(set(texts)) != len(texts):
        raise ValueError("it has a piece twice")
    if kinds.count(UNKNOWN) != 1:
        raise ValueError(f"it has {kinds.count(UNKNOWN)} pieces of the type UNKNOWN, not one")
    return PieceVocabulary(texts, kinds, scores)


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield the number and value of each field of a message; that of a fixed size as its bytes. Raises
    `ValueError` for what is no message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError("it is no message of protobuf")
        if at + size > len(data):
            raise ValueError("it is cut short, or no message of protobuf")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("it is cut short, or no message of protobuf")


def _bytes(value: _Value) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has another type than in SentencePiece")
    return value


def _int32(value: _Value) -> int:
    """Return a number or truth value, of which a negative one is stored in 64 bits."""
    if isinstance(value, bytes):
        raise ValueError("a field has another type than in SentencePiece")
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
