"""The sampling kernels against the sampler that computes everything for the whole vocabulary.

Tokens are equal but where rounding decides: there the score of the token drawn, or the place of a filter's
last token, differs by no more than rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from dense_sampler import DenseSampler, row_keys
from numpy.typing import NDArray
from torch import Tensor

from workers.errors import WorkerError
from workers.messages.rank_channel import SlotSample
from workers.messages.sampling import SamplingParams
from workers.model.noise import gumbel, seed_keys, token_counters
from workers.rank.candidate_draw import is_apart
from workers.rank.logits import SlotNeeds, SlotTable, distinct_tokens

CPU = torch.device("cpu")
# The interpreter is slow: three pieces of 64 tokens, of which the last is not full, with 16 candidates each.
PIECE, CANDIDATES, VOCAB = 64, 16, 150
EOS = (7, 110)
MAX_SLOTS = 16


@pytest.fixture(autouse=True)
def _small_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.model.cuda import sampling

    if device.type != "cpu":
        return
    monkeypatch.setattr(sampling, "_PIECE", PIECE)
    monkeypatch.setattr(sampling, "_CANDIDATES", CANDIDATES)


class Started(NamedTuple):
    """What a slot is started with."""

    params: SamplingParams
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    seed: int = 0


class Both:
    """The same slots on the device and in the reference."""

    def __init__(
        self, slot_to_start: dict[int, Started], device: torch.device, vocab_size: int = VOCAB
    ) -> None:
        from workers.model.cuda.sampling import DeviceSlots, record_words

        self.device, self.vocab_size = device, vocab_size
        self.slot_to_start = slot_to_start
        self.num_outputs = {slot: len(start.output) for slot, start in slot_to_start.items()}
        self.reference = DenseSampler(vocab_size, EOS, CPU)
        self.table = SlotTable(MAX_SLOTS, vocab_size, EOS)
        self.slots = DeviceSlots(MAX_SLOTS, vocab_size, device)
        for slot, (params, prompt, output, seed) in slot_to_start.items():
            self.reference.start(slot, params, prompt, output, seed)
            packed = np.array(prompt if params.penalizes_prompt else (), "<u4").tobytes()
            sample = SlotSample(slot, seed, 0, len(output), np.array(output, "<u4").tobytes())
            ids = distinct_tokens(packed, vocab_size)
            self.table.start((sample,), params, seed_keys([seed]), ids)
        slots = np.array(list(slot_to_start), np.int32)
        words = record_words(self.table.records[slots])
        self.slots.start(self.to_device(slots), self.to_device(words))
        special = SlotNeeds.BIAS | SlotNeeds.PENALTIES | SlotNeeds.ENDS
        for slot, needs in zip(slots.tolist(), self.table.needs(slots), strict=True):
            if needs & special:
                self.slots.start_tokens(slot, *self.table.tokens(slot))

    def to_device(self, values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def draw(
        self, logits: Tensor, slots: Sequence[int], masks: NDArray[np.uint32] | None = None
    ) -> list[int]:
        """Draw a token for each slot, check them, and count them in the reference too."""
        from workers.model.cuda.sampling import sample

        given = logits.to(self.device)
        before = given.clone()
        which = self.to_device(np.array(slots, np.int32))
        last = torch.full((MAX_SLOTS,), -5, dtype=torch.int32, device=self.device)
        masks_gpu = None if masks is None else self.to_device(masks.view(np.int32))
        drawn = sample(given, self.slots, which, masks_gpu, last)
        assert torch.equal(given, before), "logits are not changed"
        assert torch.equal(last[which.long()], drawn)
        assert int((last == -5).sum()) == MAX_SLOTS - len(slots), "other slots keep theirs"
        tokens: list[int] = drawn.tolist()
        scores = self.scores(logits, slots)
        expected = self.reference.sample(logits.clone(), slots, masks).tokens.tolist()
        for row, (token, right) in enumerate(zip(tokens, expected, strict=True)):
            is_near = not bool(is_apart(scores[row, right], scores[row, token]))
            assert token == right or is_near, f"slot {slots[row]}: token {token}, not {right}"
        for slot in slots:
            self.num_outputs[slot] += 1
        return tokens

    def scores(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the reference's scores without a mask, noise included."""
        scores = self.reference.processed_logits(logits.clone(), list(slots))
        seeds = [self.slot_to_start[slot].seed for slot in slots]
        keys = row_keys(seeds, [self.num_outputs[slot] for slot in slots])
        is_random = torch.tensor([not self.slot_to_start[slot].params.is_greedy for slot in slots])
        noise = gumbel(keys, token_counters(self.vocab_size, CPU))
        return scores + torch.where(is_random[:, None], noise, 0.0)


