"""Bound what one request may use of the engine: tokens, samples, and bytes of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.errors import CapacityError
from workers.messages.link import Submission
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.step import (
    PLAN_BYTES,
    entry_bytes,
    sample_bytes,
    start_bytes,
    table_bytes,
    target_bytes,
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The most that one request may use of a replica; counts of tokens, `max_sequences` of samples. A request
    with `max_local_kv_tokens` stays here, some of its KV in host memory; one that is handed over is on the
    device. One of a sharing group with a limit fits the group's share of the device."""

    pool: BlockPool
    max_context_tokens: int
    max_local_kv_tokens: int
    max_sequences: int

    @property
    def max_local_tokens(self) -> int:
        """The longest context, output included, of a request that is not handed over."""
        return min(self.max_context_tokens, self.max_local_kv_tokens)

    def output_limit(self, submission: Submission) -> int:
        """Return how many tokens a sample may have in all: `max_tokens`, clipped to what context and KV leave
        it. The KV of a request that is handed over grows at its decode replica."""
        num_prompt_tokens = _num_tokens(submission.prompt)
        limit = min(submission.sampling.max_tokens, self.max_context_tokens - num_prompt_tokens)
        if submission.decode:
            return limit
        num_kv_tokens = min(self.max_local_kv_tokens, self._most_of_share(submission.facts.sharing_group))
        return min(limit, num_kv_tokens - num_prompt_tokens)

    def _most_of_share(self, group: str) -> int:
        if not self.pool.has_limit(group):
            return self.max_local_kv_tokens
        return self.pool.limit(group) * self.pool.block_tokens

    def check(self, submission: Submission) -> None:
        """Raise `CapacityError`, naming field and numbers, when the request can never run here."""
        num_prompt_tokens = _num_tokens(submission.prompt)
        max_tokens, num_samples = submission.sampling.max_tokens, len(submission.samples)
        num_keys, group = len(submission.block_keys), submission.facts.sharing_group
        block_tokens = self.pool.block_tokens
        if num_prompt_tokens == 0:
            raise CapacityError("prompt: it has 0 tokens, at least 1 is needed")
        if max_tokens < 1:
            raise CapacityError(f"max_tokens: it is {max_tokens}, at least 1 is needed")
        num_kv_tokens, num_share_tokens = self.max_local_kv_tokens, self._most_of_share(group)
        if submission.decode:
            num_kv_tokens = self.pool.num_total * self.pool.block_tokens + 1
            num_share_tokens = min(num_kv_tokens, num_share_tokens + 1)
        for limit, name in (
            (self.max_context_tokens, "context"),
            (num_kv_tokens, "KV blocks"),
            (num_share_tokens, f"KV that sharing group {group!r} may use (device_kv_share); shorten it"),
        ):
            if num_prompt_tokens + 1 > limit:
                raise CapacityError(
                    f"prompt: {num_prompt_tokens} tokens and a new one exceed the {limit} tokens of {name}"
                )
        most_samples = self.pool.shares.most_of(group, self.max_sequences)
        if not 1 <= num_samples <= most_samples:
            fit = "fit this replica"
            if most_samples < self.max_sequences:
                fit = f"are the share of sharing group {group!r} (device_kv_share)"
            raise CapacityError(f"n: {num_samples} samples, from 1 to {most_samples} {fit}")
        if num_keys > num_prompt_tokens // block_tokens:
            raise CapacityError(
                f"block_keys: {num_keys} keys for {num_prompt_tokens} tokens, "
                f"but a block here has {block_tokens} tokens"
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
        """Check that the request's entries in a plan fit a frame, whatever becomes of it here or where it
        continues."""
        num_prompt_tokens = _num_tokens(submission.prompt)
        num_tokens = num_prompt_tokens + output_limit
        num_bytes = (
            start_bytes(submission)
            + sample_bytes(submission, output_limit)
            + len(submission.samples) * sample_bytes(submission, 0)
            + entry_bytes(num_tokens, len(submission.samples))
            + target_bytes(submission.sampling, num_prompt_tokens)
            + table_bytes(num_tokens // self.pool.block_tokens + 1)
        )
        if num_bytes > PLAN_BYTES:
            raise CapacityError(
                f"prompt: its {num_prompt_tokens} tokens and up to {output_limit} of output take {num_bytes} "
                f"bytes of a step's plan, {PLAN_BYTES} are the limit; without penalties they take less"
            )


def _num_tokens(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES
