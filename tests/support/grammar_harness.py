"""A small tokenizer, grammars of finitely many texts, and the slots of a rank that follow them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLParserLimits
from numpy.typing import NDArray

from workers.messages.rank_channel import SlotSample, SlotStart
from workers.messages.sampling import Grammar, SamplingParams
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.input_batch import PlannedRows
from workers.rank.slot_matchers import SlotMatchers, StepMasks

# Two end tokens, letters, and tokens of several letters.
END, OTHER_END = 0, 1
LETTERS = "abc"
LONGER = ("ab", "bc", "aa", "abc", "ca")
TOKENS = ("<end>", "<other>", *LETTERS, *LONGER)
# The model's tokens: some have no text.
VOCABULARY = 40
MAX_SLOTS = 8


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer of `TOKENS`, by their place."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": TOKENS[index], **special} for index in (END, OTHER_END)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(TOKENS)},
            "merges": ["a b", "b c", "a a", "ab c", "c a"],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def small_grammars(
    folder: Path, limits: LLParserLimits | None = None, vocab_size: int = VOCABULARY
) -> CompiledGrammars:
    """Return the grammars of a model with that tokenizer, none compiled yet."""
    write_tokenizer(folder)
    return CompiledGrammars(folder, vocab_size, (END, OTHER_END), limits)


def choice(texts: Collection[str]) -> Grammar:
    """Return the grammar of one of these texts."""
    return Grammar.of("start: " + " | ".join(json.dumps(text) for text in sorted(texts)))


def allowed(texts: Collection[str], output: Sequence[int]) -> set[int]:
    """Return the tokens that may follow an output, by trying every one: all that lead on to one of the
    texts."""
    if output and output[-1] in (END, OTHER_END):
        return set(range(VOCABULARY))  # nobody reads what is sampled now
    text = "".join(TOKENS[token] for token in output)
    ends = {END, OTHER_END} if text in texts else set()
    return ends | {
        token
        for token in range(2, len(TOKENS))
        if any(whole.startswith(text + TOKENS[token]) for whole in texts)
    }


def assert_allows(mask: NDArray[np.uint32], texts: Collection[str], output: Sequence[int]) -> set[int]:
    """Compare a mask with the tokens that may follow. Where the next letter is certain, the library may
    insist on the token that the tokenizer itself would take. Return the tokens that the mask allows."""
    found, expected = members(mask), allowed(texts, output)
    text = "".join(TOKENS[token] for token in output if token not in (END, OTHER_END))
    is_certain = text not in texts and len({it[len(text)] for it in texts if it.startswith(text)}) == 1
    assert found
    assert found <= expected if is_certain else found == expected, f"{found} after {text!r} of {texts}"
    return found


def members(mask: NDArray[np.uint32], vocab_size: int = VOCABULARY) -> set[int]:
    """Return the tokens that a mask allows."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<u4").tobytes()


def rows_of(slots: Sequence[int]) -> PlannedRows:
    """Return the rows of a step in which these slots decode."""
    own, lengths = np.arange(len(slots), dtype=np.int32), np.ones(len(slots), np.int32)
    ids = np.array(slots, np.int32)
    return PlannedRows(own, ids, lengths, lengths, ids, own, own)


class MatcherHarness:
    """The matchers of one rank. `lifted` are the slots that were let end early."""

    def __init__(self, grammars: CompiledGrammars, num_threads: int = 1) -> None:
        self.grammars = grammars
        self.lifted: list[int] = []
        self.matchers = SlotMatchers(grammars, MAX_SLOTS, num_threads, self.lifted.append)

    def start(
        self,
        slot: int,
        grammar: Grammar | None,
        output: Sequence[int] = (),
        digest: bytes = b"",
        sampling: SamplingParams | None = None,
    ) -> None:
        sample = SlotSample(slot, 0, output[-1] if output else 3, len(output), packed(output), digest)
        name = b"" if grammar is None else grammar.digest
        self.matchers.start(SlotStart(sampling or SamplingParams(), (sample,), b"", name))

    def masks(self, slots: Sequence[int]) -> StepMasks | None:
        return self.matchers.masks(rows_of(slots))

    def advance(self, slot_to_token: Mapping[int, int]) -> None:
        tokens = np.array(list(slot_to_token.values()), np.int64)
        assert self.matchers.advance(rows_of(list(slot_to_token)), tokens) == ()
