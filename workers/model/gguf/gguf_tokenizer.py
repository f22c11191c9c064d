"""Build the fast tokenizer that the metadata of a GGUF file describes, with its chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import CheckpointError
from workers.model.gguf.gguf_file import GgufFile
from workers.model.gguf.gguf_gemma4 import MARKERS
from workers.model.piece_tokenizer import (
    MAX_TOKENS,
    NORMAL,
    USER_DEFINED,
    PieceRules,
    PieceVocabulary,
    add_tokens,
    piece_tokenizer,
    surround,
)

_PREFIX = "tokenizer.ggml."
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")
_TEMPLATE = "tokenizer.chat_template"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL
)
_GPT_4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


class _Split(NamedTuple):
    """How a text is cut before pairs of tokens are merged: by `pattern` ("": as GPT-2 does). `digits`: each
    digit is by itself. `keeps_whole`: a piece that is a token is not cut further. `adds_bos` is what holds
    where the metadata does not say."""

    pattern: str = ""
    digits: bool = False
    keeps_whole: bool = False
    composes: bool = False
    adds_bos: bool = False


_LLAMA3_SPLIT = _Split(_LLAMA3, keeps_whole=True, adds_bos=True)
_DIGITS_SPLIT = _Split(digits=True)
_QWEN2_SPLIT = _Split(_QWEN2, composes=True)
# By tokenizer.ggml.pre.
_SPLITS: dict[str, _Split] = {
    "default": _Split(),
    "gpt-2": _Split(),
    "phi-2": _Split(),
    "olmo": _Split(),
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "dbrx": _Split(_LLAMA3),
    "smaug-bpe": _Split(_LLAMA3),
    "chatglm-bpe": _Split(_LLAMA3),
    "glm4": _Split(_LLAMA3),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "smollm": _DIGITS_SPLIT,
    "starcoder": _DIGITS_SPLIT,
    "refact": _DIGITS_SPLIT,
    "command-r": _Split(digits=True, composes=True),
    "stablelm2": _Split(_QWEN2),
    "tekken": _Split(_TEKKEN, keeps_whole=True, adds_bos=True),
    "gpt-4o": _Split(_GPT_4O),
}


class TokenizerFiles(NamedTuple):
    """What the files of a tokenizer say. `templates` are the chat templates by name."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    templates: dict[str, str]


def tokenizer_of(file: GgufFile) -> TokenizerFiles:
    """Return the tokenizer's files; `CheckpointError` for one of an unknown kind, or that is not whole."""
    vocabulary = _read_vocabulary(file)
    model = str(file.metadata.get(f"{_PREFIX}model", ""))
    if model not in _MODELS:
        raise CheckpointError(
            f"{file.path}: {_PREFIX}model {model[:60]!r} is not supported ({' and '.join(_MODELS)} are); "
            "take the model in Hugging Face layout"
        )
    try:
        with panics_as_errors:
            tokenizer, adds_bos = _MODELS[model](file, vocabulary)
            add_tokens(tokenizer, vocabulary, _markers(vocabulary) if model == "gemma4" else {})
            added = _surround(tokenizer, file, vocabulary, adds_bos)
            text = tokenizer.to_str()
    except (PanicError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file.path}: the tokenizer in its metadata cannot be built ({str(error)[:200]}); take another "
            "conversion of the model"
        ) from error
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return TokenizerFiles(
        text, config | added | _named(vocabulary, file.metadata), templates_of(file.metadata)
    )


def templates_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; that without one is `default`."""
    found = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    }
    found["default"] = metadata.get(_TEMPLATE)
    return {
        name: text for name, text in found.items() if isinstance(text, str) and _TEMPLATE_NAME.fullmatch(name)
    }


def _read_vocabulary(file: GgufFile) -> PieceVocabulary:
    tokens = file.metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_TOKENS:
        raise CheckpointError(
            f"{file.path}: {_PREFIX}tokens is missing; take a GGUF file with the model's tokenizer"
        )
    kinds = file.metadata.get(f"{_PREFIX}token_type") or [NORMAL] * len(tokens)
    scores = file.metadata.get(f"{_PREFIX}scores") or [0.0] * len(tokens)
    if not len(tokens) == len(kinds) == len(scores):
        raise CheckpointError(
            f"{file.path}: {len(tokens)} tokens with {len(kinds)} kinds and {len(scores)} scores; take "
            "another conversion of the model"
        )
    return PieceVocabulary(tokens, kinds, scores)


def _named(vocabulary: PieceVocabulary, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that have a role, as tokenizer_config.json names them."""
    roles = {
        "bos": "bos",
        "eos": "eos",
        "unknown": "unk",
        "padding": "pad",
        "mask": "mask",
        "seperator": "sep",
    }
    found = {
        f"{ours}_token": vocabulary.token(metadata.get(f"{_PREFIX}{theirs}_token_id"))
        for theirs, ours in roles.items()
    }
    return {name: token for name, token in found.items() if token is not None}


