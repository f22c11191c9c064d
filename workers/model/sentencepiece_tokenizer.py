"""Turn the `tokenizer.model` of a folder, with what its JSON files add, into the fast tokenizer of
`tokenizer.json`. The package `sentencepiece` is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import CheckpointError
from workers.model.model_config import read_json
from workers.model.piece_tokenizer import (
    CONTROL,
    USER_DEFINED,
    PieceRules,
    PieceVocabulary,
    add_tokens,
    piece_tokenizer,
    surround,
)
from workers.model.sentencepiece_model import UNIGRAM, SentencePieceModel, read_sentencepiece_model

FILE = "tokenizer.model"
CONFIG = "tokenizer_config.json"
# What the tokenizer is made of, where a folder has them.
SOURCES = (FILE, CONFIG, "special_tokens_map.json", "added_tokens.json")
_ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def has_sentencepiece_alone(folder: Path) -> bool:
    """Whether the folder has a `tokenizer.model` and no `tokenizer.json`."""
    return not (folder / "tokenizer.json").is_file() and (folder / FILE).is_file()


def converted_tokenizer(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return what tokenizer.json and tokenizer_config.json say of the folder's tokenizer. Raises
    `CheckpointError`, naming the file, for what is not supported or contradictory."""
    model = read_sentencepiece_model(folder / FILE)
    config = _json(folder / CONFIG)
    roles = _roles(folder, config, model)
    added = _added_tokens(folder, config, roles)
    try:
        with panics_as_errors:
            tokenizer = _tokenizer(model, config, added)
            ends = {name: _end(tokenizer, name, roles, config) for name in ("bos", "eos")}
            surround(tokenizer, ends["bos"], ends["eos"])
            text = tokenizer.to_str()
    except (PanicError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / FILE}: no tokenizer can be built of it and {CONFIG} ({str(error)[:200]}); correct "
            "them, or save the tokenizer as tokenizer.json beside it"
        ) from error
    return text, {**config, **{f"{name}_token": token for name, token in roles.items()}}


def _tokenizer(
    model: SentencePieceModel, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> Tokenizer:
    vocabulary = _renamed(model.vocabulary, added)
    rules = PieceRules(
        is_unigram=model.kind == UNIGRAM,
        byte_fallback=model.byte_fallback,
        space_prefix=_space_prefix(model, config),
        collapses_spaces=model.collapses_spaces,
        charsmap=model.charsmap,
    )
    tokenizer = piece_tokenizer(vocabulary, model.unknown_id, rules)
    add_tokens(tokenizer, vocabulary, added)
    for index, token in sorted(added.items()):
        if (found := tokenizer.token_to_id(token.content)) != index:
            raise ValueError(f"the added token {token.content[:100]!r} has id {index}, but {found} is next")
    return tokenizer


def _space_prefix(model: SentencePieceModel, config: Mapping[str, Any]) -> Literal["every", "first", "none"]:
    """Return where a space is put: `legacy` is how transformers says that also the parts between added tokens
    begin with one, as it was before that key."""
    wanted = config.get("add_prefix_space")
    if not (model.adds_dummy_prefix if wanted is None else wanted):
        return "none"
    return "first" if config.get("legacy") is False else "every"


def _renamed(vocabulary: PieceVocabulary, added: Mapping[int, AddedToken]) -> PieceVocabulary:
    """Return the pieces with those that have another text in the JSON files: tokens kept free, as a rule."""
    tokens, kinds = list(vocabulary.tokens), list(vocabulary.kinds)
    for index, token in added.items():
        if index < len(tokens) and tokens[index] != token.content:
            tokens[index], kinds[index] = token.content, CONTROL if token.special else USER_DEFINED
    return PieceVocabulary(tokens, kinds, vocabulary.scores)


def _roles(folder: Path, config: Mapping[str, Any], model: SentencePieceModel) -> dict[str, str]:
    """Return the tokens that begin and end texts, and so on, by role. The configuration comes first, also
    where it says that there is none."""
    listed = {**_json(folder / "special_tokens_map.json"), **config}
    ids = {"bos": model.bos_id, "eos": model.eos_id, "unk": model.unknown_id, "pad": model.pad_id}
    found = {}
    for role, index in ids.items():
        token = listed.get(f"{role}_token", model.vocabulary.token(index))
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[role] = token
    return found


def _added_tokens(folder: Path, config: Mapping[str, Any], roles: Mapping[str, str]) -> dict[int, AddedToken]:
    """Return the tokens that the JSON files describe, by id."""
    described = config.get("added_tokens_decoder")
    try:
        if isinstance(described, dict) and described:
            return {_id(index): _added_token(entry) for index, entry in described.items()}
        listed = {**_json(folder / "special_tokens_map.json"), **config}
        named = {_content(token) for token in listed.get("additional_special_tokens") or ()}
        special = named.union(roles.values())
        return {
            _id(index): AddedToken(token, normalized=False, special=token in special)
            for token, index in _json(folder / "added_tokens.json").items()
        }
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: the added tokens in {CONFIG} or added_tokens.json are not ids with texts; save the "
            "tokenizer again"
        ) from error


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in _ADDED_FLAGS if name in entry}
    return AddedToken(_content(entry), **flags)


def _content(token: Any) -> str:
    text = token if isinstance(token, str) else token["content"]
    if not isinstance(text, str) or not text:
        raise ValueError("a token without a text")
    return text


def _id(index: Any) -> int:
    if isinstance(index, float | bool) or int(index) < 0:
        raise ValueError("an id that is no number")
    return int(index)


def _end(
    tokenizer: Tokenizer, role: str, roles: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[str, int] | None:
    """Return the token that texts begin (bos) or end (eos) with, and its id. Without a word about it, they
    begin with one and end without."""
    wanted = config.get(f"add_{role}_token")
    if not ((role == "bos") if wanted is None else wanted) or role not in roles:
        return None
    index = tokenizer.token_to_id(roles[role])
    if index is None:
        raise ValueError(f"{role}_token {roles[role][:100]!r} is not among its tokens")
    return roles[role], index


def _json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
