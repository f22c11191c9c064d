"""What things take at one replica, in seconds, by its own measurements.

A decode step takes base + sequences x `decode_sequence_s` + context tokens x `decode_context_s`; a chunk of n
tokens behind p others takes n x `prefill_token_s` + n x (p + n / 2) x `attention_token_s`, and what decodes
in the same step adds its time without the base. A replica measures these coefficients from its steps
(`workers.scheduler.step_costs`). Until it has, its average rates are used, and until it has those, the best
of the other replicas' or the defaults below, so that a replica that has just come is tried.

Where the chunks of prompts are sized by an objective for the time of output tokens
(`workers.scheduler.chunk_sizes`), a step with a chunk takes as long as the objective, and computing a prompt
takes as much longer than its chunks alone as a step takes longer than its chunk.

What is behind others waits for them by the average rate of tokens, which is measured in the steps that
compute them and so contains their decodes. What a request computes itself is predicted by the coefficients,
and these alone are corrected where first tokens come later than the steps of the replica explain: corrected
too, the rate would count disturbances twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from router.messages import ReplicaLoad

# Assumed for a replica that has not measured its prefill rate.
DEFAULT_PREFILL_TOK_S = 10_000.0
# Assumed for a replica that has not measured its decode step.
DEFAULT_DECODE_STEP_S = 0.03
# The part of a decode step that a sequence adds, until the replica has measured both.
DEFAULT_SEQUENCE_PART = 0.02
# Time of loading a token over computing it, by tier, assumed until the replica has measured both.
DEFAULT_LOAD_RATIO = {"dram": 0.1, "nvme": 0.5}
# Time of sending a token over computing it, assumed until the prefill replica has measured both.
DEFAULT_TRANSFER_RATIO = 0.1
# The value of `Rates.disturbed_part` without an objective.
BY_STEP = -1.0
# The part of a delay that counts where sequences keep their objective all the same. Chosen on simulated loads
# of two models, whose replicas were divided between prefill and decode in every way: all divisions with
# enough decode replicas keep 99 % of the requests within both objectives. With 0 prefill replicas are left
# idle, and with 0.3 decode replicas; some then lose up to 14 % of the requests, and without an objective 34.
WITHIN_OBJECTIVE_PART = 0.1
# The part of a step that prompts get where no chunk keeps the objective (`workers.scheduler.chunk_sizes`).
LEAST_PROMPT_SHARE = 0.25
# The tokens of a step, assumed for a replica that has not reported them.
DEFAULT_BATCH_TOKENS = 512


class Rates(NamedTuple):
    """Seconds of one token, or of a step, at a replica as it is loaded now."""

    # The time of a prompt token as the replica has met them, whatever lay before it and decoded in the same
    # steps.
    token_s: float
    # The products of a token, its attention to one token before it, and its part of the decoding in the same
    # steps.
    product_s: float
    attention_s: float
    mixed_s: float
    transfer_s: float
    dram_s: float
    nvme_s: float
    # A decode step as it is now, and with one more sequence of average context.
    present_step_s: float
    step_s: float
    # Is in `product_s`, `attention_s` and `mixed_s`.
    correction: float
    # Where chunks are sized by an objective: the time to compute a prompt beside the sequences that decode,
    # over that of its chunks alone, and the part of this delay that counts for them. Otherwise a wait counts
    # by its part of a step.
    stretch: float = 1.0
    disturbed_part: float = BY_STEP
    # The times to send the states of a sequence, and a token's KV in layers with a window.
    state_s: float = 0.0
    window_token_s: float = 0.0

    def once_s(self, num_tokens: int, window_tokens: int) -> float:
        """Return the time to send what goes to another replica with a prompt whatever that one has: the KV in
        its last `window_tokens`, where layers have a window, and states."""
        return self.state_s + min(num_tokens, window_tokens) * self.window_token_s

    def prefill_s(self, num_tokens: int, num_before: int) -> float:
        """Return the time to compute `num_tokens` tokens behind `num_before`."""
        return num_tokens * (self.product_s + self.attention_s * (num_before + 0.5 * num_tokens))


def rates_of(
    report: ReplicaLoad,
    num_sequences: int,
    correction: float = 1.0,
    others: Callable[[], Iterable[ReplicaLoad]] = tuple,
    context_tokens: float = 0.0,
) -> Rates:
    """Return the rates of a replica with `num_sequences` sequences. Computing a prompt takes `correction`
    times what the coefficients say. The reports of the `others` are asked for where it has not measured
    something. `context_tokens` is what a sequence has on average where the report shows none that runs."""
    prefill_tok_s = report.prefill_tok_s or max(
        (it.prefill_tok_s for it in others() if it.prefill_tok_s), default=DEFAULT_PREFILL_TOK_S
    )
    decode_step_s = report.decode_step_s or min(
        (it.decode_step_s for it in others() if it.decode_step_s), default=DEFAULT_DECODE_STEP_S
    )
    token_s = 1.0 / prefill_tok_s
    stretch, disturbed_part = 1.0, BY_STEP
    if report.prefill_token_s:
        product_s = correction * report.prefill_token_s
        attention_s = correction * report.attention_token_s
        if report.tpot_objective_s and report.decode_base_s:
            mixed_s = 0.0
            stretch, disturbed_part = _beside_decodes(report, num_sequences, context_tokens)
        else:
            mixed_s = correction * _mixed_s(report)
    else:
        product_s, attention_s, mixed_s = correction * token_s, 0.0, 0.0
    transfer_s = 1.0 / report.transfer_tok_s if report.transfer_tok_s else DEFAULT_TRANSFER_RATIO * token_s
    # The arguments are positional, as this runs for every replica that has reported since the last decision.
    return Rates(
        token_s,
        product_s,
        attention_s,
        mixed_s,
        transfer_s,
        _load_s(report, "dram", token_s),
        _load_s(report, "nvme", token_s),
        decode_step_s,
        _step_s(report, num_sequences, decode_step_s, others, context_tokens),
        correction,
        stretch,
        disturbed_part,
        report.state_tokens * transfer_s,
        report.window_token_ratio * transfer_s,
    )


def _mixed_s(report: ReplicaLoad) -> float:
    """Return the time that decodes add to a prompt token: of a step they take their time and a token each,
    the prompts the other tokens."""
    decodes_s = (
        report.num_running * report.decode_sequence_s + report.num_context_tokens * report.decode_context_s
    )
    num_tokens = (report.max_batch_tokens or DEFAULT_BATCH_TOKENS) - report.num_running
    return decodes_s / max(1, num_tokens)


def _beside_decodes(report: ReplicaLoad, num_sequences: int, context_tokens: float) -> tuple[float, float]:
    """Return `Rates.stretch` and `Rates.disturbed_part` where chunks are sized by an objective."""
    objective_s, base_s = report.tpot_objective_s, report.decode_base_s
    decodes_s = num_sequences * _sequence_s(report, context_tokens)
    step_s = objective_s
    if base_s + decodes_s >= objective_s:
        step_s = (base_s + decodes_s) / (1 - LEAST_PROMPT_SHARE)
    beyond = 1 - objective_s / step_s
    disturbed_part = WITHIN_OBJECTIVE_PART + (1 - WITHIN_OBJECTIVE_PART) * beyond
    return step_s / (step_s - decodes_s), disturbed_part


def _sequence_s(report: ReplicaLoad, context_tokens: float) -> float:
    """Return what a sequence adds to a step."""
    context = report.num_context_tokens / report.num_running if report.num_running else context_tokens
    return report.decode_sequence_s + context * report.decode_context_s


def _load_s(report: ReplicaLoad, tier: str, token_s: float) -> float:
    load_tok_s = report.load_tok_s.get(tier, 0.0)
    if not report.prefill_tok_s or not load_tok_s:
        return DEFAULT_LOAD_RATIO[tier] * token_s
    return 1.0 / load_tok_s


def _step_s(
    report: ReplicaLoad,
    num_sequences: int,
    decode_step_s: float,
    others: Callable[[], Iterable[ReplicaLoad]],
    context_tokens: float,
) -> float:
    if not report.decode_base_s and not report.decode_step_s:
        measured = (it for it in others() if it.decode_base_s)
        report = min(measured, key=lambda it: it.decode_base_s + it.decode_sequence_s, default=report)
    if report.decode_base_s:
        return report.decode_base_s + (num_sequences + 1) * _sequence_s(report, context_tokens)
    return decode_step_s * (1 + DEFAULT_SEQUENCE_PART * num_sequences)
