"""Products of few rows with a norm before them or an addition or activation behind them: their results, bits,
division of the work, and choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from triton.runtime import interpreter
from triton.runtime.errors import OutOfResources

from workers.model.cuda import thin_choice
from workers.model.cuda.card import Card
from workers.model.cuda.quantized_product import Segments
from workers.model.cuda.thin_choice import ThinKind, is_usable, usable_plan
from workers.model.cuda.thin_product import (
    INPUTS,
    MOST_ROWS,
    ThinPlan,
    ThinShape,
    allocate_arrivals,
    multiply,
    product_us,
    thin_plan,
)
from workers.model.finish import Finish
from workers.model.norm import Norm

TOLERANCES = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
FINISHES: tuple[Finish, ...] = ("store", "add", "silu", "gelu_tanh")
# Results and inputs of a row, and parts of a result, of the products of Llama 3 8B, of a rank of eight, and
# of a small model.
SHAPES = {
    "qkv": ThinShape(6144, 4096),
    "output": ThinShape(4096, 4096),
    "gate_up": ThinShape(14_336, 4096, 2),
    "down": ThinShape(4096, 14_336),
    "an eighth of qkv": ThinShape(768, 4096),
    "small down": ThinShape(1024, 3072),
    "tiny": ThinShape(48, 96),
}
CARDS = {80: 108, 89: 142, 90: 132, 100: 148, 120: 170}


@dataclasses.dataclass(frozen=True)
class DrawnProduct:
    """A drawn product: rows, weight, bias, what is in the memory of the results before, and the norm."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    held: Tensor
    norm: Norm | None
    finish: Finish

    @staticmethod
    def drawn(
        device: torch.device, shape: ThinShape, dtype: torch.dtype, finish: Finish, num_rows: int = MOST_ROWS,
        *, has_bias: bool = False, has_norm: bool = False, seed: int = 0,
    ) -> DrawnProduct:  # fmt: skip
        draw = torch.Generator().manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=draw)

        num_weight_rows = shape.num_outputs * shape.num_parts
        x = normal(num_rows, shape.num_inputs) * (20 if has_norm else 1)
        weight = normal(num_weight_rows, shape.num_inputs) * shape.num_inputs**-0.5
        norm = Norm(normal(shape.num_inputs).to(device), 1e-5) if has_norm else None
        bias = normal(num_weight_rows).to(device, dtype) if has_bias else None
        x, weight, held = (it.to(device, dtype) for it in (x, weight, normal(num_rows, shape.num_outputs)))
        return DrawnProduct(x, weight, bias, held, norm, finish)

    def computed(self, plan: ThinPlan, rows: slice = slice(None)) -> Tensor:
        """Return the results of rows, and check that the counts of programs are zeros again."""
        out = self.held[rows].clone()
        arrivals = allocate_arrivals(out.shape[1], out.device)
        multiply(
            self.x[rows], self.weight, self.bias, out, arrivals, plan, norm=self.norm, finish=self.finish
        )
        assert not arrivals.any()
        return out

    def expected(self) -> Tensor:
        """Compute the results in float64, without rounding in between."""
        x = self.x.double()
        if self.norm is not None:
            x = F.rms_norm(x, (x.shape[1],), self.norm.weight.double(), self.norm.eps)
        sums = F.linear(x, self.weight.double(), None if self.bias is None else self.bias.double())
        if self.finish == "store":
            return sums
        if self.finish == "add":
            return self.held.double() + sums
        gate, up = sums.chunk(2, 1)
        return (F.silu(gate) if self.finish == "silu" else F.gelu(gate, approximate="tanh")) * up


def plan_of(shape: ThinShape, outputs: int = 32, num_segments: int = 1) -> ThinPlan:
    steps = math.ceil(math.ceil(shape.num_inputs / INPUTS) / num_segments)
    return ThinPlan(outputs, Segments(steps * INPUTS, num_segments), 3)


