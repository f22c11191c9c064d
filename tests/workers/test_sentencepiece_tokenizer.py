"""`tokenizer.model` as a fast tokenizer: the ids of SentencePiece's own algorithms, written out here, and of
the tokenizers of transformers; and damaged files."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece_files
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece_files import (
    BYTE,
    BYTES,
    CONTROL,
    SPECIAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    WORD,
    Piece,
    model_bytes,
    write_model,
)
from slow_cases import examples
from tokenizers import Tokenizer
from transformers import GemmaTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import SpmConverter, generate_merges

from workers.errors import CheckpointError
from workers.model.model_config import read_model_config
from workers.model.model_folder import described_folder, weights_folder
from workers.model.sentencepiece_tokenizer import CONFIG, converted_tokenizer
from workers.rank.compiled_grammars import CompiledGrammars

MARK = "\u2581"
LETTERS = ["a", "b", "c", MARK]
UNKNOWN_PENALTY = 10.0


def _converted(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(converted_tokenizer(folder)[0])


def _ids(folder: Path, text: str) -> list[int]:
    ids: list[int] = _converted(folder).encode(text, add_special_tokens=False).ids
    return ids


# ------------------------------------------------------------------------ SentencePiece, written out naively


def _normalized(text: str, *, prefix: bool, collapse: bool) -> str:
    if collapse:
        text = " ".join(part for part in text.split(" ") if part)
    if prefix and text:
        text = " " + text
    return text.replace(" ", MARK)


def _merged(text: str, pieces: Sequence[Piece]) -> list[str]:
    """Merge, again and again, the pair that becomes the piece with the highest score, the leftmost first."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == sentencepiece_files.NORMAL}
    symbols = list(text)
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            return symbols
        _, place = min(pairs)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


