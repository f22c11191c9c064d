"""What a submission must be, whoever sends it: a replica outlives a sender that knows the secret and is
wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.messages.link import MAX_MESSAGE_ENDS, Submission
from workers.messages.sampling import MAX_PROMPT_LOGPROBS, Grammar, SamplingParams

_MAX_SEED = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1
_MAX_TOKEN_ID = (1 << 32) - 1
# The largest number of single precision, in which tokens are chosen.
_MAX_FLOAT32 = 3.4e38
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def find_problem(submission: Submission, vocab_size: int) -> str:
    """Return what is wrong with the submission, beginning with the field; "" where nothing is."""
    return next(_problems(submission, vocab_size), "")


def _problems(submission: Submission, vocab_size: int) -> Iterator[str]:
    samples = submission.samples
    yield from _token_problems("prompt", submission.prompt, vocab_size)
    for sample in samples:
        yield from _token_problems(f"samples[{sample.index}].output", sample.output, vocab_size)
        if not 0 <= sample.seed <= _MAX_SEED:
            yield f"samples[{sample.index}].seed: {sample.seed} is not from 0 to {_MAX_SEED}"
    if len({sample.index for sample in samples}) < len(samples):
        yield "samples: an index comes twice"
    if any(sample.index < 0 for sample in samples):
        yield "samples: an index is negative"
    if len(samples) > 1 and len({len(sample.output) for sample in samples}) > 1:
        yield "samples: their outputs differ in length"
    if abs(submission.facts.priority) > _MAX_INT32:
        yield f"priority: {submission.facts.priority} is beyond {_MAX_INT32}"
    num_tokens, ends = len(submission.prompt) // TOKEN_BYTES, submission.message_ends
    if len(ends) > MAX_MESSAGE_ENDS or not all(0 < end <= num_tokens for end in ends):
        yield f"message_ends: these are more than {MAX_MESSAGE_ENDS}, or not within the prompt"
    for name, time_s in (("deadline_s", submission.deadline_s), ("due_s", submission.due_s)):
        if time_s is not None and not math.isfinite(time_s):
            yield f"{name}: {time_s} is no time"
    if submission.grammar is not None:
        yield from _grammar_problems(submission.grammar, submission.sampling)
    yield from _pooling_problems(submission)
    yield from _sampling_problems(submission.sampling, vocab_size)


def _pooling_problems(submission: Submission) -> Iterator[str]:
    """Yield the parameters with which an embedding of a prompt cannot be asked for."""
    if submission.facts.pooling is None:
        return
    if len(submission.samples) != 1 or submission.samples[0].output:
        yield "pooling: a prompt that is embedded has one sample, without output"
    if submission.decode is not None:
        yield "pooling: a prompt that is embedded is not handed over; leave out decode"
    if submission.grammar is not None:
        yield "pooling: a prompt that is embedded has no output that a grammar could describe"


def _token_problems(field: str, tokens: bytes, vocab_size: int) -> Iterator[str]:
    if len(tokens) % TOKEN_BYTES:
        yield f"{field}: {len(tokens)} bytes are no token ids"
    elif np.frombuffer(tokens, "<u4").max(initial=0) >= vocab_size:
        yield f"{field}: a token id is not below {vocab_size}"


def _grammar_problems(grammar: Grammar, sampling: SamplingParams) -> Iterator[str]:
    if problem := grammar.find_problem():
        yield f"grammar.{problem}"
    if sampling.ignore_eos:
        yield "sampling.ignore_eos: not with a grammar, which says where the output ends"


def _sampling_problems(sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    for name in _FLOATS:
        value = getattr(sampling, name)
        if not abs(value) <= _MAX_FLOAT32:
            yield f"sampling.{name}: {value} is no number of single precision"
    if sampling.temperature < 0:
        yield f"sampling.temperature: {sampling.temperature} is below 0"
    if sampling.repetition_penalty <= 0:
        yield f"sampling.repetition_penalty: {sampling.repetition_penalty} is not above 0"
    for name in ("top_p", "min_p"):
        if not 0 <= getattr(sampling, name) <= 1:
            yield f"sampling.{name}: {getattr(sampling, name)} is not from 0 to 1"
    for name in ("top_k", "min_tokens"):
        if not 0 <= getattr(sampling, name) <= _MAX_INT32:
            yield f"sampling.{name}: {getattr(sampling, name)} is not from 0 to {_MAX_INT32}"
    if sampling.num_logprobs is not None and not 0 <= sampling.num_logprobs <= vocab_size:
        yield f"sampling.num_logprobs: {sampling.num_logprobs} is not from 0 to {vocab_size}"
    most = min(MAX_PROMPT_LOGPROBS, vocab_size)
    if sampling.num_prompt_logprobs is not None and not 0 <= sampling.num_prompt_logprobs <= most:
        yield f"sampling.num_prompt_logprobs: {sampling.num_prompt_logprobs} is not from 0 to {most}"
    # The vocabulary of a tokenizer may be larger than the model's.
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token <= _MAX_TOKEN_ID or not abs(bias) <= _MAX_FLOAT32:
            yield f"sampling.logit_bias: {token}: {bias} is no bias of a token"
    for token in sampling.stop_token_ids:
        if not 0 <= token <= _MAX_TOKEN_ID:
            yield f"sampling.stop_token_ids: {token} is no token"
