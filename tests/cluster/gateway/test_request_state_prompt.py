"""What is read of a request's prompt: log-probabilities of its tokens, and embeddings."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from request_state_harness import (
    D0,
    D1,
    P0,
    P1,
    Effect,
    Fail,
    Finish,
    RecordedRequest,
    Route,
    Submit,
    delta,
    handed_over,
    kinds,
    make_request,
    prefilled,
    raw,
    read_of,
    route,
)

from cluster.gateway.request_state import RequestPhase
from cluster.gateway.sample_output import EmbeddingDelta, PromptLogprobsDelta
from cluster.gateway.submissions import first_route_request
from cluster.text.preprocess import SampleStart
from workers.messages.link import PromptEmbedding, PromptLogprobs, RequestFailed
from workers.messages.sampling import PackedLogprobs


def scored(num_tokens: int = 10, **fields: object) -> RecordedRequest:
    return make_request(num_prompt_tokens=num_tokens, num_prompt_logprobs=2, **fields)  # type: ignore[arg-type]


def submitted(effects: list[Effect]) -> Submit:
    (submit,) = (it for it in effects if isinstance(it, Submit))
    return submit


def routed(effects: list[Effect]) -> Route:
    (found,) = (it for it in effects if isinstance(it, Route))
    return found


def test_a_prompt_that_is_read_is_priced_whole() -> None:
    """Wherever it is cached it is computed; once it is read, what is cached counts."""
    request = scored()
    assert first_route_request(request.prepared).block_keys == ()
    asked = routed(request.start(0.0)).request
    assert (asked.block_keys, asked.num_tokens) == ((), 10)
    assert submitted(route(request, P0, D0)).submission.sampling.num_prompt_logprobs == 2
    request.on_prompt_logprobs(P0, read_of(1, 10), 2.0)
    request.on_prefilled(prefilled(), 2.0)
    request.on_delta(P0, delta(0, 0, 1, 6), 2.0)
    request.on_handed_over(D0, handed_over(), 2.0)
    again = routed(request.on_lost(D0, "reset", 3.0)).request
    assert again.block_keys == (b"k",)
    made = submitted(route(request, P1, D1)).submission
    assert made.sampling.num_prompt_logprobs is None
    assert made.sampling.max_tokens == 6


def test_another_attempt_brings_what_is_missing() -> None:
    request = scored()
    request.start(0.0)
    route(request, P0, D0)
    (first,) = request.on_prompt_logprobs(P0, read_of(1, 4), 1.0)
    assert first == PromptLogprobsDelta(1, read_of(1, 4).logprobs)
    assert routed(request.on_lost(P0, "reset", 2.0)).request.block_keys == ()
    assert submitted(route(request, P1, D0)).submission.sampling.num_prompt_logprobs == 2
    assert request.on_prompt_logprobs(P0, read_of(4, 6), 3.0) == [], "of the attempt before"
    assert request.on_prompt_logprobs(P1, read_of(1, 3, 2), 3.0) == []
    (second,) = request.on_prompt_logprobs(P1, read_of(3, 8, 2), 3.0)
    assert second == PromptLogprobsDelta(4, read_of(4, 8).logprobs)
    (third,) = request.on_prompt_logprobs(P1, read_of(8, 10, 2), 3.0)
    assert third == PromptLogprobsDelta(8, read_of(8, 10).logprobs)
    assert kinds(request.on_delta(P1, delta(0, 0, 1, 6, attempt=2), 4.0)) == ["OutputDelta"]


def test_one_that_resumes_with_output_has_had_them() -> None:
    request = scored(starts=(SampleStart(0, 5, raw([97])),))
    assert routed(request.start(0.0)).request.block_keys == (b"k",)
    assert submitted(route(request, P0, D0)).submission.sampling.num_prompt_logprobs is None
    assert kinds(request.on_delta(P0, delta(0, 1, 1, 6), 2.0)) == ["OutputDelta"]


def test_one_that_resumes_without_output_gets_them() -> None:
    request = scored(starts=(SampleStart(0, 5),))
    request.start(0.0)
    assert submitted(route(request, P0, D0)).submission.sampling.num_prompt_logprobs == 2


def test_a_prompt_of_one_token_has_none() -> None:
    request = scored(1)
    assert routed(request.start(0.0)).request.block_keys == (b"k",)
    assert submitted(route(request, P0, D0)).submission.sampling.num_prompt_logprobs is None
    assert kinds(request.on_delta(P0, delta(0, 0, 1, 6), 2.0)) == ["OutputDelta"]


def bad(part: PromptLogprobs, **changes: object) -> PromptLogprobs:
    return replace(part, logprobs=replace(part.logprobs, **changes))


@pytest.mark.parametrize(
    "part",
    [
        read_of(5, 7),  # a gap
        read_of(0, 3),
        read_of(3, 11),  # longer than the prompt
        read_of(3, 5, num_top=1),
        bad(read_of(3, 5), top_ids=b""),
        bad(read_of(3, 5), logprobs=b"\0" * 7),
    ],
)
def test_parts_that_cannot_be_read_end_the_attempt(part: PromptLogprobs) -> None:
    request = scored()
    request.start(0.0)
    route(request, P0, D0)
    request.on_prompt_logprobs(P0, read_of(1, 3), 1.0)
    effects = request.on_prompt_logprobs(P0, part, 2.0)
    assert "p0" in routed(effects).request.excluded
    assert request.timeline[-1].detail == "p0 sent a stream that cannot be read"


def test_a_token_before_the_whole_prompt_is_read_ends_the_attempt() -> None:
    request = scored()
    request.start(0.0)
    route(request, P0, D0)
    request.on_prompt_logprobs(P0, read_of(1, 9), 1.0)
    assert "p0" in routed(request.on_delta(P0, delta(0, 0, 1, 6), 2.0)).request.excluded


def test_tokens_of_the_decode_side_may_be_early() -> None:
    """They come over another link; the first token, behind which they wait, comes after the prompt's."""
    request = scored()
    request.start(0.0)
    route(request, P0, D0)
    request.on_handed_over(D0, handed_over(), 1.0)
    assert request.on_delta(D0, delta(0, 1, 2, 6), 1.0) == []
    assert kinds(request.on_prompt_logprobs(P0, read_of(1, 10), 2.0)) == ["PromptLogprobsDelta"]
    assert kinds(request.on_delta(P0, delta(0, 0, 1, 6), 2.0)) == ["OutputDelta", "OutputDelta"]


