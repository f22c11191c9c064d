"""Build the fast tokenizer that the metadata of a GGUF file describes, with its chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import CheckpointError
from workers.model.gguf.gguf_file import GgufFile

_PREFIX = "tokenizer.ggml."
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")
_TEMPLATE = "tokenizer.chat_template"
_MAX_TOKENS = 1 << 22

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
    vocabulary = _Vocabulary.read(file)
    model = str(file.metadata.get(f"{_PREFIX}model", ""))
    if model not in _MODELS:
        raise CheckpointError(
            f"{file.path}: {_PREFIX}model {model[:60]!r} is not supported ({' and '.join(_MODELS)} are); "
            "take the model in Hugging Face layout"
        )
    try:
        with panics_as_errors:
            tokenizer, adds_bos = _MODELS[model](file, vocabulary)
            _add_tokens(tokenizer, vocabulary)
            added = _surround(tokenizer, file, vocabulary, adds_bos)
            text = tokenizer.to_str()
    except (PanicError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file.path}: the tokenizer in its metadata cannot be built ({str(error)[:200]}); take another "
            "conversion of the model"
        ) from error
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return TokenizerFiles(text, config | added | vocabulary.named(file.metadata), templates_of(file.metadata))


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


class _Vocabulary(NamedTuple):
    """The tokens by id, their kinds and scores."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    @classmethod
    def read(cls, file: GgufFile) -> _Vocabulary:
        tokens = file.metadata.get(f"{_PREFIX}tokens")
        if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
            raise CheckpointError(
                f"{file.path}: {_PREFIX}tokens is missing; take a GGUF file with the model's tokenizer"
            )
        kinds = file.metadata.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
        scores = file.metadata.get(f"{_PREFIX}scores") or [0.0] * len(tokens)
        if not len(tokens) == len(kinds) == len(scores):
            raise CheckpointError(
                f"{file.path}: {len(tokens)} tokens with {len(kinds)} kinds and {len(scores)} scores; take "
                "another conversion of the model"
            )
        return cls(tokens, kinds, scores)

    @property
    def token_to_id(self) -> dict[str, int]:
        """Each token's first id."""
        return {token: index for index, token in reversed(list(enumerate(self.tokens)))}

    def token(self, index: object) -> str | None:
        """Return the token of an id, None where there is none."""
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else None

    def named(self, metadata: Mapping[str, Any]) -> dict[str, str]:
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
            f"{ours}_token": self.token(metadata.get(f"{_PREFIX}{theirs}_token_id"))
            for theirs, ours in roles.items()
        }
        return {name: token for name, token in found.items() if token is not None}


def _byte_pairs(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Build a byte-level tokenizer, whose merges the metadata lists."""
    kind = str(file.metadata.get(f"{_PREFIX}pre", "default"))
    if kind not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: {_PREFIX}pre {kind[:100]!r} is not supported (supported: {', '.join(_SPLITS)}); "
            "take the model in Hugging Face layout"
        )
    split = _SPLITS[kind]
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get(f"{_PREFIX}merges", [])]
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


def _scored_pieces(file: GgufFile, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Build a tokenizer of SentencePiece: pairs are merged in the order of the scores of what they become,
    and characters that are in no token are spelled in bytes."""
    metadata = file.metadata
    unknown = vocabulary.token(metadata.get(f"{_PREFIX}unknown_token_id", 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary.token_to_id,
            scored_merges(vocabulary.tokens, vocabulary.kinds, vocabulary.scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(metadata.get(f"{_PREFIX}add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    stages: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        stages.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer, True


def scored_merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that together are a token, the highest score of that first."""
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


_MODELS = {"gpt2": _byte_pairs, "llama": _scored_pieces}


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Have the tokens that are found in the text before anything else keep their ids."""
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if not token:
            continue
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _surround(
    tokenizer: Tokenizer, file: GgufFile, vocabulary: _Vocabulary, adds_bos: bool
) -> dict[str, bool]:
    """Have texts begin and end with the tokens that the metadata wants there."""
    wanted = {
        "bos": bool(file.metadata.get(f"{_PREFIX}add_bos_token", adds_bos)),
        "eos": bool(file.metadata.get(f"{_PREFIX}add_eos_token", False)),
    }
    ids = {name: file.metadata.get(f"{_PREFIX}{name}_token_id") for name in wanted}
    found = {
        name: (token, ids[name])
        for name, is_wanted in wanted.items()
        if is_wanted and (token := vocabulary.token(ids[name])) is not None
    }
    if found:
        first = [found["bos"][0]] if "bos" in found else []
        last = [found["eos"][0]] if "eos" in found else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{it}:1" for it in first), "$B:1", *(f"{it}:1" for it in last)],
            special_tokens=list(found.values()),
        )
    return {f"add_{name}_token": name in found for name in wanted}
