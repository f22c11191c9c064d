"""The reactive part: the replicas that queues, free KV blocks and step times of the last few samples call
for.

A signal counts when it stands in each of the last `NUM_SAMPLES` samples; growth is that of `WINDOW_S`.
Prompts that wait for blocks at the decode side are decode's shortage, however long the prefill queue is: more
prefill replicas would wait too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.metrics.demand import Demand
from cluster.scaling.config import ScalingConfig
from cluster.scaling.forecast import NORMAL_TAIL, TAIL
from cluster.scaling.measured_rates import MeasuredRates, RequestSizes
from cluster.scaling.samples import BOTH, DECODE, PREFILL, ScalingSample, kind_of

NUM_SAMPLES = 3
# How far back late first tokens and late gaps count, and prompts that had to wait for decode.
WINDOW_S = 30.0
# Free share of the KV blocks below which landings soon wait.
KV_NEAR_FULL = 0.1
# The share of the recent samples with a full decode side from which on the prefill queue is decode's doing.
_BLOCKED_SHARE = 0.3
# First tokens, or gaps, that must have been seen before the share of late ones counts.
_MIN_OUTCOMES = 20
# Growth counts when it is this many times what independent arrivals and ends vary by.
GROWTH_ERRORS = 3.0
# The part of a decode replica's time that is left to prompts at least, whatever decodes.
LEAST_FREE = 0.1


class Shortage(NamedTuple):
    """A kind of replica is short. `num_replicas` would be enough for the present load."""

    num_replicas: int
    reason: str


class Side(NamedTuple):
    """All known replicas of a kind at one moment, summed."""

    num_replicas: int
    num_running: int
    num_waiting: int
    num_landings: int
    num_waiting_landings: int
    num_held_sequences: int
    num_backlog_tokens: int
    num_free_blocks: int
    num_total_blocks: int
    num_offloaded_blocks: int
    num_preemptions: int
    # A replica that has not computed a prompt yet is taken to be as fast as the others.
    prefill_tok_s: float
    mean_step_s: float

    @property
    def num_sequences(self) -> int:
        return self.num_running + self.num_waiting + self.num_landings

    @property
    def num_used_blocks(self) -> int:
        return self.num_total_blocks - self.num_free_blocks


# The statistics of which a side has the sum over its replicas.
_SUMMED = tuple(name for name in Side._fields if name.startswith("num_") and name != "num_replicas")


def side_of(sample: ScalingSample, kind: str, *, has_prefill: bool) -> Side:
    """Return the side of the replicas whose effective role makes them of this kind."""
    replicas = [
        each
        for each in sample.replicas
        if each.is_known and kind_of(each.role, has_prefill=has_prefill) == kind
    ]

    steps = [each.decode_step_s for each in replicas if each.num_running and each.decode_step_s > 0]
    speeds = [each.prefill_tok_s for each in replicas if each.prefill_tok_s > 0]
    return Side(
        num_replicas=len(replicas),
        **{name: sum(getattr(each, name) for each in replicas) for name in _SUMMED},
        prefill_tok_s=len(replicas) * sum(speeds) / len(speeds) if speeds else 0.0,
        mean_step_s=sum(steps) / len(steps) if steps else 0.0,
    )


class ReactiveSignals:
    """The signals of the last samples, as shortages by kind."""

    def __init__(
        self,
        samples: Sequence[ScalingSample],
        config: ScalingConfig,
        rates: MeasuredRates,
        sizes: RequestSizes,
        max_sequences: int,
        start_s: float,
        expected_per_s: float,
        *,
        has_prefill: bool,
        shares_prompts: bool = False,
    ) -> None:
        """`samples` are the samples of the last half minute or so, oldest first; `start_s` is how long a new
        replica takes, `expected_per_s` how many requests a second the forecast expects. With
        `shares_prompts`, decode replicas compute prompts, too (`cluster.scaling.shared_prompts`)."""
        self._samples = samples
        self._config = config
        self._rates = rates
        self._sizes = sizes
        self._max_sequences = max_sequences
        self._start_s = start_s
        self._expected_per_s = expected_per_s
        self._has_prefill = has_prefill
        self._shares_prompts = shares_prompts

    def sides(self, kind: str) -> list[Side]:
        """Return one side for each of the last `NUM_SAMPLES`; none while there are fewer, or while replicas
        come or go: the effect of that must be seen first."""
        latest = self._samples[-NUM_SAMPLES:]
        found = [self._side(sample, kind) for sample in latest]
        is_settled = len(found) == NUM_SAMPLES and len({side.num_replicas for side in found}) == 1
        return found if is_settled and found[-1].num_replicas else []

    def _side(self, sample: ScalingSample, kind: str) -> Side:
        return side_of(sample, kind, has_prefill=self._has_prefill)

    def shortage(self, kind: str) -> Shortage | None:
        """Return the shortage of this kind; None: there is none."""
        found = []
        if kind == BOTH or (kind == PREFILL and not self._shares_prompts):
            found.append(self._queue(self.sides(kind)))
        if kind in (DECODE, BOTH):
            found += [self._kv_space(kind), self._steps(kind), self._growth(kind)]
        if kind == DECODE and self._shares_prompts:
            found.append(self._shared_queue())
        return max(filter(None, found), key=lambda each: each.num_replicas, default=None)

    # --------------------------------------------------------------------------------- prompts that wait

    def _shared_queue(self) -> Shortage | None:
        """Return the shortage of decode replicas where prompts wait at all replicas."""
        pairs = list(zip(self.sides(PREFILL), self.sides(DECODE), strict=False))
        found = self._queue([self._with_decode(*pair) for pair in pairs])
        return found and found._replace(num_replicas=found.num_replicas - pairs[-1][0].num_replicas)

    def _with_decode(self, prefill: Side, decode: Side) -> Side:
        """Return the prefill side with decode replicas, as fast as their sequences leave them time for
        prompts."""
        step, num_replicas = self._rates.step, prefill.num_replicas + decode.num_replicas
        decoding = decode.num_running * (step.per_sequence_s if step else 0.0) / self._config.itl_slo_s
        at_decode = max(decode.num_replicas - decoding, LEAST_FREE * decode.num_replicas)
        return prefill._replace(
            num_replicas=num_replicas,
            num_running=num_replicas,
            num_waiting=prefill.num_waiting + decode.num_waiting,
            num_backlog_tokens=prefill.num_backlog_tokens + decode.num_backlog_tokens,
            prefill_tok_s=(prefill.num_replicas + at_decode) * self._rates.prefill_tok_s,
        )

    def _queue(self, sides: Sequence[Side]) -> Shortage | None:
        if not sides or not all(side.prefill_tok_s > 0 for side in sides):
            return None
        # One long prompt is computed by one replica, so as many requests as replicas are no queue.
        if any(side.num_running + side.num_waiting <= side.num_replicas for side in sides):
            return None
        slo_s, prompt, tok_s = self._config.ttft_slo_s, self._sizes.prompt, self._rates.prefill_tok_s
        own_s = prompt.mean / tok_s if prompt and tok_s > 0 else 0.0
        late = late_share(self._samples, lambda each: (each.num_first_tokens, each.num_late_first_tokens))
        refused = late_share(self._samples, refusals)
        allowed_s = slo_s - own_s if own_s < slo_s else slo_s
        # How long the backlog keeps the replicas busy.
        queue_s = min(side.num_backlog_tokens / side.prefill_tok_s for side in sides)
        # Refusals keep the queue as short as the objectives of the classes require.
        if refused <= TAIL and queue_s <= (allowed_s / 2 if late > TAIL else allowed_s):
            return None
        latest = sides[-1]
        wanted = self._to_clear(latest)
        reason = (
            f"{latest.num_backlog_tokens} prompt tokens wait, {queue_s:.1f} s for {latest.num_replicas} "
            f"replicas at {tok_s:.0f} tok/s each; {slo_s:g} s is the objective for the "
            "first token"
        )
        if late > TAIL:
            reason += f", and {late:.0%} of them were late"
        if refused > TAIL:
            reason += f", and {refused:.0%} of the requests were refused"
        return Shortage(wanted, reason)

    def _to_clear(self, side: Side) -> int:
        """Return the number of replicas that keep up with the arrivals, and clear the prompts that will wait
        when they are ready, in the time that they take to start: at most one for each request, at least one
        more than there are."""
        window = self._samples[-NUM_SAMPLES - 1 :]
        span_s = window[-1].at - window[0].at
        arrived = sum(sample.demand.num_arrived + sample.demand.num_refused for sample in window[1:])
        prompt = self._sizes.prompt
        each_s = prompt.mean / span_s if prompt and span_s > 0 else 0.0
        # No fewer than are expected, and more only beyond the chance of a few arrivals.
        expected_tok_s = self._expected_per_s * prompt.mean if prompt else 0.0
        arriving_tok_s = max(expected_tok_s, (arrived - NORMAL_TAIL * math.sqrt(arrived)) * each_s)
        clear_s = max(self._start_s, self._config.up_cool_down_s, self._config.ttft_slo_s)
        # Growth beyond chance is drawn out over the time of a start.
        growing_tok_s = max(0.0, (arrived - math.sqrt(arrived)) * each_s - side.prefill_tok_s)
        backlog = side.num_backlog_tokens + growing_tok_s * self._start_s
        missing_tok_s = arriving_tok_s + backlog / clear_s - side.prefill_tok_s
        needed = side.num_replicas + math.ceil(missing_tok_s / self._rates.prefill_tok_s)
        return max(side.num_replicas + 1, min(needed, side.num_running + side.num_waiting))

    # ----------------------------------------------------------------------------------- space for decoding

    def _kv_space(self, kind: str) -> Shortage | None:
        sides = self.sides(kind)
        if not sides:
            return None
        latest = sides[-1]
        free = max(side.num_free_blocks / side.num_total_blocks for side in sides)
        waiting = min(side.num_waiting_landings for side in sides)
        preempted = latest.num_preemptions - sides[0].num_preemptions
        offloaded = min(side.num_offloaded_blocks for side in sides)
        if waiting:
            why = f"{waiting} prompts wait for free KV blocks at the decode side"
        elif all(map(self._is_slotless, sides)):
            sequences = latest.num_running + latest.num_waiting
            why = f"{sequences} sequences share {self._num_slots(latest)} slots"
        elif held := min(side.num_held_sequences for side in sides):
            why = f"{held} sequences wait in gateways for a place to decode"
        elif free < KV_NEAR_FULL:
            why = f"{free:.0%} of the KV blocks are free"
        elif preempted > 0:
            why = f"{preempted} sequences were preempted for want of KV blocks"
        elif offloaded and latest.num_offloaded_blocks > sides[0].num_offloaded_blocks:
            why = f"{latest.num_offloaded_blocks} KV blocks moved to host memory"
        else:
            return None
        wanted = max(latest.num_replicas + 1, self._to_hold(latest))
        return Shortage(wanted, f"{why} ({latest.num_replicas} replicas, {free:.0%} free)")

    def _num_slots(self, side: Side) -> int:
        return side.num_replicas * self._max_sequences

    def _to_hold(self, side: Side) -> int:
        """Return the number of replicas that hold the present sequences, and the prompts that the prefill
        side has yet to hand over."""
        coming = self._num_coming(side)
        sequences = side.num_running + side.num_waiting + coming
        # Most of those that come have their blocks already: prompts wait with landings.
        num_landed = side.num_landings - side.num_waiting_landings
        without_blocks = side.num_waiting + max(coming - num_landed, side.num_waiting_landings)
        blocks = side.num_used_blocks + without_blocks * self._rates.blocks_per_sequence
        capacity = side.num_total_blocks / side.num_replicas * (1 - KV_NEAR_FULL)
        return math.ceil(max(blocks / capacity, sequences / self._rates.batch))

    def _num_coming(self, decode: Side) -> float:
        """Return the number of sequences that the prefill side hands over before those that decode now have
        ended. Prompts have landings before they are computed, so those are not others."""
        side = self._side(self._samples[-1], PREFILL)
        if not (at_prefill := side.num_running + side.num_waiting):
            return decode.num_landings
        num_prompts = max(at_prefill, decode.num_landings)
        prompt, output, step = self._sizes.prompt, self._sizes.output, self._rates.step
        if not (prompt and output and step and prompt.mean > 0 and side.prefill_tok_s > 0):
            return num_prompts
        stay_s = output.mean * step.step_s(self._rates.batch)
        return min(num_prompts, stay_s * side.prefill_tok_s / prompt.mean)

    def _steps(self, kind: str) -> Shortage | None:
        sides = self.sides(kind)
        if not sides:
            return None
        latest, slo_s = sides[-1], self._config.itl_slo_s
        late = late_share(self._samples, lambda each: (each.num_gaps, each.num_late_gaps))
        step_s = min(side.mean_step_s for side in sides)
        is_slow = step_s > (self._planned_step_s if late > TAIL else slo_s)
        # With one sequence a replica, another replica makes no step shorter.
        if not is_slow or any(side.num_running <= side.num_replicas for side in sides):
            return None
        wanted = max(latest.num_replicas + 1, math.ceil(latest.num_sequences / self._rates.batch))
        reason = (
            f"steps take {1e3 * step_s:.0f} ms at {latest.num_running / latest.num_replicas:.1f} sequences a "
            f"replica; {1e3 * slo_s:.0f} ms is the objective"
        )
        if late > TAIL:
            reason += f", and {late:.0%} of the gaps were longer"
        return Shortage(min(wanted, latest.num_sequences), reason)

    def _growth(self, kind: str) -> Shortage | None:
        """Return the shortage that comes before a replica that is ordered now: where sequences become more
        beyond chance, be it that more come or that they stay for longer. Answers that get longer are seen
        here before the first of them have ended."""
        span_s = self._samples[-1].at - self._samples[0].at
        if span_s < WINDOW_S / 2:
            return None
        sides = [self._side(sample, kind) for sample in self._samples]
        counts = [side.num_running + side.num_waiting for side in sides]
        # Of the first and of the last third, whose middles are two thirds apart: single moments say little.
        third = max(1, len(counts) // 3)
        before, now = sum(counts[:third]) / third, sum(counts[-third:]) / third
        if now - before <= GROWTH_ERRORS * math.sqrt(now + before):
            return None
        # Until a new replica is ready; no more than twice as many, as growth may end at any moment.
        growing_s = self._start_s + span_s / 6
        expected = now + min((now - before) / (span_s * 2 / 3) * growing_s, now)
        wanted = math.ceil(expected / self._rates.batch / self._config.target_load)
        if wanted <= sides[-1].num_replicas:
            return None
        return Shortage(
            wanted,
            f"{before:.0f} sequences have become {now:.0f} in {span_s * 2 / 3:.0f} s, and {expected:.0f} are "
            f"expected when a new replica is ready, in batches of {self._rates.batch}",
        )

    @property
    def _planned_step_s(self) -> float:
        """The step of the batch for which the forecast plans: where gaps are late, steps longer than that
        are the reason. At least half of the objective, as while the cost of steps is not known."""
        step, half_s = self._rates.step, self._config.itl_slo_s / 2
        if step is None:
            return half_s
        return max(half_s, step.step_s(max(1.0, self._config.target_load * self._rates.batch)))

    def is_blocked(self) -> bool:
        """Whether prompts had to wait for decode in a good part of the recent samples: between them a place
        gets free now and then, and is taken at once."""
        sides = [self._side(sample, DECODE) for sample in self._samples]
        count = sides[-1].num_replicas if sides else 0
        # The sides since replicas came or went: earlier ones say nothing of now.
        stable = list(itertools.takewhile(lambda side: side.num_replicas == count, reversed(sides)))
        is_often = sum(map(self._is_full, stable)) > _BLOCKED_SHARE * len(stable)
        return self._kv_space(DECODE) is not None or (len(stable) >= NUM_SAMPLES and is_often)

    def _is_full(self, side: Side) -> bool:
        has_blocks = side.num_free_blocks >= KV_NEAR_FULL * side.num_total_blocks
        is_waited_for = side.num_waiting_landings or side.num_held_sequences
        return bool(is_waited_for) or not has_blocks or self._is_slotless(side)

    def _is_slotless(self, side: Side) -> bool:
        """Return whether some sequences have no slot: handed-over sequences count as running from the start,
        also those that no step has a slot for."""
        return side.num_running + side.num_waiting > self._num_slots(side)


def refusals(demand: Demand) -> tuple[int, int]:
    """Return how many requests came, and how many of them were refused because of the load."""
    return demand.num_arrived + demand.num_refused, demand.num_refused


def late_share(samples: Sequence[ScalingSample], counts: Callable[[Demand], tuple[int, int]]) -> float:
    """Return the late or refused share of all requests in these samples; `counts` gives (all, late or
    refused) of one sample. 0 while there are few requests."""
    pairs = [counts(sample.demand) for sample in samples]
    total = sum(count for count, _ in pairs)
    return sum(late for _, late in pairs) / total if total >= _MIN_OUTCOMES else 0.0