# ------------------------------------------------------------------------------------------- embeddings

VECTOR = np.array([1.0, -2.0, 0.5], "<f4").tobytes()


def embedding(attempt: int = 1, vector: bytes = VECTOR) -> PromptEmbedding:
    return PromptEmbedding("r", attempt, vector)


def test_an_embedding_is_the_end() -> None:
    request = make_request(pooling="last", max_tokens=1)
    asked = routed(request.start(0.0)).request
    assert (asked.facts.decodes, asked.block_keys) == (False, (b"k",))
    assert not first_route_request(request.prepared).facts.decodes
    made = submitted(route(request, None, D0)).submission
    assert (made.pooling, made.decode) == ("last", None)
    request.on_prefilled(prefilled(), 2.0)
    emitted, released, finished = request.on_embedding(D0, embedding(), 2.0)
    assert emitted == EmbeddingDelta(VECTOR)
    assert kinds([released]) == ["Release"]
    assert isinstance(finished, Finish)
    (sample,) = finished.summary.samples
    assert (sample.finish, sample.num_tokens, finished.summary.ttft_s) == ("stop", 0, 2.0)
    assert request.phase is RequestPhase.ENDED
    assert request.on_embedding(D0, embedding(), 3.0) == request.on_lost(D0, "late", 3.0) == []


def test_an_embedding_is_computed_again_at_another_replica() -> None:
    request = make_request(pooling="last", max_tokens=1)
    request.start(0.0)
    route(request, None, D0)
    assert "d0" in routed(request.on_lost(D0, "reset", 1.0)).request.excluded
    assert submitted(route(request, None, P0)).submission.pooling == "last"
    assert request.on_embedding(D0, embedding(), 2.0) == [], "of the attempt before"
    assert kinds(request.on_embedding(P0, embedding(2), 2.0)) == ["EmbeddingDelta", "Release", "Finish"]


@pytest.mark.parametrize("vector", [b"", b"\0" * 7])
def test_a_vector_that_cannot_be_read_ends_the_attempt(vector: bytes) -> None:
    request = make_request(pooling="last", max_tokens=1)
    request.start(0.0)
    route(request, None, D0)
    assert "d0" in routed(request.on_embedding(D0, embedding(vector=vector), 1.0)).request.excluded


def test_a_replica_that_embeds_what_shall_be_generated_is_left() -> None:
    request = make_request()
    request.start(0.0)
    route(request, None, D0)
    assert "d0" in routed(request.on_embedding(D0, embedding(), 1.0)).request.excluded


def test_an_invalid_one_fails() -> None:
    request = make_request(pooling="last", max_tokens=1)
    request.start(0.0)
    route(request, None, D0)
    failed = RequestFailed("r", 1, "invalid", "pooling: a prompt that is embedded has one sample")
    assert isinstance(request.on_failed(D0, failed, 1.0)[-1], Fail)


def test_packed_log_probabilities() -> None:
    packed = read_of(1, 6).logprobs
    tokens = packed.unpacked()
    assert [it.logprob for it in tokens] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert tokens[2].top == ((0, -3.5), (1, -4.5))
    assert packed.part(1, 3).unpacked() == tokens[1:3]
    assert packed.part(3, 99).unpacked() == tokens[3:]
    assert packed.num_bytes == 5 * 4 + 2 * 5 * 2 * 4
    assert PackedLogprobs(0, b"\0" * 8).unpacked() == [replace(tokens[0], logprob=0.0, top=())] * 2
