"""Find the rate of requests that one replica holds within objectives.

A replica of both roles computes prompts in chunks that are as long as the objective for output tokens lets
them be (`engine.tpot_objective_s`, which plans set): while there are prompts, a step takes that long.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

from cluster.config import Role
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile
from cluster.planning.device_split import DeviceSplit, HeldMemory, held_memory
from cluster.planning.planned_model import PlannedModel
from cluster.planning.step_times import StepTimes

# The part of requests that may miss an objective.
MISSES = 0.1
# The number of standard deviations that so few exceed.
_DEVIATIONS = 1.2816
# The squared coefficient of variation of the time of a prompt: lengths are as unlike as those of an
# exponential distribution.
_VARIATION = 1.0
# The most sequences of a step for which plans are made.
MAX_SEQUENCES = 512
# The least chunk beside sequences: a block.
_LEAST_CHUNK = 64
# No replica is planned busier: queues grow without end as this comes close to 1.
_MOST_BUSY = 0.95
_NUM_BISECTIONS = 32
# Batches that are compared where the largest is not the best.
_NUM_BATCHES = 256


class PlannedLoad(NamedTuple):
    """What is asked of the cluster: mean tokens of prompts and answers, and objectives for nine of ten
    requests. A share of the prompts' tokens, `hit_rate`, has KV that is found again, of which what is not on
    a device takes `load_s` a prompt to load."""

    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    hit_rate: float = 0.0
    load_s: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """The tokens of a mean prompt that are not computed."""
        return min(int(self.hit_rate * self.input_tokens), self.input_tokens - 1)

    @property
    def computed_tokens(self) -> int:
        """The tokens of a mean prompt that are computed."""
        return self.input_tokens - self.cached_tokens

    def check(self, max_context_tokens: int) -> None:
        """Raise `ConfigError` where a request is longer than the model's context."""
        if (num_tokens := self.input_tokens + self.output_tokens) > max_context_tokens:
            raise ConfigError(
                f"--input and --output: {num_tokens} tokens are more than the model's context of "
                f"{max_context_tokens}; lower one of them"
            )

    @property
    def mean_context(self) -> float:
        """The tokens of a sequence in the mean of its steps."""
        return self.input_tokens + self.output_tokens / 2


class ReplicaCapacity(NamedTuple):
    """What one replica holds: its rate of requests, and the sequences that decode at a time, in the mean and
    in nine of ten moments. `busy` is the share of time in which it computes prompts; the times are those of
    nine of ten requests. `chunk` is that of a prompt beside sequences. `bound` says what limits it."""

    split: DeviceSplit
    role: Role
    memory: HeldMemory
    rate: float
    busy: float
    mean_batch: float
    batch: float
    ttft_s: float
    tpot_s: float
    prefill_s: float
    bound: str
    chunk: ChunkBeside | None = None


class ChunkBeside(NamedTuple):
    """The mean chunk of prompts in a step that also decodes, and the time of the step through all stages."""

    num_tokens: float
    step_s: float


class SplitMemory:
    """Remembers what devices hold by the split, whatever the load."""

    def __init__(self, model: PlannedModel, profile: DeviceProfile) -> None:
        self._model, self._profile = model, profile
        self._split_to_held: dict[DeviceSplit, HeldMemory | None] = {}

    def of(self, split: DeviceSplit) -> HeldMemory | None:
        """Return what a device holds with as many sequences as plans have at most; None where too little is
        left for KV."""
        if split not in self._split_to_held:
            held = held_memory(self._model, self._profile, split, MAX_SEQUENCES)
            self._split_to_held[split] = held
        return self._split_to_held[split]


class CapacityFinder:
    """Finds what replicas of a model hold on one kind of device."""

    def __init__(
        self,
        model: PlannedModel,
        profile: DeviceProfile,
        load: PlannedLoad,
        memory: SplitMemory | None = None,
    ) -> None:
        self._model, self._profile, self._load = model, profile, load
        self._memory = memory or SplitMemory(model, profile)

    def find(self, split: DeviceSplit, role: Role) -> ReplicaCapacity | None:
        """Return the capacity; None where it has no memory, or where not even one request at a time meets the
        objectives."""
        replica = self._replica(split, role)
        return None if replica is None else replica.capacity()

    def at(self, split: DeviceSplit, role: Role, rate: float) -> ReplicaCapacity | None:
        """Return the times of a replica that has this rate of requests; None where they exceed an objective
        or its memory."""
        replica = self._replica(split, role)
        return None if replica is None else replica.at(rate)

    def _replica(self, split: DeviceSplit, role: Role) -> _Replica | None:
        memory = self._memory.of(split)
        if memory is None:
            return None
        device_tokens = memory.kv_tokens if split.offload_tokens else math.inf
        times = StepTimes(self._model, self._profile, split, device_tokens)
        return _Replica(self._load, split, role, memory, times)


