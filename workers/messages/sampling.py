"""The parameters of sampling, and the reports of a choice: parts of the messages of Links and of rank
channels."""

from __future__ import annotations

import hashlib
import struct

from kvtransfer.codec import Part

_GREEDY_TEMPERATURE = 1e-5
# The largest number of likeliest tokens that is reported at each position of a prompt.
MAX_PROMPT_LOGPROBS = 128
# The longest text of a grammar, in bytes of UTF-8.
MAX_GRAMMAR_BYTES = 256 << 10


class Grammar(Part, frozen=True):
    """The grammar that the output must follow: `text` is a grammar of llguidance, in Lark's syntax or its own
    JSON. `digest` is the SHA-256 of the text in UTF-8, by which the compiled grammar is cached."""

    text: str
    digest: bytes

    @staticmethod
    def of(text: str) -> Grammar:
        """Return the grammar of a text."""
        return Grammar(text, hashlib.sha256(text.encode()).digest())

    def find_problem(self) -> str:
        """Return what is wrong with its fields, beginning with the field; "" where nothing is. The text is
        not compiled."""
        num_bytes = len(self.text.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            return f"text: {num_bytes} bytes, {MAX_GRAMMAR_BYTES} are the limit"
        return "" if self == Grammar.of(self.text) else "digest: it is not that of the text"


class SamplingParams(Part, frozen=True):
    """The parameters by which tokens are chosen, in the order of application: logit bias, repetition penalty
    (over prompt and output), presence and frequency penalties (over output), minimum length, temperature,
    top-k, top-p, min-p, then Gumbel-max with noise from (seed, output index). A temperature below 1e-5 is
    greedy: the likeliest token wins whatever the noise, and smaller ones would overflow.

    `top_k` 0, `top_p` 1, `min_p` 0 and penalties 1, 0, 0 are off. `num_logprobs` None: no log-probabilities;
    n: those of the chosen token and of the n most likely, of the model's own distribution (before any
    processing). `num_prompt_logprobs` asks for the same of each token of the prompt but the first, at most
    `MAX_PROMPT_LOGPROBS`; the whole prompt is computed for it, whatever of it is cached. `stop_token_ids` end
    the sequence like the model's own end tokens, which `ignore_eos` disables. `min_tokens` suppresses every
    end token until that many were produced.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def penalizes_prompt(self) -> bool:
        """Whether a token's chances depend on its being in the prompt."""
        return self.repetition_penalty != 1.0

    @property
    def penalizes_output(self) -> bool:
        """Whether a token's chances depend on the output so far."""
        return self.penalizes_prompt or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class TokenLogprob(Part, frozen=True):
    """Log-probability of the chosen token, and the most likely ones as (token id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class PackedLogprobs(Part, frozen=True):
    """Log-probabilities of consecutive tokens, packed: float32 `logprobs` [num_tokens] and, of the `num_top`
    most likely at each place, uint32 `top_ids` and float32 `top_logprobs` [num_tokens, num_top], the
    likeliest first. All are little-endian."""

    num_top: int
    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs) // 4

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes packed."""
        return len(self.logprobs) + len(self.top_ids) + len(self.top_logprobs)

    @property
    def is_whole(self) -> bool:
        """Whether all three have the sizes that they must have together."""
        num_bytes = 4 * self.num_tokens
        num_top_bytes = num_bytes * self.num_top
        sizes = len(self.logprobs), len(self.top_ids), len(self.top_logprobs)
        return self.num_top >= 0 and sizes == (num_bytes, num_top_bytes, num_top_bytes)

    def part(self, first: int, end: int) -> PackedLogprobs:
        """Return the log-probabilities of the tokens [first, end)."""
        of_tokens = slice(4 * first, 4 * end)
        of_top = slice(4 * first * self.num_top, 4 * end * self.num_top)
        return PackedLogprobs(
            self.num_top, self.logprobs[of_tokens], self.top_ids[of_top], self.top_logprobs[of_top]
        )

    def unpacked(self) -> list[TokenLogprob]:
        """Return the log-probabilities token by token."""
        logprobs = struct.unpack(f"<{self.num_tokens}f", self.logprobs)
        ids = struct.unpack(f"<{len(self.top_ids) // 4}I", self.top_ids)
        top = struct.unpack(f"<{len(self.top_logprobs) // 4}f", self.top_logprobs)
        pairs = tuple(zip(ids, top, strict=True))
        return [
            TokenLogprob(logprob, pairs[index * self.num_top : (index + 1) * self.num_top])
            for index, logprob in enumerate(logprobs)
        ]
