"""Benchmark the engine alone, beside the machine's limits and, on request, transformers, in the same run.

Called by `tandem bench engine` and by `benchmarks/engine.py`. Every measurement is a dictionary passed to
`emit`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtransfer.common.clock import Clock, SystemClock
from workers.errors import CapacityError
from workers.messages import BatchEntry, SamplingParams, SlotSample, SlotStart, StepPlan, TableChange
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import ModelWork
from workers.rank.model_runner import ModelRunner, read_dtype
from workers.rank.probe import DeviceLimits, MeasureSizes, measure_limits, synchronize

Emit = Callable[[dict[str, Any]], None]
# Takes (batch, prompt tokens), returns the seconds of one run.
_Generate = Callable[[int, int], float]

_NUM_DECODE_STEPS = 16
_CHUNK_TOKENS = 512
_CHECK_TOKENS = 96
_CHECK_CHUNK_TOKENS = 32
_GEMM_SIZE = 2048
_READ_BYTES = 512 << 20


def run_engine_bench(
    model_dir: Path,
    dtype: str,
    threads: int,
    prefill_tokens: Sequence[int],
    decode_batches: Sequence[int],
    context_tokens: int,
    emit: Emit,
    repeat: int = 3,
    *,
    peer: bool = False,
    block_tokens: int = 64,
    device: str = "cpu",
) -> None:
    """Check the logits, measure the machine's limits, then measure prefill and decode.

    Rates, limits included, are tokens a second of the best of `repeat` runs, which other load on the machine
    distorts least. With `peer`, transformers' `generate` is measured in turn with the engine. Raises
    `CapacityError` if a length exceeds the model's positions.
    """
    clock = SystemClock()
    config = read_model_config(model_dir)
    runner = ModelRunner(
        model_dir=model_dir,
        dtype=read_dtype(dtype),
        device=torch.device(device),
        block_tokens=block_tokens,
        num_kv_tokens=_num_kv_tokens(config, prefill_tokens, decode_batches, context_tokens, block_tokens),
        num_threads=threads,
        max_sequences=max(decode_batches, default=1),
        clock=clock,
    )
    with contextlib.closing(runner):
        runner.warm_up()
        engine = _Engine(runner, clock, block_tokens)
        has_transformers = importlib.util.find_spec("transformers") is not None
        reference = _Peer(model_dir, runner, clock) if has_transformers else None
        emit(_check(engine, reference))
        if peer and reference is None:
            emit({"what": "peer", "skipped": "transformers is not installed"})
        rival = reference if peer else None
        del reference  # its memory, when it is not measured
        sizes = MeasureSizes(_GEMM_SIZE, _READ_BYTES, repeat)
        machine = measure_limits(runner.kv.device, runner.kv.dtype, clock, sizes)
        emit(_line(machine))
        roofline = Roofline(config, runner.kv.dtype.itemsize, machine)
        for num_tokens in prefill_tokens:
            line = {"what": "prefill", "tokens": num_tokens, "batch": 1, "context": 0, "dtype": dtype}
            prefill_s = engine.prefill_s, rival.prefill_s if rival else None
            _measure(line, roofline.prefill_tok_s(num_tokens), num_tokens, prefill_s, repeat, emit)
        for batch in decode_batches:
            num_tokens = batch * _NUM_DECODE_STEPS
            limit = roofline.decode_tok_s(batch, context_tokens + _NUM_DECODE_STEPS / 2)
            line = {
                "what": "decode",
                "tokens": num_tokens,
                "batch": batch,
                "context": context_tokens,
                "dtype": dtype,
            }
            decode_s = engine.decode_s, rival.decode_s if rival else None
            _measure(line, limit, context_tokens, decode_s, repeat, emit)


def _num_kv_tokens(
    config: ModelConfig,
    prefill_tokens: Sequence[int],
    decode_batches: Sequence[int],
    context_tokens: int,
    block_tokens: int,
) -> int:
    """Return the KV tokens of the largest measurement. Every sequence begins a block of its own."""
    decode_tokens = context_tokens + _NUM_DECODE_STEPS + 1
    longest = max([*prefill_tokens, decode_tokens, _CHECK_TOKENS])
    if longest > config.max_context_tokens:
        raise CapacityError(f"{longest} tokens exceed the model's {config.max_context_tokens} positions")
    num_blocks = -(-longest // block_tokens)
    num_decode_blocks = max(decode_batches, default=0) * -(-decode_tokens // block_tokens)
    return max(num_blocks, num_decode_blocks) * block_tokens


def _measure(
    line: dict[str, Any],
    limit_tok_s: float,
    prompt_tokens: int,
    generators: tuple[_Generate, _Generate | None],
    repeat: int,
    emit: Emit,
) -> None:
    """Emit `line` with the best of several runs of the engine and, in turn with it, of the peer. The first
    run of each is dropped."""
    ours, theirs = generators
    our_times, their_times = [], []
    for _ in range(repeat + 1):
        our_times.append(ours(line["batch"], prompt_tokens))
        if theirs is not None:
            their_times.append(theirs(line["batch"], prompt_tokens))
    tok_s = line["tokens"] / min(our_times[1:])
    limit = {"limit_tok_s": round(limit_tok_s, 1), "ratio": round(tok_s / limit_tok_s, 4)}
    emit({**line, "tok_s": round(tok_s, 1), **limit})
    if theirs is not None:
        peer_tok_s = line["tokens"] / min(their_times[1:])
        emit(
            {
                **line,
                "what": "peer",
                "of": line["what"],
                "peer": "transformers",
                "tok_s": round(tok_s, 1),
                "peer_tok_s": round(peer_tok_s, 1),
                "ratio": round(tok_s / peer_tok_s, 3),
            }
        )


class _Engine:
    """Drives a model runner with hand-made plans over random prompts that never repeat."""

    def __init__(self, runner: ModelRunner, clock: Clock, block_tokens: int) -> None:
        self.runner = runner
        self._clock = clock
        self._block_tokens = block_tokens
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, num_tokens: int) -> bytes:
        """Draw random token ids as uint32 bytes."""
        ids = torch.randint(0, self.runner.config.vocab_size, (num_tokens,), generator=self._generator)
        return bytes(ids.numpy().astype("<u4").tobytes())

    def starts(
        self, last_tokens: Sequence[int], num_total: int
    ) -> tuple[tuple[SlotStart, ...], tuple[TableChange, ...]]:
        """Start sequences that may grow to `num_total` tokens each, in blocks one after another."""
        num_blocks = -(-num_total // self._block_tokens)
        blocks = np.arange(len(last_tokens) * num_blocks, dtype="<u4").reshape(-1, num_blocks)
        samples = [SlotSample(slot, 0, token) for slot, token in enumerate(last_tokens)]
        return (
            tuple(SlotStart(SamplingParams(), (sample,)) for sample in samples),
            tuple(TableChange(slot, 0, table.tobytes()) for slot, table in enumerate(blocks)),
        )

    def entry(self, slot: int, start: int, tokens: bytes, samples: bool) -> BatchEntry:
        """Make an entry of a started sequence."""
        return BatchEntry(slot, start, len(tokens) // 4, tokens, (slot,) if samples else ())

    def prefill_s(self, batch: int, num_tokens: int) -> float:
        """Return the seconds for one prompt, in chunks, up to its first token."""
        assert batch == 1
        started_at = self._clock.now()
        self._prefill(batch, num_tokens, num_tokens)
        elapsed_s = self._clock.now() - started_at
        self.run(free_slots=(0,))
        return elapsed_s

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds for the steps in which each of `batch` sequences gets `_NUM_DECODE_STEPS`
        tokens."""
        num_total = context_tokens + _NUM_DECODE_STEPS + 1
        self._prefill(batch, context_tokens, num_total)
        started_at = self._clock.now()
        decodes = np.arange(batch, dtype="<u4").tobytes()
        for _ in range(_NUM_DECODE_STEPS):
            self.run(decodes=decodes)
        elapsed_s = self._clock.now() - started_at
        self.run(free_slots=tuple(range(batch)))
        return elapsed_s

    def _prefill(self, batch: int, num_tokens: int, num_total: int) -> None:
        prompts = [self.draw(num_tokens) for _ in range(batch)]
        starts, tables = self.starts([int.from_bytes(it[-4:], "little") for it in prompts], num_total)
        self.run(starts=starts, tables=tables)
        for slot, prompt in enumerate(prompts):
            for begin in range(0, num_tokens, _CHUNK_TOKENS):
                end = min(begin + _CHUNK_TOKENS, num_tokens)
                entry = self.entry(slot, begin, prompt[4 * begin : 4 * end], end == num_tokens)
                self.run(entries=(entry,))

    def run(self, **changes: Any) -> None:
        """Run a plan with these fields."""
        self.runner.run(StepPlan(0, **changes))


