"""Experts by the kernels, against those in plain torch, and the choice of experts against that in torch."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from launch_recorder import recorded_launches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_checkpoint import write_config
from workers.model import cuda, native
from workers.model.experts import make_experts as making
from workers.model.experts.expert_products import ExpertWeights, TorchExperts
from workers.model.experts.make_experts import choose, make_experts
from workers.model.experts.mixture import Mixture
from workers.model.experts.mixture_shape import Clamp, ExpertActivation
from workers.model.experts.mixture_weights import MixtureWeights, SharedWeights
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing, choose_experts
from workers.model.linear_weights import LinearWeights
from workers.model.model_config import read_model_config
from workers.model.rank_memory import RankShape, activation_bytes

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.cuda import experts as kernels
from workers.model.experts import triton_experts
from workers.model.experts.triton_experts import TritonExperts

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2**-5}
# The interpreter's products of bfloat16 are wrong; on a device, each more dtype is a minute of compilation.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
modes = pytest.mark.parametrize("is_deterministic", [False, True], ids=["any", "deterministic"])
ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)


class ExpertSizes(NamedTuple):
    """The sizes of a problem."""

    num_tokens: int
    num_experts: int
    num_chosen: int
    hidden_size: int
    size: int


class Problem(NamedTuple):
    weights: ExpertWeights
    x: Tensor
    routing: Routing

    def to(self, device: torch.device, dtype: torch.dtype) -> Problem:
        def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [it.to(device, dtype) for it in tensors]

        weights, biases = self.weights, (self.weights.gate_up_bias, self.weights.down_bias)
        gate_up_bias, down_bias = (None if it is None else it.to(device, dtype) for it in biases)
        weights = dataclasses.replace(
            weights,
            gates=moved(weights.gates),
            ups=moved(weights.ups),
            downs=moved(weights.downs),
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
        )
        routing = Routing(*(it.to(device) for it in self.routing))
        return Problem(weights, self.x.to(device, dtype), routing)


def drawn_routing(rng: np.random.Generator, case: ExpertSizes, share_of_none: float = 0.0) -> Routing:
    """Draw other experts for each token, of which some are not of this rank, and unequal weights."""
    rows = [rng.permutation(case.num_experts)[: case.num_chosen] for _ in range(case.num_tokens)]
    experts = np.array(rows, np.int32).reshape(case.num_tokens, case.num_chosen)
    experts[rng.random(experts.shape) < share_of_none] = -1
    weights = rng.random(experts.shape, dtype=np.float32) + 0.1
    return Routing(torch.from_numpy(experts), torch.from_numpy(weights))


def drawn_problem(
    seed: int,
    case: ExpertSizes,
    activation: ExpertActivation = "silu",
    *,
    has_bias: bool = False,
    share_of_none: float = 0.0,
) -> Problem:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))

    def each(rows: int, columns: int) -> list[Tensor]:
        return [draw(rows, columns) * columns**-0.5 for _ in range(case.num_experts)]

    hidden, size, is_gated = case.hidden_size, case.size, activation != "relu2"
    weights = ExpertWeights(
        each(size, hidden) if is_gated else (),
        each(size, hidden),
        each(hidden, size),
        activation,
        draw(case.num_experts, 2 * size) if has_bias and is_gated else None,
        draw(case.num_experts, hidden) if has_bias else None,
        Clamp(1.3, 0.7),
    )
    return Problem(weights, draw(case.num_tokens, hidden), drawn_routing(rng, case, share_of_none))


def check(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def drawn_case(seed: int) -> ExpertSizes:
    rng = np.random.default_rng(seed + 100)
    num_experts = int(rng.integers(1, 10))
    hidden_size, size = (int(it) for it in rng.integers(1, 90, 2))
    num_chosen = int(rng.integers(1, num_experts + 1))
    return ExpertSizes(int(rng.integers(1, 50)), num_experts, num_chosen, hidden_size, size)


@dtypes
@modes
@pytest.mark.parametrize("seed", range(9))
def test_sums_are_those_of_torch(
    device: torch.device, dtype: torch.dtype, is_deterministic: bool, seed: int
) -> None:
    """Of drawn sizes, activations, biases and ranks that have some of the experts."""
    case, activation = drawn_case(seed), ACTIVATIONS[seed % 3]
    problem = drawn_problem(seed, case, activation, has_bias=seed % 2 == 0, share_of_none=0.3 * (seed % 4))
    weights, x, routing = problem.to(device, dtype)
    exact = problem.to(device, torch.float32)
    expected = TorchExperts(exact.weights)(x.float(), routing)
    experts = make_experts(weights, is_deterministic=is_deterministic)
    assert isinstance(experts, TritonExperts)
    assert (experts.num_experts, experts.hidden_size) == (case.num_experts, case.hidden_size)
    actual = experts(x, routing)
    assert actual.dtype == dtype
    check(actual, expected)
    hidden = torch.ones_like(x)
    experts.add_to(hidden, x, routing)
    assert torch.equal(hidden, torch.ones_like(x) + actual)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1], [0, 1], [1, 0]],  # two experts without rows
        [[2, -1]] * 40,  # all on one
        [[-1, -1]] * 3,  # none at all
        [[3, 2]],
    ],
    ids=["some", "one", "none", "alone"],
)
@modes
def test_rows_on_few_experts(device: torch.device, is_deterministic: bool, rows: list[list[int]]) -> None:
    problem = drawn_problem(1, ExpertSizes(len(rows), 4, 2, 24, 17)).to(device, torch.float32)
    routing = problem.routing._replace(experts=torch.tensor(rows, dtype=torch.int32, device=device))
    expected = TorchExperts(problem.weights)(problem.x, routing)
    check(make_experts(problem.weights, is_deterministic=is_deterministic)(problem.x, routing), expected)


def test_no_token_is_no_launch(device: torch.device) -> None:
    problem = drawn_problem(1, ExpertSizes(0, 4, 2, 24, 17)).to(device, torch.float32)
    assert make_experts(problem.weights)(problem.x, problem.routing).shape == (0, 24)


def bits_hold(experts: TritonExperts, problem: Problem, parts: Sequence[tuple[int, int]]) -> None:
    """Assert that tokens have the same results by themselves as among all."""
    _, x, routing = problem
    whole = experts(x, routing)
    assert not bool(whole.isnan().any())
    for first, end in parts:
        part = Routing(*(it[first:end].clone() for it in routing))
        assert torch.equal(experts(x[first:end], part), whole[first:end]), (first, end)


@dtypes
def test_a_token_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    """In deterministic mode whatever the number of tokens; otherwise where experts have few rows each."""
    drawn = drawn_problem(
        5, ExpertSizes(40, 4, 3, 140, 70), "clamped_swiglu", has_bias=True, share_of_none=0.1
    )
    problem = drawn.to(device, dtype)
    parts = [(0, 1), (39, 40), (3, 38)]
    bits_hold(TritonExperts(problem.weights, is_deterministic=True), problem, parts)
    few = Problem(problem.weights, problem.x[:20], Routing(*(it[:20].clone() for it in problem.routing)))
    bits_hold(TritonExperts(problem.weights), few, [(0, 1), (19, 20), (3, 15)])


def test_the_order_in_which_a_router_names_experts_does_not_matter(device: torch.device) -> None:
    problem = drawn_problem(6, ExpertSizes(20, 7, 4, 48, 33), has_bias=True, share_of_none=0.2)
    weights, x, routing = problem.to(device, torch.float32)
    experts = make_experts(weights)
    turned = Routing(*(it.flip(1).contiguous() for it in routing))
    assert torch.equal(experts(x, turned), experts(x, routing))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@modes
def test_a_nan_spoils_its_token_only(
    device: torch.device, is_deterministic: bool, activation: ExpertActivation
) -> None:
    problem = drawn_problem(7, ExpertSizes(40, 4, 2, 40, 24), activation)
    weights, x, routing = problem.to(device, torch.float32)
    experts = make_experts(weights, is_deterministic=is_deterministic)
    clean = experts(x, routing)
    x[7, 5] = float("nan")
    spoilt = experts(x, routing)
    assert bool(spoilt[7].isnan().all())
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


def test_an_expert_can_be_replaced(device: torch.device) -> None:
    """Which counts nothing."""
    sizes = ExpertSizes(9, 4, 2, 40, 24)
    first, second = (drawn_problem(seed, sizes, has_bias=True).to(device, torch.float32) for seed in (1, 2))
    experts, others = TritonExperts(first.weights), TritonExperts(second.weights)
    for expert in range(sizes.num_experts):
        experts.replace(expert, others.rows(expert))
    assert not bool(experts.counts.any())
    assert torch.equal(experts(first.x, first.routing), others(first.x, first.routing))
    assert experts.counts.tolist() == torch.bincount(first.routing.experts.flatten().cpu()).tolist()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_are_grouped_products(
    device: torch.device, activation: ExpertActivation, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16; of sizes that are not aligned the kernels compute them."""
    monkeypatch.setattr(triton_experts, "_GROUPED_ROWS", 4)
    case = ExpertSizes(40, 6, 3, 64, 40)
    problem = drawn_problem(8, case, activation, has_bias=has_bias, share_of_none=0.2)
    weights, x, routing = problem.to(device, torch.bfloat16)
    experts = make_experts(weights)
    with recorded_launches() as launches:
        actual = experts(x, routing)
    assert launches.count("aten::_grouped_mm") == 2
    assert not {"_gate_up_kernel", "_down_kernel"} & set(launches)
    exact = problem.to(device, torch.float32)
    check(actual, TorchExperts(exact.weights)(x.float(), routing))
    few = Routing(*(it[:7].clone() for it in routing))
    with recorded_launches() as launches:
        experts(x[:7], few)
    assert launches == ["_sort_kernel", "_gate_up_kernel", "_down_kernel", "_add_kernel"]


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "size", "is_deterministic"),
    [
        (torch.bfloat16, 64, 36, False),
        (torch.bfloat16, 60, 40, False),
        (torch.float16, 64, 40, False),
        (torch.bfloat16, 64, 40, True),
    ],
)
def test_what_grouped_products_lack_is_left_to_the_kernels(
    device: torch.device, dtype: torch.dtype, hidden_size: int, size: int, is_deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(triton_experts, "_GROUPED_ROWS", 4)
    problem = drawn_problem(9, ExpertSizes(20, 4, 2, hidden_size, size)).to(device, dtype)
    experts = make_experts(problem.weights, is_deterministic=is_deterministic)
    with recorded_launches() as launches:
        experts(problem.x, problem.routing)
    assert launches == ["_sort_kernel", "_gate_up_kernel", "_down_kernel", "_add_kernel"]


# ---------------------------------------------------------------------------------------------- sorting


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_sorted_rows(device: torch.device, seed: int, tile_rows: int) -> None:
    """Against a stable sort, also of more pairs than a program reads at a time."""
    rng = np.random.default_rng(seed)
    num_experts = int(rng.integers(1, 40))
    num_chosen = int(rng.integers(1, min(num_experts, 8) + 1))
    case = ExpertSizes(int(rng.choice([1, 3, 20, 60])), num_experts, num_chosen, 0, 0)
    experts = drawn_routing(rng, case, float(rng.choice([0.0, 0.5, 1.0]))).experts
    totals = torch.full((num_experts,), 1 << 40, device=device)
    order = kernels.sort_rows(experts.to(device), totals, tile_rows, 128)
    order = kernels.SortedRows(*(it.cpu() for it in order))
    named = experts.flatten()
    pairs = torch.argsort(torch.where(named < 0, num_experts, named), stable=True)
    num_rows = int((named >= 0).sum())
    assert order.pairs.tolist() == [*pairs[:num_rows].tolist(), *[0] * (len(named) - num_rows)]
    rows = torch.full((len(named),), -1)
    rows[pairs[:num_rows]] = torch.arange(num_rows)
    assert order.rows.tolist() == rows.tolist()
    counts = torch.bincount(named[named >= 0], minlength=num_experts)
    assert order.ends.tolist() == counts.cumsum(0).tolist()
    assert (totals.cpu() - (1 << 40)).tolist() == counts.tolist()
    tiles = [
        [expert, first, min(first + tile_rows, int(end))]
        for expert, (count, end) in enumerate(zip(counts, order.ends, strict=True))
        for first in range(int(end - count), int(end), tile_rows)
    ]
    assert order.tiles[: len(tiles)].tolist() == tiles
    assert bool((order.tiles[len(tiles) :, 0] == -1).all())


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 4), (4, 4), (5, 4), (19, 4), (64, 1), (100, 3)])
def test_no_division_of_rows_fills_more_tiles(num_pairs: int, num_experts: int) -> None:
    """The most are filled where each expert has one row and the others are whole tiles of one."""
    tile_rows = 16
    one_each = min(num_pairs, num_experts)
    worst = one_each - 1 + -(-(num_pairs - one_each + 1) // tile_rows)
    assert kernels.most_tiles(num_pairs, num_experts, tile_rows) == worst


# ----------------------------------------------------------------------------------------------- choice

NONE = float("-inf")
RULES = [
    RouterRule(8, 3),
    RouterRule(7, 1, is_normalized=True),
    RouterRule(128, 8, is_normalized=True, scale=2.5),
    RouterRule(5, 5, "softmax_chosen"),
    RouterRule(32, 4, "softmax_chosen", scale=0.5),
    RouterRule(20, 6, "sigmoid", is_normalized=True, sum_offset=1e-20),
    RouterRule(12, 2, "sigmoid", is_normalized=True, least_sum=1.6),
    RouterRule(16, 4, "sigmoid", is_normalized=True, num_groups=4, num_chosen_groups=2),
    RouterRule(20, 3, num_groups=4, num_chosen_groups=2, group_score="best", scale=16.0),
    RouterRule(15, 7, num_groups=3, num_chosen_groups=3),
    RouterRule(6, 2, "sparsemixer", jitter=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_choice_is_that_of_torch(device: torch.device, rule: RouterRule, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(9, rule.num_experts, generator=generator).to(device) * 2
    bias = torch.rand(rule.num_experts, generator=generator).to(device) if has_bias else None
    expected = choose_experts(logits.clone(), rule, bias)
    actual = choose(logits, rule, bias)
    assert actual.experts.dtype == torch.int32
    assert torch.equal(actual.experts, expected.experts)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=2e-6, atol=1e-7)


def test_equal_scores_are_taken_by_number_and_none_twice(device: torch.device) -> None:
    rule = RouterRule(6, 4, "softmax_chosen")
    logits = torch.tensor(
        [[0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [NONE, NONE, 0.0, NONE, NONE, NONE]], device=device
    )
    assert choose(logits, rule).experts.tolist() == [[1, 3, 0, 2], [2, 0, 1, 3]]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("scoring", ["softmax", "softmax_chosen", "sigmoid"])
def test_logits_that_are_no_numbers_choose_experts_that_there_are(device: torch.device, scoring: str) -> None:
    rule = RouterRule(6, 3, scoring, is_normalized=True)  # type: ignore[arg-type]
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(2)).to(device)
    clean = choose(logits, rule)
    logits[1, 2], logits[2, :] = float("nan"), float("nan")
    spoilt = choose(logits, rule)
    assert torch.equal(spoilt.weights[0], clean.weights[0])
    assert bool(spoilt.weights[1:].isnan().any(1).all())
    for row in spoilt.experts.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(6))


# ---------------------------------------------------------------------------------------------- mixture


def drawn_mixture(device: torch.device, *, has_shared: bool, held: range = range(8)) -> Mixture:
    case = ExpertSizes(1, len(held), 2, 32, 24)
    problem = drawn_problem(3, case).to(device, torch.float32)
    generator = torch.Generator().manual_seed(4)

    def linear(rows: int, columns: int) -> LinearWeights:
        return LinearWeights((torch.randn(rows, columns, generator=generator).to(device),), None)

    shared = None
    if has_shared:
        shared = SharedWeights(linear(2 * 16, 32), linear(32, 16), torch.randn(1, 32).to(device))
    weights = MixtureWeights(linear(8, 32), None, held, problem.weights, shared)
    return Mixture(weights, RouterRule(8, 2, is_normalized=True), "silu")


EXPERTS = ["_choose_kernel", "_sort_kernel", "_gate_up_kernel", "_down_kernel", "_add_kernel"]


def test_a_mixture_is_six_launches(device: torch.device) -> None:
    """The last of which adds to the hidden states."""
    mixture = drawn_mixture(device, has_shared=False)
    hidden, x = torch.zeros(2, 32, device=device), torch.randn(2, 32, device=device)
    with recorded_launches() as launches:
        assert mixture.add_to(hidden, x) is None
    assert launches == ["aten::mm", *EXPERTS]
    assert torch.equal(hidden, mixture(x))


def test_shared_experts_are_seven_launches_more(device: torch.device) -> None:
    mixture = drawn_mixture(device, has_shared=True)
    hidden, x = torch.zeros(2, 32, device=device), torch.randn(2, 32, device=device)
    with recorded_launches() as launches:
        assert mixture.add_to(hidden, x) is not None
    shared = ["aten::mm", "_gate_mul_kernel", "aten::mm", "aten::mm", "aten::sigmoid", "aten::mul_"]
    assert launches == ["aten::mm", *EXPERTS, *shared, "aten::add_"]


# What waits for the device, and what a CUDA graph cannot hold.
WAITS = {"aten::nonzero", "aten::item", "aten::_local_scalar_dense", "aten::_to_copy", "aten::where"}


@pytest.mark.parametrize("num_tokens", [1, 60])
def test_nothing_of_a_part_of_the_experts_waits_for_the_device(device: torch.device, num_tokens: int) -> None:
    """Neither with few rows nor with many."""
    mixture = drawn_mixture(device, has_shared=True, held=range(2, 5))
    x = torch.randn(num_tokens, 32, device=device)
    with recorded_launches() as launches:
        mixture(x)
    assert not WAITS & set(launches)
    assert EXPERTS[0] in launches
    assert 0 < int(mixture.counts.sum()) < 2 * num_tokens or num_tokens == 1


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in its block while they live; `most` is their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self._now = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = all(it.alias_info is None for it in func._schema.returns)
        for tensor in result if isinstance(result, tuple) else (result,):
            if is_new and isinstance(tensor, Tensor):
                self._now += tensor.nbytes
                self.most = max(self.most, self._now)
                weakref.finalize(tensor, self._freed, tensor.nbytes)
        return result

    def _freed(self, num_bytes: int) -> None:
        self._now -= num_bytes


@pytest.mark.parametrize(("hidden_size", "size"), [(96, 32), (32, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["grouped", "tiled"])
def test_the_memory_of_many_rows_is_counted(
    device: torch.device, tmp_path: Path, dtype: torch.dtype, hidden_size: int, size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Estimated for a rank is no less than what the experts hold at a time, and little more."""
    monkeypatch.setattr(triton_experts, "_GROUPED_ROWS", 4)
    num_tokens, num_experts, num_chosen = 40, 4, 2
    keys = {"num_experts": num_experts, "num_experts_per_tok": num_chosen, "moe_intermediate_size": size}
    write_config(tmp_path, "qwen3_moe", "bfloat16", hidden_size=hidden_size, **keys)
    config = read_model_config(tmp_path)
    assert config.mixture is not None
    rank = RankShape(config, 0, config.num_layers)
    counted = activation_bytes(rank, 2, num_tokens, 1, is_on_cuda=True)
    dense = dataclasses.replace(config, mixture=config.mixture._replace(rule=RouterRule(1, 0), size=0))
    counted -= activation_bytes(RankShape(dense, 0, config.num_layers), 2, num_tokens, 1)
    problem = drawn_problem(1, ExpertSizes(num_tokens, num_experts, num_chosen, hidden_size, size))
    weights, x, routing = problem.to(device, dtype)
    experts = make_experts(weights)
    with _LiveBytes() as live:
        experts(x, routing)
    out_bytes = x.nbytes  # counted with the hidden states
    assert counted / 3 <= live.most - out_bytes <= counted


@pytest.mark.gpu
def test_a_graph_holds_a_mixture(device: torch.device) -> None:
    """Whatever experts the tokens of its replays choose."""
    mixture = drawn_mixture(device, has_shared=True)
    x = torch.randn(3, 32, device=device)
    mixture(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixture(x)
    for _ in range(3):
        x.copy_(torch.randn(3, 32, device=device))
        graph.replay()
        torch.testing.assert_close(captured, mixture(x))


def test_other_devices_have_the_experts_of_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "DEVICE_TYPES", set())
    problem = drawn_problem(1, ExpertSizes(1, 2, 1, 8, 8)).to(device, torch.float32)
    assert isinstance(making.make_experts(problem.weights), TorchExperts)
