"""Mixtures of experts: ours by an instruction set of this CPU, beside dense products and torch's loop.

A JSON line for each shape and number of rows, with the least microseconds of rounds in which all take turns.
`dense_us` is the time of two packed products for each expert that has rows, each of their mean number.
`limit_us` is the longer of reading the weights of these experts and of the multiplications, at the read
bandwidth and at the rate of the fastest square product of the same rounds. `of_limit` and `of_dense` are
those times over ours, and `ratio` is the time of torch's loop over ours. Each call takes the weights of
another layer and another routing, so that no weights are in a cache. With `--threads 1` the times are CPU
time, which other processes disturb less.

    python -m benchmarks.experts [--rows 1,8,16,512,2048] [--shapes small] [--dtype bf16] [--isa avx2]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine_bench.roofline import multiplies_bf16
from workers.model import native
from workers.model.experts.expert_products import Experts, ExpertWeights, TorchExperts
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.router_rule import RouterRule
from workers.model.experts.routing import Routing, choose_experts
from workers.model.native.isa import available_isas
from workers.model.products import PackedLinear


class Shape(NamedTuple):
    """The experts of a model's layers, of which `num_layers` are measured."""

    hidden_size: int
    size: int
    num_experts: int
    num_chosen: int
    num_layers: int

    @property
    def expert_items(self) -> int:
        return 3 * self.hidden_size * self.size


SHAPES = {
    "small": Shape(1024, 384, 64, 8, 8),
    # The experts of gpt-oss-20b.
    "large": Shape(2880, 2880, 32, 4, 2),
}
# Weights of dense products that are more than caches hold.
DENSE_BYTES = 160 << 20
READ_BYTES = 160 << 20
SQUARE = 1536
ROUND_S = 0.02
NUM_ROUTINGS = 16

