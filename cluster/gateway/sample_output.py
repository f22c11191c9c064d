"""The samples of a request at the gateway: the output they have, and what is left to route and to submit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.tokenizer import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from router.messages import RouteRequest
from workers.messages import HandOverTarget, SampleState, Submission, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens and text of one sample, for the client."""

    sample: int
    first_index: int
    tokens: bytes
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: str


class SampleOutput:
    """One continuation of the prompt: its seed, its output, and deltas that arrived early."""

    def __init__(self, start: SampleStart, text: SampleText) -> None:
        self.index = start.index
        self.seed = start.seed
        self.tokens = bytearray(start.output)
        self.finish = start.finish
        self.held: dict[int, TokenDelta] = {}
        self.is_decoding = False
        # Ended by a stop string, which its replica does not know.
        self.was_cut = False
        self._text = text
        self._num_tokens_before = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """The number of output tokens so far."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def has_progressed(self) -> bool:
        """Whether this attempt has brought a token."""
        return self.num_tokens > self._num_tokens_before

    def begin_attempt(self) -> None:
        """Forget what belongs to the previous attempt only."""
        self.held.clear()
        self.is_decoding = False
        self._num_tokens_before = self.num_tokens

    def take(self, delta: TokenDelta) -> list[OutputDelta]:
        """Take a delta in any order, and return all output that is complete up to there."""
        if not self.held and delta.first_index == self.num_tokens and (delta.tokens or delta.finish):
            return [self._append(delta)]
        self._hold(delta)
        output = []
        while (ready := self._next_delta()) is not None:
            output.append(self._append(ready))
        return output

    def _hold(self, delta: TokenDelta) -> None:
        """Keep the delta until its turn; of two at the same index, keep the longer one."""
        known = self.held.get(delta.first_index)
        if known is None or (len(known.tokens), known.finish) < (len(delta.tokens), delta.finish):
            self.held[delta.first_index] = delta

    def _next_delta(self) -> TokenDelta | None:
        """Return what continues the output, cut to what is new; drop what is there already."""
        for first_index in sorted(self.held):
            if self.finish or first_index > self.num_tokens:
                return None
            delta = self.held.pop(first_index)
            num_known = self.num_tokens - first_index
            num_new = len(delta.tokens) // TOKEN_BYTES - num_known
            if num_new > 0 or (num_new == 0 and delta.finish):
                return TokenDelta(
                    request_id=delta.request_id,
                    attempt=delta.attempt,
                    sample=delta.sample,
                    first_index=self.num_tokens,
                    tokens=delta.tokens[num_known * TOKEN_BYTES :],
                    logprobs=delta.logprobs[num_known:],
                    finish=delta.finish,
                )
        return None

    def _append(self, delta: TokenDelta) -> OutputDelta:
        """Append the tokens up to a stop string."""
        step = self._text.push(delta.tokens, delta.finish)
        self.was_cut = bool(step.finish) and not delta.finish
        tokens = delta.tokens[: step.num_tokens * TOKEN_BYTES]
        self.tokens += tokens
        self.finish = step.finish
        if self.finish:
            self.held.clear()
        return OutputDelta(
            sample=self.index,
            first_index=delta.first_index,
            tokens=tokens,
            text=step.text,
            logprobs=delta.logprobs[: step.num_tokens],
            finish=step.finish,
        )


def by_submission(unfinished: Sequence[SampleOutput]) -> list[list[SampleOutput]]:
    """Group samples without any output together, each other one by itself."""
    fresh = [sample for sample in unfinished if not sample.tokens]
    groups = [[sample] for sample in unfinished if sample.tokens]
    return [fresh, *groups] if fresh else groups


def route_request(
    prepared: PreparedRequest, unfinished: Sequence[SampleOutput], excluded: tuple[str, ...]
) -> RouteRequest:
    """Build the router's request for what is left."""
    longest = max(sample.num_tokens for sample in unfinished)
    shortest = min(sample.num_tokens for sample in unfinished)
    return RouteRequest(
        request_id=prepared.request_id,
        tenant=prepared.tenant,
        block_keys=prepared.block_keys,
        num_tokens=prepared.num_prompt_tokens + longest,
        max_new_tokens=max(1, prepared.sampling.max_tokens - shortest),
        num_samples=len(unfinished),
        excluded=excluded,
        pinned_prefill=prepared.pinned_prefill,
        pinned_decode=prepared.pinned_decode,
    )


def submission(
    prepared: PreparedRequest,
    group: Sequence[SampleOutput],
    number: int,
    target: HandOverTarget | None,
    now: float,
    *,
    suspect: bool = False,
) -> Submission:
    """Begin an attempt of the samples of `group`, as they are now."""
    for sample in group:
        sample.begin_attempt()
    deadline_at = prepared.deadline_at
    return Submission(
        request_id=prepared.request_id,
        attempt=number,
        tenant=prepared.tenant,
        priority=prepared.priority,
        prompt=prepared.prompt,
        block_keys=prepared.block_keys,
        samples=tuple(SampleState(sample.index, sample.seed, bytes(sample.tokens)) for sample in group),
        sampling=prepared.sampling,
        decode=target,
        deadline_s=None if deadline_at is None else max(0.0, deadline_at - now),
        suspect=suspect,
    )