def logits_of(seed: int, num_rows: int, vocab_size: int = VOCAB, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=12,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={3: 4.0, 149: 5.0, 128: -50.0, 1: 2.0},
    min_tokens=9,
    stop_token_ids=(2, 140),
)
PARAMS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=3.0),
    "bias": SamplingParams(temperature=0.5, logit_bias={5: 9.0, 120: 8.0, 17: -100.0}),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=1.5),
    "minimum": SamplingParams(temperature=0.2, min_tokens=5, logit_bias={7: 90.0, 110: 80.0, 9: 70.0}),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_1": SamplingParams(temperature=1.0, top_k=1),
    "many": SamplingParams(temperature=2.0, top_k=40),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "tiny top_p": SamplingParams(temperature=1.0, top_p=1e-6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "top_k and top_p": SamplingParams(temperature=1.5, top_k=15, top_p=0.7),
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_those_of_the_reference(device: torch.device, name: str) -> None:
    """Over steps, in which the tokens drawn count for penalties, minimum length and noise."""
    prompt, output = (5, 9, 9, 120, 70), (3, 3, 130)
    both = Both({slot: Started(PARAMS[name], prompt, output, slot - 9) for slot in (4, 1)}, device)
    for step in range(2):
        both.draw(logits_of(step, 2), [4, 1])


def test_rows_of_all_kinds_in_one_call(device: torch.device) -> None:
    """In an order of slots that is not that of their numbers; a second call has some of them."""
    starts = [Started(params, (1, 2, 3), (4, 4), seed) for seed, params in enumerate(PARAMS.values())]
    both = Both(dict(enumerate(starts)), device)
    order = np.random.default_rng(0).permutation(len(starts)).tolist()
    both.draw(logits_of(5, len(order)), order)
    both.draw(logits_of(6, 4), order[:4])


@pytest.mark.parametrize("name", ["greedy", "plain", "top_k", "top_p"])
def test_masked_tokens_are_never_drawn(device: torch.device, name: str) -> None:
    both = Both({0: Started(PARAMS[name])}, device)
    logits = logits_of(1, 1)
    allowed = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    allowed[[40, 100, 149]] = 1
    masks = np.packbits(allowed, bitorder="little").view("<u4")[None]
    (token,) = both.draw(logits, [0], masks)
    assert token in (40, 100, 149)
    (none,) = both.draw(logits, [0], np.zeros_like(masks))
    assert none == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.5),
    ],
    ids=["top_k", "top_p", "both", "min_p"],
)
@pytest.mark.parametrize("num_likely", [2, 40])
def test_the_least_likely_token_that_is_kept(
    device: torch.device, params: SamplingParams, num_likely: int
) -> None:
    """It is drawn where noise wants it, and the next one never is; also where one piece has more likely
    tokens than it has candidates, and so is read again."""
    seed, num_draws = 11, 4096
    logits = logits_of(2, 1, spread=0.5)
    logits[0, 65 : 65 + num_likely] += 4.0
    reference = DenseSampler(VOCAB, EOS, CPU)
    reference.start(0, params, (), (), seed)
    kept = reference.processed_logits(logits.clone(), [0])[0] > -torch.inf
    last = int(logits[0].masked_fill(~kept, torch.inf).argmin())
    next_one = int(logits[0].masked_fill(kept, -torch.inf).argmax())
    kept[next_one] = True
    keys = row_keys([seed] * num_draws, range(num_draws))
    scores = logits + gumbel(keys, token_counters(VOCAB, CPU))
    winners = scores.masked_fill_(~kept, -torch.inf).argmax(1).tolist()
    starts = [Started(params, (), (1,) * winners.index(token), seed) for token in (last, next_one)]
    first, other = Both(dict(enumerate(starts)), device).draw(logits.repeat(2, 1), [0, 1])
    assert first == last
    assert other != next_one