Work = Callable[[], object]
Clock = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,512,2048")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--isa", default="", help="instruction sets, default: the best of this CPU")
    parser.add_argument("--peers", default="1", help="0: no loop of torch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    isas = args.isa.split(",") if args.isa else [available_isas()[0].value]
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    for name in args.shapes.split(","):
        bench = Bench(SHAPES[name], dtype, isas, clock, has_peers=args.peers != "0")
        for rows in args.rows.split(","):
            print(json.dumps({"benchmark": "experts", "shape": name} | bench.measure(int(rows), args.rounds)))


class Bench:
    """The experts of a shape's layers, by every way."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, isas: list[str], clock: Clock, *, has_peers: bool
    ) -> None:
        self._shape, self._dtype, self._clock = shape, dtype, clock
        kernels = {isa.value: native.compiled(isa) for isa in available_isas() if isa.value in isas}
        self._kernels = {isa: found for isa, found in kernels.items() if found is not None}
        self._generator = torch.Generator().manual_seed(0)
        self._ways: dict[str, list[Experts]] = {f"ours_{isa}": [] for isa in self._kernels}
        if has_peers:
            self._ways["torch"] = []
        for _ in range(shape.num_layers):
            weights = self._expert_weights()
            for isa, found in self._kernels.items():
                self._ways[f"ours_{isa}"].append(PackedExperts(found, weights))
            if has_peers:
                self._ways["torch"].append(TorchExperts(weights))
        self._dense = self._dense_products() if self._kernels else []
        self._read = torch.zeros(READ_BYTES // 4)
        is_square_bf16 = dtype == torch.bfloat16 and multiplies_bf16()
        self._square = self._random(SQUARE, SQUARE).to(torch.bfloat16 if is_square_bf16 else torch.float32)

    @torch.inference_mode()
    def measure(self, num_rows: int, num_rounds: int) -> dict[str, object]:
        """Return the figures of so many rows."""
        rule = RouterRule(self._shape.num_experts, self._shape.num_chosen)
        routings = [
            choose_experts(self._random(num_rows, rule.num_experts), rule) for _ in range(NUM_ROUTINGS)
        ]
        num_touched = sum(int(torch.bincount(experts.flatten()).count_nonzero()) for experts, _ in routings)
        x = self._random(num_rows, self._shape.hidden_size).to(self._dtype)
        works = {name: _rotated(layers, x, routings) for name, layers in self._ways.items()}
        works["read"], works["gemm"] = self._read.sum, lambda: torch.mm(self._square, self._square)
        if self._dense:
            works["dense"] = self._dense_work(num_rows, round(num_touched / NUM_ROUTINGS))
        return self._line(num_rows, num_touched / NUM_ROUTINGS, _least_s(works, num_rounds, self._clock))

    def _line(self, num_rows: int, num_touched: float, name_to_s: dict[str, float]) -> dict[str, object]:
        """Return the figures of rows that have chosen `num_touched` experts in the mean."""
        num_bytes = num_touched * self._shape.expert_items * self._dtype.itemsize
        num_products = num_rows * self._shape.num_chosen * self._shape.expert_items
        read_s = name_to_s.pop("read") * num_bytes / self._read.nbytes
        gemm_s = name_to_s.pop("gemm") * num_products / SQUARE**3
        line: dict[str, object] = {"rows": num_rows}
        line |= {f"{name}_us": round(time_s * 1e6) for name, time_s in name_to_s.items()}
        line["limit_us"] = round(max(read_s, gemm_s) * 1e6)
        ours_s = min(time_s for name, time_s in name_to_s.items() if name.startswith("ours"))
        line["gb_s"] = round(num_bytes / ours_s / 1e9, 1)
        line["gflop_s"] = round(2 * num_products / ours_s / 1e9)
        line["of_limit"] = round(max(read_s, gemm_s) / ours_s, 2)
        for figure, name in (("of_dense", "dense"), ("ratio", "torch")):
            if name in name_to_s:
                line[figure] = round(name_to_s[name] / ours_s, 2)
        return line

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self._generator)

    def _weight(self, num_outputs: int, num_inputs: int) -> Tensor:
        return self._random(num_outputs, num_inputs).div_(num_inputs**0.5).to(self._dtype)

    def _expert_weights(self) -> ExpertWeights:
        # One expert's numbers serve all of a layer: they take other memory when they are packed.
        size, hidden_size, count = self._shape.size, self._shape.hidden_size, self._shape.num_experts
        gate, up, down = (
            self._weight(*sizes) for sizes in ((size, hidden_size),) * 2 + ((hidden_size, size),)
        )
        return ExpertWeights([gate] * count, [up] * count, [down] * count)

    def _dense_products(self) -> list[tuple[PackedLinear, PackedLinear]]:
        shape, kernels = self._shape, next(iter(self._kernels.values()))
        gate_up, down = (
            self._weight(2 * shape.size, shape.hidden_size),
            self._weight(shape.hidden_size, shape.size),
        )
        num_copies = max(2, DENSE_BYTES // (shape.expert_items * self._dtype.itemsize))
        return [
            (PackedLinear(kernels, gate_up, gate="silu"), PackedLinear(kernels, down))
            for _ in range(num_copies)
        ]

    def _dense_work(self, num_rows: int, num_experts: int) -> Work:
        """Return two dense products for each expert that has rows, of the mean number of these."""
        shape, products = self._shape, cycle(self._dense)
        x = self._random(num_rows * shape.num_chosen // num_experts, shape.hidden_size).to(self._dtype)

        def work() -> None:
            for _ in range(num_experts):
                gate_up, down = next(products)
                down(gate_up.gated(x))

        return work


def _rotated(layers: list[Experts], x: Tensor, routings: list[Routing]) -> Work:
    calls: Iterator[tuple[Experts, Routing]] = zip(cycle(layers), cycle(routings), strict=False)

    def work() -> object:
        layer, routing = next(calls)
        return layer(x, routing)

    return work


def _least_s(works: dict[str, Work], num_rounds: int, clock: Clock) -> dict[str, float]:
    """Return the least of the mean times of rounds in which all take turns."""
    name_to_s = dict.fromkeys(works, float("inf"))
    for _ in range(num_rounds):
        for name, work in works.items():
            name_to_s[name] = min(name_to_s[name], _time_s(work, clock))
    return name_to_s


def _time_s(work: Work, clock: Clock) -> float:
    """Return the mean of as many calls as fit a round."""
    work()
    started_at = clock()
    num_calls = 0
    while num_calls == 0 or clock() - started_at < ROUND_S:
        work()
        num_calls += 1
    return (clock() - started_at) / num_calls


if __name__ == "__main__":
    main()
