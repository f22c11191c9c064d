"""The engine on a CUDA device, as JSON lines: each figure with its limit, as measured here, and their ratio.

    python -m benchmarks.gpu [PART ...] [--batches 1,32,256] [--context 1024]

Without parts all run, each in a process of its own: one that fails prints its error as a line and the next
begins. Limits are measured first: the rate of copies on the device, read and write counted, and that of large
products in bf16. The model has the shape of Llama 3 8B with random weights, which are made on the device;
the part `experts` has a quarter of the layers of Qwen3-30B-A3B, of which a token chooses 8 of 128 experts,
and `hybrid` the shape of Qwen3.5 9B, whose layers keep a state but for every fourth.
`target` is the ratio to reach. `--device cpu --model tiny` tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.device_time import DeviceTime
from benchmarks.gpu_kernels import kernels, mixed, needs_cuda, products, start
from benchmarks.gpu_quantized import EXPERT_BATCHES, engine_fp8, engine_int4, quantized, quantized_experts
from benchmarks.gpu_served import MODEL_TO_SERVED, ServedSizes, served
from benchmarks.nccl_pair_rate import nccl_pair
from benchmarks.push_rate import copy_rate_across, make_pool, push_rate
from benchmarks.random_checkpoint import LLAMA_8B, QWEN3_5_9B, QWEN3_30B_QUARTER, write_config
from benchmarks.random_quantized import QuantizedForm, draw_quantized
from benchmarks.rank_sums import time_sums
from cluster.serve.ray_watchdog import members
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import Shard
from workers.engine_bench.driver import EngineDriver
from workers.messages.rank_channel import BatchEntry, StepPlan
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.sizes import ModelWork
from workers.model.tensor_files import TensorFiles, WeightSlice
from workers.rank.device_accounts import CudaAccounts
from workers.rank.model_runner import ModelRunner
from workers.rank.probe import MeasureSizes, best_s, measure_limits, synchronize
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity

CLOCK = SystemClock()
BLOCK_TOKENS = 64
PART_TIMEOUT_S = 240
# Five clusters start.
SERVED_TIMEOUT_S = 560
# The batches with long contexts, and the tokens of a chunk behind one.
_LONG_BATCHES = (1, 8)
_SHORT_CHUNK_TOKENS = 64


class Limits(NamedTuple):
    """The limits of the device: bytes a second of copies, read and written, and operations a second."""

    byte_s: float
    flop_s: float


class Sizes(NamedTuple):
    """The sizes of everything; `shape`, and those of the models with experts and with states, are keys of
    config.json."""

    shape: dict[str, Any]
    experts: dict[str, Any]
    states: dict[str, Any]
    copied_bytes: int
    gemm: int
    prefill_tokens: int
    # Of the part about long contexts.
    long_context: int
    num_steps: int
    num_pushed_blocks: int
    served: ServedSizes
    family: str = "llama"


_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TINY_STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
MODEL_TO_SIZES = {
    "8b": Sizes(
        LLAMA_8B, QWEN3_30B_QUARTER, QWEN3_5_9B, 2 << 30, 8192, 4096, 30_000, 64, 128, MODEL_TO_SERVED["8b"]
    ),
    "tiny": Sizes({}, _TINY_EXPERTS, _TINY_STATES, 8 << 20, 128, 96, 1000, 8, 16, MODEL_TO_SERVED["tiny"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="print the parts and what each measures")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="8b", choices=list(MODEL_TO_SIZES))
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--limits", help=argparse.SUPPRESS)  # of the process of one part
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:18} {(part.__doc__ or '').splitlines()[0]}")
        return
    if args.limits is not None:
        run_part(args.parts[0], args, Limits(*json.loads(args.limits)))
        return
    limits = _measure_and_print(args)
    if limits is not None:
        for name in args.parts or PARTS:
            run_in_process(name, limits)


def _measure_and_print(args: argparse.Namespace) -> Limits | None:
    """Print the device and its limits. Returns None, after a line with the error, if it cannot be used."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print_line("limits", error="torch finds no CUDA device")
        return None
    try:
        limits = measure(device, MODEL_TO_SIZES[args.model])
    except RuntimeError as error:
        print_line("limits", error=str(error))
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the parts need it
    about = {"torch": torch.__version__, "device": "cpu"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"device": properties.name, "cuda": str(torch.version.cuda)}
    print_line("limits", **about)
    print_line("limits", figure="copy_gb_s", value=limits.byte_s / 1e9)
    print_line("limits", figure="matrix_tflop_s", value=limits.flop_s / 1e12)
    return limits


