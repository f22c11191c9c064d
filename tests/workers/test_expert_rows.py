"""Rows that are sent to the ranks of their experts: results as of one rank, as many bytes as the formula
says, and no rank that waits for one that has failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from met_collectives import MetCollectives, together
from parallel_ranks import BLOCK_TOKENS
from torch import Tensor

from workers.model import expert_rows
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import Decoder, load_decoder
from workers.model.expert_rows import RowProducts
from workers.model.experts.copy_slots import CopyPlace, CopySlots
from workers.model.experts.mixture_shape import MixtureShape
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing
from workers.model.parallel import Unfinished, parallelize
from workers.model.sizes import held_experts, part
from workers.model.weights import ShardSpec

CPU = torch.device("cpu")
NUM_ROWS, HIDDEN_SIZE, NUM_EXPERTS, NUM_CHOSEN = 53, 6, 8, 3
SHAPE = MixtureShape(RouterRule(NUM_EXPERTS, NUM_CHOSEN), 4, (0,))


class KnownMixture:
    """A mixture whose routing is known, and whose expert e gives e + 1 times a row, of which each of the
    ranks that share it computes an equal part. A row begins with its number. The `copied` experts have a copy
    at the last part."""

    def __init__(self, routing: Routing, rank: int, tp: int, ep: int, copied: Sequence[int] = ()) -> None:
        self._routing, self._share = routing, ep / tp
        self._held = held_experts(SHAPE, rank, tp, ep).experts
        self.slots = copied_slots(rank // (tp // ep), ep, copied)
        self.copies = self if copied else None

    def route(self, x: Tensor) -> Routing:
        rows = x[:, 0].long()
        return Routing(self._routing.experts[rows], self._routing.weights[rows])

    def sum_held(self, x: Tensor, routing: Routing) -> Tensor:
        is_held = (routing.experts >= self._held.start) & (routing.experts < self._held.stop)
        if self.copies is not None:
            is_held = self.slots.places(x, routing.experts) >= 0
        assert is_held.any(1).all(), "no row is sent in vain"
        factors = (routing.experts + 1) * routing.weights * is_held
        return x * (factors.sum(1, keepdim=True) * self._share)


def copied_slots(number: int, ep: int, copied: Sequence[int]) -> CopySlots:
    slots = CopySlots(NUM_EXPERTS, CopyPlace(number, ep, len(copied)), CPU)
    for slot, expert in enumerate(copied):
        slots.change(ep - 1, slot, expert, torch.zeros(NUM_EXPERTS + len(copied), dtype=torch.int64))
    return slots


@pytest.fixture(params=[(2, 2), (3, 3), (4, 4), (4, 2)], ids=lambda param: f"tp{param[0]}-ep{param[1]}")
def split(request: pytest.FixtureRequest) -> tuple[int, int]:
    tp, ep = request.param
    return tp, ep


@pytest.mark.parametrize("copied", [(), (0, 1)], ids=["", "copies"])
def test_rows_are_sent_once_to_each_rank_of_their_experts(
    split: tuple[int, int], copied: Sequence[int]
) -> None:
    tp, ep = split
    generator = torch.Generator().manual_seed(11)
    experts = torch.rand(NUM_ROWS, NUM_EXPERTS, generator=generator).argsort(1)[:, :NUM_CHOSEN].int()
    experts[: NUM_ROWS // 3] = torch.tensor([0, 1, 2])  # one rank has much more to compute than others
    routing = Routing(experts, torch.rand(NUM_ROWS, NUM_CHOSEN, generator=generator))
    hidden = torch.randn(NUM_ROWS, HIDDEN_SIZE, generator=generator)
    hidden[:, 0] = torch.arange(NUM_ROWS)
    attention = torch.randn(tp, NUM_ROWS, HIDDEN_SIZE, generator=generator)
    attention[:, :, 0] = 0

    def run(collectives: MetCollectives) -> tuple[Tensor, list[int]]:
        rank = collectives.tp_rank
        mixture: Any = KnownMixture(routing, rank, tp, ep, copied)
        output: Any = lambda x: attention[rank].clone()  # noqa: E731
        products = RowProducts(output, mixture, SHAPE, ep, collectives)
        found = hidden.clone()
        rows = products.own(found)
        rows.add_(products.output(found))
        normed = rows.clone()
        rows.add_(products.mixture(normed))
        products.gather(found)
        return found, collectives.sent

    before = hidden + attention.sum(0)
    factors = ((experts + 1) * routing.weights).sum(1, keepdim=True)
    parts = copied_slots(0, ep, copied).parts(before, experts)
    for rank, (found, sent) in enumerate(together(tp, run)):
        torch.testing.assert_close(found, before + before * factors)
        assert sent == formula(parts.tolist(), rank, tp, ep)
    if copied:
        moved = (parts == ep - 1) & (experts < 2)
        assert 0 < int(moved.sum()) < int((experts < 2).sum()), "some of their rows go to the copies"


def formula(parts: list[list[int]], rank: int, tp: int, ep: int) -> list[int]:
    """The bytes that a rank sends in each exchange: partial sums, rows, results, hidden states. `parts`
    compute the experts of each row."""
    row_bytes = 4 * HIDDEN_SIZE

    def goes(row: int, other: int) -> bool:
        return other // (tp // ep) in parts[row]

    own = part(NUM_ROWS, rank, tp)
    others = [other for other in range(tp) if other != rank]
    num_sent = sum(goes(row, other) for row in own for other in others)
    num_returned = sum(goes(row, rank) for row in range(NUM_ROWS) if row not in own)
    return [
        (NUM_ROWS - len(own)) * row_bytes,
        num_sent * (8 * NUM_CHOSEN + row_bytes),
        num_returned * row_bytes,
        (tp - 1) * len(own) * row_bytes,
    ]


# ------------------------------------------------------------------------------------- a rank that fails


class FailedError(Exception):
    """A failure of one rank, before one of its collectives."""


class Failing:
    """Takes the collectives' place in the model, and fails once, before the `fails_at`-th is begun."""

    def __init__(self, collectives: Unfinished) -> None:
        self._collectives = collectives
        self.tp, self.tp_rank, self.shares_memory = collectives.tp, collectives.tp_rank, True
        self.gather_columns = collectives.gather_columns
        self.fails_at, self.num_done = -1, 0

    def _count(self) -> None:
        if self.num_done == self.fails_at:
            self.fails_at = -1
            raise FailedError
        self.num_done += 1

    def all_reduce(self, tensor: Tensor) -> None:
        self._count()
        self._collectives.all_reduce(tensor)

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        self._count()
        return self._collectives.exchange(parts, num_rows)