class _Replica:
    """One replica, whose highest rate is found by bisection: all times grow with the rate."""

    def __init__(
        self, load: PlannedLoad, split: DeviceSplit, role: Role, memory: HeldMemory, times: StepTimes
    ) -> None:
        self._load, self._split, self._role = load, split, role
        self._memory, self._times = memory, times
        self._prefill = times.prefill(load.input_tokens, load.cached_tokens)
        self._batch_to_chunk: dict[int, ChunkBeside | None] = {}
        of_sequence = load.input_tokens + load.output_tokens
        self._most_batch = min(float(MAX_SEQUENCES), memory.all_tokens / of_sequence)
        if split.offload_tokens and role != "prefill":
            # More sequences that read host memory than this hold each other up.
            batches = [self._most_batch * part / _NUM_BATCHES for part in range(1, _NUM_BATCHES + 1)]
            self._most_batch = max(batches, key=self._rate_of)

    def capacity(self) -> ReplicaCapacity | None:
        """Return the capacity, None if there is none."""
        rate = self._most_rate()
        found = self.at(rate) if rate > 0 else None
        return None if found is None else found._replace(bound=self._bound(rate))

    def _most_rate(self) -> float:
        if self._role != "decode":
            chunk = self._chunk(1.0) if self._role == "both" else None
            least_s = self._prefill.busy_s if chunk is None else self._beside_s(chunk)
            return _bisect(0.0, _MOST_BUSY / least_s, lambda rate: self.at(rate) is not None)

        def holds(mean_batch: float) -> bool:
            return self._meets(self._state_of(self._rate_of(mean_batch), mean_batch))

        # A little less, since the batch of a rate is found by bisection, too.
        return self._rate_of(_bisect(0.0, self._most_batch, holds)) * (1 - 1e-6)

    def _rate_of(self, mean_batch: float) -> float:
        """Return the rate at which so many sequences decode at a time (Little's law), without prompts."""
        step_s = self._times.decode_s(max(mean_batch, 1.0), self._load.mean_context)
        return mean_batch / (self._load.output_tokens * step_s)

    def _bound(self, rate: float) -> str:
        """Say what a slightly higher rate exceeds."""
        over = self._state(rate * 1.01)
        if over is None and self._role != "decode":
            return "time for prompts"
        if over is None or over.batch > self._most_batch:
            return "memory for KV" if self._most_batch < MAX_SEQUENCES else "sequences of a step"
        return "TPOT" if over.tpot_s > self._load.tpot_s else "TTFT"

    def at(self, rate: float) -> ReplicaCapacity | None:
        """Return the state at this rate; None where it exceeds an objective or a limit."""
        state = self._state(rate)
        return state if self._meets(state) else None

    def _meets(self, state: ReplicaCapacity | None) -> bool:
        """Whether the state is within the objectives and limits."""
        if state is None or state.batch > self._most_batch:
            return False
        if self._load.input_tokens > self._memory.all_tokens:
            return False
        return state.ttft_s <= self._load.ttft_s and state.tpot_s <= self._load.tpot_s

    def _state(self, rate: float) -> ReplicaCapacity | None:
        """Return the state at this rate, whatever the objectives; None where there is no steady one."""
        mean_batch = self._mean_batch(rate) if self._role != "prefill" else 0.0
        return self._state_of(rate, mean_batch)

    def _state_of(self, rate: float, mean_batch: float) -> ReplicaCapacity | None:
        """Return the state at this rate, at which so many sequences decode in the mean."""
        batch = tpot_s = ttft_s = busy = 0.0
        chunk = None
        if self._role != "prefill":
            batch = max(1.0, mean_batch + _DEVIATIONS * math.sqrt(mean_batch))
            tpot_s = self._times.decode_s(batch, self._load.mean_context)
        if self._role == "prefill":
            busy = rate * self._prefill.busy_s
            ttft_s = self._ttft_s(busy, self._prefill.busy_s, self._prefill.latency_s + self._transfer_s())
        elif self._role == "both":
            if (chunk := self._chunk(mean_batch)) is None or self._chunk(batch) is None:
                return None
            of_prompt_s = self._beside_s(chunk)
            busy = rate * of_prompt_s
            tpot_s = self._tpot_s(batch, min(1.0, busy))
            # At least a step, and the last chunk passes the other stages.
            latency_s = max(of_prompt_s, chunk.step_s / self._split.pp) + chunk.step_s * (
                1 - 1 / self._split.pp
            )
            ttft_s = self._ttft_s(busy, of_prompt_s, latency_s)
        if busy >= _MOST_BUSY:
            return None
        return ReplicaCapacity(
            self._split,
            self._role,
            self._memory,
            rate,
            busy,
            mean_batch,
            batch,
            ttft_s,
            tpot_s,
            self._prefill.latency_s,
            "",
            chunk,
        )

    def _mean_batch(self, rate: float) -> float:
        """Return how many sequences decode at a time: as many as arrive while one decodes (Little's law).
        More than fit where they come faster than those end."""

        def is_too_few(batch: float) -> bool:
            chunk = self._chunk(batch) if self._role == "both" else None
            busy = min(1.0, rate * self._beside_s(chunk)) if chunk else 0.0
            return rate * self._load.output_tokens * self._tpot_s(max(batch, 1.0), busy) > batch

        if is_too_few(self._most_batch):
            return 1.01 * self._most_batch
        return _bisect(0.0, self._most_batch, is_too_few)

    def _tpot_s(self, batch: float, busy: float) -> float:
        """Return the mean time of a step, where prompts are computed for this share of the time."""
        step_s = self._times.decode_s(batch, self._load.mean_context)
        chunk = self._chunk(batch) if busy else None
        return step_s if chunk is None else step_s + busy * (chunk.step_s - step_s)

    def _chunk(self, batch: float) -> ChunkBeside | None:
        """Return the longest chunk of a prompt beside so many sequences with which a step takes no longer
        than the objective; None: not even a block."""
        whole = max(1, math.floor(batch))
        fewer, more = self._longest_chunk(whole), self._longest_chunk(whole + 1)
        if fewer is None or more is None:
            return None
        part = max(0.0, batch - whole)
        return ChunkBeside(*(one + part * (other - one) for one, other in zip(fewer, more, strict=True)))

    def _longest_chunk(self, batch: int) -> ChunkBeside | None:
        """Return that of a whole number of sequences."""
        if batch not in self._batch_to_chunk:
            self._batch_to_chunk[batch] = self._found_chunk(batch)
        return self._batch_to_chunk[batch]

    def _found_chunk(self, batch: int) -> ChunkBeside | None:
        load, times = self._load, self._times
        decodes = max(1.0, batch / self._split.pp)

        def step_s(num_tokens: int) -> float:
            start = load.cached_tokens + max(0, load.computed_tokens - num_tokens) // 2
            return times.step_s(decodes, load.mean_context, [(start, num_tokens)])

        sizes = range(_LEAST_CHUNK, times.chunk_tokens + 1)
        num_fitting = bisect.bisect_right(sizes, load.tpot_s, key=step_s)
        if not num_fitting:
            return None
        return ChunkBeside(sizes[num_fitting - 1], step_s(sizes[num_fitting - 1]))

    def _beside_s(self, chunk: ChunkBeside) -> float:
        """Return for how long a prompt is computed in such chunks. As many are under way as there are
        stages."""
        return self._load.computed_tokens / (self._split.pp * chunk.num_tokens) * chunk.step_s

    def _ttft_s(self, busy: float, service_s: float, latency_s: float) -> float:
        """Return the time to the first token that nine of ten requests have: of the prompt, and of the wait
        for prompts before it, which take `service_s` each."""
        wait_s = waited_s(busy, service_s) if busy < _MOST_BUSY else math.inf
        return self._load.load_s + latency_s + wait_s

    def _transfer_s(self) -> float:
        """Return by how much later than the prompt is computed its KV has reached the other replica: with
        the last chunk's, or with that of a long cached prefix."""
        last_s = self._times.transfer_s(self._load.computed_tokens)
        return max(last_s, self._times.network_s(self._load.input_tokens) - self._prefill.latency_s)


def waited_s(load: float, service_s: float) -> float:
    """Return the wait for a server with this load that only `MISSES` of the requests exceed.

    The mean wait is that of Pollaczek and Khinchine, load x service x (1 + variation) / (2 (1 - load)); of
    the requests that wait at all, a part of `load`, the waits are taken for exponential.
    """
    if load <= MISSES:
        return 0.0
    mean_s = service_s * (1 + _VARIATION) / (2 * (1 - load))
    return mean_s * math.log(load / MISSES)


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Return the greatest number between for which it holds, if it holds for all that are smaller."""
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
