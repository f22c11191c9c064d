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
        if self._role == "prefill":
            return _bisect(0.0, _MOST_BUSY / self._prefill.busy_s, lambda rate: self.at(rate) is not None)

        def holds(mean_batch: float) -> bool:
            return self._meets(self._state_of(self._rate_of(mean_batch), mean_batch))

        # A little less, since the batch of a rate is found by bisection, too.
        return self._rate_of(_bisect(0.0, self._most_batch, holds)) * (1 - 1e-6)

    def _rate_of(self, mean_batch: float) -> float:
        """Return the rate at which so many sequences decode at a time.

        It solves rate x output x step / (1 - rate x prompt) = batch, Little's law where prompts take a part
        of the time.
        """
        step_s = self._times.decode_s(max(mean_batch, 1.0), self._load.mean_context)
        prompt_s = self._prefill.busy_s if self._role != "decode" else 0.0
        return mean_batch / (self._load.output_tokens * step_s + mean_batch * prompt_s)

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
        busy = self._busy(rate)
        mean_batch = self._mean_batch(rate, busy) if self._role != "prefill" and busy < _MOST_BUSY else 0.0
        return self._state_of(rate, mean_batch)

    def _busy(self, rate: float) -> float:
        return rate * self._prefill.busy_s if self._role != "decode" else 0.0

    def _state_of(self, rate: float, mean_batch: float) -> ReplicaCapacity | None:
        """Return the state at this rate, at which so many sequences decode in the mean."""
        decodes, computes = self._role != "prefill", self._role != "decode"
        busy = self._busy(rate)
        if busy >= _MOST_BUSY:
            return None
        batch = max(1.0, mean_batch + _DEVIATIONS * math.sqrt(mean_batch)) if decodes else 0.0
        step_s = self._times.decode_s(batch, self._load.mean_context) if decodes else 0.0
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

    def _mean_batch(self, rate: float, busy: float) -> float:
        """Return how many sequences decode at a time: as many as arrive while one decodes (Little's law).
        More than fit where they come faster than those end."""

        def is_too_few(batch: float) -> bool:
            step_s = self._times.decode_s(max(batch, 1.0), self._load.mean_context)
            return rate * self._load.output_tokens * step_s / (1 - busy) > batch

        if is_too_few(self._most_batch):
            return 1.01 * self._most_batch
        return _bisect(0.0, self._most_batch, is_too_few)

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
