"""Collect the output of each sample, and the log-probabilities or the embedding of the prompt (sans-I/O)."""

from __future__ import annotations

from typing import NamedTuple

from cluster.metrics.ended_request import SampleResult
from cluster.text.output_parsers.pieces import ToolCallDelta
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.sample_text import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.messages.link import PromptLogprobs, TokenDelta
from workers.messages.sampling import PackedLogprobs, TokenLogprob


class OutputDelta(NamedTuple):
    """New tokens and text of one sample, for the client."""

    sample: int
    first_index: int
    tokens: bytes
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    # The stop string or stop token that ended the sample; None: neither.
    matched_stop: str | int | None = None


class PromptLogprobsDelta(NamedTuple):
    """Log-probabilities of the prompt's tokens [first_index, first_index + n), for the client. They come in
    order, from index 1 to the prompt's end, before any token of output."""

    first_index: int
    logprobs: PackedLogprobs


class EmbeddingDelta(NamedTuple):
    """The embedding of the prompt, for the client: float32 [hidden_size], not normalized. It is all the
    output of a request with `pooling`."""

    vector: bytes


Output = OutputDelta | PromptLogprobsDelta | EmbeddingDelta


class PromptProgress:
    """The progress of the log-probabilities of a request's prompt, over all attempts together. A call that
    resumes with output has had them."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._num_tokens = prepared.num_prompt_tokens
        self._num_top = prepared.sampling.num_prompt_logprobs
        has_output = any(start.output or start.finish for start in prepared.samples)
        self._next_index = self._num_tokens if self._num_top is None or has_output else 1

    @property
    def is_whole(self) -> bool:
        """Whether none are missing."""
        return self._next_index >= self._num_tokens

    def is_readable(self, part: PromptLogprobs) -> bool:
        """Return whether a part can follow on what is here, or repeats some of it."""
        logprobs = part.logprobs
        return (
            logprobs.is_whole
            and logprobs.num_top == self._num_top
            and 1 <= part.first_index <= self._next_index
            and part.first_index + logprobs.num_tokens <= self._num_tokens
        )

    def take(self, part: PromptLogprobs) -> PromptLogprobsDelta | None:
        """Take a readable part, and return the new portion of it."""
        first, num_tokens = self._next_index, part.logprobs.num_tokens
        num_known = first - part.first_index
        if num_known >= num_tokens:
            return None
        self._next_index = part.first_index + num_tokens
        return PromptLogprobsDelta(first, part.logprobs.part(num_known, num_tokens))


class SampleOutput:
    """A continuation of the prompt: its seed, its output, and deltas that arrived early."""

    def __init__(self, start: SampleStart, text: SampleText) -> None:
        self.index = start.index
        self.seed = start.seed
        self.tokens = bytearray(start.output)
        self.finish = start.finish
        self.early: dict[int, TokenDelta] = {}
        self.is_decoding = False
        # A stop string, which the replica does not know, ended the sample.
        self.was_cut = False
        # What the grammar allowed behind the last token; b"": not known.
        self.mask_digest = b""
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

    @property
    def result(self) -> SampleResult:
        """Return how the sample ended, or how far it has come."""
        return SampleResult(self.index, self.finish, self.num_tokens, self._text.num_reasoning_tokens)

    def begin_attempt(self) -> None:
        """Forget the state that belongs to the previous attempt only."""
        self.early.clear()
        self.is_decoding = False
        self._num_tokens_before = self.num_tokens

    def take(self, delta: TokenDelta) -> list[OutputDelta]:
        """Take a delta in any order, and return all output that is complete up to there."""
        if not self.early and delta.first_index == self.num_tokens and (delta.tokens or delta.finish):
            return [self._append(delta)]
        self._keep(delta)
        output = []
        while (ready := self._next_delta()) is not None:
            output.append(self._append(ready))
        return output

    def _keep(self, delta: TokenDelta) -> None:
        """Keep the delta until its turn; of two at the same index, keep the longer one."""
        known = self.early.get(delta.first_index)
        if known is None or (len(known.tokens), known.finish) < (len(delta.tokens), delta.finish):
            self.early[delta.first_index] = delta

    def _next_delta(self) -> TokenDelta | None:
        """Return the continuation of the output, cut to the new tokens; drop those that are there already."""
        for first_index in sorted(self.early):
            if self.finish or first_index > self.num_tokens:
                return None
            delta = self.early.pop(first_index)
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
                    mask_digest=delta.mask_digest,
                )
        return None

    def _append(self, delta: TokenDelta) -> OutputDelta:
        """Append the tokens up to a stop string."""
        step = self._text.push(delta.tokens, delta.finish)
        self.was_cut = bool(step.finish) and not delta.finish
        tokens = delta.tokens[: step.num_tokens * TOKEN_BYTES]
        self.tokens += tokens
        if tokens:
            self.mask_digest = delta.mask_digest
        self.finish = step.finish
        if self.finish:
            self.early.clear()
        return OutputDelta(
            sample=self.index,
            first_index=delta.first_index,
            tokens=tokens,
            text=step.text,
            logprobs=delta.logprobs[: step.num_tokens],
            finish=step.finish,
            reasoning=step.reasoning,
            tool_calls=step.tool_calls,
            matched_stop=step.matched_stop,
        )
