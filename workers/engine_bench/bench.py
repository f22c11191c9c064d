"""Benchmark the engine alone, along with the machine's limits and other engines, round by round.

Called by `tandem bench engine` and by `benchmarks/engine.py`. Every result is a dictionary passed to `emit`:
"check" (logits against transformers, and those of each form of weights against those of the stored one),
"machine", "peer loaded", "peer skipped" or "peer failed", a "round" of each measure as it is done, and in the
end one line a measure ("prefill" or "decode") and one for each peer and each form of it ("peer").
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.host import cpu_flags, cpu_name
from workers.engine_bench.driver import CHUNK_TOKENS, EngineDriver
from workers.engine_bench.logits_check import CHECK_TOKENS, check_form, check_logits
from workers.engine_bench.peer_child import Settings
from workers.engine_bench.peer_process import INSTALL, PeerProcess, PeerSpec
from workers.engine_bench.roofline import LayerProducts, Roofline
from workers.engine_bench.rounds import (
    Measure,
    Meter,
    OthersMeter,
    Round,
    measure_s,
    median_ratio,
    median_tok_s,
    run_rounds,
)
from workers.engine_bench.weight_forms import FormName, GgufModel, MeasuredForm, measured_form
from workers.errors import CapacityError, PeerError
from workers.model import native
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import refuse_expert_offload
from workers.model.weight_bytes import WeightBytes
from workers.rank.model_runner import ModelRunner
from workers.rank.probe import MeasureSizes, measure_limits
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, read_dtype

Emit = Callable[[dict[str, Any]], None]

OURS = "tandem"
DETERMINISTIC = "deterministic"
NUM_DECODE_STEPS = 24
_LIMIT = "limit"
_PRODUCTS = "products"
_GEMM_SIZE = 2048
_READ_BYTES = 512 << 20
_NUM_LIMIT_RUNS = 2
# Peers compute the context of a decode batch themselves; ours need not, so longer contexts are ours alone.
_MOST_PEER_DECODE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of a benchmark. `decode` are pairs of batch and context; `peer_cache` None: a folder that
    is removed afterwards. `with_deterministic`: our engine is also measured in deterministic mode, as a peer
    is; and so with each of the forms `weights` of weights. `gguf` is what `model_dir` is made of, for the
    form "gguf"; llama.cpp loads that file too. `expert_offload` experts of each layer are computed by the
    CPU."""

    model_dir: Path
    dtype: str
    threads: int = 2
    prefill: Sequence[int] = (512, 2048)
    decode: Sequence[tuple[int, int]] = ((1, 128), (4, 128), (8, 128), (16, 128))
    num_rounds: int = 5
    peers: Sequence[PeerSpec] = ()
    peer_cache: Path | None = None
    block_tokens: int = 64
    device: str = "cpu"
    with_deterministic: bool = False
    expert_offload: int = 0
    weights: Sequence[FormName] = ()
    gguf: GgufModel | None = None

    def measures(self) -> list[Measure]:
        """Return one measure for each prompt length and each decode batch."""
        return [
            *(Measure("prefill", num_tokens) for num_tokens in self.prefill),
            *(
                Measure("decode", batch * NUM_DECODE_STEPS, batch, context, NUM_DECODE_STEPS)
                for batch, context in self.decode
            ),
        ]


