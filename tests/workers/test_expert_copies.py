"""Who computes a row of an expert with copies, and the weights and counts of copies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from torch import Tensor

from workers.errors import WorkerError
from workers.model.decoder import load_decoder
from workers.model.experts.copied_experts import CopiedExperts, with_slots
from workers.model.experts.copy_slots import NUM_CHOICES, CopyPlace, CopySlots
from workers.model.experts.expert_products import ExpertWeights, TorchExperts
from workers.model.experts.make_experts import make_experts
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.routing import Routing
from workers.model.sizes import part
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.expert_copier import ExpertCopier

CPU = torch.device("cpu")
NUM_EXPERTS, NUM_PARTS, NUM_SLOTS, HIDDEN_SIZE, SIZE = 10, 4, 2, 50, 21
DTYPES = [torch.float32, torch.bfloat16]


def slots_of(copies: list[tuple[int, int, int]], number: int = 0) -> CopySlots:
    """Return what a rank of the part knows when (part, slot, expert) were copied."""
    slots = CopySlots(NUM_EXPERTS, CopyPlace(number, NUM_PARTS, NUM_SLOTS), CPU)
    for copy in copies:
        slots.change(*copy, torch.zeros(NUM_EXPERTS + NUM_SLOTS, dtype=torch.int64))
    return slots


def drawn(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Draw rows, and the experts of each."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(dtype)
    return x, torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(1)[:, :3].int()


COPIES = [(1, 0, 0), (3, 1, 0), (0, 0, 9), (2, 0, 3), (2, 1, 1), (2, 0, -1), (0, 1, 6)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_computed_by_one_holder_wherever_that_is_asked(dtype: torch.dtype) -> None:
    x, experts = drawn(400, dtype)
    ranks = [slots_of(COPIES, number) for number in range(NUM_PARTS)]
    parts = ranks[0].parts(x, experts)
    places = torch.stack([rank.places(x, experts) for rank in ranks])
    assert all(torch.equal(rank.parts(x, experts), parts) for rank in ranks[1:])
    assert torch.equal((places >= 0).nonzero()[:, 0].bincount(), parts.flatten().bincount())
    assert torch.equal((places >= 0).int().argmax(0), parts)
    assert ((places >= 0).sum(0) == 1).all()
    for expert in range(NUM_EXPERTS):
        holders = ranks[0].holders(expert)
        copies = {number for number, slot, of in COPIES if of == expert and (number, slot) != (2, 0)}
        assert set(holders) == copies | {ranks[0].owner(expert)}
        found = parts[experts == expert].bincount(minlength=NUM_PARTS) / int((experts == expert).sum())
        for number in range(NUM_PARTS):
            assert abs(found[number] - (number in holders) / len(holders)) < 0.2, "holders have equal shares"


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_computes_a_row_follows_from_that_row_alone(dtype: torch.dtype) -> None:
    """In any order, among any others, and whatever the distance of rows in memory."""
    x, experts = drawn(64, dtype)
    slots = slots_of(COPIES)
    parts = slots.parts(x, experts)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(slots.parts(x[order], experts[order]), parts[order])
    wide = torch.full((64, HIDDEN_SIZE + 3), 7.0, dtype=dtype)
    wide[:, :HIDDEN_SIZE] = x
    rows = zip(torch.split(wide[:, :HIDDEN_SIZE], 1), torch.split(experts, 1), strict=True)
    assert torch.equal(torch.cat([slots.parts(*row) for row in rows]), parts)


def test_a_part_owns_what_it_owned_and_copies_follow_in_slots() -> None:
    x, experts = drawn(200)
    slots = slots_of([(2, 1, 0)], number=2)
    owned = part(NUM_EXPERTS, 2, NUM_PARTS)
    places = slots.places(x, experts)
    is_owned = (experts >= owned.start) & (experts < owned.stop)
    assert torch.equal(places[is_owned], experts[is_owned] - owned.start)
    of_copied = places[experts == 0]
    assert set(of_copied.tolist()) == {-1, len(owned) + 1}
    assert (places[~is_owned & (experts != 0)] == -1).all()
    assert NUM_CHOICES % 2 == 0


def test_tokens_of_copies_are_those_of_the_expert_that_was_there() -> None:
    slots = slots_of([], number=1)
    num_owned = len(part(NUM_EXPERTS, 1, NUM_PARTS))
    counts = torch.zeros(num_owned + NUM_SLOTS, dtype=torch.int64)

    def count(slot: int, tokens: int) -> None:
        counts[num_owned + slot] += tokens

    slots.change(1, 0, 8, counts)
    count(0, 30)
    slots.change(3, 0, 2, counts)  # another part's
    count(0, 5)
    assert slots.tokens(counts) == {8: 35}
    slots.change(1, 0, 9, counts)
    count(0, 7)
    slots.change(1, 1, 8, counts)
    count(1, 100)
    assert slots.tokens(counts) == {8: 135, 9: 7}
    slots.change(1, 1, -1, counts)
    slots.change(1, 0, 8, counts)
    count(0, 1)
    assert slots.tokens(counts) == {8: 136, 9: 7}


class UnlikeGroups:
    """The groups of a rank whose neighbor names other kernels."""

    tp, tp_rank = 2, 0

    def exchange(self, parts: list[Tensor], num_rows: list[int]) -> list[Tensor]:
        assert num_rows == [1, 1]
        return [parts[0], torch.full_like(parts[1], ord("x"))]


def test_ranks_of_unlike_kernels_do_not_start_with_copies(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **CASES["qwen3_moe-1"])
    shard, groups = ShardSpec(0, 4, 0, 2, 2), UnlikeGroups()
    ExpertCopier(load_decoder(tmp_path, torch.float32, CPU, shard), cast("RankGroups", groups))
    decoder = load_decoder(tmp_path, torch.float32, CPU, shard, expert_copies=1)
    with pytest.raises(WorkerError, match=r"^engine\.expert_copies: .*unlike kernels \(.+, x+\).*; set 0"):
        ExpertCopier(decoder, cast("RankGroups", groups))


# -------------------------------------------------------------------------------------------- weights


def weights_of(num_experts: int, dtype: torch.dtype, *, has_biases: bool) -> ExpertWeights:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) * 0.2).to(dtype)

    gates, ups = (draw(num_experts, SIZE, HIDDEN_SIZE) for _ in range(2))
    downs = draw(num_experts, HIDDEN_SIZE, SIZE)
    biases = (draw(num_experts, 2 * SIZE), draw(num_experts, HIDDEN_SIZE)) if has_biases else (None, None)
    return ExpertWeights(list(gates), list(ups), list(downs), "clamped_swiglu", *biases)


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_computes_the_bits_of_its_original(
    dtype: torch.dtype, backend: str, *, has_biases: bool
) -> None:
    """Of two ranks with five experts each; the weights of the second are other ones."""
    whole = weights_of(10, dtype, has_biases=has_biases)
    ranks = []
    for number in range(2):
        owned = part(10, number, 2)
        cut = slice(owned.start, owned.stop)
        own = dataclasses.replace(
            whole,
            gates=whole.gates[cut],
            ups=whole.ups[cut],
            downs=whole.downs[cut],
            gate_up_bias=None if whole.gate_up_bias is None else whole.gate_up_bias[cut],
            down_bias=None if whole.down_bias is None else whole.down_bias[cut],
        )
        experts = make_experts(with_slots(own, NUM_SLOTS))
        assert isinstance(experts, PackedExperts if backend == "kernels" else TorchExperts)
        slots = CopySlots(10, CopyPlace(number, 2, NUM_SLOTS), CPU)
        counts = torch.zeros(5 + NUM_SLOTS, dtype=torch.int64)
        ranks.append((experts, CopiedExperts(experts, owned, slots, counts)))
    (owner, of_owner), (holder, of_holder) = ranks
    x = drawn(30, dtype)[0]

    def result(experts: Any, place: int) -> Tensor:
        ones = torch.ones(len(x), 1)
        found: Tensor = experts(x, Routing(torch.full((len(x), 1), place, dtype=torch.int32), ones))
        return found

    before = [result(holder, place) for place in range(5)]
    for expert, slot in ((3, 1), (0, 0), (2, 1)):
        packed = of_owner.read(expert)
        assert packed.nbytes == of_holder.num_bytes == of_owner.num_bytes
        of_holder.write(slot, packed)
        assert torch.equal(result(holder, 5 + slot), result(owner, expert))
    assert all(torch.equal(result(holder, place), it) for place, it in enumerate(before))