def run_in_process(name: str, limits: Limits) -> None:
    """Run a part in a process of its own, whose errors and end are a line like others."""
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--limits", json.dumps(limits)]
    given = [word for word in command if word not in PARTS]
    with subprocess.Popen(
        [*given, name], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            timeout_s = SERVED_TIMEOUT_S if name == served.__name__ else PART_TIMEOUT_S
            errors = process.communicate(timeout=timeout_s)[1]
        except subprocess.TimeoutExpired:
            print_line(name, error=f"not done within {timeout_s} s")
            return
        finally:  # whatever it started, too, would keep the device's memory from the next part
            killed = set[int]()
            while found := set(members({process.pid})) - killed:  # also what starts in the meantime
                for member in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
                killed |= found
    if process.returncode:
        ends = [line.strip() for line in errors.strip().splitlines()[-3:]]
        print_line(name, error=" | ".join(ends) or f"ended with status {process.returncode}")


def run_part(name: str, args: argparse.Namespace, limits: Limits) -> None:
    """Print the lines of one part in this process."""
    batches = tuple(int(number) for number in args.batches.split(","))
    bench = Bench(torch.device(args.device), MODEL_TO_SIZES[args.model], limits, batches, args.context)
    for line in PARTS[name](bench):
        print_line(name, **line)


def print_line(part: str, **fields: object) -> None:
    rounded = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in fields.items()
    }
    print(json.dumps({"benchmark": "gpu", "part": part, **rounded}), flush=True)


