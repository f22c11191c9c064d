"""Find the rate of requests that one replica holds within objectives."""

from __future__ import annotations

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
# No replica is planned busier: queues grow without end as this comes close to 1.
_MOST_BUSY = 0.95
_NUM_BISECTIONS = 32


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
    nine of ten requests. `bound` says what limits it."""

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
        self._num_chunks = math.ceil(load.computed_tokens / times.chunk_tokens)
        of_sequence = load.input_tokens + load.output_tokens
        self._most_batch = min(float(MAX_SEQUENCES), memory.all_tokens / of_sequence)

    def capacity(self) -> ReplicaCapacity | None:
        """Return the capacity, None if there is none."""
        most = 1.0
        while self.at(most) is not None:
            most *= 2
        rate = _bisect(0.0, most, lambda rate: self.at(rate) is not None)
        found = self.at(rate) if rate > 0 else None
        if found is None:
            return None
        return found._replace(bound=self._bound(rate))

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
        if state is None or state.batch > self._most_batch:
            return None
        is_late = state.ttft_s > self._load.ttft_s or state.tpot_s > self._load.tpot_s
        return None if is_late else state

    def _state(self, rate: float) -> ReplicaCapacity | None:
        """Return the state at this rate, whatever the objectives; None where there is no steady one."""
        decodes, computes = self._role != "prefill", self._role != "decode"
        busy = rate * self._prefill.busy_s if computes else 0.0
        if busy >= _MOST_BUSY:
            return None
        mean_batch = self._mean_batch(rate, busy) if decodes else 0.0
        if mean_batch is None:
            return None
        batch = max(1.0, mean_batch + _DEVIATIONS * math.sqrt(mean_batch)) if decodes else 0.0
        context = self._load.mean_context
        step_s = self._times.decode_s(batch, context) if decodes else 0.0
        tpot_s = step_s / (1 - busy)
        ttft_s = self._ttft_s(rate, step_s) if computes else 0.0
        if ttft_s is None:
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
        )

    def _mean_batch(self, rate: float, busy: float) -> float | None:
        """Return how many sequences decode at a time: as many as arrive while one decodes (Little's law).
        None where they come faster than they end."""

        def is_too_few(batch: float) -> bool:
            step_s = self._times.decode_s(max(batch, 1.0), self._load.mean_context)
            return rate * self._load.output_tokens * step_s / (1 - busy) > batch

        if is_too_few(MAX_SEQUENCES):
            return None
        return _bisect(0.0, MAX_SEQUENCES, is_too_few)

    def _ttft_s(self, rate: float, step_s: float) -> float | None:
        """Return the time to the first token that nine of ten requests have: the prompt's chunks, between
        which a replica of both roles decodes, what the hand-over adds, and the wait for prompts before it."""
        between_s = self._num_chunks * step_s
        service_s = self._prefill.busy_s + between_s
        load = rate * service_s
        if load >= _MOST_BUSY:
            return None
        wait_s = waited_s(load, service_s)
        transfer_s = self._transfer_s() if self._role == "prefill" else 0.0
        return self._load.load_s + self._prefill.latency_s + between_s + transfer_s + wait_s

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