@pytest.mark.parametrize("seed", range(6))
def test_results_are_those_of_a_product_and_what_is_around_it(device: torch.device, seed: int) -> None:
    """Of drawn shapes, in one segment and in several."""
    draw = np.random.default_rng(seed)
    finish: Finish = FINISHES[seed % 4]
    dtype = torch.bfloat16 if seed < 4 else torch.float16
    num_segments = int(draw.integers(1, 4))
    num_inputs = int(draw.integers(1, 5 * 8)) * 16 + INPUTS * num_segments
    shape = ThinShape(int(draw.integers(1, 80)), num_inputs, 2 if finish in ("silu", "gelu_tanh") else 1)
    case = DrawnProduct.drawn(
        device, shape, dtype, finish, int(draw.integers(1, MOST_ROWS + 1)), has_bias=bool(seed % 3),
        has_norm=dtype == torch.bfloat16 and seed != 1, seed=seed,
    )  # fmt: skip
    result, expected = case.computed(plan_of(shape, 16 << seed % 2, num_segments)), case.expected()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("num_segments", [1, 3])
def test_a_row_has_the_same_bits_beside_any_others(device: torch.device, num_segments: int) -> None:
    shape = ThinShape(40, 3 * INPUTS)
    case = DrawnProduct.drawn(device, shape, torch.bfloat16, "store", has_norm=True, seed=num_segments)
    plan = plan_of(shape, 32, num_segments)
    whole = case.computed(plan)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 20), slice(31, 32)):
        assert torch.equal(case.computed(plan, rows), whole[rows]), rows