def _byte_pairs(file: GgufFile, vocabulary: PieceVocabulary) -> tuple[Tokenizer, bool]:
    """Build a byte-level tokenizer, whose merges the metadata lists."""
    kind = str(file.metadata.get(f"{_PREFIX}pre", "default"))
    if kind not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: {_PREFIX}pre {kind[:100]!r} is not supported (supported: {', '.join(_SPLITS)}); "
            "take the model in Hugging Face layout"
        )
    split = _SPLITS[kind]
    merges = _merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.token_to_id, merges, ignore_merges=split.keeps_whole))
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    stages: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern:
        stages.append(pre_tokenizers.Split(Regex(split.pattern), "isolated", invert=False))
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages) if len(stages) > 1 else stages[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _scored_pieces(file: GgufFile, vocabulary: PieceVocabulary) -> tuple[Tokenizer, bool]:
    """Build a tokenizer of SentencePiece of the kind BPE."""
    has_prefix = bool(file.metadata.get(f"{_PREFIX}add_space_prefix", True))
    rules = PieceRules(space_prefix="every" if has_prefix else "none")
    return piece_tokenizer(vocabulary, _unknown(file), rules), True


def _merged_pieces(file: GgufFile, vocabulary: PieceVocabulary) -> tuple[Tokenizer, bool]:
    """Build a tokenizer of pieces whose merges the metadata lists, as Gemma 4 has: of whole texts, with marks
    for spaces, and characters that are in no piece spelled in bytes."""
    rules = PieceRules(space_prefix="none")
    merges = _merges(file, vocabulary)
    if not merges:
        raise CheckpointError(
            f"{file.path}: {_PREFIX}merges is missing; take another conversion of the model"
        )
    return piece_tokenizer(vocabulary, _unknown(file), rules, merges), True


def _unknown(file: GgufFile) -> int:
    """Return the id of what is in no piece."""
    return int(file.metadata.get(f"{_PREFIX}unknown_token_id", 0))


def _markers(vocabulary: PieceVocabulary) -> dict[int, AddedToken]:
    """Return by id the tokens of Gemma 4 that are special there, but a user's own in its GGUF files."""
    return {
        index: AddedToken(token, normalized=False, special=True)
        for index, token in enumerate(vocabulary.tokens)
        if token in MARKERS and vocabulary.kinds[index] == USER_DEFINED
    }


def _merges(file: GgufFile, vocabulary: PieceVocabulary) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, the first one first; `ValueError` where one of them, or
    both together, are no token."""
    known, found = set(vocabulary.tokens), []
    for merge in file.metadata.get(f"{_PREFIX}merges", []):
        left, _, right = str(merge).partition(" ")
        if not {left, right, left + right} <= known:
            raise ValueError(f"{merge!r} of {_PREFIX}merges is not a pair of tokens that are one together")
        found.append((left, right))
    return found


_MODELS = {"gpt2": _byte_pairs, "llama": _scored_pieces, "gemma4": _merged_pieces}


def _surround(
    tokenizer: Tokenizer, file: GgufFile, vocabulary: PieceVocabulary, adds_bos: bool
) -> dict[str, bool]:
    """Have texts begin and end with the tokens that the metadata wants there."""
    wanted = {
        "bos": bool(file.metadata.get(f"{_PREFIX}add_bos_token", adds_bos)),
        "eos": bool(file.metadata.get(f"{_PREFIX}add_eos_token", False)),
    }
    ends = {name: _end(file, vocabulary, name) if is_wanted else None for name, is_wanted in wanted.items()}
    surround(tokenizer, ends["bos"], ends["eos"])
    return {f"add_{name}_token": end is not None for name, end in ends.items()}


def _end(file: GgufFile, vocabulary: PieceVocabulary, role: str) -> tuple[str, int] | None:
    """Return the token of this role and its id; None where the file has none."""
    index: Any = file.metadata.get(f"{_PREFIX}{role}_token_id")
    token = vocabulary.token(index)
    return None if token is None else (token, index)
