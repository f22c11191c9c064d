"""The split of a model's layers over the stages of a pipeline, so that the slowest stage is as fast as it can
be. No torch.

Called by the engine core when its ranks have joined and reported what a layer costs on their devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from workers.errors import WorkerError
from workers.messages.rank_channel import StageCost

# The layers [start, end) of each stage.
Stages = tuple[tuple[int, int], ...]


def split_layers(num_layers: int, costs: Sequence[StageCost], last_stage_limit: int | None = None) -> Stages:
    """Return contiguous ranges, one for each of `costs`, none empty: those whose slowest stage is fastest; of
    these, those that take the least time in all stages together; of these, more layers in earlier stages. The
    last begins at most at `last_stage_limit`, if it is given, and there are no more stages than that allows.

    Stages of unknown cost (all 0) are equal. Raises `WorkerError` when there are more stages than layers.
    """
    if len(costs) > num_layers:
        raise WorkerError(
            f"pp {len(costs)} is more than num_hidden_layers {num_layers}: a stage would be empty"
        )
    limit = num_layers - 1 if last_stage_limit is None else last_stage_limit
    # The layers that are on the last stage in any case are counted as one with its first.
    num_bound = num_layers - 1 - limit
    times = _stage_times(num_layers, costs)
    times[-1] = times[-1][num_bound:]
    num_free = num_layers - num_bound
    slowest_s = _fastest_slowest(num_free, times)
    *layers, last = _least_sum(num_free, times, slowest_s)
    return _ranges((*layers, last + num_bound))


def given_layers(num_layers: int, layers: Sequence[int]) -> Stages:
    """Return the ranges of stages with these numbers of layers. Raises `WorkerError` when they are not the
    model's."""
    if min(layers) < 1:
        raise WorkerError(f"layers {list(layers)}: every stage needs at least one")
    if sum(layers) != num_layers:
        raise WorkerError(
            f"layers {list(layers)} are {sum(layers)} together, but num_hidden_layers is {num_layers}"
        )
    return _ranges(layers)


def _stage_times(num_layers: int, costs: Sequence[StageCost]) -> list[list[float]]:
    """Return the seconds as [stage][number of layers]."""
    if all(cost.layer_s == 0 for cost in costs):
        costs = [StageCost(layer_s=1.0)] * len(costs)
    last = len(costs) - 1
    fixed = [
        (cost.embedding_s if stage == 0 else 0.0) + (cost.head_s if stage == last else 0.0)
        for stage, cost in enumerate(costs)
    ]
    return [
        [fixed[stage] + count * cost.layer_s for count in range(num_layers + 1)]
        for stage, cost in enumerate(costs)
    ]


def _fastest_slowest(num_layers: int, times: list[list[float]]) -> float:
    """Return the least time that the slowest stage can take."""
    # best[n]: of the stages so far, with n layers in all
    best = [float("inf") if count == 0 else times[0][count] for count in range(num_layers + 1)]
    for stage_times in times[1:]:
        best = [
            min(
                (max(best[total - count], stage_times[count]) for count in range(1, total)),
                default=float("inf"),
            )
            for total in range(num_layers + 1)
        ]
    return best[num_layers]


def _least_sum(num_layers: int, times: list[list[float]], slowest_s: float) -> tuple[int, ...]:
    """Return the layers of each stage: the least time in all, where no stage takes longer than
    `slowest_s`."""
    # From the last stage to the first; found[n]: (time, layers of the stages so far) with n layers in all.
    found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage_times in reversed(times):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for total, (sum_s, layers) in found.items():
            for count in range(1, num_layers - total + 1):
                if stage_times[count] > slowest_s:
                    break
                candidate = (sum_s + stage_times[count], (count, *layers))
                held = longer.get(total + count)
                if held is None or (candidate[0], held[1]) < (held[0], candidate[1]):
                    longer[total + count] = candidate
        found = longer
    return found[num_layers][1]


def _ranges(layers: Sequence[int]) -> Stages:
    starts = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    return tuple(pairwise(starts))
