"""The costs of a replica's steps, fitted to the steps that it runs: the router prices requests by them.

A step of decodes alone takes

    base + sequences x `decode_sequence_s` + tokens of context x `decode_context_s`

in all stages together, and a chunk of n tokens behind p others

    n x `prefill_token_s` + n x (p + n / 2) x `attention_token_s`

in the slowest stage, which is what the others behind it wait for. Of a step with chunks and decodes, what the
decodes add is taken off; before that is known such a step teaches nothing.

Chunks that are sized by an objective (`workers.scheduler.chunk_sizes`) may be so short that reading the
weights is most of them. A price per token would then rise with every shorter chunk, so whole steps are
predicted from a fit of their own, with a base.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from workers.messages.rank_channel import StepPlan

# The share of the known sums that is kept at every step: about the last 500 steps count.
_FORGETTING = 0.998
# The number of steps before anything is told.
_NUM_FIRST_STEPS = 16
# The number of steps from one fit to the next.
_FIT_PERIOD = 8
# The weight of the last coefficients against the steps.
_INERTIA = 1e-3
# The value told where a fit finds nothing, as 0 means that it is not known.
_LEAST_S = 1e-9
# The ratio of a decode's coefficients until steps with fewer and more sequences tell them apart. If a
# sequence added nothing, all streams would be sent to the first replica that has measured its base.
FIRST_DECODE_RATIO = (1.0, 0.02, 0.0)
# Contexts of fewer tokens than this hardly tell attention from the rest of a chunk. Noise there would make
# long prompts many times too dear, so attention is learned slowly from such contexts.
_TELLING_CONTEXT = 400.0
# The ratio of the coefficients of a step with chunks, until long and short ones tell them apart: its base, a
# token, and a token attended to.
_FIRST_CHUNK_RATIO = (64.0, 1.0, 0.0)
# A step that takes this many times its prediction was disturbed, and counts as one that took this much. The
# first steps are compared with each other: one that also loaded a library must not price all that follow.
_MOST_RATIO = 3.0
# The rounds in which the fit of the first steps finds those that were disturbed.
_NUM_REWEIGHTED = 12


class _Observation(NamedTuple):
    terms: Sequence[float]
    observed: float
    weight: float


class NonNegativeFit:
    """Recursive least squares with forgetting: coefficients, none negative, of a sum that is observed with
    noise.

    The squares are kept as their normal equations, whose terms decay. Where the newer observations do not
    tell coefficients apart (all of one size), those stay as they were, by a small weight of the last fit; in
    the beginning they have the ratio `first`. So nothing that was learned is lost by an hour of equal steps.
    """

    def __init__(self, first: Sequence[float], *, has_attention: bool = False) -> None:
        """`has_attention`: the last coefficient is a token's attention to another one, and the one before it
        a token's."""
        self._first = tuple(first)
        self._has_attention = has_attention
        self._num = num_coefficients = len(first)
        self._products = [[0.0] * num_coefficients for _ in range(num_coefficients)]
        self._moments = [0.0] * num_coefficients
        self._num_steps = 0
        # The first steps, until there are enough of them.
        self._first_steps: list[_Observation] = []
        # The coefficients; () until there are enough steps.
        self.coefficients: tuple[float, ...] = ()

    def predict(self, terms: Sequence[float]) -> float:
        """Return what the coefficients make of the terms; 0.0: not known yet."""
        return sum(each * term for each, term in zip(self.coefficients, terms, strict=False))

    def add(self, terms: Sequence[float], observed: float, weight: float = 1.0) -> None:
        """Observe `observed` as the sum of the terms, each at least 0 and the first above 0."""
        self._num_steps += 1
        step = _Observation(terms, observed, weight)
        if self._num_steps < _NUM_FIRST_STEPS:
            self._first_steps.append(step)
            return
        if self._first_steps:
            self._add_first([*self._first_steps, step])
            self._first_steps.clear()
        else:
            predicted = self.predict(terms)
            self._count(step, _MOST_RATIO * predicted if predicted > 0 else observed)
        if self._num_steps % _FIT_PERIOD == 0:
            self._fit()

    def _add_first(self, steps: Sequence[_Observation]) -> None:
        """Count the first steps, and none for much more than the others explain: coefficients with the least
        sum of errors, not of their squares, follow most of the steps (by squares that are weighted anew, see
        https://en.wikipedia.org/wiki/Iteratively_reweighted_least_squares)."""
        weights = [step.weight for step in steps]
        for _ in range(_NUM_REWEIGHTED):
            fit = NonNegativeFit(self._first, has_attention=self._has_attention)
            for step, weight in zip(steps, weights, strict=True):
                fit._count(step._replace(weight=weight), step.observed)
            fit._fit()
            errors = [
                max(abs(step.observed - fit.predict(step.terms)), 1e-3 * step.observed) for step in steps
            ]
            weights = [
                step.weight**0.5 / max(error, _LEAST_S) for step, error in zip(steps, errors, strict=True)
            ]
        for step in steps:
            predicted = fit.predict(step.terms)
            self._count(step, _MOST_RATIO * predicted if predicted > 0 else step.observed)

    def _count(self, step: _Observation, most: float) -> None:
        """Add a step that took at most `most` to the squares."""
        terms, observed, weight = step.terms, min(step.observed, most), step.weight
        for row, term in enumerate(terms):
            products = self._products[row]
            for column, other in enumerate(terms):
                products[column] = _FORGETTING * products[column] + weight * term * other
            self._moments[row] = _FORGETTING * self._moments[row] + weight * term * observed

    def _fit(self) -> None:
        last = self.coefficients or self._scaled_first()
        matrix = [row.copy() for row in self._products]
        moments = self._moments.copy()
        for index in range(self._num):
            inertia = _INERTIA * self._products[index][index]
            if self._has_attention and index == self._num - 1:
                inertia += _TELLING_CONTEXT**2 * self._products[index - 1][index - 1]
            matrix[index][index] += inertia
            moments[index] += inertia * last[index]
        self.coefficients = _least(matrix, moments)

    def _scaled_first(self) -> tuple[float, ...]:
        """Return the multiple of `first` that comes closest to the observations."""
        first, products = self._first, self._products
        moment = sum(each * moment for each, moment in zip(first, self._moments, strict=True))
        square = sum(
            each * other * product
            for each, row in zip(first, products, strict=True)
            for other, product in zip(first, row, strict=True)
        )
        return tuple(each * moment / square for each in first)