def run_engine_bench(options: BenchOptions, emit: Emit, meter: Meter | None = None) -> None:
    """Check the logits, load the peers that are installed, then run the rounds and report their medians.

    Raises `CapacityError` if a length exceeds the model's positions, and `CheckpointError` if no experts can
    be left to the CPU.
    """
    clock = SystemClock()
    config = read_model_config(options.model_dir)
    refuse_expert_offload(
        config,
        options.expert_offload,
        (options.device,),
        tp=1,
        is_deterministic=options.with_deterministic,
    )
    measures = options.measures()
    with contextlib.ExitStack() as stack:
        name_to_form = {OURS: MeasuredForm(options.model_dir)}
        for name in options.weights:
            name_to_form[name] = measured_form(name, options.model_dir, options.gguf)

        def make_driver(form: MeasuredForm, *, is_deterministic: bool = False) -> EngineDriver:
            runner = _runner(options, config, form, clock, is_deterministic=is_deterministic)
            stack.enter_context(contextlib.closing(runner))
            runner.warm_up()
            return EngineDriver(runner, clock, options.block_tokens)

        drivers = {name: make_driver(form) for name, form in name_to_form.items()}
        if options.with_deterministic:
            drivers[DETERMINISTIC] = make_driver(name_to_form[OURS], is_deterministic=True)
        emit(check_logits(drivers[OURS], options.model_dir))
        for name in options.weights:
            emit(check_form(name, drivers[name], drivers[OURS]))
        for driver in drivers.values():
            driver.fill_kv()
        emit(_machine(drivers[OURS].runner))
        cache_dir = options.peer_cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        name_to_weights = _weight_bytes(options, config, name_to_form)
        turns = _Turns(drivers, config, name_to_weights, clock, emit)
        stack.callback(turns.close)
        turns.load_peers(options, measures, cache_dir)
        for measure in _warm_up(measures):
            turns(measure, 0)
        rounds = run_rounds(
            measures,
            options.num_rounds,
            turns,
            meter or OthersMeter(turns.cpu_s, clock),
            lambda measure, done: emit(_round_line(measure, done)),
        )
        for measure, done in rounds.items():
            _report(measure, done, options.dtype, emit)


def _runner(
    options: BenchOptions, config: ModelConfig, form: MeasuredForm, clock: Clock, *, is_deterministic: bool
) -> ModelRunner:
    """Load the model with weights of this form."""
    measures = options.measures()
    return ModelRunner(
        CheckpointFolder(form.folder),
        ComputeSettings(
            read_dtype(options.dtype),
            torch.device(options.device),
            options.threads,
            is_deterministic=is_deterministic,
            expert_offload=options.expert_offload,
            weights=form.form,
        ),
        RankCapacity(
            options.block_tokens,
            _num_kv_tokens(config, measures, options.block_tokens),
            max((each.batch for each in measures), default=1),
        ),
        clock,
    )


def _weight_bytes(
    options: BenchOptions, config: ModelConfig, name_to_form: Mapping[str, MeasuredForm]
) -> dict[str, WeightBytes]:
    """Return the mean bytes of the weights of each form."""
    item_bytes, device = read_dtype(options.dtype).itemsize, torch.device(options.device).type
    return {name: form.weight_bytes(config, item_bytes, device) for name, form in name_to_form.items()}


def _warm_up(measures: Sequence[Measure]) -> Iterator[Measure]:
    """Return shorter measures, whose results are dropped: they compile, touch memory, and compute the context
    of each decode batch."""
    prefills = [each for each in measures if each.what == "prefill"]
    yield from sorted(prefills, key=lambda each: each.num_tokens)[:1]
    for measure in measures:
        if measure.what == "decode":
            yield measure._replace(num_tokens=measure.batch, num_steps=1)


