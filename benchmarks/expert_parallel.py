"""A layer's experts on several ranks: rows sent to the ranks of their experts, beside two sums over all.

A JSON line for each number of ranks and of rows, and for each load. `sums_ms` and `rows_ms` are the least
times from the product of attention's output to the hidden states after the experts, of rounds in which both
ways take turns; `sums_cpu_ms` and `rows_cpu_ms` the least times of the first rank's processor in the same
rounds, which neither waits nor other processes lengthen. `bytes` is what all ranks together have sent by
rows, as counted by their collectives, and `formula_bytes` what follows from the routing. `two_sums_bytes` is
what two ring all-reduces send. `mean_others` is to how many other ranks a row goes.

*even*: each expert is chosen as often as its router says, about alike. *hot*: 40 % of the rows choose the
first expert beside others, and its rank computes for all of them. *copied*: the same, with `--copies` slots
in each rank for copies of experts, placed as an engine core does. `busiest_share` is the part
of all (row, expert) pairs that the busiest rank computes. `busiest_sums_cpu_ms` and `busiest_rows_cpu_ms` are
the processor times of the rank that has most, and `sums_of_even` and `rows_of_even` how many times those of
even loads they are: what a stage of ranks with cores of their own waits for.

`choice_us` is the time in which a rank finds the rows that it computes of a step. A rank computes with one
thread. With fewer cores than ranks the times say little, and the bytes are the same.

    python -m benchmarks.expert_parallel [--ranks 2,4] [--rows 16,64,256,1024] [--dtype bf16] [--copies 1]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.experts import SHAPES
from benchmarks.rank_parts import answer, joined_groups, rank_parts
from benchmarks.replica import CLOCK
from workers.model.apply_norm import apply_norm
from workers.model.expert_rows import RowProducts, routed_row_bytes, row_parts
from workers.model.experts.copy_slots import CopyPlace
from workers.model.experts.expert_products import ExpertWeights
from workers.model.experts.mixture import Mixture
from workers.model.experts.mixture_shape import MixtureShape
from workers.model.experts.mixture_weights import MixtureWeights
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import choose_experts
from workers.model.linear_weights import LinearWeights
from workers.model.make_linear import make_linear
from workers.model.norm import Norm
from workers.model.sizes import held_experts
from workers.rank.collectives import RankGroups
from workers.replica.copy_placement import CopyRules, place_copies

SMALL = SHAPES["small"]
HIDDEN_SIZE = SMALL.hidden_size
RULE = RouterRule(SMALL.num_experts, SMALL.num_chosen, "softmax", is_normalized=True)
HOT_SHARE = 0.4
LOADS = ("even", "hot", "copied")
WAYS = ("sums", "rows")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rows", default="16,64,256,1024")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--links", default="memory", choices=("memory", "gloo"))
    parser.add_argument("--chosen", type=int, default=SMALL.num_chosen, help="experts of a row")
    parser.add_argument("--copies", type=int, default=1, help="slots for copies of experts in a rank")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        play(json.loads(args.part))
        return
    for num_ranks in map(int, args.ranks.split(",")):
        order = {
            "num_ranks": num_ranks,
            "rows": list(map(int, args.rows.split(","))),
            "dtype": args.dtype,
            "links": args.links,
            "repeat": args.repeat,
            "chosen": args.chosen,
            "copies": args.copies,
        }
        measure(order)


def measure(order: dict[str, Any]) -> None:
    """Print the lines of one number of ranks."""
    with rank_parts("benchmarks.expert_parallel", order) as ranks:
        for _ in order["rows"]:
            even: dict[str, float] = {}
            for _ in LOADS:
                answers = [answer(rank) for rank in ranks]
                first = answers[0]
                first["bytes"] = sum(it["bytes"] for it in answers)
                busiest = {way: max(it[f"{way}_cpu_ms"] for it in answers) for way in WAYS}
                even = even or busiest
                for way in WAYS:
                    first[f"busiest_{way}_cpu_ms"] = busiest[way]
                    first[f"{way}_of_even"] = round(busiest[way] / even[way], 2)
                print(json.dumps(first), flush=True)


# --------------------------------------------------------------------------------------------- one rank


def play(order: dict[str, Any]) -> None:
    """Compute a layer as one rank, for each number of rows and each load."""
    groups = joined_groups(order)
    dtype = DTYPES[order["dtype"]]
    for num_rows in order["rows"]:
        for load in LOADS:
            case = RoutedStep.make(num_rows, load, dtype, RULE._replace(num_chosen=order["chosen"]))
            layer = Layer(case, groups, order["copies"] if load == "copied" else 0)
            print(json.dumps(layer.measure(order)), flush=True)
    groups.smallest(0)
    groups.close()


class RoutedStep(NamedTuple):
    """The hidden states of a step [num_rows, hidden_size], the router of the layer [num_experts,
    hidden_size], the bias of its choice [num_experts], and the experts of each row that follow."""

    load: str
    shape: MixtureShape
    hidden: Tensor
    router: Tensor
    bias: Tensor
    experts: Tensor

    @staticmethod
    @torch.inference_mode()
    def make(num_rows: int, load: str, dtype: torch.dtype, rule: RouterRule) -> RoutedStep:
        """Draw the same case on every rank."""
        generator = torch.Generator().manual_seed(17)
        hidden = torch.randn(num_rows, HIDDEN_SIZE, generator=generator).to(dtype)
        router = torch.randn(SMALL.num_experts, HIDDEN_SIZE, generator=generator).mul_(0.05).to(dtype)
        logits = make_linear(router).floats(apply_norm(hidden, norm_of_ones()))
        bias = torch.zeros(SMALL.num_experts)
        if load != "even":
            scores = logits.softmax(-1)
            missing = scores.topk(rule.num_chosen).values[:, -1] - scores[:, 0]
            bias[0] = missing.quantile(HOT_SHARE)
        experts = choose_experts(logits, rule, bias).experts
        return RoutedStep(load, MixtureShape(rule, SMALL.size, (0,)), hidden, router, bias, experts)


def place(case: RoutedStep, num_ranks: int, num_slots: int) -> NDArray[np.bool_]:
    """Return which rank holds each expert [num_experts, num_ranks], with copies for the loads of the case."""
    num_experts = case.shape.rule.num_experts
    is_owned = np.zeros((num_experts, num_ranks), dtype=bool)
    for rank in range(num_ranks):
        owned = held_experts(case.shape, rank, num_ranks, num_ranks).experts
        is_owned[owned.start : owned.stop, rank] = True
    # As many tokens as an engine core counts in a while: then chance does not matter.
    loads = case.experts.flatten().bincount(minlength=num_experts).numpy() * 1e4
    return place_copies(loads, is_owned, is_owned, num_slots, CopyRules())


def norm_of_ones() -> Norm:
    return Norm(torch.ones(HIDDEN_SIZE), 1e-6)


class Layer:
    """The part of a layer from the product of attention's output on, on one rank."""

    def __init__(self, case: RoutedStep, groups: RankGroups, num_slots: int) -> None:
        self._case, self._groups = case, groups
        num_ranks, dtype = groups.tp, case.hidden.dtype
        self._held = [held_experts(case.shape, rank, num_ranks, num_ranks) for rank in range(num_ranks)]
        held = self._held[groups.tp_rank].experts
        gates, downs = (
            [(torch.randn(*size) * 0.03).to(dtype) for _ in held]
            for size in ((SMALL.size, HIDDEN_SIZE), (HIDDEN_SIZE, SMALL.size))
        )
        weights = MixtureWeights(
            LinearWeights((case.router,), None),
            case.bias,
            held,
            ExpertWeights(gates, gates, downs),
            None,
            copies=CopyPlace(groups.tp_rank, num_ranks, num_slots) if num_slots else None,
        )
        self._mixture = Mixture(weights, case.shape.rule, "silu")
        self._is_held = place(case, num_ranks, num_slots)
        if (copies := self._mixture.copies) is not None:
            owners = place(case, num_ranks, 0)
            for number in range(num_ranks):
                of_part = (self._is_held & ~owners)[:, number].nonzero()[0].tolist()
                for slot, expert in enumerate(of_part):
                    copies.note(number, slot, expert)
        num_inputs = HIDDEN_SIZE // num_ranks
        self._mixed = torch.randn(len(case.hidden), num_inputs).to(dtype)
        # Attention adds nothing, so that the routing is known.
        self._output = make_linear(torch.zeros(HIDDEN_SIZE, num_inputs, dtype=dtype))
        self._rows = RowProducts(self._output, self._mixture, case.shape, num_ranks, groups)
        self._norm = norm_of_ones()

    def _choice_us(self, repeat: int) -> float:
        """Return the least time in which the rank finds the rows that it computes."""
        normed = apply_norm(self._case.hidden, self._norm)
        routing = self._mixture.route(normed)
        times = []
        for _ in range(10 * repeat):
            began_at = CLOCK.now()
            self._mixture._of_rank(normed, routing)
            times.append(1e6 * (CLOCK.now() - began_at))
        return round(min(times), 1)

    @torch.inference_mode()
    def measure(self, order: dict[str, Any]) -> dict[str, Any]:
        """Time both ways in turns, and count the bytes of one by rows."""
        ways: tuple[Callable[[Tensor], None], ...] = (self._by_sums, self._by_rows)
        times: tuple[list[float], list[float]] = ([], [])
        cpu_times: tuple[list[float], list[float]] = ([], [])
        results = []
        for _ in range(order["repeat"] + 1):
            results = [self._case.hidden.clone() for _ in ways]
            for number, (way, hidden) in enumerate(zip(ways, results, strict=True)):
                self._groups.agree(True)
                began_at, cpu_began_at = CLOCK.now(), time.thread_time()
                way(hidden)
                cpu_times[number].append(1e3 * (time.thread_time() - cpu_began_at))
                times[number].append(1e3 * (CLOCK.now() - began_at))
        error = float((results[0] - results[1]).abs().max() / results[0].abs().max())
        assert error < 0.02, f"the two ways differ by {error}"
        before = self._groups.num_exchanged_bytes
        self._by_rows(self._case.hidden.clone())
        (sums_ms, rows_ms), (sums_cpu_ms, rows_cpu_ms) = (
            [round(min(of_way[1:]), 3) for of_way in both] for both in (times, cpu_times)
        )
        return {
            "ranks": order["num_ranks"],
            "rows": len(self._case.hidden),
            "load": self._case.load,
            "chosen": order["chosen"],
            "dtype": order["dtype"],
            "links": order["links"],
            "sums_ms": sums_ms,
            "rows_ms": rows_ms,
            "ratio": round(sums_ms / rows_ms, 2),
            "sums_cpu_ms": sums_cpu_ms,
            "rows_cpu_ms": rows_cpu_ms,
            "cpu_ratio": round(sums_cpu_ms / rows_cpu_ms, 2),
            "choice_us": self._choice_us(order["repeat"]),
            "bytes": self._groups.num_exchanged_bytes - before,
            **self._expected(),
        }

    def _by_sums(self, hidden: Tensor) -> None:
        attention = self._output(self._mixed)
        self._groups.all_reduce(attention)
        total = self._mixture(apply_norm(hidden, self._norm, None, attention))
        self._groups.all_reduce(total)
        hidden.add_(total)

    def _by_rows(self, hidden: Tensor) -> None:
        rows = self._rows.own(hidden)
        normed = apply_norm(rows, self._norm, None, self._rows.output(self._mixed))
        rows.add_(self._rows.mixture(normed))
        self._rows.gather(hidden)

    def _expected(self) -> dict[str, Any]:
        """Return the bytes of all ranks together, by the routing."""
        num_rows, num_ranks = len(self._case.hidden), self._groups.tp
        item_bytes = self._case.hidden.element_size()
        experts = self._case.experts
        pairs = torch.stack([((experts >= it.start) & (experts < it.stop)).sum(1) for it, _ in self._held], 1)
        if (copies := self._mixture.copies) is not None:
            parts = copies.slots.parts(apply_norm(self._case.hidden, self._norm), experts)
            pairs = torch.stack([(parts == rank).sum(1) for rank in range(num_ranks)], 1)
        goes = pairs > 0
        owners = torch.tensor(
            [rank for rank, rows in enumerate(row_parts(num_rows, num_ranks)) for _ in rows]
        )
        num_sent = int(goes.sum() - goes.gather(1, owners[:, None]).sum())
        row_bytes = HIDDEN_SIZE * item_bytes
        in_sums = (num_ranks - 1) * num_rows * row_bytes
        packed = routed_row_bytes(HIDDEN_SIZE, experts.shape[1], item_bytes)
        return {
            "formula_bytes": 2 * in_sums + num_sent * (packed + row_bytes),
            "two_sums_bytes": 4 * in_sums,
            "mean_others": round(num_sent / num_rows, 3),
            "busiest_share": round(float(pairs.sum(0).max() / pairs.sum()), 3),
        }


if __name__ == "__main__":
    main()