@pytest.mark.parametrize("finish", ["add", "silu"])
def test_segments_are_added_in_their_order_whichever_ends_last(
    device: torch.device, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs run in every order in the interpreter; a card has one that it does not tell."""
    shape = ThinShape(20, 3 * INPUTS, 2 if finish == "silu" else 1)
    case = DrawnProduct.drawn(device, shape, torch.bfloat16, finish, 5, has_norm=True, has_bias=True, seed=4)
    plan = plan_of(shape, 32, 3)
    known = case.computed(plan)
    if device.type != "cpu":
        assert all(torch.equal(case.computed(plan), known) for _ in range(100))
        return
    set_place = interpreter.InterpreterBuilder.set_grid_idx
    for order in itertools.permutations(range(3)):

        def set_other(builder: Any, x: int, y: int, z: int, order: tuple[int, ...] = order) -> None:
            set_place(builder, x, order[y], z)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", set_other)
        assert torch.equal(case.computed(plan), known), order


def test_a_norm_of_rows_beyond_half_precision_is_finite(device: torch.device) -> None:
    shape = ThinShape(16, 2 * INPUTS)
    case = DrawnProduct.drawn(device, shape, torch.bfloat16, "store", 2, has_norm=True)
    large = dataclasses.replace(case, x=case.x * 1e15)
    torch.testing.assert_close(
        large.computed(plan_of(shape)).double(), large.expected(), rtol=2e-2, atol=4e-2
    )
    none = dataclasses.replace(case, x=case.x * 0)
    assert not none.computed(plan_of(shape)).any(), "rows of zeros have a norm"


# ------------------------------------------------------------------------------- division of the work


@pytest.mark.parametrize("capability", CARDS)
@pytest.mark.parametrize("name", SHAPES)
def test_plans_fit_a_card_and_cover_the_inputs(capability: int, name: str) -> None:
    shape, card = SHAPES[name], Card(capability)
    plan = thin_plan(shape, card, CARDS[capability])
    assert plan.segments.num_inputs % INPUTS == 0
    before_last = plan.segments.num_inputs * (plan.segments.num_segments - 1)
    assert before_last < shape.num_inputs <= plan.segments.num_inputs * plan.segments.num_segments
    stage_bytes = INPUTS * (2 * plan.outputs * shape.num_parts + 2 * MOST_ROWS + 4)
    assert (plan.num_stages - 1) * stage_bytes < card.shared_bytes
    assert plan.num_stages >= 3


def test_weights_of_few_outputs_are_cut_into_segments() -> None:
    """As many programs read as there are multiprocessors, or most of them; others need no segments."""
    card, num = Card(90), CARDS[90]
    name_to_plan = {name: thin_plan(shape, card, num) for name, shape in SHAPES.items()}
    segments = {name: plan.segments.num_segments for name, plan in name_to_plan.items()}
    assert segments["qkv"] == segments["gate_up"] == 1
    assert segments["down"] > 1
    assert segments["an eighth of qkv"] > 1
    for name in ("qkv", "output", "gate_up", "down", "an eighth of qkv"):
        plan = name_to_plan[name]
        programs = -(-SHAPES[name].num_outputs // plan.outputs) * plan.segments.num_segments
        assert programs >= 0.7 * num, name


def test_the_time_of_a_plan_follows_from_bytes_and_waves() -> None:
    """By hand for one wave of an H200: of 128 programs each reads 32 outputs of 4,096 inputs at the rate of
    the memory, 132 times 36,000 bytes in a microsecond, and 32 rows at twice that rate."""
    shape = ThinShape(4096, 4096)
    plan = ThinPlan(32, Segments(4096, 1), 8)
    weights_us = 128 * 32 * 4096 * 2 / (132 * 36_000)
    rows_us = 128 * 32 * 4096 * 2 / (2 * 132 * 36_000)
    assert product_us(shape, plan, Card(90), 132) == pytest.approx(1 + weights_us + rows_us)
    # Too few bytes on their way: two stages of 32 outputs and 128 inputs for each program and microsecond.
    slow = plan._replace(num_stages=3)
    slow_us = 128 * 32 * 4096 * 2 / (128 * 2 * 32 * 128 * 2)
    assert product_us(shape, slow, Card(90), 132) == pytest.approx(1 + slow_us + rows_us)
    # Few programs read at one and a half times the share of theirs; more programs end sooner.
    few = ThinPlan(128, Segments(4096, 1), 6)
    few_us = 32 * 128 * 4096 * 2 / (1.5 * 36_000 * 32)
    assert product_us(shape, few, Card(90), 132) == pytest.approx(1 + few_us + rows_us / 4)
    cut = ThinPlan(128, Segments(1024, 4), 6)
    assert product_us(shape, cut, Card(90), 132) < product_us(shape, few, Card(90), 132)


def test_what_segments_exchange_is_little() -> None:
    """At most 4 % of the bytes of a weight of Llama 3 8B, at 32 rows, which stay in the L2 cache."""
    for name in ("qkv", "output", "gate_up", "down"):
        shape = SHAPES[name]
        for capability, num in CARDS.items():
            count = thin_plan(shape, Card(capability), num).segments.num_segments
            if count > 1:
                exchanged = count * MOST_ROWS * shape.num_outputs * shape.num_parts * 4
                read = shape.num_outputs * shape.num_parts * shape.num_inputs * 2
                assert exchanged <= 0.125 * read, (name, capability)


# ------------------------------------------------------------------------------------------- choice


def test_a_product_is_used_where_it_is_right_and_takes_no_longer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 11.0, 10.0, 9.0])
    monkeypatch.setattr(thin_choice, "median_us", lambda *_: next(times))
    kinds: tuple[tuple[Finish, bool], ...] = (("silu", True), ("add", False))
    for finish, has_norm in kinds:
        shape = ThinShape(16, 160, 2 if finish == "silu" else 1)
        case = DrawnProduct.drawn(device, shape, torch.bfloat16, finish, has_norm=has_norm, has_bias=has_norm)
        kind = ThinKind(torch.bfloat16, shape, finish, has_norm, has_norm)
        assert is_usable(case.weight, case.bias, kind, plan_of(shape)) is (finish == "silu"), "9 is less"

    def wrong(*args: Any, **options: Any) -> None:
        multiply(*args, **options)
        args[3].mul_(1.1)

    def refused(*_: Any, **__: Any) -> None:
        raise OutOfResources(1 << 20, 99 << 10, "shared memory")

    for other in (wrong, refused):
        monkeypatch.setattr(thin_choice, "multiply", other)
        assert not is_usable(case.weight, case.bias, kind, plan_of(shape))


def test_float16_has_no_norm_in_its_products_and_float32_no_such_products(device: torch.device) -> None:
    weight = torch.zeros(32, 64, device=device)
    assert usable_plan(weight, None, "store", has_norm=False) is None
    assert usable_plan(weight.half(), None, "store", has_norm=True) is None
    if device.type == "cpu":
        assert usable_plan(weight.half(), None, "store", has_norm=False) is not None
        assert usable_plan(weight.bfloat16(), None, "store", has_norm=True) is not None