def _num_kv_tokens(config: ModelConfig, measures: Sequence[Measure], block_tokens: int) -> int:
    """Return the KV tokens of the largest measure. Every sequence begins a block of its own."""
    lengths = {each: _sequence_tokens(each) for each in measures}
    longest = max([*lengths.values(), CHECK_TOKENS])
    if longest > config.max_context_tokens:
        raise CapacityError(f"{longest} tokens exceed the model's {config.max_context_tokens} positions")
    blocks = [each.batch * -(-length // block_tokens) for each, length in lengths.items()]
    return max([*blocks, -(-longest // block_tokens)]) * block_tokens


def _sequence_tokens(measure: Measure) -> int:
    return measure.num_tokens if measure.what == "prefill" else measure.context + measure.num_steps + 1


class _Turns:
    """Gives every engine its turn at a measure, ours and the loaded peers, in alternating order."""

    def __init__(
        self,
        drivers: Mapping[str, EngineDriver],
        config: ModelConfig,
        name_to_weights: Mapping[str, WeightBytes],
        clock: Clock,
        emit: Emit,
    ) -> None:
        self._drivers = drivers
        self._name_to_weights = name_to_weights
        self._config = config
        kv = drivers[OURS].runner.kv
        self._device, self._dtype = kv.device, kv.dtype
        self._clock = clock
        self._emit = emit
        self._peers: dict[str, PeerProcess] = {}
        self._ended_cpu_s = 0.0
        is_cpu = self._device.type == "cpu"
        self._products = LayerProducts(config, self._dtype, CHUNK_TOKENS, clock) if is_cpu else None

    def load_peers(self, options: BenchOptions, measures: Sequence[Measure], cache_dir: Path) -> None:
        """Start the peers one after another, and report those that are missing or fail."""
        asked = [each for each in measures if _suits_peers(each)]
        decoded = [each for each in asked if each.what == "decode"]
        for spec in options.peers:
            file = options.gguf.file if options.gguf and spec.name == "llama.cpp" else None
            settings = Settings(
                peer=spec.name,
                model_dir=str(options.model_dir.resolve()),
                dtype=spec.dtype or _peer_dtype(spec.name, options.dtype),
                threads=options.threads,
                max_tokens=max(map(_sequence_tokens, asked), default=1) + 1,
                max_batch=max((each.batch for each in decoded), default=1),
                max_batch_tokens=max(map(_sequence_tokens, decoded), default=1),
                cache_dir=str(cache_dir.resolve()),
                gguf="" if file is None else str(file.resolve()),
            )
            self._load(spec, settings)

    def _load(self, spec: PeerSpec, settings: Settings) -> None:
        process = PeerProcess.start(spec, settings, self._clock)
        try:
            ready = process.wait_ready()
        except PeerError as error:
            process.close()
            self._emit({"what": "peer failed", "peer": spec.label, "reason": str(error)})
            return
        if ready is None:
            process.close()
            remedy = f"not installed for {spec.python}: {INSTALL[spec.name]}"
            self._emit({"what": "peer skipped", "peer": spec.label, "reason": remedy})
            return
        self._peers[spec.label] = process
        fields = {"version": ready.version, "dtype": settings.dtype, "detail": ready.detail}
        self._emit({"what": "peer loaded", "peer": spec.label, **fields})

    def __call__(self, measure: Measure, number: int) -> Mapping[str, float]:
        """Return tokens a second by engine, and by the limits of the machine at this moment."""
        names = [*self._drivers, *(self._peers if _suits_peers(measure) else ())]
        rates: dict[str, float] = {}
        for name in names if number % 2 == 0 else reversed(names):
            engine = self._drivers[name] if name in self._drivers else self._peers[name]
            try:
                rates[name] = measure.num_tokens / measure_s(engine, measure)
            except PeerError as error:
                self._drop(name, str(error))
        sizes = MeasureSizes(_GEMM_SIZE, _READ_BYTES, _NUM_LIMIT_RUNS)
        machine = measure_limits(self._device, self._dtype, self._clock, sizes)
        for name, weights in self._name_to_weights.items():
            roofline = Roofline(self._config, self._dtype.itemsize, machine, weights)
            rates[_limit_of(name)] = _limit_tok_s(roofline, measure)
        if measure.what == "prefill" and self._products is not None and measure.num_tokens >= CHUNK_TOKENS:
            rates[_PRODUCTS] = CHUNK_TOKENS / self._products.seconds()
        return rates

    def cpu_s(self) -> float:
        """Return the CPU seconds that this process and the peers have used."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        running_s = sum(peer.cpu_s() for peer in self._peers.values())
        return own.ru_utime + own.ru_stime + running_s + self._ended_cpu_s

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _drop(self, name: str, reason: str) -> None:
        peer = self._peers.pop(name)
        self._ended_cpu_s += peer.cpu_s()
        peer.close()
        self._emit({"what": "peer failed", "peer": name, "reason": reason})


def _limit_of(name: str) -> str:
    """Return the name of the limit of an engine."""
    return _LIMIT if name == OURS else f"{name} {_LIMIT}"


def _limit_tok_s(roofline: Roofline, measure: Measure) -> float:
    if measure.what == "prefill":
        return roofline.prefill_tok_s(measure.num_tokens)
    return roofline.decode_tok_s(measure.batch, measure.context + measure.num_steps / 2)


def _suits_peers(measure: Measure) -> bool:
    return measure.what == "prefill" or measure.batch * measure.context <= _MOST_PEER_DECODE_TOKENS


def _peer_dtype(name: str, dtype: str) -> str:
    """Return the dtype in which a peer is fastest at no less than our precision: torch emulates bf16 where
    the CPU has no instructions for it, llama.cpp widens it."""
    emulates = cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16", "bf16"))
    return "fp32" if dtype == "bf16" and emulates and name != "llama.cpp" else dtype


def _machine(runner: ModelRunner) -> dict[str, Any]:
    kernels = native.load()
    return {
        "what": "machine",
        "cpu": cpu_name(),
        "isa": kernels.isa.value if kernels is not None else "none that the kernels know",
        "threads": torch.get_num_threads(),
        "dtype": str(runner.kv.dtype).removeprefix("torch."),
    }


def _round_line(measure: Measure, done: Round) -> dict[str, Any]:
    rates = {name: round(tok_s, 1) for name, tok_s in done.name_to_tok_s.items()}
    return {"what": "round", "of": measure.label, "tok_s": rates, "others": round(done.others, 3)}


def _report(measure: Measure, rounds: Sequence[Round], dtype: str, emit: Emit) -> None:
    """Emit a measure's line and those of its peers: medians over `rounds`, and medians of ratios."""
    shape = {"tokens": measure.num_tokens, "batch": measure.batch, "context": measure.context}
    rounds_of = {
        "rounds": len(rounds),
        "void": sum(each.is_void for each in rounds),
        "others": [round(each.others, 3) for each in rounds],
    }
    line = {"what": measure.what, **shape, "dtype": dtype, "tok_s": _rounded(median_tok_s(rounds, OURS), 1)}
    for name in (_LIMIT, _PRODUCTS):
        if (tok_s := median_tok_s(rounds, name)) is not None:
            line[f"{name}_tok_s"] = round(tok_s, 1)
            line[f"{name}_ratio"] = _rounded(median_ratio(rounds, OURS, name), 3)
    emit({**line, **rounds_of})
    names = dict.fromkeys(name for each in rounds for name in each.name_to_tok_s)
    limits = {name for name in names if name.endswith(_LIMIT)}
    forms = [name for name in names if _limit_of(name) in limits and name != OURS]
    for name in names:
        if name in (OURS, _PRODUCTS) or name in limits:
            continue
        peer_tok_s = _rounded(median_tok_s(rounds, name), 1)
        ratio = _rounded(median_ratio(rounds, OURS, name), 3)
        rates: dict[str, Any] = {"tok_s": line["tok_s"], "peer_tok_s": peer_tok_s, "ratio": ratio}
        if name in forms:
            rates |= {
                "limit_tok_s": _rounded(median_tok_s(rounds, _limit_of(name)), 1),
                "limit_ratio": _rounded(median_ratio(rounds, name, _limit_of(name)), 3),
            }
        elif forms:
            rates["form_ratios"] = {it: _rounded(median_ratio(rounds, it, name), 3) for it in forms}
        emit({"what": "peer", "of": measure.what, **shape, "peer": name, **rates})


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
