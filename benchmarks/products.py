"""Linear products of a model's shapes: ours for each instruction set of this CPU beside those of torch.

A JSON line for each shape and number of rows: microseconds of a call, the least of rounds in which all ways
take turns; `limit_us` is the longer of reading the weights and of the multiplications, at the read bandwidth
and at the rate of the fastest square product of the same rounds. `ratio` is the time of the fastest other way
over ours. Weights are rotated, so that none is in a cache. With `--threads 1` the times are CPU time, which
other processes disturb less. `--weights` adds products with quantized weights; the `ratio` of each is the
time of ours with weights of `--dtype` over its own.

    python -m benchmarks.products [--rows 1,4,8,16,64,512] [--dtype bf16] [--isa avx2] [--weights int8,int4]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine_bench.roofline import multiplies_bf16
from workers.model import native
from workers.model.native.isa import available_isas
from workers.model.products import PackedLinear
from workers.model.quantization.packed_codes import PackedForm
from workers.model.quantization.packed_product import PackedQuantizedLinear
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

# Outputs and inputs of the products of Qwen3-0.6B.
SHAPES = {
    "qkv": (4096, 1024),
    "output": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
    "square": (4096, 4096),
}
DEFAULT_SHAPES = ",".join(name for name in SHAPES if name != "square")
# Codes, and inputs of a group; 0: all of a row.
WEIGHTS = {"int8": (Codes.INT8, 0), "int4": (Codes.UINT4, 32), "fp8": (Codes.E4M3, 0)}
OURS = "ours_"
ROTATED_BYTES = 160 << 20
ROUND_S = 0.02
LARGEST_HEAD_ROWS = 64
SQUARE = 1536
Clock = Callable[[], float]

Product = Callable[[Tensor], object]
# Takes a weight, and rows of its dtype.
Way = Callable[[Tensor], Product]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,16,64,512")
    parser.add_argument("--shapes", default=DEFAULT_SHAPES)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--isa", default="", help="instruction sets, default: all of this CPU")
    parser.add_argument("--weights", default="", help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--peers", default="1", help="0: only ours")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    isas, forms = (names.split(",") if names else [] for names in (args.isa, args.weights))
    ways = _ways(dtype, isas, args.peers != "0") | _quantized_ways(isas, forms)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows = [int(number) for number in args.rows.split(",")]
    for shape in args.shapes.split(","):
        measure(shape, dtype, ways, rows, args.rounds, clock)


@torch.inference_mode()
def measure(
    shape: str, dtype: torch.dtype, ways: dict[str, Way], rows: list[int], num_rounds: int, clock: Clock
) -> None:
    """Print a line for each number of rows."""
    num_outputs, num_inputs = SHAPES[shape]
    weight_bytes = num_outputs * num_inputs * dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(num_outputs, num_inputs, generator=generator) / 32).to(dtype)
        for _ in range(max(1, ROTATED_BYTES // weight_bytes))
    ]
    name_to_products = {name: cycle([way(weight) for weight in weights]) for name, way in ways.items()}
    read = torch.zeros(ROTATED_BYTES // 4)
    square_dtype = dtype if dtype != torch.bfloat16 or multiplies_bf16() else torch.float32
    square = torch.randn(SQUARE, SQUARE, generator=generator).to(square_dtype)
    for num_rows in rows:
        if shape == "head" and num_rows > LARGEST_HEAD_ROWS:
            continue
        x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
        works: dict[str, Callable[[], object]] = {
            name: partial(_next, products, x) for name, products in name_to_products.items()
        }
        works["read"], works["gemm"] = read.sum, partial(torch.mm, square, square)
        name_to_times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(num_rounds):
            for name, work in works.items():
                name_to_times[name].append(_time_s(work, clock))
        name_to_s = {name: min(times) for name, times in name_to_times.items()}
        read_s = name_to_s.pop("read") * weight_bytes / read.nbytes
        gemm_s = name_to_s.pop("gemm") * num_rows * num_inputs * num_outputs / SQUARE**3
        print(json.dumps(_line(shape, num_rows, name_to_s, max(read_s, gemm_s), weight_bytes)), flush=True)


def _line(
    shape: str, num_rows: int, name_to_s: dict[str, float], limit_s: float, weight_bytes: int
) -> dict[str, object]:
    line: dict[str, object] = {"benchmark": "products", "shape": shape, "rows": num_rows}
    line |= {f"{name}_us": round(time_s * 1e6) for name, time_s in name_to_s.items()}
    line["limit_us"] = round(limit_s * 1e6)
    ours = min((time_s, name) for name, time_s in name_to_s.items() if name.startswith(OURS))
    quantized = [name for name in name_to_s if name.split("_")[0] in WEIGHTS]
    others = [it for name, it in name_to_s.items() if not name.startswith(OURS) and name not in quantized]
    line["gb_s"] = round(weight_bytes / ours[0] / 1e9, 1)
    line["of_limit"] = round(limit_s / ours[0], 2)
    if others:
        line["ratio"] = round(min(others) / ours[0], 2)
    for name in quantized:
        line[f"{name}_ratio"] = round(name_to_s[OURS + name.split("_", 1)[1]] / name_to_s[name], 2)
    return line


def _ways(dtype: torch.dtype, names: list[str], has_peers: bool) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    if has_peers:
        ways["linear"] = lambda weight: lambda x: F.linear(x, weight)
        if dtype == torch.bfloat16 and multiplies_bf16():
            ways["onednn"] = _onednn
        ways["mkl_fp32"] = _mkl
    for isa in available_isas():
        kernels = native.compiled(isa) if not names or isa.value in names else None
        if kernels is not None:
            ways[OURS + isa.value] = partial(PackedLinear, kernels)
    return ways


def _quantized_ways(isas: list[str], forms: list[str]) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for isa in available_isas():
        kernels = native.compiled(isa) if forms and (not isas or isa.value in isas) else None
        if kernels is not None:
            ways |= {f"{form}_{isa.value}": partial(_quantized, kernels, *WEIGHTS[form]) for form in forms}
    return ways


def _quantized(kernels: native.Kernels, codes: Codes, group: int, weight: Tensor) -> Product:
    """Return the product with a weight of drawn codes that has the shape of `weight`."""
    num_outputs, num_inputs = weight.shape
    group = group or num_inputs
    packed = torch.randint(0, 0x78, (num_outputs, num_inputs * codes.num_bits // 8), dtype=torch.uint8)
    scales = torch.full((num_outputs, num_inputs // group), 2.0**-7)
    drawn = QuantizedWeight(codes, packed, scales, group)
    form = PackedForm.of([drawn])
    assert form is not None
    return PackedQuantizedLinear(kernels, drawn, form)


def _onednn(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _mkl(weight: Tensor) -> Product:
    """Return the product in float32, whatever the weights are."""
    plain = weight.float()
    packed = torch.ops.mkl._mkl_reorder_linear_weight(plain, 16)
    return lambda x: torch.ops.mkl._mkl_linear(x.float(), packed, plain, None, len(x))


def _next(products: cycle[Product], x: Tensor) -> object:
    return next(products)(x)


def _time_s(work: Callable[[], object], clock: Clock) -> float:
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
