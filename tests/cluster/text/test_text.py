"""Incremental text equals the text of all tokens at once; stop strings cut exactly, wherever tokens end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_harness import train_tokenizer, write_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece_files import BYTES, SPECIAL, Piece
from sentencepiece_files import write_model as write_pieces
from slow_cases import examples
from text_harness import train_byte_fallback
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.errors import InvalidRequestError
from cluster.text.sample_text import SampleText, StopStrings
from cluster.text.tokenizer import REPLACEMENT, SHORT_CHARS, ModelText
from kvtransfer.common.panics import PanicError
from workers.errors import CheckpointError
from workers.model.model_folder import described_folder

BYTE_LEVEL = train_tokenizer()
PANIC: type[BaseException] = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
TEXTS = st.text(st.sampled_from("ab é€ 😀\n\ufffdñ漢"), max_size=30)


BYTE_FALLBACK = train_byte_fallback()


def raw(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = ModelText(tokenizer).detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40))
def test_byte_level_pieces_of_any_tokens_make_the_whole_text(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=examples(300))
@given(TEXTS)
@example("\ufffd\ufffdé")
def test_no_piece_of_a_text_has_half_a_character(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode(text).ids
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        if REPLACEMENT not in text:
            assert not any(REPLACEMENT in piece for piece in pieces)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["</s>", "▁the", "▁", "a", "▁a", "b", "<0xE2>"]), max_size=20))
def test_skipped_tokens_leave_spaces_alone(tokens: list[str]) -> None:
    ids = [index for token in tokens if (index := BYTE_FALLBACK.token_to_id(token)) is not None]
    assert "".join(pieces_of(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids, skip_special_tokens=True)


def test_endless_broken_bytes_do_not_pile_up() -> None:
    broken = BYTE_FALLBACK.token_to_id("<0xFF>")
    detokenizer: Any = ModelText(BYTE_FALLBACK).detokenizer()
    text = "".join(detokenizer.push(broken) for _ in range(500))
    assert len(text) == 500
    assert len(detokenizer._window) < 50


def test_a_character_in_bytes_is_shown_with_its_last_byte() -> None:
    detokenizer = ModelText(BYTE_FALLBACK).detokenizer()
    ids = [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "漢€".encode()]
    assert [detokenizer.push(token) for token in ids] == ["", "", "漢", "", "", "€"]


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule itself: the first stop string to be complete, and of those the one that began first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_stop_strings_cut_the_same_wherever_pieces_end(stops: list[str], pieces: list[str]) -> None:
    matcher, shown, stopped = StopStrings(stops), "", ""
    whole = "".join(pieces)
    for piece in pieces:
        found, stopped = matcher.push(piece)
        shown += found
        assert cut(whole, stops)[0].startswith(shown)
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, bool(stopped)) == cut(whole, stops)
    assert not stopped or stopped in stops


def test_what_cannot_begin_a_stop_string_is_not_held_back() -> None:
    matcher = StopStrings(["END", "\n\n"])
    assert matcher.push("the E").text == "the "
    assert matcher.push("x").text == "Ex"
    assert matcher.push("y\n").text == "y"
    assert matcher.push("z").text == "\nz"


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.sampled_from(["", "a", "é€", "\n"]))
def test_grouping_of_tokens_does_not_matter(text: str, sizes: list[int], stop: str) -> None:
    """After k tokens the same text is out, whether they came one by one or in deltas: resuming needs it."""
    model = ModelText(BYTE_LEVEL)
    ids = list(BYTE_LEVEL.encode(text).ids)
    stops = [stop] if stop else []
    grouped, single = SampleText(model.detokenizer(), stops), SampleText(model.detokenizer(), stops)
    out_grouped = out_single = ""
    for size in sizes:
        group, ids = ids[:size], ids[size:]
        step = grouped.push(raw(group), "")
        out_grouped += step.text
        for count, token in enumerate(group, 1):
            one = single.push(raw([token]), "")
            out_single += one.text
            if one.finish:
                assert (step.finish, step.num_tokens) == ("stop", count)
                break
        assert out_grouped == out_single
        if step.finish:
            return


def test_an_end_token_is_counted_and_not_shown() -> None:
    model = ModelText(BYTE_LEVEL)
    ids = list(BYTE_LEVEL.encode("the fox").ids)
    step = SampleText(model.detokenizer()).push(raw(ids), "stop")
    assert (step.num_tokens, step.text) == (len(ids), BYTE_LEVEL.decode(ids[:-1]))


def test_an_unfinished_character_shows_at_the_end() -> None:
    model = ModelText(BYTE_LEVEL)
    first = BYTE_LEVEL.encode("€").ids[0]
    text = SampleText(model.detokenizer())
    assert text.push(raw([first]), "").text == ""
    assert text.push(b"", "length").text == BYTE_LEVEL.decode([first])


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ModelText.load(tmp_path)


@pytest.mark.parametrize("change", [{"version": 7}, {"model": {"type": "BPE"}}, None, {"pre_tokenizer": []}])
def test_a_tokenizer_that_cannot_be_read_is_named(change: dict[str, Any] | None, tmp_path: Path) -> None:
    file = write_model(tmp_path) / "tokenizer.json"
    file.write_text("{" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: unreadable: "):
        ModelText.load(tmp_path)


def test_a_tokenizer_whose_merges_break_its_reader_is_named(tmp_path: Path) -> None:
    """The reader then panics, which is no `Exception`."""
    file = write_model(tmp_path) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"] |= {"continuing_subword_prefix": "x" * 300}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: unreadable: "):
        ModelText.load(tmp_path)


def test_a_panic_of_the_pattern_is_an_error_of_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: the regex engine gives up, after a time in which no event loop may stand again."""
    tokenizer = Tokenizer(models.BPE(vocab={"x": 0, "y": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = ModelText.load(tmp_path)
    assert text.short_chars == SHORT_CHARS
    monkeypatch.setattr("cluster.text.tokenizer._SLOW_S", 0.0)  # a fast CPU panics sooner
    with pytest.raises(
        InvalidRequestError, match="prompt: the model's tokenizer fails on this text"
    ) as failed:
        text.encode("x" * 28)
    assert isinstance(failed.value.__cause__, PanicError)
    assert text.short_chars == 0
    with pytest.raises(InvalidRequestError):
        text.encode("x" * 28)
    assert text.encode("xy") == raw([0, 1])


@pytest.mark.parametrize("error", [PANIC("words of the prompt"), RuntimeError("words of the prompt")])
def test_whatever_the_library_raises_is_an_error_of_ours(error: BaseException) -> None:
    class Failing:
        """The library, every call of which fails once it is loaded."""

        def __init__(self) -> None:
            self.is_loaded = False
            self._tokenizer = train_byte_fallback()

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._tokenizer, name)

            def call(*args: Any, **options: Any) -> Any:
                if self.is_loaded:
                    raise error
                return found(*args, **options)

            return call

    library = Failing()
    text = ModelText(library)
    detokenizer = text.detokenizer()
    library.is_loaded = True
    for work in (lambda: text.encode("a"), lambda: text.encode("a" * 5000), lambda: text.decode(raw([300]))):
        with pytest.raises(InvalidRequestError) as failed:
            work()
        assert "words of the prompt" not in str(failed.value)
    expected = PanicError if isinstance(error, PANIC) else RuntimeError
    for other in (
        lambda: detokenizer.push(2),
        lambda: text.token_bytes(2),
        lambda: text.detokenizer(["a"]),
    ):
        with pytest.raises(expected):
            other()


def test_encode_and_decode(tmp_path: Path) -> None:
    model = ModelText.load(write_model(tmp_path))
    tokens = model.encode("<|im_start|>the fox")
    assert np.frombuffer(tokens, dtype="<u4").tolist() == BYTE_LEVEL.encode("<|im_start|>the fox").ids
    assert model.decode(tokens) == "the fox"
    assert model.decode(tokens, keep_special_tokens=True) == "<|im_start|>the fox"


def test_a_sentencepiece_model_serves_texts(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", "llama", seed=0)
    letters = [Piece(letter, -float(rank)) for rank, letter in enumerate(["\u2581", *"abcdefgh"])]
    write_pieces(tmp_path / "model" / "tokenizer.model", [*SPECIAL, *BYTES, *letters])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        ModelText.load(tmp_path / "model")
    model = ModelText.load(described_folder(tmp_path / "model", tmp_path / "cache"))
    tokens = model.encode("a bad é")
    assert np.frombuffer(tokens, "<u4")[0] == 1
    assert model.decode(tokens) == "a bad é"