def measure(device: torch.device, sizes: Sizes) -> Limits:
    """Measure the device's limits: in bf16, on a CPU in float32."""
    source = torch.ones(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = best_s(lambda: target.copy_(source), CLOCK, device, 10)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = measure_limits(device, dtype, CLOCK, MeasureSizes(sizes.gemm, sizes.copied_bytes, 10))
    return Limits(2 * sizes.copied_bytes / copy_s, found.flop_s)


# ------------------------------------------------------------------------------------------ the engine


class RandomFiles(TensorFiles):
    """Draws the tensors of a checkpoint on the device, instead of reading them; the weights of products
    quantized, where they have a `drawn_form`."""

    drawn_form: QuantizedForm | None = None

    def __enter__(self) -> RandomFiles:
        torch.manual_seed(0)
        return self

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype

    def tensor(
        self, name: str, shape: tuple[int, ...], *slices: slice, dtype: torch.dtype | None = None
    ) -> Tensor:
        drawn = torch.randn(shape, dtype=dtype or self.dtype, device=self.device)
        if len(shape) == 1:
            return drawn.mul_(0.1).add_(1)[slices]
        return drawn.mul_(shape[-1] ** -0.5)[slices]

    @property
    def may_quantize(self) -> bool:
        return self.drawn_form is not None

    def quantized(self, part: WeightSlice, *, is_table: bool = False) -> QuantizedWeight | None:
        if self.drawn_form is None or is_table:
            return None
        num_rows, num_columns = part.shape[-2:]
        return draw_quantized(self.drawn_form, num_rows, num_columns, self.device).rows(part.rows)


def files_of(form: QuantizedForm | None) -> type[RandomFiles]:
    """Return files whose products have weights of this form."""
    return type("FilesOfForm", (RandomFiles,), {"drawn_form": form})


class Bench:
    """A device and its limits, and the engine on it once a part needs that."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        limits: Limits,
        batches: tuple[int, ...],
        context: int,
        *,
        is_deterministic: bool = False,
        weights: QuantizedForm | None = None,
        mixed_tokens: int = 0,
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.limits = limits
        self.batches = batches
        self.context = context
        self._is_deterministic, self._weights = is_deterministic, weights
        self._mixed_tokens = mixed_tokens
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def deterministic(self) -> Bench:
        """Return the same bench in deterministic mode, with an engine of its own."""
        arguments = self.device, self.sizes, self.limits, self.batches, self.context
        return Bench(*arguments, is_deterministic=True)

    def with_weights(self, form: QuantizedForm) -> Bench:
        """Return the same bench with quantized weights in products, with an engine of its own."""
        arguments = self.device, self.sizes, self.limits, self.batches, self.context
        return Bench(*arguments, weights=form)

    def with_mixed_graphs(self, num_tokens: int) -> Bench:
        """Return the same bench with graphs of steps with a chunk of up to `num_tokens`, with an engine of
        its own."""
        arguments = self.device, self.sizes, self.limits, self.batches, self.context
        return Bench(*arguments, mixed_tokens=num_tokens)

    def with_experts(self) -> Bench:
        """Return a bench of the model with experts."""
        sizes = self.sizes._replace(shape=self.sizes.experts, family="qwen3_moe")
        return Bench(self.device, sizes, self.limits, EXPERT_BATCHES, self.context)

    def with_long_context(self) -> Bench:
        """Return a bench of few sequences with long contexts."""
        return Bench(self.device, self.sizes, self.limits, _LONG_BATCHES, self.sizes.long_context)

    def with_states(self) -> Bench:
        """Return a bench of the model most of whose layers keep a state."""
        sizes = self.sizes._replace(shape=self.sizes.states, family="qwen3_5_text")
        return Bench(self.device, sizes, self.limits, self.batches, self.context)

    @cached_property
    def driver(self) -> EngineDriver:
        """The engine, with KV for the largest batch, warmed up and its graphs recorded."""
        num_tokens = max(self.context + 2 * self.sizes.num_steps, BLOCK_TOKENS)
        num_blocks = max(self.batches) * -(-num_tokens // BLOCK_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            dtype = str(self._dtype).removeprefix("torch.")
            write_config(Path(folder), self.sizes.family, dtype, **self.sizes.shape)
            save_file({"unread": torch.zeros(1)}, str(Path(folder) / "model.safetensors"))
            with mock.patch("workers.model.weights.TensorFiles", files_of(self._weights)):
                runner = ModelRunner(
                    CheckpointFolder(Path(folder)),
                    ComputeSettings(
                        self._dtype,
                        self.device,
                        torch.get_num_threads(),
                        is_deterministic=self._is_deterministic,
                    ),
                    RankCapacity(
                        BLOCK_TOKENS,
                        max(num_blocks * BLOCK_TOKENS, self.sizes.prefill_tokens + BLOCK_TOKENS),
                        max(self.batches),
                        mixed_tokens=self._mixed_tokens,
                    ),
                    CLOCK,
                )
        runner.warm_up(self.sizes.prefill_tokens)
        driver = EngineDriver(runner, CLOCK, BLOCK_TOKENS)
        driver.fill_kv()
        return driver

    def close(self) -> None:
        """Give the engine's memory back."""
        driver: EngineDriver = self.__dict__.pop("driver")
        driver.runner.close()
        del driver
        if self.device.type == "cuda":
            CudaAccounts(self.device).release(with_workspaces=True)

    @property
    def work(self) -> ModelWork:
        """The least work of a step."""
        return ModelWork(self.driver.runner.config, self._dtype.itemsize)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's KV."""
        return block_layout(self.sizes).block_bytes // BLOCK_TOKENS

    def decode_step_s(self, batch: int) -> float:
        """Return the seconds of a step, the best of three runs."""
        steps = self.sizes.num_steps
        self.driver.decode_s(batch, self.context, 4)
        return min(self.driver.decode_s(batch, self.context, steps) for _ in range(3)) / steps

    def prefill_s(self) -> float:
        """Return the seconds of one prompt in one chunk, the best of three."""
        num_tokens = self.sizes.prefill_tokens
        return min(self.driver.prefill_s(num_tokens, num_tokens) for _ in range(3))


Line = dict[str, object]


def decode(bench: Bench) -> Iterator[Line]:
    """Decode steps by batch: the time to copy as many bytes as they read, over their own."""
    yield from _decode_lines(bench, 0.88)


def experts(bench: Bench) -> Iterator[Line]:
    """Decode steps of a model with experts, of which those count that the tokens would choose at random."""
    yield from _decode_lines(bench.with_experts(), 0.7)


def hybrid(bench: Bench) -> Iterator[Line]:
    """A model most of whose layers keep a state: its decode steps, a prompt in one chunk, and its kernels."""
    with_states = bench.with_states()
    yield from _decode_lines(with_states, 0.7)
    yield _prefill_line(with_states, 0.5)
    if bench.device.type == "cuda":
        yield from kernels(with_states)


def _decode_lines(bench: Bench, target: float) -> Iterator[Line]:
    for batch in bench.batches:
        step_s = bench.decode_step_s(batch)
        work = bench.work.of([(bench.context - 1, 1)] * batch, batch)
        limit_s = max(work.read_bytes / bench.limits.byte_s, work.flops / bench.limits.flop_s)
        figure = f"decode_ms at batch {batch}, context {bench.context}"
        yield _time_line(figure, step_s * 1e3, limit_s * 1e3, target)


def _time_line(figure: str, value: float, limit: float, target: float) -> Line:
    """Return the line of a time whose limit over it should be the target."""
    return {"figure": figure, "value": value, "limit": limit, "ratio": limit / value, "target": target}


def prefill(bench: Bench) -> Iterator[Line]:
    """A prompt in one chunk: the time of as many operations in a large product, over its own."""
    yield _prefill_line(bench, 0.6)


def _prefill_line(bench: Bench, target: float) -> Line:
    prompt_s = bench.prefill_s()
    limit_s = bench.work.of([(0, bench.sizes.prefill_tokens)], 1).flops / bench.limits.flop_s
    figure = f"prefill_ms of {bench.sizes.prefill_tokens} tokens"
    return _time_line(figure, prompt_s * 1e3, limit_s * 1e3, target)


def long_context(bench: Bench) -> Iterator[Line]:
    """Decode steps, and a short chunk, behind 30,000 tokens: the time to copy their bytes, over their own."""
    long = bench.with_long_context()
    yield from _decode_lines(long, 0.88)
    long.driver.chunk_s(long.context, _SHORT_CHUNK_TOKENS, 2)
    num_steps = long.sizes.num_steps
    step_s = (
        min(long.driver.chunk_s(long.context, _SHORT_CHUNK_TOKENS, num_steps) for _ in range(3)) / num_steps
    )
    work = long.work.of([(long.context, _SHORT_CHUNK_TOKENS)], 1)
    limit_s = max(work.read_bytes / bench.limits.byte_s, work.flops / bench.limits.flop_s)
    figure = f"step_ms of {_SHORT_CHUNK_TOKENS} tokens behind {long.context}"
    yield _time_line(figure, step_s * 1e3, limit_s * 1e3, 0.6)


def idle(bench: Bench) -> Iterator[Line]:
    """The share of a decode step in which the device does nothing: at most 5 %."""
    needs_cuda(bench)
    few, many = 4, 24
    for batch in bench.batches:
        step_s = bench.decode_step_s(batch)
        with DeviceTime() as of_few:
            bench.driver.decode_s(batch, bench.context, few)
        with DeviceTime() as of_many:
            bench.driver.decode_s(batch, bench.context, many)
        device_s = (of_many.busy_s - of_few.busy_s) / (many - few)
        yield {
            "figure": f"idle_share at batch {batch}",
            "value": 1 - device_s / step_s,
            "limit": 0.05,
            "ratio": device_s / step_s,
            "target": 0.95,
        }


def host(bench: Bench) -> Iterator[Line]:
    """What a decode step costs the process of its rank while the device computes: at most 0.5 ms."""
    needs_cuda(bench)
    for batch in bench.batches:
        wait = partial(synchronize, bench.device)
        host_ms = 1e3 * bench.driver.host_s(batch, bench.context, bench.sizes.num_steps, wait)
        yield _time_line(f"host_ms of a rank's step at batch {batch}", host_ms, 0.5, 1.0)


def sampling(bench: Bench) -> Iterator[Line]:
    """The share of sampling in the device's work of a step that is not a graph: at most 5 %."""
    needs_cuda(bench)
    runner = bench.driver.runner
    for batch in bench.batches:
        tokens = [bench.driver.draw(1) for _ in range(batch)]
        entries = [BatchEntry(slot, bench.context, 1, each, (slot,)) for slot, each in enumerate(tokens)]
        plan = StepPlan(0, entries=tuple(entries))
        with bench.driver.started(tokens, bench.context + 1):
            runner.steps.run(plan)
            with DeviceTime() as layers:
                executed = runner.steps.execute(plan)
            with DeviceTime() as draws:
                runner.steps.collect(runner.steps.sample(executed))
        share = draws.busy_s / (layers.busy_s + draws.busy_s)
        yield {
            "figure": f"sampling_share at batch {batch}",
            "value": share,
            "limit": 0.05,
            "ratio": 0.05 / max(share, 1e-9),
            "target": 1.0,
        }


def deterministic(bench: Bench) -> Iterator[Line]:
    """What deterministic mode costs: times with it over times without."""
    fixed = bench.deterministic()
    pairs: list[tuple[str, Callable[[Bench], float]]] = [
        (f"decode_ms at batch {batch}", partial(Bench.decode_step_s, batch=batch)) for batch in bench.batches
    ]
    pairs.append((f"prefill_ms of {bench.sizes.prefill_tokens} tokens", Bench.prefill_s))
    plain = [time(bench) * 1e3 for _, time in pairs]
    bench.close()  # its memory is needed
    for (figure, time), without in zip(pairs, plain, strict=True):
        value = time(fixed) * 1e3
        limit = (1.25 if time is Bench.prefill_s else 1.1) * without
        yield _time_line(f"deterministic {figure}", value, limit, 1.0) | {"without": without}


def cuda_ipc(bench: Bench) -> Iterator[Line]:
    """Pushes between two processes, with checksums: their rate over that of copies, also across cards."""
    layout, num_blocks = block_layout(bench.sizes), bench.sizes.num_pushed_blocks
    is_cuda = bench.device.type == "cuda"

    def line(figure: str, rate: float, limit: float) -> Line:
        ratio = rate / limit
        return {"figure": figure, "value": rate / 1e9, "limit": limit / 1e9, "ratio": ratio, "target": 0.8}

    rate = push_rate(bench.device, layout, num_blocks)
    # The limit is that of bytes which are both read and written.
    yield line("cuda_ipc_gb_s" if is_cuda else "shm_gb_s", rate, bench.limits.byte_s / 2)
    if is_cuda and torch.cuda.device_count() > 1:
        rate = push_rate(bench.device, layout, num_blocks, is_across=True)
        limit = copy_rate_across(bench.device, num_blocks * layout.block_bytes)
        yield line("cuda_ipc_gb_s across cards", rate, limit)


def hand_over(bench: Bench) -> Iterator[Line]:
    """Prompts of 4,096 tokens pushed while their rank computes: the time of their bytes at 0.8 of a copy."""
    num_blocks = max(bench.sizes.prefill_tokens // BLOCK_TOKENS, 1)
    layout = block_layout(bench.sizes)
    num_bytes = num_blocks * layout.block_bytes
    seconds = num_bytes / push_rate(bench.device, layout, num_blocks, is_busy=True)
    limit = num_bytes / (0.8 * bench.limits.byte_s / 2)
    yield {
        "figure": f"landing_ms of {bench.sizes.prefill_tokens} tokens",
        "value": seconds * 1e3,
        "limit": limit * 1e3,
        "ratio": limit / seconds,
        "target": 1 / 1.2,
    }


def rank_sums(bench: Bench) -> Iterator[Line]:
    """Sums of two ranks in a graph, on a card each, through mapped memory: their time over that of NCCL."""
    needs_cuda(bench)
    for timed in time_sums():
        line: Line = {"figure": f"sum_us of {timed.num_bytes} bytes", "value": timed.one_shot_us}
        if timed.nccl_us:
            line |= {"limit": timed.nccl_us, "ratio": timed.nccl_us / timed.one_shot_us, "target": 1.0}
        yield line


def offload(bench: Bench) -> Iterator[Line]:
    """Blocks to pinned host memory and back, with checksums: their rate over that of plain copies."""
    needs_cuda(bench)
    layout = block_layout(bench.sizes)
    pool = make_pool(bench.device, layout, bench.sizes.num_pushed_blocks)
    ids = range(pool.num_blocks)
    memory = np.zeros(pool.num_blocks * layout.block_bytes, np.uint8)
    region = ByteRegion(memory.data)
    pool.attach(region)
    offsets = [block * layout.block_bytes for block in ids]
    pinned = torch.from_numpy(memory)
    there = torch.empty(memory.size, dtype=torch.uint8, device=bench.device)
    limits = {
        "store": best_s(lambda: pinned.copy_(there, non_blocking=True), CLOCK, bench.device, 5),
        "load": best_s(lambda: there.copy_(pinned, non_blocking=True), CLOCK, bench.device, 5),
    }
    works: dict[str, Callable[[], object]] = {
        "store": lambda: pool.store(ids, region, offsets),
        "load": lambda: pool.load(ids, layout.shard, region, offsets, layout.shard),
    }
    for name, work in works.items():
        seconds = best_s(work, CLOCK, bench.device, 5)
        rate, limit = memory.size / seconds / 1e9, memory.size / limits[name] / 1e9
        line: Line = {"figure": f"{name}_gb_s", "value": rate, "limit": limit, "ratio": rate / limit}
        yield line | {"target": 0.85}


_IN_ORDER = (
    decode, prefill, long_context, experts, hybrid, quantized, quantized_experts, engine_fp8, engine_int4,
    idle, host, sampling, cuda_ipc, hand_over, rank_sums, nccl_pair, offload, deterministic, kernels, mixed,
    products, start, served,
)  # fmt: skip
PARTS: dict[str, Callable[[Bench], Iterator[Line]]] = {part.__name__: part for part in _IN_ORDER}


def block_layout(sizes: Sizes) -> BlockLayout:
    """Return the layout of the model's blocks in 16 bits."""
    shape = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16} | sizes.shape
    shard = Shard(0, shape["num_hidden_layers"], 0, shape["num_key_value_heads"])
    return BlockLayout(shard, shape["head_dim"], BLOCK_TOKENS, 2)


if __name__ == "__main__":
    main()