def _least(matrix: list[list[float]], moments: list[float]) -> tuple[float, ...]:
    """Return the x, none negative, for which x * matrix * x / 2 - moments * x is least: of every choice of
    coefficients that are not 0, the solution that is valid and best."""
    num = len(moments)
    used = [index for index in range(num) if matrix[index][index] > 0]
    best, least = (0.0,) * num, 0.0
    for size in range(1, len(used) + 1):
        for chosen in combinations(used, size):
            solution = _solve(
                [[matrix[row][column] for column in chosen] for row in chosen],
                [moments[row] for row in chosen],
            )
            # Where the gradient is 0, the value is half of the linear term.
            value = -sum(moments[index] * x for index, x in zip(chosen, solution, strict=True)) / 2
            if value < least and min(solution) >= 0:
                least = value
                by_index = dict(zip(chosen, solution, strict=True))
                best = tuple(by_index.get(index, 0.0) for index in range(num))
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve by Gaussian elimination without pivoting, which a positive definite matrix does not need. The
    matrix is scaled to a diagonal of ones."""
    num = len(right)
    scales = [matrix[index][index] ** -0.5 for index in range(num)]
    rows = [
        [
            *(matrix[row][column] * scales[row] * scales[column] for column in range(num)),
            right[row] * scales[row],
        ]
        for row in range(num)
    ]
    for pivot in range(num):
        for row in range(pivot + 1, num):
            factor = rows[row][pivot] / rows[pivot][pivot]
            for column in range(pivot, num + 1):
                rows[row][column] -= factor * rows[pivot][column]
    solution = [0.0] * num
    for row in reversed(range(num)):
        rest = sum(rows[row][column] * solution[column] for column in range(row + 1, num))
        solution[row] = (rows[row][num] - rest) / rows[row][row]
    return [each * scale for each, scale in zip(solution, scales, strict=True)]


class StepCosts:
    """The coefficients by the names of `ReplicaStats`, 0.0 until enough steps were seen; see the module's
    text."""

    def __init__(self) -> None:
        self._decode = NonNegativeFit(FIRST_DECODE_RATIO)
        self._prefill = NonNegativeFit((1.0, 0.0), has_attention=True)
        self._chunks = NonNegativeFit(_FIRST_CHUNK_RATIO, has_attention=True)

    def add(self, plan: StepPlan, decode_starts: Collection[int], stage_to_busy_s: Sequence[float]) -> float:
        """Note a finished step: its decodes computed the tokens at `decode_starts`, and each stage's slowest
        rank took `stage_to_busy_s`.

        Return the time after which the coefficients so far expect the next step to be done, in the slowest
        stage. Without prompts, or before they are known, that is what the step took."""
        total_s, slowest_s = sum(stage_to_busy_s), max(stage_to_busy_s)
        if min(stage_to_busy_s) <= 0:
            return slowest_s
        num_sequences, num_context_tokens = len(decode_starts), sum(decode_starts)
        num_tokens, num_attended = 0, 0.0
        for entry in plan.entries:
            if entry.num_tokens > 1:
                num_tokens += entry.num_tokens
                num_attended += entry.num_tokens * (entry.start + entry.num_tokens / 2)
            else:
                num_sequences += 1
                num_context_tokens += entry.start
        if not num_tokens:
            self._decode.add((1.0, num_sequences, num_context_tokens), total_s)
            return slowest_s
        if num_sequences and not self._decode.coefficients:
            return slowest_s
        decodes_s = self._decode.predict((0.0, num_sequences, num_context_tokens)) * slowest_s / total_s
        prompts_s = self._prefill.predict((num_tokens, num_attended))
        if decodes_s < slowest_s:
            # Per token, a small chunk is measured with as large an error as a large one.
            chunks_s, weight = slowest_s - decodes_s, 1.0 / num_tokens
            self._prefill.add((num_tokens, num_attended), chunks_s, weight)
            self._chunks.add((1.0, num_tokens, num_attended), chunks_s, weight)
        return decodes_s + prompts_s if prompts_s else slowest_s

    def step_s(
        self,
        num_sequences: int,
        num_context_tokens: int,
        num_tokens: int,
        num_attended: float,
        *,
        num_stages: int = 1,
    ) -> float:
        """Return the seconds from one output token to the next, where every step of the `num_stages` under
        way decodes `num_sequences` behind `num_context_tokens` in all, and computes chunks of `num_tokens`
        that attend to `num_attended` others; 0.0: not known yet. More of anything never takes less."""
        decode, chunks = self._decode, self._chunks
        if not decode.coefficients or (num_tokens and not chunks.coefficients):
            return 0.0
        base_s = decode.predict((1.0, 0.0, 0.0))
        if num_tokens:
            base_s = max(base_s, num_stages * chunks.predict((1.0, num_tokens, num_attended)))
        return base_s + decode.predict((0.0, num_sequences, num_context_tokens))

    def coefficients(self) -> dict[str, Any]:
        """Return the fields of `ReplicaStats` that are measured here."""
        decode, prefill = self._decode.coefficients, self._prefill.coefficients
        return {
            "prefill_token_s": max(prefill[0], _LEAST_S) if prefill else 0.0,
            "attention_token_s": prefill[1] if prefill else 0.0,
            "decode_base_s": max(decode[0], _LEAST_S) if decode else 0.0,
            "decode_sequence_s": decode[1] if decode else 0.0,
            "decode_context_s": decode[2] if decode else 0.0,
        }
