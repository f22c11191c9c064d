"""Write the files of SentencePiece models by the message that transformers has of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import sentencepiece_model_pb2_new

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE, WORD = 1, 2, 3


class Piece(NamedTuple):
    """One piece of a model."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


SPECIAL = [Piece("<unk>", 0, UNKNOWN), Piece("<s>", 0, CONTROL), Piece("</s>", 0, CONTROL)]
BYTES = [Piece(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]


def model_bytes(
    pieces: Sequence[Piece],
    *,
    trainer: dict[str, Any] | None = None,
    normalizer: dict[str, Any] | None = None,
) -> bytes:
    """Return the file of a model; `trainer` and `normalizer` are fields of its two specifications."""
    model: Any = sentencepiece_model_pb2_new.ModelProto()
    for piece in pieces:
        model.pieces.add(piece=piece.text, score=piece.score, type=piece.kind)
    for specification, fields in (
        (model.trainer_spec, {"model_type": BPE, "byte_fallback": True} | (trainer or {})),
        (model.normalizer_spec, {"remove_extra_whitespaces": False} | (normalizer or {})),
    ):
        for name, value in fields.items():
            setattr(specification, name, value)
    return bytes(model.SerializeToString())


def write_model(path: Path, pieces: Sequence[Piece], **fields: Any) -> Path:
    """Write the file, with the fields of `model_bytes`."""
    path.write_bytes(model_bytes(pieces, **fields))
    return path