class FailingRank:
    """A rank of a model with experts in a thread, which computes a step of a prompt again and again."""

    def __init__(self, decoder: Decoder, collectives: MetCollectives) -> None:
        config, shard = decoder.config, decoder.shard
        self.decoder, self.unfinished = decoder, Unfinished(collectives, decoder)
        self.collectives = Failing(self.unfinished)
        parallelize(decoder, self.collectives)
        shape = (8, config.num_layers, 2, config.num_kv_heads // shard.tp_size, BLOCK_TOKENS, config.head_dim)
        self.kv = torch.zeros(shape)

    def step(self, tokens: Tensor) -> Tensor | None:
        """Return the hidden states after the layers; None where the rank has failed."""
        attention = choose_attention(self.decoder.attention_shape, self.kv)
        step = StepInput.of([SequenceSpan(0, len(tokens), range(8))], BLOCK_TOKENS)
        self.unfinished.begin(len(tokens), 1)
        try:
            hidden = self.decoder.forward(tokens, step, attention)
            self.decoder.logits(hidden[-1:])
        except FailedError:
            self.unfinished.finish(self.kv)
            return None
        return hidden


def test_a_rank_that_fails_sends_no_rows_and_returns_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its sums and exchanges; then the ranks compute on as if nothing had happened."""
    monkeypatch.setattr(expert_rows, "LEAST_ROWS", 8)
    write_family_checkpoint(tmp_path, **CASES["qwen3_moe-2"] | {"num_key_value_heads": 3})
    tokens = torch.randint(200, (23,), generator=torch.Generator().manual_seed(3))
    num_layers = 4
    whole = load_decoder(tmp_path, torch.float32, CPU, ShardSpec(0, num_layers))
    config = whole.config
    assert config.mixture is not None
    num_with = len(config.mixture.layers)
    kv = torch.zeros(8, num_layers, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
    step = StepInput.of([SequenceSpan(0, 23, range(8))], BLOCK_TOKENS)
    expected = whole.forward(tokens, step, choose_attention(whole.attention_shape, kv))
    num_collectives = 1 + 4 * num_with + 2 * (num_layers - num_with)

    def run(collectives: MetCollectives) -> None:
        shard = ShardSpec(0, num_layers, collectives.tp_rank, 3, 3)
        rank = FailingRank(load_decoder(tmp_path, torch.float32, CPU, shard), collectives)
        for fails_at in range(num_collectives):
            rank.collectives.num_done = 0
            rank.collectives.fails_at = fails_at if collectives.tp_rank == 1 else -1
            failed = rank.step(tokens)
            assert (failed is None) == (collectives.tp_rank == 1)
            found = rank.step(tokens)
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert rank.collectives.num_done == num_collectives + (
                fails_at if failed is None else num_collectives
            )

    together(3, run)
