"""Every malformed request gets its own error, which names the field, and the next request works."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import MAX_CONTEXT, PROMPT, Pair, expected

from cluster.api.generate_options import GenerateOptions
from cluster.errors import HTTP_STATUS, STATUS_TABLE, CallError, RequestError, RetryableError, bad_fields
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.validation import ServingLimits, check_request, max_tokens_of, sampling_of
from workers.messages.sampling import SamplingParams

LIMITS = ServingLimits(
    model_name="m",
    vocab_size=400,
    max_context_tokens=512,
    max_samples=4,
    default_max_tokens=256,
    allow_pins=False,
)
CHAT = pb.ChatMessage
TEXT = pb.ContentPart


def request(**fields: Any) -> pb.GenerateRequest:
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["text"] = PROMPT
    return pb.GenerateRequest(**fields)


BAD: dict[str, tuple[str, Callable[[], pb.GenerateRequest]]] = {
    "no prompt": ("prompt", pb.GenerateRequest),
    "empty text": ("prompt", lambda: request(text="")),
    "no tokens": ("prompt", lambda: request(token_ids=pb.TokenIds())),
    "no messages": ("chat", lambda: request(chat=pb.ChatPrompt())),
    "a message without role": (
        "chat.messages[0].role",
        lambda: request(chat=pb.ChatPrompt(messages=[CHAT(content=[TEXT(text="x")])])),
    ),
    "4 MB of text": ("prompt", lambda: request(text="x" * 4_000_000)),
    "4 MB of chat": (
        "prompt",
        lambda: request(
            chat=pb.ChatPrompt(messages=[CHAT(role=pb.ROLE_USER, content=[TEXT(text="x" * 4_000_000)])])
        ),
    ),
    "too many tokens": ("prompt", lambda: request(token_ids=pb.TokenIds(ids=[5] * 600))),
    "as many tokens as the context": ("prompt", lambda: request(token_ids=pb.TokenIds(ids=[5] * 512))),
    "a long text": ("prompt", lambda: request(text="x y z " * 500)),
    "an unknown token": ("token_ids", lambda: request(token_ids=pb.TokenIds(ids=[5, 400]))),
    "NaN temperature": ("temperature", lambda: request(temperature=math.nan)),
    "infinite temperature": ("temperature", lambda: request(temperature=math.inf)),
    "negative temperature": ("temperature", lambda: request(temperature=-1)),
    "negative top_k": ("top_k", lambda: request(top_k=-1)),
    "top_p of 0": ("top_p", lambda: request(top_p=0)),
    "top_p above 1": ("top_p", lambda: request(top_p=1.5)),
    "NaN top_p": ("top_p", lambda: request(top_p=math.nan)),
    "min_p above 1": ("min_p", lambda: request(min_p=1.1)),
    "repetition penalty of 0": ("repetition_penalty", lambda: request(repetition_penalty=0)),
    "presence penalty": ("presence_penalty", lambda: request(presence_penalty=3)),
    "frequency penalty": ("frequency_penalty", lambda: request(frequency_penalty=-2.5)),
    "bias of an unknown token": ("logit_bias", lambda: request(logit_bias={400: 1})),
    "NaN bias": ("logit_bias[3]", lambda: request(logit_bias={3: math.nan})),
    "no samples": ("n", lambda: request(n=0)),
    "too many samples": ("n", lambda: request(n=17)),
    "too many logprobs": ("logprobs", lambda: request(logprobs=21)),
    "negative max_tokens": ("max_tokens", lambda: request(max_tokens=-5)),
    "max_tokens of 0": ("max_tokens", lambda: request(max_tokens=0)),
    "negative min_tokens": ("min_tokens", lambda: request(min_tokens=-1)),
    "min above max": ("min_tokens", lambda: request(min_tokens=9, max_tokens=8)),
    "an empty stop string": ("stop[1]", lambda: request(stop=["a", ""])),
    "many stop strings": ("stop", lambda: request(stop=["a"] * 17)),
    "a long stop string": ("stop[0]", lambda: request(stop=["a" * 300])),
    "an unknown stop token": ("stop_token_ids", lambda: request(stop_token_ids=[400])),
    "a bad tenant": ("tenant", lambda: request(tenant="a b")),
    "a bad request id": ("request_id", lambda: request(request_id="x" * 200)),
    "priority": ("priority", lambda: request(priority=1000)),
    "resume without seed": ("seed", lambda: request(request_id="r", resume=[pb.ResumedSample(sample=0)])),
    "resume without id": ("request_id", lambda: request(seed=1, resume=[pb.ResumedSample(sample=0)])),
    "resume without token": (
        "resume_token",
        lambda: request(request_id="r", seed=1, resume=[pb.ResumedSample(sample=0)]),
    ),
    "resume of an unknown sample": (
        "resume[0].sample",
        lambda: request(request_id="r", seed=1, resume=[pb.ResumedSample(sample=1)]),
    ),
    "resume with an unknown token": (
        "resume[0].token_ids",
        lambda: request(request_id="r", seed=1, resume=[pb.ResumedSample(token_ids=[400])]),
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_malformed_request_names_its_field_and_the_next_one_works(pair: Pair, what: str) -> None:
    field, make = BAD[what]
    call = pair.client.stub().Generate(make())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [name for name, _ in bad_fields(tuple(caught.value.trailing_metadata()))] == [field]
    assert field in caught.value.details()
    assert not pair.prefill.submissions
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=3))
    assert list(done.token_ids[0]) == expected(1, 3)


async def test_an_unknown_model_is_not_found(pair: Pair) -> None:
    with pytest.raises(CallError, match="served: 'm'") as caught:
        await pair.client.complete(PROMPT, GenerateOptions(model="other"))
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    await pair.client.complete(PROMPT, GenerateOptions(model="m", max_tokens=2))


async def test_more_than_the_gateway_reads_is_refused_by_grpc(pair: Pair) -> None:
    with pytest.raises(CallError, match="RESOURCE_EXHAUSTED"):
        await pair.client.complete("x" * (17 << 20))
    await pair.client.complete(PROMPT, GenerateOptions(max_tokens=2))


async def test_tokenize_and_detokenize_check_too(pair: Pair) -> None:
    stub = pair.client.stub()
    for call in (
        stub.Tokenize(pb.TokenizeRequest()),
        stub.Tokenize(pb.TokenizeRequest(text="x" * 4_000_000)),
        stub.Tokenize(
            pb.TokenizeRequest(
                chat=pb.ChatPrompt(messages=[CHAT(role=pb.ROLE_USER, content=[TEXT(text="x" * 4_000_000)])])
            )
        ),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[400])),
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * (MAX_CONTEXT + 1))),
        stub.Explain(pb.ExplainRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await call


def test_all_bad_fields_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        check_request(request(text="", temperature=-1, n=9), LIMITS)
    assert [name for name, _ in getattr(caught.value, "violations")] == ["prompt", "temperature", "n"]  # noqa: B009


def test_pins_need_the_debug_setting() -> None:
    with pytest.raises(RequestError, match=r"debug\.allow_pins"):
        check_request(request(pins=pb.Pins(decode="d0")), LIMITS)


def test_absent_fields_take_the_engines_defaults_and_zeros_are_kept() -> None:
    assert sampling_of(request(), 5) == SamplingParams(max_tokens=5)
    given = sampling_of(
        request(temperature=0.5, top_p=0.9, logprobs=0, ignore_eos=True, logit_bias={3: 2}), 5
    )
    assert (given.temperature, given.top_p, given.num_logprobs, given.ignore_eos) == (0.5, 0.9, 0, True)
    assert given.logit_bias == {3: 2.0}


def test_the_default_length_is_cut_to_the_context() -> None:
    assert max_tokens_of(request(), 10, LIMITS) == 256
    assert max_tokens_of(request(), 500, LIMITS) == 12
    assert max_tokens_of(request(min_tokens=300), 10, LIMITS) == 300
    assert max_tokens_of(request(max_tokens=502), 10, LIMITS) == 502
    with pytest.raises(RequestError, match="at most 502"):
        max_tokens_of(request(max_tokens=503), 10, replace(LIMITS, caps_max_tokens=False))


def test_a_request_fits_the_share_of_its_tenant() -> None:
    limits = replace(LIMITS, kv_share=0.25, max_share_tokens=100, caps_max_tokens=False)
    assert max_tokens_of(request(), 10, limits) == 90
    assert max_tokens_of(request(max_tokens=90), 10, limits) == 90
    with pytest.raises(RequestError, match=r"^max_tokens: 91 .* 100 tokens .* ask for at most 90"):
        max_tokens_of(request(max_tokens=91), 10, limits)
    assert max_tokens_of(request(), 99, limits) == 1
    with pytest.raises(RequestError, match=r"^prompt: has 100 tokens .*device_kv_share 0.25\); shorten"):
        max_tokens_of(request(), 100, limits)
    roomy = replace(limits, max_share_tokens=600)
    with pytest.raises(RequestError, match=r"exceed the context of 512; ask for at most 502"):
        max_tokens_of(request(max_tokens=503), 10, roomy)


def test_more_than_fits_is_cut() -> None:
    assert max_tokens_of(request(max_tokens=32_000), 10, LIMITS) == 502
    assert max_tokens_of(request(max_tokens=502), 10, LIMITS) == 502
    limits = replace(LIMITS, kv_share=0.25, max_share_tokens=100)
    assert max_tokens_of(request(max_tokens=32_000), 10, limits) == 90
    for num_prompt_tokens, most in ((512, LIMITS), (100, limits)):
        with pytest.raises(RequestError, match=r"^prompt: has \d+ tokens.*shorten it"):
            max_tokens_of(request(max_tokens=32_000), num_prompt_tokens, most)


def test_a_resumed_request_is_cut_where_a_new_one_is_refused() -> None:
    """The gateway that accepted it may have had more room, or another setting."""
    limits = replace(LIMITS, caps_max_tokens=False)
    resumed = request(max_tokens=503)
    resumed.resume.add()
    assert max_tokens_of(resumed, 10, limits) == 502
    shared = replace(limits, kv_share=0.25, max_share_tokens=100)
    assert max_tokens_of(resumed, 10, shared) == 90


def test_every_error_of_a_request_has_a_status() -> None:
    leaves, classes = set(), [RequestError]
    while classes:
        found = classes.pop()
        classes.extend(found.__subclasses__())
        if found not in (RequestError, RetryableError):
            leaves.add(found)
    assert leaves == set(STATUS_TABLE)
    assert HTTP_STATUS.keys() >= set(STATUS_TABLE.values())
