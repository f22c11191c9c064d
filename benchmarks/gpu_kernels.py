"""Parts of `benchmarks.gpu` about single kernels: their times in a step, and products of both modes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.device_time import DeviceTime, profile_of
from benchmarks.expert_layers import graph_of
from kvtransfer.common.clock import SystemClock
from workers.model.finish import Finish
from workers.rank.probe import best_s

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

# The steps of a profile, of which the shorter is taken off the longer one.
_FEW_STEPS, _MANY_STEPS = 4, 12
# The kernels of a step that a line names, those that take longest.
_MOST_NAMED = 16
_MIXED_CHUNK_TOKENS, _MIXED_STEPS = 512, 16
_SHORT_PROMPT_TOKENS = 64
# What kernels do, by their names, in the order in which names are tried.
_KIND_TO_PATTERN = {
    "attention": r"^_(attend|reduce_pieces|combine_pieces|latent)",
    "products": r"gemm|gemv|cutlass|nvjet|splitk|_product_kernel|_multiply_kernel|_add_segments",
    "sampling": r"^_(pieces|rows)_kernel|sampl",
    "states": r"^_(token|inverse|chunk|convolve|keep|scan)_kernel",
}
# Outputs and inputs of the weights of Llama 3 8B.
_WEIGHTS = {
    "qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336),
}  # fmt: skip
_ROWS = (1, 16, 32, 256, 4096)
# The results of a row and its parts, the inputs, the finish and the norm of products of few rows, and their
# numbers of rows.
_FEW_ROWS = (1, 8, 32)
_NAME_TO_FEW: dict[str, tuple[int, int, int, Finish, bool]] = {
    "norm and qkv": (6144, 4096, 1, "store", True),
    "output and addition": (4096, 4096, 1, "add", False),
    "norm, gate_up and silu": (14_336, 4096, 2, "silu", True),
    "down and addition": (4096, 14_336, 1, "add", False),
}  # fmt: skip
# As many weights as caches do not hold.
_NUM_WEIGHTS = 8


class KernelTime(NamedTuple):
    """How often a kernel ran, and its microseconds in all."""

    launches: float
    time_us: float


def kernel_times(events: Iterable[Any]) -> dict[str, KernelTime]:
    """Add up the events of the device, of a profile of torch, by their names."""
    times: dict[str, KernelTime] = {}
    for event in events:
        if event.device_type.name == "CUDA":
            count, time_us = times.get(event.name, KernelTime(0, 0.0))
            elapsed_us = event.time_range.end - event.time_range.start
            times[event.name] = KernelTime(count + 1, time_us + elapsed_us)
    return times


def of_one_step(
    few: Mapping[str, KernelTime], many: Mapping[str, KernelTime], num_steps: int
) -> dict[str, KernelTime]:
    """Return what one step takes, of profiles whose difference is `num_steps`: longest first, without what a
    step does not run."""
    steps: dict[str, KernelTime] = {}
    for name, of in many.items():
        less = few.get(name, KernelTime(0, 0.0))
        count, time_us = of.launches - less.launches, of.time_us - less.time_us
        steps[name] = KernelTime(count / num_steps, time_us / num_steps)
    return dict(
        sorted(((n, it) for n, it in steps.items() if it.launches > 0), key=lambda it: -it[1].time_us)
    )


def kind_of(name: str) -> str:
    """Return what a kernel does: one of the kinds, or "other"."""
    return next(
        (kind for kind, it in _KIND_TO_PATTERN.items() if re.search(it, name, re.IGNORECASE)), "other"
    )


def kernels(bench: Bench) -> Iterator[dict[str, object]]:
    """Kernels of a decode step by batch: their times, and by kind the time to copy their bytes over it."""
    needs_cuda(bench)
    kv = bench.driver.runner.kv
    token_bytes = kv[0].numel() * kv.element_size() / bench.driver.runner.attention.block_tokens
    for batch in bench.batches:
        bench.driver.decode_s(batch, bench.context, _FEW_STEPS)
        few, many = (_profiled(bench, batch, steps) for steps in (_FEW_STEPS, _MANY_STEPS))
        step = of_one_step(few, many, _MANY_STEPS - _FEW_STEPS)
        kv_bytes = batch * bench.context * token_bytes
        state_bytes = batch * bench.work.state_bytes
        read_bytes = bench.work.of([(bench.context - 1, 1)] * batch, batch).read_bytes
        kind_to_bytes = {"attention": kv_bytes, "products": read_bytes - kv_bytes - state_bytes}
        if state_bytes:
            kind_to_bytes["states"] = state_bytes
        yield from step_lines(step, f"batch {batch}", kind_to_bytes, bench.limits.byte_s)


def step_lines(
    step: Mapping[str, KernelTime], where: str, kind_to_bytes: Mapping[str, float], byte_s: float
) -> Iterator[dict[str, object]]:
    """Return the lines of a step: of each kind with the limit of its bytes, then of the longest kernels."""
    kinds = {kind_of(name) for name in step}
    for kind in sorted(kinds):
        times = [it for name, it in step.items() if kind_of(name) == kind]
        value = sum(it.time_us for it in times)
        line: dict[str, object] = {"figure": f"{kind}_us of a step at {where}", "value": value}
        line["launches"] = sum(it.launches for it in times)
        if kind in kind_to_bytes:
            limit = kind_to_bytes[kind] / byte_s * 1e6
            line |= {"limit": limit, "ratio": limit / value, "target": 0.88}
        yield line
    for name, time in list(step.items())[:_MOST_NAMED]:
        yield {"figure": f"kernel_us of a step at {where}", "kernel": name[:120], "value": time.time_us} | {
            "launches": time.launches
        }


def mixed(bench: Bench) -> Iterator[dict[str, object]]:
    """The idle share of steps with a chunk and decodes, at most 5 %; these and short prompts as graphs."""
    needs_cuda(bench)
    # A slot is needed for the chunk.
    batches = sorted({min(batch, max(bench.batches) - 1) for batch in bench.batches} - {0})
    plain = [_mixed_step_s(bench, decodes) for decodes in batches]
    for decodes, step_s in zip(batches, plain, strict=True):
        arguments = decodes, bench.context, _MIXED_CHUNK_TOKENS
        with DeviceTime() as of_few:
            bench.driver.mixed_s(*arguments, _FEW_STEPS)
        with DeviceTime() as of_many:
            bench.driver.mixed_s(*arguments, _MANY_STEPS)
        device_s = (of_many.busy_s - of_few.busy_s) / (_MANY_STEPS - _FEW_STEPS)
        yield {
            "figure": f"idle_share of {_MIXED_CHUNK_TOKENS} tokens beside {decodes} decodes",
            "value": 1 - device_s / step_s,
            "limit": 0.05,
            "ratio": device_s / step_s,
            "target": 0.95,
        }
    prompt_s = _short_prompt_s(bench)
    bench.close()  # its memory is needed
    with_graphs = bench.with_mixed_graphs(_MIXED_CHUNK_TOKENS)
    for decodes, step_s in zip(batches, plain, strict=True):
        graph_s = _mixed_step_s(with_graphs, decodes)
        yield {
            "figure": f"step_ms as a graph of {_MIXED_CHUNK_TOKENS} tokens beside {decodes} decodes",
            "value": graph_s * 1e3,
            "limit": step_s * 1e3,
            "ratio": step_s / graph_s,
            "target": 1.0,
        }
    graph_s = _short_prompt_s(with_graphs)
    yield {
        "figure": f"prefill_ms as a graph of {_SHORT_PROMPT_TOKENS} tokens alone",
        "value": graph_s * 1e3,
        "limit": prompt_s * 1e3,
        "ratio": prompt_s / graph_s,
        "target": 1.0,
    }


def _short_prompt_s(bench: Bench) -> float:
    """Return the seconds of a short prompt on an idle rank, up to its first token."""
    bench.driver.prefill_s(_SHORT_PROMPT_TOKENS, _SHORT_PROMPT_TOKENS)
    return min(bench.driver.prefill_s(_SHORT_PROMPT_TOKENS, _SHORT_PROMPT_TOKENS) for _ in range(5))


def _mixed_step_s(bench: Bench, num_decodes: int) -> float:
    """Return the seconds of a step with a chunk beside so many decodes."""
    arguments = num_decodes, bench.context, _MIXED_CHUNK_TOKENS
    bench.driver.mixed_s(*arguments, 2)
    return min(bench.driver.mixed_s(*arguments, _MIXED_STEPS) for _ in range(3)) / _MIXED_STEPS


def start(bench: Bench) -> Iterator[dict[str, object]]:
    """Starts of a rank with 16 GB of weights: without compiled kernels, with them, and beside another."""
    needs_cuda(bench)
    command = [sys.executable, "-m", "benchmarks.start_up", "--device", str(bench.device), "--shape", "8b"]
    command += ["--rounds", "0", "--as-found", "--kv-tokens", "131072", "--folder", "/dev/shm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    for line in map(json.loads, done.stdout.splitlines()):
        if "start_s" in line:
            about = {name: line[name] for name in ("phases", "kernels_s", "overlap_s", "cpu_s")}
            target_s = line["target_s"]
            figures = {"value": line["start_s"], "limit": target_s, "ratio": target_s / line["start_s"]}
            figures |= {"target": 1.0, "read_s": line["limit_s"]}
            yield {"figure": f"{line['start']} start_s", **figures, **about}


def products(bench: Bench) -> Iterator[dict[str, object]]:
    """Products of deterministic mode and of few rows: their limit over their time, and torch's time over it.

    Products of few rows have the norm, the addition or the activation around them."""
    needs_cuda(bench)
    yield from few_rows_lines(bench)
    from workers.model.cuda.product_choice import chosen_product

    multiply = chosen_product(bench.device, torch.bfloat16)
    for name, (num_outputs, num_inputs) in _WEIGHTS.items():
        weights = [
            torch.randn(num_outputs, num_inputs, device=bench.device).to(torch.bfloat16)
            for _ in range(_NUM_WEIGHTS)
        ]
        for num_rows in _ROWS:
            x = torch.randn(num_rows, num_inputs, device=bench.device).to(torch.bfloat16)
            out = x.new_empty(num_rows, num_outputs)
            ours: list[Callable[[], object]] = []
            plain: list[Callable[[], object]] = []
            for weight in weights:
                ours.append(partial(multiply, x, weight, None, out))
                plain.append(partial(torch.mm, x, weight.t(), out=out))
            ours_s, plain_s = (
                best_s(graph_of(steps), SystemClock(), bench.device, 20) / _NUM_WEIGHTS
                for steps in (ours, plain)
            )
            num_bytes = 2 * (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs))
            flops = 2 * num_rows * num_outputs * num_inputs
            limit_s = max(num_bytes / bench.limits.byte_s, flops / bench.limits.flop_s)
            yield {
                "figure": f"{name} product_us of {num_rows} rows",
                "value": ours_s * 1e6,
                "bytes": num_bytes,
                "limit": limit_s * 1e6,
                "ratio": limit_s / ours_s,
                "target": 0.8,
                "torch_ratio": plain_s / ours_s,
            }


def few_rows_lines(bench: Bench) -> Iterator[dict[str, object]]:
    """Return the lines of products of few rows: each in one kernel, beside the former kernels."""
    from workers.model.cuda.card import card_of
    from workers.model.cuda.thin_choice import ThinKind, ThinTrial, num_multiprocessors
    from workers.model.cuda.thin_product import ThinShape, product_us, thin_plan

    card, num = card_of(bench.device), num_multiprocessors(bench.device)
    for name, (num_outputs, num_inputs, num_parts, finish, has_norm) in _NAME_TO_FEW.items():
        shape = ThinShape(num_outputs, num_inputs, num_parts)
        kind = ThinKind(torch.bfloat16, shape, finish, has_norm, has_bias=False)
        plan = thin_plan(shape, card, num)
        weights = [
            torch.randn(num_outputs * num_parts, num_inputs, device=bench.device).to(torch.bfloat16)
            for _ in range(_NUM_WEIGHTS)
        ]
        for num_rows in _FEW_ROWS:
            trials = [ThinTrial(weight, None, kind, plan, num_rows) for weight in weights]
            ours_s, former_s = (
                best_s(graph_of(steps), SystemClock(), bench.device, 20) / _NUM_WEIGHTS
                for steps in ([it.run for it in trials], [it.run_former for it in trials])
            )
            num_added = 2 if finish == "add" else 1
            num_bytes = 2 * num_outputs * num_parts * num_inputs
            num_bytes += 2 * num_rows * (num_inputs + num_added * num_outputs) + 4 * num_inputs * has_norm
            limit_s = num_bytes / bench.limits.byte_s
            yield {
                "figure": f"{name} us of {num_rows} rows",
                "value": ours_s * 1e6,
                "bytes": num_bytes,
                "limit": limit_s * 1e6,
                "ratio": limit_s / ours_s,
                "target": 0.88,
                "torch_ratio": former_s / ours_s,
                "planned_us": product_us(shape, plan, card, num),
                "segments": plan.segments.num_segments,
            }


def _profiled(bench: Bench, batch: int, num_steps: int) -> dict[str, KernelTime]:
    with profile_of(torch.profiler.ProfilerActivity.CUDA) as profile:
        bench.driver.decode_s(batch, bench.context, num_steps)
        torch.cuda.synchronize()
    return kernel_times(profile.events())


def needs_cuda(bench: Bench) -> None:
    if bench.device.type != "cuda":
        raise RuntimeError("this part needs a CUDA device")