def test_equal_logits(device: torch.device) -> None:
    """Ties with the last token that a filter keeps are kept, and the first of the likeliest is greedy."""
    starts = {0: Started(SamplingParams()), 1: Started(SamplingParams(temperature=1.0, top_k=2), seed=3)}
    both = Both(starts, device)
    tokens = []
    for _ in range(4):
        first, other = both.draw(torch.zeros(2, VOCAB), [0, 1])
        assert first == 0
        tokens.append(other)
    assert len(set(tokens)) == 4, "any token may be drawn"


def test_a_row_without_a_slot_is_left_out(device: torch.device) -> None:
    from workers.model.cuda.sampling import sample

    both = Both({2: Started(PARAMS["plain"], seed=8), 5: Started(PARAMS["top_k"], seed=9)}, device)
    logits = logits_of(4, 4)
    before = both.slots.records.clone()
    slots = both.to_device(np.array([2, -1, 5, -1], np.int32))
    tokens = sample(logits.to(device), both.slots, slots).tolist()
    assert tokens[1] == tokens[3] == 0
    assert [tokens[0], tokens[2]] == Both(both.slot_to_start, device).draw(logits[[0, 2]], [2, 5])
    changed = (both.slots.records != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [2, 5]


def test_a_row_does_not_depend_on_those_beside_it(device: torch.device) -> None:
    logits = logits_of(7, 3)
    params = (EVERYTHING, PARAMS["plain"], PARAMS["top_p"])
    starts = {slot: Started(it, (1, 5), (6,), slot) for slot, it in enumerate(params)}
    together = Both(starts, device).draw(logits, [0, 1, 2])
    alone = Both(starts, device)
    for slot in (2, 0, 1):
        assert alone.draw(logits[slot : slot + 1], [slot]) == [together[slot]]


def test_a_slot_that_is_started_again_forgets_its_tokens(device: torch.device) -> None:
    from workers.model.cuda.sampling import record_words

    both = Both({0: Started(PARAMS["penalties"], (1, 2), (3,))}, device)
    both.draw(logits_of(1, 1), [0])
    again = Both({0: Started(PARAMS["penalties"], (9,), ())}, device)
    again.slots, before = both.slots, again.slots
    again.slots.start(
        again.to_device(np.array([0], np.int32)), again.to_device(record_words(again.table.records[:1]))
    )
    again.slots.start_tokens(0, *again.table.tokens(0))
    assert torch.equal(again.slots.counts, before.counts)
    again.draw(logits_of(2, 1), [0])


def test_too_many_tokens_are_refused(device: torch.device) -> None:
    from workers.model.cuda.sampling import MOST_BIASES, DeviceSlots

    slots = DeviceSlots(1, 8, device)
    none = np.zeros(0, np.int32)
    ids = np.zeros(MOST_BIASES + 1, np.int32)
    with pytest.raises(WorkerError, match="1025 logit biases"):
        slots.start_tokens(0, ids, ids.view(np.float32), none, none, none)
    assert DeviceSlots.num_bytes(1, 8) == sum(
        tensor.numel() * 4 for tensor in (slots.records, slots.lists, slots.counts)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARAMS)
def test_a_large_vocabulary(device: torch.device, name: str) -> None:
    vocab_size = 151_936
    starts = {slot: Started(PARAMS[name], (5, 120), (3, 3), slot) for slot in range(MAX_SLOTS)}
    both = Both(starts, device, vocab_size)
    for step in range(3):
        both.draw(logits_of(step, MAX_SLOTS, vocab_size), range(MAX_SLOTS))
