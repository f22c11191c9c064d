"""One continuation of a prompt at the gateway: its seed, the tokens it has, and those that came early."""

from __future__ import annotations

from cluster.gateway.actions import Emit
from cluster.text.preprocess import SampleStart
from cluster.text.tokenizer import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.messages import TokenDelta


class Sample:
    """One continuation: what it has, and what arrived early."""

    def __init__(self, start: SampleStart, text: SampleText) -> None:
        self.index = start.index
        self.seed = start.seed
        self.output = bytearray(start.output)
        self.finish = start.finish
        self.held: dict[int, TokenDelta] = {}
        self.is_decoding = False
        # Ended by a stop string, of which its replica knows nothing.
        self.was_cut = False
        self._text = text
        self._num_tokens_before = self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.output) // TOKEN_BYTES

    @property
    def has_progressed(self) -> bool:
        """Whether this attempt has brought a token."""
        return self.num_tokens > self._num_tokens_before

    def begin_attempt(self) -> None:
        self.held.clear()
        self.is_decoding = False
        self._num_tokens_before = self.num_tokens

    def hold(self, delta: TokenDelta) -> None:
        """Keep it until its turn; of two at the same index the one that tells more."""
        known = self.held.get(delta.first_index)
        if known is None or (len(known.tokens), known.finish) < (len(delta.tokens), delta.finish):
            self.held[delta.first_index] = delta

    def next_delta(self) -> TokenDelta | None:
        """What continues the output, cut to what is new; drops what is there already."""
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

    def apply(self, delta: TokenDelta) -> Emit:
        """Append the tokens up to a stop string."""
        step = self._text.push(delta.tokens, delta.finish)
        self.was_cut = bool(step.finish) and not delta.finish
        tokens = delta.tokens[: step.num_tokens * TOKEN_BYTES]
        self.output += tokens
        self.finish = step.finish
        if self.finish:
            self.held.clear()
        return Emit(
            sample=self.index,
            first_index=delta.first_index,
            tokens=tokens,
            text=step.text,
            logprobs=delta.logprobs[: step.num_tokens],
            finish=step.finish,
        )
