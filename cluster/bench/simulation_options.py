"""What the options of `tandem simulate` describe: the load, and the replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

from cluster.bench.conversations import read_conversations
from cluster.bench.mooncake_trace import MooncakeTrace
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile, device_profile, read_profile
from cluster.planning.device_split import DeviceSplit, held_memory
from cluster.planning.planned_model import PlannedModel, planned_model
from cluster.planning.step_times import StepTimes
from cluster.simulation.batch_gate import Batching
from cluster.simulation.simulated_load import (
    DrawnLengths,
    SimulatedSession,
    conversation_sessions,
    drawn_sessions,
    prefill_token_s,
    trace_sessions,
)
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel, planned_steps
from workers.config import DEVICE_TO_STEP_SIZES

Format = Literal["mooncake", "sharegpt", "synthetic"]
# Of drawn requests and of conversations, where no number is given.
_DEFAULT_REQUESTS = 1000
_MAX_SEQUENCES = 256
_BLOCK_TOKENS = 64
# Without a model: what a decode step takes, on a device of no kind, and the blocks of its KV.
_STEP_S, _SEQUENCE_S, _CONTEXT_S = 0.008, 1e-5, 4e-8
_DEFAULT_BLOCKS = 6000
_DEFAULT_UTILIZATION = 0.75


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The requests of a simulation. `trace` is None for synthetic ones."""

    trace: Path | None
    kind: Format
    num_requests: int | None
    rate_s: float
    time_scale: float
    lengths: DrawnLengths
    shared_tokens: int
    think_s: float
    most_output: int | None
    seed: int

    @cached_property
    def recorded(self) -> MooncakeTrace | None:
        """The trace, where the load is one. Raises `BenchError` for a file that is none."""
        if self.trace is None or self.kind != "mooncake":
            return None
        return MooncakeTrace(self.trace, self.num_requests, self.time_scale)

    @property
    def span_s(self) -> float:
        """About how long requests arrive."""
        if self.recorded is not None:
            return max(1.0, *(request.at_s for request in self.recorded))
        return (self.num_requests or _DEFAULT_REQUESTS) / self.rate_s

    def sessions(self) -> Iterator[SimulatedSession]:
        """Yield the sessions, the same each time."""
        for session in self._sessions():
            yield session if self.most_output is None else session.cut(self.most_output)

    def _sessions(self) -> Iterator[SimulatedSession]:
        if self.recorded is not None:
            return trace_sessions(self.recorded)
        num_requests = self.num_requests or _DEFAULT_REQUESTS
        if self.trace is not None:
            told = (
                [("\n".join(turn.content for turn in it.asked), it.answer) for it in conversation]
                for conversation in islice(read_conversations(self.trace), num_requests)
            )
            return conversation_sessions(told, self.rate_s, self.seed, self.think_s)
        return drawn_sessions(
            self.lengths, self.rate_s, num_requests, self.seed, shared_tokens=self.shared_tokens
        )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """The engine of every replica. Without a model, prompts are computed at a constant rate."""

    model: str
    hardware: str
    split: DeviceSplit
    kv_blocks: int | None
    block_tokens: int | None
    utilization: float | None
    batching: Batching

    def engine(self, load: LoadOptions, num_computing: int) -> SimulatedEngine:
        """Return the engine of replicas of which so many compute the prompts of the load. Raises
        `ConfigError` where the options do not go together, or the model does not fit the device."""
        if self.model:
            if self.utilization is not None:
                raise ConfigError("--utilization: is for replicas without --model, whose speed it decides")
            engine = _engine_on(planned_model(self.model, "auto", "auto"), self._profile(), self.split)
        elif self.hardware:
            raise ConfigError("--model: name the model that runs on --hardware")
        else:
            steps = StepModel(_STEP_S, _SEQUENCE_S, _CONTEXT_S, self._token_s(load, num_computing))
            engine = SimulatedEngine(steps, _DEFAULT_BLOCKS)
        if self.block_tokens is not None:
            num_blocks = max(2, engine.num_blocks * engine.block_tokens // self.block_tokens)
            engine = engine._replace(block_tokens=self.block_tokens, num_blocks=num_blocks)
        if self.kv_blocks is not None:
            engine = engine._replace(num_blocks=self.kv_blocks)
        return engine._replace(batching=self.batching)

    def _token_s(self, load: LoadOptions, num_computing: int) -> float:
        utilization = self.utilization or _DEFAULT_UTILIZATION
        if load.recorded is not None:
            return prefill_token_s(load.recorded, num_computing, utilization)
        return utilization * num_computing / (load.rate_s * load.lengths.input_tokens)

    def _profile(self) -> DeviceProfile:
        if not self.hardware:
            raise ConfigError("--hardware: name the device on which --model runs, as H100")
        if self.hardware.endswith(".json"):
            return read_profile(Path(self.hardware))
        return device_profile(self.hardware)


def roles_of(num_prefill: int, num_decode: int, *, are_colocated: bool) -> list[str]:
    """Return the role of each replica. Raises `ConfigError` where none decodes."""
    if are_colocated or not num_prefill:
        roles = ["both"] * (num_prefill + num_decode)
    else:
        roles = ["prefill"] * num_prefill + ["decode"] * num_decode
    if not roles or set(roles) == {"prefill"}:
        raise ConfigError("--decode: no replica decodes; give one, or --colocated")
    return roles


def _engine_on(model: PlannedModel, profile: DeviceProfile, split: DeviceSplit) -> SimulatedEngine:
    """Return the engine of a replica of the model on these devices, as `tandem plan` predicts it. Raises
    `ConfigError` where the model does not fit them."""
    memory = held_memory(model, profile, split, _MAX_SEQUENCES)
    if memory is None:
        raise ConfigError(
            f"--hardware {profile.name}: {model.source} does not fit {split.num_devices} of them; give a "
            "larger --tp or --pp"
        )
    times, sizes = StepTimes(model, profile, split), DEVICE_TO_STEP_SIZES[profile.kind]
    return SimulatedEngine(
        planned_steps(model, profile, split),
        num_blocks=max(2, memory.kv_tokens // _BLOCK_TOKENS),
        block_tokens=_BLOCK_TOKENS,
        max_batch_tokens=sizes.max_batch_tokens,
        chunk_tokens=sizes.chunk_tokens,
        max_sequences=_MAX_SEQUENCES,
        token_bytes=max(4, int(times.token_bytes)),
        max_context_tokens=model.shape.max_context_tokens,
    )


def price_per_s(price_per_hour: float | None, num_devices: int) -> float | None:
    """Return the price of all devices a second; None without the price of one."""
    return None if price_per_hour is None else price_per_hour * num_devices / 3600
