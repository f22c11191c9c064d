"""Chats and completions over HTTP: the wire format of answers, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_harness import TEMPLATE, GatewayHarness, decode, encode, raw, truth
from http_harness import CHAT, HttpFrontHarness

from cluster.proto.tandem.v1 import inference_pb2 as pb

assert "im_start" in TEMPLATE
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def answer(seed: int, count: int, prompt: str = RENDERED) -> str:
    return decode(truth(raw(encode(prompt)), seed, count))


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[HttpFrontHarness]:
    async with HttpFrontHarness(harness) as built:
        yield built


def submission(front: HttpFrontHarness) -> Any:
    """The latest that a replica has got."""
    return front.harness.replicas["p0"].submissions[-1]


async def test_a_chat_is_answered_as_a_whole(front: HttpFrontHarness) -> None:
    reply = await front.chat()
    assert reply.status == 200
    body = reply.json
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": answer(1, 8), "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    num_prompt = len(encode(RENDERED))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 8,
        "total_tokens": num_prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["id"] == "chatcmpl-" + reply.headers["X-Request-Id"]
    assert (body["object"], body["model"]) == ("chat.completion", "m")


async def test_a_chat_is_streamed_in_chunks_with_the_usage_at_the_end(front: HttpFrontHarness) -> None:
    reply = await front.chat(stream=True, stream_options={"include_usage": True}, n=2)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *chunks, done = [event for _, event in reply.events]
    assert done == "[DONE]"
    *parts, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 16
    assert all(part["usage"] is None for part in parts)
    assert {part["id"] for part in chunks} == {"chatcmpl-" + reply.headers["X-Request-Id"]}
    for index in range(2):
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "length"
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == (answer(1, 8) if index == 0 else text)
        assert text


async def test_a_stream_without_options_has_no_usage(front: HttpFrontHarness) -> None:
    reply = await front.chat(stream=True)
    assert all("usage" not in event for _, event in reply.events[:-1])


async def test_the_output_ends_before_a_stop_string(front: HttpFrontHarness) -> None:
    stop = answer(1, 8)[2:4]
    reply = await front.chat(stop=stop)
    choice = reply.json["choices"][0]
    assert choice["message"]["content"] == answer(1, 8).partition(stop)[0]
    assert choice["finish_reason"] == "stop"


async def test_logprobs_are_those_of_the_output(front: HttpFrontHarness) -> None:
    items = (await front.chat(logprobs=True, top_logprobs=2)).json["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in items] == [-0.5] * 8
    assert [[top["logprob"] for top in item["top_logprobs"]] for item in items] == [[-1.0, -2.0]] * 8
    reply = await front.chat(top_logprobs=2)
    assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


async def test_every_field_reaches_the_replica(front: HttpFrontHarness) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"42": -1.5},
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": 3,
        "max_tokens": None,
        "max_completion_tokens": 4,
        "user": "somebody",
        "metadata": {"a": "b"},
        "store": False,
        "request_id": "mine",
    }
    reply = await front.chat(**fields)
    assert reply.status == 200, reply.body
    assert reply.headers["X-Request-Id"] == "mine"
    sampling = submission(front).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 7, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.25, {42: -1.5})
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (2, 4, True)
    assert sampling.stop_token_ids == (9,)
    assert submission(front).priority == 3


async def test_the_defaults_are_openais(front: HttpFrontHarness) -> None:
    await front.chat(top_k=-1)
    assert submission(front).sampling.temperature == 1.0
    assert submission(front).sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 99}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias[x]"),
        ({"logit_bias": {"5": 1000}}, "logit_bias[5]"),
        ({"seed": 1 << 64}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"colour": "red"}, "colour"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"priority": 1000}, "priority"),
        ({"request_id": "a/b"}, "request_id"),
        ({"": 1}, "body"),
    ],
)
async def test_a_bad_field_is_named(front: HttpFrontHarness, fields: dict[str, Any], param: str) -> None:
    reply = await front.chat(**fields)
    assert reply.status == 400, reply.body
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert reply.error["message"].startswith(f"{param}: ")


async def test_null_is_as_absent_also_of_fields_that_are_not_known(front: HttpFrontHarness) -> None:
    body = {**CHAT, "functions": None, "audio": None, "temperature": None, "tools": None}
    assert (await front.post("/v1/chat/completions", body)).status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a":' * 100_000, b'{"messages": "\\ud800"}'])
async def test_what_is_no_json_object_is_refused(front: HttpFrontHarness, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    reply = await front.send("POST", "/v1/chat/completions", data=body, headers=headers)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


async def test_all_bad_values_are_named_at_once(front: HttpFrontHarness) -> None:
    reply = await front.chat(temperature=-1, max_tokens=0)
    assert "temperature: is -1" in reply.error["message"]
    assert "max_tokens: is 0" in reply.error["message"]


async def test_an_unknown_model_is_404(front: HttpFrontHarness) -> None:
    reply = await front.chat(model="gpt-9")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


async def test_models_are_listed(front: HttpFrontHarness) -> None:
    listed = (await front.get("/v1/models")).json
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["m"])
    assert (await front.get("/v1/models/m")).json == listed["data"][0]
    assert (await front.get("/v1/models/other")).error["code"] == "model_not_found"
    assert (await front.get("/v1/models/of/others")).error["code"] == "model_not_found"


async def test_a_model_may_have_a_slash_in_its_name(harness: GatewayHarness) -> None:
    async with HttpFrontHarness(harness, harness.config(model_name="Qwen/Qwen3-8B")) as front:
        for path in ("Qwen/Qwen3-8B", "Qwen%2FQwen3-8B"):
            assert (await front.get(f"/v1/models/{path}")).json["id"] == "Qwen/Qwen3-8B"


async def test_a_request_that_fails_before_its_first_token_has_a_status_of_its_own(
    front: HttpFrontHarness,
) -> None:
    for replica in front.harness.replicas.values():
        replica.script.num_refusals = 1000
    reply = await front.chat(stream=True)
    assert reply.status in (429, 503)
    assert int(reply.headers["Retry-After"]) >= 0
    assert reply.error["code"] in ("overloaded", "unavailable")


# ------------------------------------------------------------------------------------------ completions


async def test_several_prompts_are_several_choices(front: HttpFrontHarness) -> None:
    body = {"model": "m", "prompt": ["one two", "three"], "n": 2, "seed": 1, "max_tokens": 3}
    reply = await front.post("/v1/completions", body)
    assert reply.status == 200
    choices = reply.json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == answer(1, 3, "one two")
    assert choices[2]["text"] == answer(1, 3, "three")
    assert reply.json["usage"]["completion_tokens"] == 12
    assert reply.json["object"] == "text_completion"


async def test_token_ids_are_a_prompt(front: HttpFrontHarness) -> None:
    ids = encode("one two")
    for prompt in (ids, [ids]):
        reply = await front.post("/v1/completions", {"prompt": prompt, "seed": 1, "max_tokens": 3})
        assert reply.json["choices"][0]["text"] == answer(1, 3, "one two")


async def test_completions_are_streamed(front: HttpFrontHarness) -> None:
    body = {"prompt": ["one two", "three"], "seed": 1, "max_tokens": 3, "stream": True}
    reply = await front.post("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *chunks, usage, done = [event for _, event in reply.events]
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 6
    for index, prompt in enumerate(("one two", "three")):
        own = [it["choices"][0] for it in chunks if it["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == answer(1, 3, prompt)
        assert own[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [[], "", [[]], [1, "a"], [True], {"a": 1}, [-1], ["a"] * 300])
async def test_a_bad_prompt_is_named(front: HttpFrontHarness, prompt: Any) -> None:
    reply = await front.post("/v1/completions", {"prompt": prompt, "max_tokens": 3})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


@pytest.mark.parametrize("bad", ["", [1 << 30], "x" * 40_000])
async def test_one_bad_prompt_ends_all_and_is_named(front: HttpFrontHarness, bad: Any) -> None:
    front.harness.replicas["p0"].script.stop_after = 0
    fine = "fine" if isinstance(bad, str) else [5]
    reply = await front.post("/v1/completions", {"prompt": [fine, bad, fine], "max_tokens": 3})
    assert (reply.status, reply.error["param"]) == (400, "prompt[1]")
    front.harness.replicas["p0"].script.resume.set()
    reply = await front.post("/v1/completions", {"prompt": [fine], "max_tokens": 0})
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


async def test_the_usage_in_chunks_is_that_of_all_prompts(front: HttpFrontHarness) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["one two", "three"], "max_tokens": 3, "stream": True, "stream_options": options}
    reply = await front.post("/v1/completions", body)
    *chunks, last, _ = [event["usage"] for _, event in reply.events[:-1]] + [None]
    counts = [usage["completion_tokens"] for usage in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["completion_tokens"] == 6
    assert chunks[-1]["prompt_tokens"] == last["prompt_tokens"]


async def test_the_longest_id_serves_for_several_prompts(front: HttpFrontHarness) -> None:
    name = "a" * 128
    for route, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        ids = set()
        for request_id in (name, name[:-1] + "b"):
            reply = await front.post(route, {field: ["one", "two"], "request_id": request_id})
            assert reply.status == 200, reply.body
            ids |= {it.request_id for it in front.gateway.requests.latest(10, None)}
        assert len(ids) == (4 if route == "/v1/completions" else 8)
        assert all(len(it) <= 128 for it in ids)


def test_the_wire_formats_cover_every_finish_reason() -> None:
    from cluster.http.answers import FINISH_NAMES

    assert {0, *FINISH_NAMES} == set(pb.FinishReason.values())