def _most_probable(text: str, pieces: Sequence[Piece]) -> list[list[str]]:
    """Find the segmentations with the highest sum of scores, of which there are several where pieces can
    change places; a character in no piece costs more than any."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == sentencepiece_files.NORMAL}
    unknown = min(scores.values()) - UNKNOWN_PENALTY
    best: list[tuple[float, list[list[str]]]] = [(0.0, [[]])]
    for end in range(1, len(text) + 1):
        found = []
        for start in range(end):
            part = text[start:end]
            score = scores.get(part, unknown if len(part) == 1 else -math.inf)
            found.append((best[start][0] + score, [[*before, part] for before in best[start][1]]))
        highest = max(score for score, _ in found)
        equal = [segments for score, segments in found if score > highest - 1e-5]
        best.append((highest, list(itertools.chain.from_iterable(equal))))
    return best[-1][1]


def _spelled(symbols: Sequence[str], pieces: Sequence[Piece], *, has_bytes: bool) -> list[int]:
    """Return the ids of the symbols: unknown ones in bytes, or as one unknown token."""
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    found: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            found.append(ids[symbol])
        elif has_bytes:
            found.extend(ids[f"<0x{byte:02X}>"] for byte in symbol.encode())
        elif not found or found[-1] != 0:
            found.append(0)
    return found


@st.composite
def _bpe_pieces(draw: st.DrawFn) -> list[Piece]:
    """Draw pieces as training finds them: each is made of two that were there, in one way."""
    texts = list(LETTERS)
    for first, second in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=14)):
        text = texts[first % len(texts)] + texts[second % len(texts)]
        if text not in texts and all(_num_splits(it, [*texts, text]) <= 1 for it in [*texts, text]):
            texts.append(text)
    order = draw(st.permutations(range(len(texts))))
    return [Piece(text, -float(rank)) for text, rank in zip(texts, order, strict=True)]


def _num_splits(text: str, texts: Sequence[str]) -> int:
    return sum(text[:cut] in texts and text[cut:] in texts for cut in range(1, len(text)))


TEXTS = st.lists(st.sampled_from([*"abc ", "  ", "é", "日", "ab", "cab"]), max_size=14).map("".join)


@settings(max_examples=examples(150), deadline=None)
@given(
    pieces=_bpe_pieces(), text=TEXTS, prefix=st.booleans(), collapse=st.booleans(), has_bytes=st.booleans()
)
def test_pairs_are_merged_as_sentencepiece_merges_them(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[Piece],
    text: str,
    prefix: bool,
    collapse: bool,
    has_bytes: bool,
) -> None:
    folder = tmp_path_factory.mktemp("bpe")
    every = [*SPECIAL, *(BYTES if has_bytes else []), *pieces]
    normalizer = {"add_dummy_prefix": prefix, "remove_extra_whitespaces": collapse}
    write_model(
        folder / "tokenizer.model", every, trainer={"byte_fallback": has_bytes}, normalizer=normalizer
    )
    symbols = _merged(_normalized(text, prefix=prefix, collapse=collapse), every)
    assert _ids(folder, text) == _spelled(symbols, every, has_bytes=has_bytes)


@settings(max_examples=examples(150), deadline=None)
@given(
    scores=st.lists(st.floats(-20, -0.125, width=32), min_size=12, max_size=12, unique=True),
    texts=st.lists(st.text("abc" + MARK, min_size=2, max_size=4), min_size=8, max_size=8, unique=True),
    text=TEXTS,
    prefix=st.booleans(),
)
def test_the_most_probable_pieces_are_those_of_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory,
    scores: list[float],
    texts: list[str],
    text: str,
    prefix: bool,
) -> None:
    folder = tmp_path_factory.mktemp("unigram")
    pieces = [Piece(it, score) for it, score in zip([*LETTERS, *texts], scores, strict=True)]
    every = [*SPECIAL, *pieces]
    trainer = {"model_type": UNIGRAM, "byte_fallback": False}
    normalizer = {"add_dummy_prefix": prefix, "remove_extra_whitespaces": True}
    write_model(folder / "tokenizer.model", every, trainer=trainer, normalizer=normalizer)
    best = _most_probable(_normalized(text, prefix=prefix, collapse=True), every)
    assert _ids(folder, text) in [_spelled(symbols, every, has_bytes=False) for symbols in best]


# ------------------------------------------------------------------------------------------ transformers


WORDS = ["the", "cat", "sat", "on", "mat", "then", "that", "hat", "at", "an", "he"]
CHARACTERS = sorted({*"".join(WORDS), MARK, ".", "1", "\n"})


def _trained() -> list[Piece]:
    """Return pieces that grow from the words, one character at a time, with a space before each word."""
    texts = dict.fromkeys(CHARACTERS)
    for word in WORDS:
        for end in range(2, len(word) + 2):
            texts[f"{MARK}{word}"[:end]] = None
            texts[word[:end]] = None
    return [Piece(text, -float(index)) for index, text in enumerate(texts)]


LLAMA = [*SPECIAL, *BYTES, *_trained()]
GEMMA = [
    Piece("<pad>", 0, CONTROL),
    Piece("<eos>", 0, CONTROL),
    Piece("<bos>", 0, CONTROL),
    Piece("<unk>", 0, UNKNOWN),
    Piece("<mask>", 0, CONTROL),
    Piece("\n\n", 0, USER_DEFINED),
    *BYTES,
    *_trained(),
]


def _vocabulary(pieces: Sequence[Piece]) -> tuple[dict[str, int], Any]:
    """Return ids and merges, as transformers makes them of pieces with scores."""
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    skipped = [piece.text for piece in pieces if piece.kind in (BYTE, CONTROL, UNKNOWN)]
    return ids, generate_merges(ids, {piece.text: piece.score for piece in pieces}, skipped)


class _Case(NamedTuple):
    pieces: list[Piece]
    model: dict[str, Any]
    config: dict[str, Any]
    theirs: Callable[..., Any]
    options: dict[str, Any]


CASES = {
    "llama": _Case(LLAMA, {}, {"legacy": False}, LlamaTokenizer, {"add_bos_token": True}),
    "llama without a prefix": _Case(
        LLAMA,
        {},
        {"legacy": False, "add_prefix_space": False, "add_bos_token": False},
        LlamaTokenizer,
        {"add_prefix_space": False, "add_bos_token": False},
    ),
    "llama with an end": _Case(
        LLAMA,
        {},
        {"legacy": False, "add_bos_token": True, "add_eos_token": True},
        LlamaTokenizer,
        {"add_bos_token": True, "add_eos_token": True},
    ),
    "gemma": _Case(
        GEMMA,
        {
            "trainer": {"bos_id": 2, "eos_id": 1, "pad_id": 0, "unk_id": 3},
            "normalizer": {"add_dummy_prefix": False},
        },
        {},
        GemmaTokenizer,
        {"add_bos_token": True},
    ),
}
SENTENCES = st.lists(
    st.one_of(
        st.sampled_from([*WORDS, " ", "  ", ".", "\n", "\n\n", "1", "é", "🧑‍🚀", "<0x41>"]),
        st.sampled_from(["<s>", "</s>", "<bos>", "<eos>", "<unk>", "<|user|>", "<tool>"]),
        st.text(max_size=4),
    ),
    max_size=10,
).map("".join)


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    write_model(folder / "tokenizer.model", case.pieces, **case.model)
    size = len(case.pieces)
    added = {
        str(size): {"content": "<|user|>", "special": True, "normalized": False},
        str(size + 1): {"content": "<tool>", "special": False, "normalized": False, "rstrip": True},
    }
    config = case.config | {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids, merges = _vocabulary(case.pieces)
    theirs = case.theirs(vocab=ids, merges=merges, **case.options)
    from transformers import AddedToken

    known = [piece for piece in case.pieces if piece.kind == USER_DEFINED]
    theirs.add_tokens([AddedToken(piece.text, normalized=False, special=False) for piece in known])
    theirs.add_tokens([AddedToken("<|user|>", special=True, normalized=False)], special_tokens=True)
    theirs.add_tokens([AddedToken("<tool>", special=False, normalized=False, rstrip=True)])
    return _converted(folder), theirs


@settings(max_examples=examples(200), deadline=None)
@given(text=SENTENCES)
@example(text="the cat<|user|> sat</s>on <tool>  a mat <s>the")
@example(text=" the  cat\n\n🧑‍🚀")
def test_ids_and_texts_are_those_of_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    expected = theirs(text)["input_ids"]
    assert ours.encode(text).ids == expected
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_a_table_of_characters_is_applied_as_by_transformers(tmp_path: Path) -> None:
    """Its one entry makes one letter of what are two."""
    texts = [f"{MARK}fi", "fi", MARK, *"fi"]
    pieces = [*SPECIAL, *(Piece(text, -float(rank)) for rank, text in enumerate(texts))]
    trainer = {"model_type": UNIGRAM, "byte_fallback": False}
    normalizer = {"precompiled_charsmap": _charsmap("ﬁ", "fi"), "remove_extra_whitespaces": True}
    file = write_model(tmp_path / "tokenizer.model", pieces, trainer=trainer, normalizer=normalizer)

    class Slow:
        vocab_file = str(file)
        legacy = True

    theirs = SpmConverter(Slow()).converted()
    ours = _converted(tmp_path)
    for text in ("ﬁ", "fi ﬁ", "fifi"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids
    assert ours.encode("ﬁ", add_special_tokens=False).tokens == [f"{MARK}fi"]


def _charsmap(character: str, replacement: str) -> bytes:
    """Return the table of SentencePiece with one entry: a double array of the bytes of the character, and the
    replacements."""
    units = [0] * 1024
    place = 0
    for number, byte in enumerate(character.encode()):
        child = 256 * (number + 1)
        units[place] |= (place ^ child ^ byte) << 10
        place, units[child] = child, byte
    leaf = place ^ 1
    units[place] |= 1 << 10 | 1 << 8
    units[leaf] = 1 << 31
    trie = struct.pack("<1024I", *units)
    return struct.pack("<I", len(trie)) + trie + replacement.encode() + b"\0"


def test_spaces_stand_before_every_part_in_tokenizers_of_old(tmp_path: Path) -> None:
    """Those without `legacy: false`, as SentencePiece itself does with each part that it is given."""
    write_model(tmp_path / "tokenizer.model", LLAMA)
    ours = _converted(tmp_path)
    assert ours.encode("the<s>cat").tokens == ["<s>", f"{MARK}the", "<s>", f"{MARK}cat"]
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    assert _converted(tmp_path).encode("the<s>cat").tokens == ["<s>", f"{MARK}the", "<s>", "cat"]


def test_files_of_old_list_added_tokens_apart(tmp_path: Path) -> None:
    write_model(tmp_path / "tokenizer.model", LLAMA)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": len(LLAMA) + 1, "<y>": len(LLAMA)}))
    roles = {"additional_special_tokens": ["<y>"], "bos_token": {"content": "<y>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles))
    text, config = converted_tokenizer(tmp_path)
    ours = Tokenizer.from_str(text)
    assert ours.encode("the<x>").ids[0] == ours.token_to_id("<y>") == len(LLAMA)
    assert ours.encode("the<x>").ids[-1] == len(LLAMA) + 1
    added = ours.get_added_tokens_decoder()
    assert (added[len(LLAMA)].special, added[len(LLAMA) + 1].special) == (True, False)
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<y>", "</s>", "<unk>")


def test_a_piece_that_was_kept_free_may_have_another_text(tmp_path: Path) -> None:
    write_model(tmp_path / "tokenizer.model", [*LLAMA, Piece("<unused0>", 0, USER_DEFINED)])
    added = {str(len(LLAMA)): {"content": "<|end|>", "special": True}}
    config = {"added_tokens_decoder": added, "add_bos_token": False, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _converted(tmp_path).encode("<|end|>").ids == [len(LLAMA)]


# ------------------------------------------------------------------------------------------ wrong files


def _raw(pieces: Sequence[Piece] = LLAMA, **fields: Any) -> Callable[[], bytes]:
    return lambda: model_bytes(pieces, **fields)


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut": (lambda: model_bytes(LLAMA)[:-3], "cut short"),
    "another format": (lambda: b"IQ== 0\nIg== 1\nIw== 2\n" * 50, "not a supported SentencePiece model"),
    "empty": (lambda: b"", "it has no pieces"),
    "too large": (lambda: bytes(17 << 20), "has more than 16 MiB"),
    "words": (_raw(trainer={"model_type": WORD}), "model_type is word, neither unigram nor bpe"),
    "suffix": (_raw(trainer={"treat_whitespace_as_suffix": True}), "treat_whitespace_as_suffix"),
    "spaces": (_raw(normalizer={"escape_whitespaces": False}), "escape_whitespaces is off"),
    "twice": (_raw([*LLAMA, Piece("the")]), "a piece twice"),
    "no unknown": (_raw(LLAMA[1:]), "0 pieces of the type UNKNOWN"),
    "long": (_raw([*LLAMA, Piece("x" * 600)]), "without a text, or a damaged one"),
    "nan": (_raw([*LLAMA, Piece("x", math.nan)]), "score is not finite"),
    "not utf-8": (lambda: model_bytes(LLAMA).replace(b"the", b"\xff\xfee"), "codec can't decode"),
    "charsmap": (_raw(normalizer={"precompiled_charsmap": b"\xff" * 9}), "precompiled_charsmap is damaged"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_a_sentence(case: str, tmp_path: Path) -> None:
    make, message = WRONG[case]
    (tmp_path / "tokenizer.model").write_bytes(make())
    with pytest.raises(CheckpointError, match=message) as caught:
        converted_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.model") in str(caught.value)
    assert "tokenizer.json beside it" in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(model_bytes([*SPECIAL, *_trained()], trainer={"byte_fallback": False}))
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), min_size=1, max_size=4)
    ):
        raw[place] = byte
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "tokenizer.model").write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        _converted(folder).encode("the cat")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            CONFIG,
            {"added_tokens_decoder": {"x": {"content": "<x>"}}},
            "are not ids with texts",
        ),
        (
            CONFIG,
            {"added_tokens_decoder": {"9999": {"content": "<x>"}}},
            "'<x>' has id 9999",
        ),
        (CONFIG, {"bos_token": "<none>"}, "bos_token '<none>' is not among its tokens"),
        ("added_tokens.json", {"<x>": "one"}, "are not ids with texts"),
        ("special_tokens_map.json", {"additional_special_tokens": 3}, "are not ids with texts"),
    ],
)
def test_json_files_that_contradict_are_refused(
    name: str, content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "tokenizer.model", LLAMA)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        converted_tokenizer(tmp_path)


# ------------------------------------------------------------------------------------------ the folder


def _folder(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> Path:
    """Make a checkpoint whose tokenizer is a SentencePiece model, with a chat template and an end token."""
    checkpoint = make_checkpoint("llama", vocab_size=len(LLAMA), eos_token_id=2)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    write_model(folder / "tokenizer.model", LLAMA)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / CONFIG).write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    return folder


def test_a_folder_is_described_by_one_with_a_fast_tokenizer(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, cache = _folder(tmp_path, make_checkpoint), tmp_path / "cache"
    folder = described_folder(model, cache)
    assert folder.parent == cache
    assert folder.name.startswith("model-")
    assert read_model_config(folder) == read_model_config(model)
    assert (folder / "chat_template.jinja").read_text() == "{{ bos_token }}{{ messages[0].content }}"
    assert json.loads((folder / CONFIG).read_text())["eos_token"] == "</s>"
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the cat").tokens[0] == "<s>"
    assert not (folder / "model.safetensors").exists()
    assert weights_folder(model, "bf16", cache) == model
    assert described_folder(model, cache) == folder


def test_grammars_find_the_converted_tokenizer(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = described_folder(_folder(tmp_path, make_checkpoint), tmp_path / "cache")
    grammars = CompiledGrammars(folder, len(LLAMA), (2,))
    assert grammars.tokenizer.tokenize_str("cat") != []


def test_another_tokenizer_has_another_folder(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model, cache = _folder(tmp_path, make_checkpoint), tmp_path / "cache"
    first = described_folder(model, cache)
    (model / CONFIG).write_text('{"add_bos_token": false}')
    second = described_folder(model, cache)
    assert first != second
    assert Tokenizer.from_file(str(second / "tokenizer.json")).encode("the").tokens == [f"{MARK}the"]
    (model / "tokenizer.json").write_text("{}")
    assert described_folder(model, cache) == model


def test_an_error_names_the_folder_that_is_served(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = _folder(tmp_path, make_checkpoint)
    config = json.loads((model / "config.json").read_text()) | {"hidden_act": "tanh"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{model}/config.json"):
        described_folder(model, tmp_path / "cache")
    shutil.copyfile(make_checkpoint("llama") / "config.json", model / "config.json")
    (model / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{model}/tokenizer.model"):
        described_folder(model, tmp_path / "cache")