class Roofline:
    """The roofline of a machine: the tokens a second that its arithmetic and memory allow. A model that fits
    the caches may exceed the memory bound."""

    def __init__(self, config: ModelConfig, item_bytes: int, machine: DeviceLimits) -> None:
        self._work = ModelWork(config, item_bytes)
        self._flop_s, self._byte_s = machine

    def prefill_tok_s(self, num_tokens: int) -> float:
        """Bound one prompt: linear layers and causal attention for every token, the head once, weights read
        once."""
        flops = self._work.of([(0, num_tokens)], 1).flops
        return num_tokens / max(flops / self._flop_s, self._work.weight_bytes / self._byte_s)

    def decode_tok_s(self, batch: int, mean_context: float) -> float:
        """Bound one decode step by the lower of arithmetic and memory; weights and all KV are read once."""
        work = self._work.of([(mean_context - 1, 1)] * batch, batch)
        return batch / max(work.read_bytes / self._byte_s, work.flops / self._flop_s)


class _Peer:
    """The same checkpoint in transformers, in the same dtype, with the same threads."""

    def __init__(self, model_dir: Path, runner: ModelRunner, clock: Clock) -> None:
        transformers = importlib.import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=runner.kv.dtype)
        self._model: Any = model.to(runner.kv.device).eval()
        self._model.generation_config.eos_token_id = None  # it must not stop early
        self._model.generation_config.pad_token_id = 0
        self._device = runner.kv.device
        self._clock = clock
        self._generator = torch.Generator().manual_seed(1)
        self._vocab_size = runner.config.vocab_size

    @torch.inference_mode()
    def logits(self, tokens: bytes) -> Tensor:
        """Return float32 [num_tokens, vocab_size], the logits at every position."""
        ids = torch.from_numpy(np.frombuffer(tokens, dtype="<u4").astype(np.int64))[None]
        output: Tensor = self._model(ids.to(self._device)).logits
        return output[0].float()

    def prefill_s(self, batch: int, num_tokens: int) -> float:
        """Return the seconds to generate one token."""
        return self._generate_s(self._draw(batch, num_tokens), 1)

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Return the seconds that `_NUM_DECODE_STEPS` further tokens add to a generation."""
        prompts = self._draw(batch, context_tokens)
        prefill_s = self._generate_s(prompts, 1)
        return self._generate_s(prompts, _NUM_DECODE_STEPS + 1) - prefill_s

    def _draw(self, batch: int, num_tokens: int) -> Tensor:
        ids = torch.randint(0, self._vocab_size, (batch, num_tokens), generator=self._generator)
        return ids.to(self._device)

    def _generate_s(self, prompts: Tensor, num_new: int) -> float:
        started_at = self._clock.now()
        output = self._model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_new, do_sample=False
        )
        synchronize(self._device)
        assert output.shape[1] == prompts.shape[1] + num_new
        return self._clock.now() - started_at


def _check(engine: _Engine, reference: _Peer | None) -> dict[str, Any]:
    """Compare the logits of a prompt, in chunks and then token by token, with those of transformers."""
    if reference is None:
        return {"what": "check", "skipped": "transformers is not installed"}
    tokens = engine.draw(_CHECK_TOKENS)
    num_chunked = _CHECK_TOKENS // 2
    begins = [*range(0, num_chunked, _CHECK_CHUNK_TOKENS), *range(num_chunked, _CHECK_TOKENS)]
    ends = [*begins[1:], _CHECK_TOKENS]
    starts, tables = engine.starts([0], _CHECK_TOKENS)
    engine.run(starts=starts, tables=tables)
    entries = [
        engine.entry(0, begin, tokens[4 * begin : 4 * end], True)
        for begin, end in zip(begins, ends, strict=True)
    ]
    ours = torch.cat([engine.runner.logits(StepPlan(0, entries=(entry,))) for entry in entries])
    engine.run(free_slots=(0,))
    theirs = reference.logits(tokens)[[end - 1 for end in ends]]
    return {
        "what": "check",
        "against": "transformers",
        "positions": len(ends),
        "max_error": float((ours - theirs).abs().max() / theirs.abs().max()),
        "argmax_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def _line(machine: DeviceLimits) -> dict[str, Any]:
    """Return the JSON line of the limits."""
    return {
        "what": "limits",
        "gemm_gflop_s": round(machine.flop_s / 1e9, 1),
        "read_gb_s": round(machine.byte_s / 1e9, 2),
        "threads": torch.get_num_threads(),
    }
