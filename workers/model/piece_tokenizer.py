"""Build fast tokenizers of the kind of SentencePiece from their pieces, and give any tokenizer the tokens
that are found before all others. GGUF files and `tokenizer.model` describe the same things in two forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# Kinds of pieces, by the numbers that both forms give them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS = 1 << 22
_SPACE = "\u2581"


class PieceVocabulary(NamedTuple):
    """The tokens by id, their kinds and scores."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    @property
    def token_to_id(self) -> dict[str, int]:
        """Each token's first id."""
        return {token: index for index, token in reversed(list(enumerate(self.tokens)))}

    def token(self, index: object) -> str | None:
        """Return the token of an id, None where there is none."""
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else None


class PieceRules(NamedTuple):
    """How a text is spelled in pieces. `space_prefix`: a space is put before every part of a text between
    tokens that were found before, or before the first one. `charsmap` is SentencePiece's own table of
    characters to replace."""

    is_unigram: bool = False
    byte_fallback: bool = True
    space_prefix: Literal["every", "first", "none"] = "every"
    collapses_spaces: bool = False
    charsmap: bytes = b""


def piece_tokenizer(
    vocabulary: PieceVocabulary,
    unknown: int,
    rules: PieceRules,
    merges: list[tuple[str, str]] | None = None,
) -> Tokenizer:
    """Return the tokenizer without its added tokens; `unknown` is the id of what is in no piece, and `merges`
    are the pairs of pieces that are merged, the first one first (None: those of `scored_merges`). Raises
    `ValueError` or `TypeError` where the library refuses the pieces."""
    tokenizer = Tokenizer(_model(vocabulary, unknown, rules, merges))
    steps = _normalizers(rules)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if rules.space_prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    stages: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.space_prefix != "none":
        stages.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def scored_merges(vocabulary: PieceVocabulary) -> list[tuple[str, str]]:
    """Return every pair of tokens that together are a token, the highest score of that first."""
    tokens, scores = vocabulary.tokens, vocabulary.scores
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, vocabulary.kinds, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def add_tokens(
    tokenizer: Tokenizer, vocabulary: PieceVocabulary, described: Mapping[int, AddedToken] | None = None
) -> None:
    """Have the tokens that are found in the text before anything else keep their ids: those of such kinds,
    and those that are `described` by id."""
    found = {
        index: AddedToken(token, normalized=False, special=kind in (CONTROL, UNKNOWN))
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if token and kind in (CONTROL, UNKNOWN, USER_DEFINED)
    }
    found |= described or {}
    tokenizer.add_tokens([found[index] for index in sorted(found)])  # at once: each call sorts all of them


def surround(tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Have texts begin and end with these tokens and ids; None: with none."""
    first, last = ([] if it is None else [it[0]] for it in (bos, eos))
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{it}:1" for it in first), "$B:1", *(f"{it}:1" for it in last)],
            special_tokens=[it for it in (bos, eos) if it is not None],
        )


def _model(
    vocabulary: PieceVocabulary, unknown: int, rules: PieceRules, merges: list[tuple[str, str]] | None
) -> models.Model:
    """Return what cuts a text: the most probable pieces, or merged pairs. Characters that are in no piece are
    spelled in bytes where there are such pieces."""
    if rules.is_unigram:
        pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
        return models.Unigram(pieces, unknown, rules.byte_fallback)
    return models.BPE(
        vocabulary.token_to_id,
        scored_merges(vocabulary) if merges is None else merges,
        unk_token=vocabulary.token(unknown),
        fuse_unk=True,
        byte_fallback=rules.byte_fallback,
    )


def _normalizers(rules: PieceRules) -> list[Any]:
    steps: list[Any] = [normalizers.Precompiled(rules.charsmap)] if rules.charsmap else []
    if rules.collapses_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if rules.space_prefix == "every":
        steps.append(normalizers.Prepend(_SPACE))
    if rules.space_prefix != "first":
        steps.append(normalizers.Replace(" ", _SPACE))
    return steps
