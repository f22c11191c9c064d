"""The way into the engine: what can fit at all, and when an outbound request asks for its landing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.errors import CapacityError
from workers.messages import Submission
from workers.scheduler.block_tables import BlockTables
from workers.scheduler.sequence import LandingState, Sequence, StoreLoad
from workers.scheduler.step import PLAN_BYTES, LandingNeed, LoadNeed, entry_bytes, sample_bytes, start_bytes

_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one request may use of a replica at most; counts of tokens, `max_sequences` of samples. That with
    `max_local_kv_tokens` stays here, some of its KV in host memory; an outbound one is on the device."""

    max_context_tokens: int
    max_kv_tokens: int
    max_local_kv_tokens: int
    max_sequences: int
    block_tokens: int

    def output_limit(self, submission: Submission) -> int:
        """Tokens a sample may have in all: `max_tokens`, clipped to what context and KV leave it. The KV of
        an outbound request grows elsewhere."""
        num_prompt_tokens = _num_tokens(submission.prompt)
        limit = min(submission.sampling.max_tokens, self.max_context_tokens - num_prompt_tokens)
        return limit if submission.decode else min(limit, self.max_local_kv_tokens - num_prompt_tokens)

    def check(self, submission: Submission) -> None:
        """Raise `CapacityError`, naming field and numbers, when the request can never run here."""
        num_prompt_tokens = _num_tokens(submission.prompt)
        max_tokens, num_samples = submission.sampling.max_tokens, len(submission.samples)
        num_keys = len(submission.block_keys)
        if num_prompt_tokens == 0:
            raise CapacityError("prompt: it has 0 tokens, at least 1 is needed")
        if max_tokens < 1:
            raise CapacityError(f"max_tokens: it is {max_tokens}, at least 1 is needed")
        num_kv_tokens = self.max_kv_tokens + 1 if submission.decode else self.max_local_kv_tokens
        for limit, name in ((self.max_context_tokens, "context"), (num_kv_tokens, "KV blocks")):
            if num_prompt_tokens + 1 > limit:
                raise CapacityError(
                    f"prompt: {num_prompt_tokens} tokens and a new one exceed the {limit} tokens of {name}"
                )
        if not 1 <= num_samples <= self.max_sequences:
            raise CapacityError(f"n: {num_samples} samples, from 1 to {self.max_sequences} fit this replica")
        if num_keys > num_prompt_tokens // self.block_tokens:
            raise CapacityError(
                f"block_keys: {num_keys} keys for {num_prompt_tokens} tokens, "
                f"but a block here has {self.block_tokens} tokens"
            )
        limit = self.output_limit(submission)
        for sample in submission.samples:
            if _num_tokens(sample.output) >= limit:
                raise CapacityError(
                    f"samples[{sample.index}].output: {_num_tokens(sample.output)} tokens leave nothing to "
                    f"compute, at most {limit} fit max_tokens, context and KV"
                )
        self._check_plan(submission, limit)

    def _check_plan(self, submission: Submission, output_limit: int) -> None:
        """Whatever becomes of the request, here or where it goes on, what a plan says of it fits a frame."""
        sampling, num_prompt_tokens = submission.sampling, _num_tokens(submission.prompt)
        num_tokens = num_prompt_tokens + output_limit
        num_bytes = (
            start_bytes(sampling, num_prompt_tokens)
            + sample_bytes(sampling, output_limit)
            + len(submission.samples) * sample_bytes(sampling, 0)
            + entry_bytes(num_tokens, num_tokens // self.block_tokens + 1, len(submission.samples))
        )
        if num_bytes > PLAN_BYTES:
            raise CapacityError(
                f"prompt: its {num_prompt_tokens} tokens and up to {output_limit} of output take {num_bytes} "
                f"bytes of a step's plan, {PLAN_BYTES} are the limit; without penalties they take less"
            )


def landing_needs(
    running: Iterable[Sequence],
    waiting: Collection[Sequence],
    window_tokens: int,
    now: float,
    is_isolating: bool = False,
) -> list[LandingNeed]:
    """Outbound requests with fewer than `window_tokens` tokens to compute ahead of them; marks them asked.

    A request that waits for its landing holds back only those behind it that go to the same replica, so that
    one full decode replica does not idle the others. The first of them holds nobody back after `_WAIT_S`: it
    may need more room than others would (`kvtransfer.protocol.receiver`). Of the suspects only the next one asks,
    when none is being isolated (`is_isolating`): a landing that waits for its turn would time out.
    """
    needs: list[LandingNeed] = []
    if not waiting:
        return needs
    num_ready_tokens = sum(sequence.num_remaining for sequence in running)
    target_to_asked_tokens: dict[str, int] = {}
    passed_targets: set[str] = set()
    for sequence in waiting:
        request = sequence.request
        if request.submission.suspect:
            if is_isolating:
                continue
            is_isolating = True
        num_uncached_tokens = sequence.num_tokens - sequence.num_expected_cached_tokens
        if request.landing is LandingState.READY:
            num_ready_tokens += num_uncached_tokens
            continue
        assert request.submission.decode is not None
        target = request.submission.decode.address
        num_asked_tokens = target_to_asked_tokens.get(target, 0)
        if request.landing is LandingState.NEEDED:
            if num_ready_tokens + num_asked_tokens > window_tokens:
                continue
            request.landing, request.landing_asked_at = LandingState.ASKED, now
            needs.append(_landing_need(sequence))
        elif target not in passed_targets and now >= request.landing_asked_at + _WAIT_S:
            passed_targets.add(target)
            continue
        target_to_asked_tokens[target] = num_asked_tokens + num_uncached_tokens
    return needs


def load_needs(waiting: Iterable[Sequence], tables: BlockTables, most: int) -> list[LoadNeed]:
    """What the first waiting sequences lack, so that at most `most` of them are being loaded; marks them
    asked, or done when the device holds all that can be had."""
    needs: list[LoadNeed] = []
    num_loading = 0
    for sequence in waiting:
        if num_loading >= most:
            break
        if sequence.load is StoreLoad.WANTED:
            keys, num_held = tables.wanted_keys(sequence)
            sequence.load = StoreLoad.ASKED if num_held < len(keys) else StoreLoad.DONE
            if sequence.load is StoreLoad.ASKED:
                key, tenant = sequence.request.key, sequence.request.submission.tenant
                needs.append(LoadNeed(*key, sequence.index, tenant, tuple(keys), num_held))
        num_loading += sequence.load is StoreLoad.ASKED
    return needs


def _landing_need(sequence: Sequence) -> LandingNeed:
    request = sequence.request
    return LandingNeed(
        request_id=request.submission.request_id,
        attempt=request.submission.attempt,
        submission=request.submission,
        num_tokens=sequence.num_tokens,
        deadline=request.deadline,
    )


def _num_tokens(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES
