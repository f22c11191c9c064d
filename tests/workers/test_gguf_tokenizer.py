"""Tokenizers out of GGUF files: for any text the ids of the tokenizer from which the file was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf_files
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_cases import examples
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.convert_slow_tokenizer import generate_merges

from workers.errors import CheckpointError
from workers.model.gguf.gguf_config import generation_config_of
from workers.model.gguf.gguf_file import GgufFile
from workers.model.gguf.gguf_tokenizer import TokenizerFiles, tokenizer_of
from workers.model.piece_tokenizer import PieceVocabulary, scored_merges

CORPUS = [path.read_text() for path in sorted(Path(__file__).parent.glob("test_[a-m]*.py"))][:12]
CORPUS += [
    "It's 2024, they'LL pay 1234567 or 3.14; I'd say naïve café über Straße. Ĳ ﬁ é\n\n\t x\r\n  y"
] * 50
CORPUS += ["日本語のテキスト 中文 한국어 русский العربية हिन्दी ไทย 😀👍🏽"] * 50
SPECIAL = ["<|begin|>", "<|end|>", "<unk>"]
# As the tokenizer.json of the models of these kinds has them.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])


def _splitting(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
    return pre_tokenizers.Sequence([split, BYTE_LEVEL])


class _Kind(NamedTuple):
    pre_tokenizer: Any
    keeps_whole: bool = False
    normalizer: Any = None


KINDS = {
    "default": _Kind(GPT2),
    "llama-bpe": _Kind(_splitting(LLAMA3_PATTERN), keeps_whole=True),
    "qwen2": _Kind(_splitting(QWEN2_PATTERN), normalizer=normalizers.NFC()),
    "stablelm2": _Kind(_splitting(QWEN2_PATTERN)),
    "smollm": _Kind(DIGITS),
    "command-r": _Kind(DIGITS, normalizer=normalizers.NFC()),
    "tekken": _Kind(_splitting(TEKKEN_PATTERN), keeps_whole=True),
}


def _byte_level(kind: _Kind) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind.keeps_whole))
    if kind.normalizer is not None:
        tokenizer.normalizer = kind.normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = kind.pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def _read(file: Path) -> tuple[Tokenizer, TokenizerFiles]:
    files = tokenizer_of(GgufFile.read(file))
    return Tokenizer.from_str(files.tokenizer_json), files


class _Pair(NamedTuple):
    original: Tokenizer
    ours: Tokenizer


@pytest.fixture(scope="module", params=list(KINDS))
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Pair:
    original = _byte_level(KINDS[request.param])
    kinds = dict.fromkeys(SPECIAL, gguf_files.CONTROL) | {"<think>": gguf_files.USER_DEFINED}
    path = tmp_path_factory.mktemp("bpe") / "t.gguf"
    flags = {"add_bos_token": False}
    gguf_files.write_tokenizer_gguf(path, original, "gpt2", request.param, kinds=kinds, flags=flags)
    return _Pair(original, _read(path)[0])


# Words of the corpus, marks, digits and any character.
PIECES = st.one_of(
    st.sampled_from(
        [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "12345", "def ", "return", "é", "e\u0301", "👍🏽"]
    ),
    st.sampled_from([*SPECIAL, "<think>", "<0x41>", "\u2581", "日本語", "🧑‍🚀"]),
    st.text(max_size=6),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@settings(max_examples=examples(300))
@given(text=TEXTS)
@example(text="It's 1234567 <|begin|> x<think>\n\n  y")
def test_byte_level_ids_and_texts_are_the_original_s(byte_level: _Pair, text: str) -> None:
    _assert_same(byte_level, text)


def _assert_same(pair: _Pair, text: str) -> None:
    expected = pair.original.encode(text)
    found = pair.ours.encode(text)
    assert (found.ids, found.tokens) == (expected.ids, expected.tokens)
    assert pair.ours.decode(found.ids) == pair.original.decode(expected.ids)


def _pieces(prefix: bool) -> tuple[Tokenizer, list[float]]:
    """Train a tokenizer of pieces with spaces as marks, bytes and special tokens, and the scores that its
    merges stand for."""
    mark = "\u2581"
    spaces = normalizers.Replace(" ", mark)
    normalizer = normalizers.Sequence([normalizers.Prepend(mark), spaces]) if prefix else spaces
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    learning = Tokenizer(models.BPE(unk_token="<unk>"))
    learning.normalizer, learning.pre_tokenizer = normalizer, pre_tokenizers.Split(mark, "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=[*special, *byte_names], show_progress=False, limit_alphabet=150
    )
    learning.train_from_iterator(CORPUS, trainer)
    learned = json.loads(learning.to_str())["model"]
    tokens = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    rank = {"".join(pair): -float(index) for index, pair in reversed(list(enumerate(learned["merges"])))}
    scores = [rank.get(token, -1e6) for token in tokens]
    merges = generate_merges(learned["vocab"], dict(zip(tokens, scores, strict=True)), _piece_kinds(tokens))
    model = models.BPE(learned["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    stages: list[Any] = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer, scores


def _piece_kinds(tokens: list[str]) -> dict[str, int]:
    kinds = {token: gguf_files.BYTE for token in tokens if token.startswith("<0x")}
    return kinds | {"<unk>": gguf_files.UNKNOWN, "<s>": gguf_files.CONTROL, "</s>": gguf_files.CONTROL}


@pytest.fixture(scope="module", params=[True, False], ids=["space prefix", "no prefix"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Pair:
    original, scores = _pieces(request.param)
    path = tmp_path_factory.mktemp("pieces") / "t.gguf"
    vocabulary = original.get_vocab()
    gguf_files.write_tokenizer_gguf(
        path,
        original,
        "llama",
        scores=scores,
        kinds=_piece_kinds(list(vocabulary)),
        flags={} if request.param else {"add_space_prefix": False},
        ids={"bos": 1, "eos": 2, "unknown": 0},
    )
    return _Pair(original, _read(path)[0])


@settings(max_examples=examples(300))
@given(text=TEXTS)
@example(text="</s> hello<s>world \U0001f9d1")
def test_ids_of_scored_pieces_are_the_original_s(pieces: _Pair, text: str) -> None:
    _assert_same(pieces, text)


# Special in the tokenizer of Gemma 4. The converter calls some of them the user's own.
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
MARKERS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>']


def _gemma4() -> Any:
    """Return the tokenizer that transformers makes of learned pieces and merges of Gemma 4's kind."""
    learning = Tokenizer(models.BPE(unk_token="<unk>"))
    learning.normalizer = normalizers.Replace(" ", "\u2581")
    learning.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    names = [*CONTROLS, *MARKERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=names, show_progress=False, limit_alphabet=150
    )
    learning.train_from_iterator([*CORPUS, "a\n\n\n\nb\n\n"] * 2, trainer)
    learned = json.loads(learning.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    assert ("\n", "\n") in merges
    special = {f"marker{index}_token": marker for index, marker in enumerate([*CONTROLS[5:], *MARKERS])}
    return transformers.GemmaTokenizer(vocab=learned["vocab"], merges=merges, extra_special_tokens=special)


@pytest.fixture(scope="module")
def gemma4_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    original = _gemma4()
    tokenizer = original.backend_tokenizer
    kinds = _piece_kinds(list(tokenizer.get_vocab()))
    kinds |= dict.fromkeys(CONTROLS, gguf_files.CONTROL) | dict.fromkeys(MARKERS, gguf_files.USER_DEFINED)
    path = gguf_files.write_tokenizer_gguf(
        tmp_path_factory.mktemp("gemma4") / "t.gguf",
        tokenizer,
        "gemma4",
        kinds=kinds,
        flags={"add_space_prefix": False},
        ids={"bos": 2, "eos": 6, "unknown": 3, "padding": 0},
        architecture="gemma4",
    )
    return original, path


@settings(max_examples=examples(300))
@given(text=st.lists(PIECES | st.sampled_from([*CONTROLS, *MARKERS, "\n\n\n"]), max_size=12).map("".join))
@example(text="<|turn>user\n\n\n\n Héllo  \U0001f9d1<turn|>\n<|channel>x<channel|>")
@pytest.mark.slow
def test_ids_of_gemma4_are_the_original_s_after_its_first_token(
    gemma4_file: tuple[Any, Path], text: str
) -> None:
    original, ours = gemma4_file[0], _read(gemma4_file[1])[0]
    expected = original.backend_tokenizer.encode(text, add_special_tokens=False)
    found = ours.encode(text)
    assert (found.ids, found.tokens) == ([2, *expected.ids], ["<bos>", *expected.tokens])
    for skips in (True, False):
        decoded = ours.decode(expected.ids, skip_special_tokens=skips)
        assert decoded == original.backend_tokenizer.decode(expected.ids, skip_special_tokens=skips)


def test_all_ends_of_gemma4_are_found_and_no_normal_token(gemma4_file: tuple[Any, Path]) -> None:
    file = GgufFile.read(gemma4_file[1])
    texts = file.metadata["tokenizer.ggml.tokens"]
    ends = generation_config_of(file)["eos_token_id"]
    assert {texts[end] for end in ends} == {"<eos>", "<turn|>", "<|tool_response>"}
    file.metadata["tokenizer.ggml.token_type"][texts.index("<|tool_response>")] = gguf_files.NORMAL
    assert {texts[end] for end in generation_config_of(file)["eos_token_id"]} == {"<eos>", "<turn|>"}


def test_a_tokenizer_of_gemma4_without_merges_is_refused(gemma4_file: tuple[Any, Path]) -> None:
    file = GgufFile.read(gemma4_file[1])
    del file.metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges is missing; take another conversion"):
        tokenizer_of(file)


@pytest.mark.parametrize("merge", ["a", "a ", "a \U0001f9d1", "a \n"])
def test_a_merge_that_is_not_of_tokens_is_refused(gemma4_file: tuple[Any, Path], merge: str) -> None:
    """Also one whose two tokens together are none."""
    file = GgufFile.read(gemma4_file[1])
    file.metadata["tokenizer.ggml.merges"].append(merge)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges is not a pair of tokens"):
        tokenizer_of(file)


def test_pieces_merge_by_the_score_of_what_they_become() -> None:
    """As SentencePiece does: of the pairs in a text, that with the highest score first."""
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    kinds, scores = [gguf_files.NORMAL] * 6, [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    assert scored_merges(PieceVocabulary(tokens, kinds, scores)) == [
        ("b", "c"),
        ("a", "b"),
        ("a", "bc"),
        ("ab", "c"),
    ]
    tokenizer = Tokenizer(
        models.BPE(
            dict(zip(tokens, range(6), strict=True)), scored_merges(PieceVocabulary(tokens, kinds, scores))
        )
    )
    assert tokenizer.encode("abcab").tokens == ["abc", "ab"]
    no_control = scored_merges(PieceVocabulary(tokens, [1, 1, 1, gguf_files.CONTROL, 1, 1], scores))
    assert no_control == [("b", "c"), ("a", "bc")]


MakeFile = Callable[[dict[str, bool]], tuple[Tokenizer, TokenizerFiles]]


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    original = _byte_level(KINDS["llama-bpe"])

    def make(flags: dict[str, bool]) -> tuple[Tokenizer, TokenizerFiles]:
        kinds, ids = dict.fromkeys(SPECIAL, gguf_files.CONTROL), {"bos": 0, "eos": 1, "unknown": 2}
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        gguf_files.write_tokenizer_gguf(
            path, original, "gpt2", "llama-bpe", kinds=kinds, flags=flags, ids=ids
        )
        return _read(path)

    return make


def test_texts_begin_and_end_as_the_metadata_says(make_file: MakeFile) -> None:
    plain = make_file({"add_bos_token": False})[0].encode("def").ids
    assert make_file({})[0].encode("def").ids == [0, *plain]  # what this kind of model has by default
    both, files = make_file({"add_bos_token": True, "add_eos_token": True})
    assert both.encode("def").ids == [0, *plain, 1]
    assert both.encode("def", add_special_tokens=False).ids == plain
    assert files.tokenizer_config["bos_token"] == "<|begin|>"
    assert files.tokenizer_config["eos_token"] == "<|end|>"
    assert files.tokenizer_config["unk_token"] == "<unk>"
    assert files.tokenizer_config["add_eos_token"] is True
    assert both.decode([0, *plain, 1]) == "def"
