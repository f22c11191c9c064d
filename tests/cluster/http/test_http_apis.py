"""Responses, messages, token counts and embeddings over HTTP: what requests become, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from gateway_harness import MAX_CONTEXT, PROMPT, GatewayHarness, decode, encode, raw, truth
from http_harness import SCHEMAS, HttpFrontHarness, embedding_of

from cluster.admission.degradation import Degradation
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.http import chat, fields, messages, messages_schemas, responses, schemas
from cluster.http.body_decoding import decode as decode_body
from cluster.http.server import ROUTE_ACCESS
from cluster.proto.tandem.v1 import inference_pb2 as pb

RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[HttpFrontHarness]:
    async with HttpFrontHarness(harness) as built:
        yield built


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def calls_of(kind: Any, module: Any, body: dict[str, Any]) -> pb.GenerateRequest:
    (call,) = module.translate(decode_body(json.dumps(body).encode(), kind, {})).calls
    assert isinstance(call, pb.GenerateRequest)
    return call


# ------------------------------------------------------------------------------------------- messages


async def test_messages_are_answered_in_anthropics_shape(front: HttpFrontHarness) -> None:
    reply = await front.post("/v1/messages", MESSAGES)
    assert reply.status == 200
    seed = front.harness.replicas["p0"].submissions[-1].samples[0].seed
    text = decode(truth(raw(encode(RENDERED)), seed, 8))
    assert reply.json["content"] == [{"type": "text", "text": text}]
    assert reply.json["stop_reason"] == "max_tokens"
    assert (await front.post("/v1/messages/count_tokens", {"messages": MESSAGES["messages"]})).json == {
        "input_tokens": len(encode(RENDERED))
    }
    streamed = await front.post("/v1/messages", {**MESSAGES, "stream": True})
    names = [name for name, _ in streamed.events]
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert all(name == event["type"] for name, event in streamed.events)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: ",
        ),
        ({"mcp_servers": []}, "mcp_servers: "),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: "),
        ({"output_config": {"verbosity": "high"}}, "output_config.verbosity: "),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: "),
    ],
)
async def test_a_bad_field_of_messages_is_named(
    front: HttpFrontHarness, changes: dict[str, Any], problem: str
) -> None:
    reply = await front.post("/v1/messages", {**MESSAGES, **changes})
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert reply.json["error"]["message"].startswith(problem)
    assert (await front.post("/v1/messages", {**MESSAGES, "model": "x"})).json["error"]["type"] == (
        "not_found_error"
    )


def test_a_conversation_with_tools_becomes_turns() -> None:
    body = {
        "max_tokens": 8,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "here"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "sun"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
        "cache_control": {"type": "ephemeral"},
    }
    call = calls_of(messages_schemas.MessagesRequest, messages, body)
    assert call.constraint.json_schema == '{"a":1}'
    found = call.chat
    roles = [pb.Role.Name(turn.role).removeprefix("ROLE_").lower() for turn in found.messages]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    told = found.messages[2]
    assert (told.reasoning, told.content[0].text, told.tool_calls[0].name) == ("hm", "I look.", "look")
    assert json.loads(told.tool_calls[0].arguments) == {"place": "here"}
    assert (found.messages[3].tool_call_id, found.messages[3].content[0].text) == ("t1", "sun")
    assert found.messages[4].content[0].text == "and?"
    assert found.tool_choice.mode == pb.ToolChoice.MODE_REQUIRED
    assert found.HasField("parallel_tool_calls")
    assert not found.parallel_tool_calls
    assert json.loads(found.template_args_json) == {"enable_thinking": False, "reasoning_effort": "low"}


def prompt_of(front: HttpFrontHarness) -> str:
    return decode(memoryview(front.harness.replicas["p0"].submissions[-1].prompt).cast("I").tolist())


@pytest.mark.parametrize("content", ['{"city": "', [{"type": "text", "text": '{"city": "'}]])
async def test_a_last_message_of_the_assistant_is_continued(front: HttpFrontHarness, content: Any) -> None:
    turns = [*MESSAGES["messages"], {"role": "assistant", "content": content}]
    reply = await front.post("/v1/messages", {**MESSAGES, "messages": turns})
    assert reply.status == 200, reply.body
    # Special tokens are not decoded.
    assert prompt_of(front) == 'user\nhello\nassistant\n{"city": "'
    counted = await front.post("/v1/messages/count_tokens", {"messages": turns})
    usage = reply.json["usage"]
    assert counted.json["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
        [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
        [{"type": "thinking", "thinking": "hm"}],
        [],
    ],
)
async def test_a_last_message_of_the_assistant_that_cannot_be_continued_is_named(
    front: HttpFrontHarness, content: Any
) -> None:
    turns = [*MESSAGES["messages"], {"role": "assistant", "content": content}]
    reply = await front.post("/v1/messages", {**MESSAGES, "messages": turns})
    assert reply.status == 400
    assert reply.json["error"]["message"].startswith("messages[1]: ")
    assert "text and without tool calls" in reply.json["error"]["message"]


def test_a_tool_that_failed_says_so() -> None:
    for is_error, text in ((True, "Error: no such city"), (False, "no such city"), (None, "no such city")):
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "no such city", "is_error": is_error}
        body = {"max_tokens": 8, "messages": [{"role": "user", "content": [result]}]}
        (turn,) = calls_of(messages_schemas.MessagesRequest, messages, body).chat.messages
        assert "".join(part.text for part in turn.content) == text
    alone = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": [alone]}]}
    (turn,) = calls_of(messages_schemas.MessagesRequest, messages, body).chat.messages
    assert "".join(part.text for part in turn.content) == "Error: "


# ------------------------------------------------------------------------------------------ responses


async def test_responses_are_answered_and_streamed(front: HttpFrontHarness) -> None:
    reply = await front.post("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 8})
    seed = front.harness.replicas["p0"].submissions[-1].samples[0].seed
    (item,) = reply.json["output"]
    assert item["content"][0]["text"] == decode(truth(raw(encode(RENDERED)), seed, 8))
    assert reply.json["incomplete_details"] == {"reason": "max_output_tokens"}
    body = {"model": "m", "input": "hello", "max_output_tokens": 8, "stream": True}
    streamed = await front.post("/v1/responses", body)
    assert streamed.events[0][0] == "response.created"
    assert streamed.events[-1][0] == "response.incomplete"
    assert all(name == event["type"] for name, event in streamed.events)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
async def test_a_bad_field_of_responses_is_named(
    front: HttpFrontHarness, changes: dict[str, Any], param: str
) -> None:
    reply = await front.post("/v1/responses", {"model": "m", "input": "hello", **changes})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_items_become_turns() -> None:
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": "weather?"},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        ],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "tools": [{"type": "function", "name": "look", "parameters": {}, "strict": True}],
        "tool_choice": {"type": "function", "name": "look"},
        "reasoning": {"effort": "low"},
    }
    call = calls_of(responses.ResponsesRequest, responses, body)
    roles = [pb.Role.Name(turn.role).removeprefix("ROLE_").lower() for turn in call.chat.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    told = call.chat.messages[2]
    assert (told.reasoning, told.content[0].text, told.tool_calls[0].id) == ("hm", "I look.", "c1")
    assert call.constraint.json_schema == '{"type":"object"}'
    assert (call.chat.tools[0].strict, call.chat.tool_choice.name) == (True, "look")
    assert json.loads(call.chat.template_args_json) == {"reasoning_effort": "low"}


# ---------------------------------------------------------------------------------- chats, as calls


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.Constraint(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
            pb.Constraint(json_schema='{"a":1}'),
        ),
        ({"guided_json": {"a": 1}}, pb.Constraint(json_schema='{"a":1}')),
        ({"guided_json": '{"a": 1}'}, pb.Constraint(json_schema='{"a": 1}')),
        ({"guided_regex": "a+"}, pb.Constraint(regex="a+")),
        ({"guided_choice": ["a", "b"]}, pb.Constraint(choice=pb.Choices(choices=["a", "b"]))),
        ({"guided_grammar": "root ::= x"}, pb.Constraint(grammar="root ::= x")),
        ({"structured_outputs": {"json": {"a": 1}}}, pb.Constraint(json_schema='{"a":1}')),
        ({"structured_outputs": {"regex": "a+"}}, pb.Constraint(regex="a+")),
        ({"structured_outputs": {"choice": ["a"]}}, pb.Constraint(choice=pb.Choices(choices=["a"]))),
        ({"structured_outputs": {"grammar": "g"}}, pb.Constraint(grammar="g")),
        ({"structured_outputs": {"json_object": True}}, pb.Constraint(json_object=True)),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<f>", "schema": {"a": 1}, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            },
            pb.Constraint(
                structural_tags=pb.StructuralTags(
                    tags=[pb.StructuralTag(begin="<f>", json_schema='{"a":1}', end="</f>")], triggers=["<f"]
                )
            ),
        ),
    ],
)
def test_what_the_output_must_look_like(given: dict[str, Any], constraint: pb.Constraint | None) -> None:
    call = calls_of(schemas.ChatRequest, chat, {"messages": [{"role": "user", "content": "x"}], **given})
    assert (call.constraint if call.HasField("constraint") else None) == constraint


def test_a_chat_with_tools_becomes_turns() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "weather"}, {"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "refusal": None,
                "audio": None,
                "function_call": None,
                "annotations": [],
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "high",
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
        "truncate_prompt_tokens": 64,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "service_tier": "flex",
        "prompt_cache_key": "a key with spaces",
        "include_reasoning": False,
    }
    call = calls_of(schemas.ChatRequest, chat, body)
    turns = call.chat.messages
    assert [part.text for part in turns[1].content] == ["weather", "?"]
    assert (turns[2].reasoning, turns[2].tool_calls[0].arguments) == ("hm", "{}")
    assert (turns[3].tool_call_id, turns[3].role) == ("c1", pb.ROLE_TOOL)
    assert call.chat.tool_choice.name == "f"
    assert call.chat.HasField("parallel_tool_calls")
    assert json.loads(call.chat.template_args_json) == {"enable_thinking": False, "reasoning_effort": "high"}
    assert (call.chat.continue_final_message, call.chat.add_generation_prompt) == (True, False)
    assert (call.truncate_prompt_tokens, call.include_stop, call.keep_special_tokens) == (64, True, True)
    assert (call.prompt_logprobs, call.service_class) == (1, pb.SERVICE_CLASS_BATCH)
    assert len(call.session_id) == 64
    assert call.HasField("separate_reasoning")


# -------------------------------------------------------------------------------------- tokens, embeddings


async def test_text_and_chats_are_tokenized_and_ids_are_text_again(front: HttpFrontHarness) -> None:
    reply = (await front.post("/tokenize", {"model": "m", "prompt": "hello you"})).json
    assert reply["tokens"] == encode("hello you")
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 512)
    chatted = (await front.post("/tokenize", {"messages": MESSAGES["messages"]})).json
    assert chatted["tokens"] == encode(RENDERED)
    assert (await front.post("/detokenize", {"tokens": reply["tokens"]})).json == {"prompt": "hello you"}
    refused = await front.post("/detokenize", {"tokens": [100_000]})
    assert (refused.status, refused.error["param"]) == (400, "tokens")
    assert (await front.post("/tokenize", {})).error["param"] == "prompt"


async def test_embeddings_are_numbers_or_base64(front: HttpFrontHarness) -> None:
    prompts = ["hello you", "other"]
    vectors = [embedding_of(raw(encode(prompt))) for prompt in prompts]
    reply = await front.post("/v1/embeddings", {"model": "m", "input": prompts, "normalize": False})
    assert reply.status == 200, reply.body
    assert [item["embedding"] for item in reply.json["data"]] == [vector.tolist() for vector in vectors]
    assert [item["index"] for item in reply.json["data"]] == [0, 1]
    num_tokens = sum(len(encode(prompt)) for prompt in prompts)
    assert reply.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    body = {"input": encode(prompts[0]), "encoding_format": "base64", "dimensions": 4}
    (item,) = (await front.post("/v1/embeddings", body)).json["data"]
    found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    wanted = vectors[0][:4] / np.linalg.norm(vectors[0][:4])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


async def test_dimensions_that_no_vector_has_are_refused_before_anything_is_computed(
    front: HttpFrontHarness,
) -> None:
    reply = await front.post("/v1/embeddings", {"input": ["x", "y"], "dimensions": 33})
    assert (reply.status, reply.error["param"]) == (400, "dimensions")
    assert "have 32" in reply.error["message"]
    assert all(not replica.submissions for replica in front.harness.replicas.values())


async def test_embeddings_have_the_id_of_the_header(front: HttpFrontHarness) -> None:
    for body, name in (({}, "traced"), ({"request_id": "mine"}, "mine")):
        reply = await front.post("/v1/embeddings", {"input": "x", **body}, headers={"X-Request-Id": "traced"})
        assert (reply.status, reply.headers["X-Request-Id"]) == (200, name)
        listed = front.gateway.requests.latest(10, None)
        assert f"{name}:0" in {it.request_id for it in listed}


@pytest.mark.parametrize(
    ("changes", "param"), [({"input": []}, "input"), ({"encoding_format": "hex"}, "encoding_format")]
)
async def test_a_bad_field_of_embeddings_is_named(
    front: HttpFrontHarness, changes: dict[str, Any], param: str
) -> None:
    reply = await front.post("/v1/embeddings", {"model": "m", "input": "x", **changes})
    assert (reply.status, reply.error["param"]) == (400, param)


# ------------------------------------------------------------------------------ what others have sent


# As Open WebUI sends them: the list of models, a chat, the title and the tags of it, a chat that goes on.
OPEN_WEBUI: list[dict[str, Any]] = [
    {
        "stream": True,
        "model": "m",
        "messages": [
            {"role": "system", "content": "User Context:\n\n"},
            {"role": "user", "content": "hello"},
        ],
        "stream_options": {"include_usage": True},
    },
    {
        "model": "m",
        "messages": [{"role": "user", "content": "### Task:\nGenerate a concise, 3-5 word title."}],
        "stream": False,
        "max_completion_tokens": 100,
    },
    {
        "stream": True,
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "again"},
        ],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 42,
        "stop": ["</s>"],
        "max_tokens": 100,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -10},
        "tools": [],
        "user": {"name": "somebody", "id": "1"},
    },
]


@pytest.mark.parametrize("body", OPEN_WEBUI)
async def test_what_open_webui_sends_is_answered(front: HttpFrontHarness, body: dict[str, Any]) -> None:
    headers = {"Authorization": "Bearer ", "X-OpenWebUI-User-Name": "somebody", "X-OpenWebUI-User-Id": "1"}
    assert (await front.get("/v1/models", headers=headers)).json["data"][0]["id"] == "m"
    reply = await front.post("/v1/chat/completions", body, headers=headers)
    assert reply.status == 200, reply.body
    if body["stream"]:
        assert reply.events[-1][1] == "[DONE]"
    else:
        assert reply.json["choices"][0]["message"]["content"]


async def test_fields_that_other_clients_keep_in_messages_are_ignored(front: HttpFrontHarness) -> None:
    kept = {"role": "assistant", "content": "Hi.", "provider_specific_fields": {"refusal": None}}
    turns = [{"role": "user", "content": "hello"}, kept, {"role": "user", "content": "again"}]
    assert (await front.chat(messages=turns)).status == 200


# ------------------------------------------------------------------------------------------- the table


def test_the_table_has_every_route() -> None:
    posted = {path for method, path in ROUTE_ACCESS if method == "POST"}
    assert fields.FIELDS.keys() == posted == SCHEMAS.keys()


@pytest.mark.parametrize("route", SCHEMAS)
def test_the_table_has_every_field_once(route: str) -> None:
    names = [entry.name for entry in fields.FIELDS[route]]
    assert len(names) == len(set(names))
    served = {entry.name for entry in fields.FIELDS[route] if entry.effect != "refused"}
    assert set(SCHEMAS[route].__struct_fields__) == served


@pytest.mark.parametrize("route", SCHEMAS)
async def test_every_refused_field_is_refused_by_name(front: HttpFrontHarness, route: str) -> None:
    for name, remedy in fields.refused(route).items():
        reply = await front.post(route, {name: "x"})
        assert reply.status == 400
        message = reply.json["error"]["message"]
        assert message.startswith(f"{name}: is not supported")
        assert remedy in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 8}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 8}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8}),
    ],
)
async def test_usage_says_what_the_maximum_was_cut_to_under_load(
    front: HttpFrontHarness, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "capped_max_tokens" not in (await front.post(path, body)).json["usage"]
    monkeypatch.setattr(Degradation, "max_tokens", lambda self, service_class, asked: min(asked, 3))
    usage = (await front.post(path, body)).json["usage"]
    assert usage["capped_max_tokens"] == 3
    assert 3 in (usage.get("completion_tokens"), usage.get("output_tokens"))
    options = {} if path == "/v1/messages" else {"stream_options": {"include_usage": True}}
    streamed = await front.post(path, {**body, "stream": True, **options})
    assert b'"capped_max_tokens":3' in streamed.body, "at the end of a stream too"


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "abc"}]}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": [{"role": "user", "content": "abc"}]}),
        ("/v1/completions", "max_tokens", {"prompt": "abc"}),
        ("/v1/responses", "max_output_tokens", {"input": "abc"}),
        ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
async def test_more_tokens_than_fit_the_context_are_cut(
    front: HttpFrontHarness, path: str, field: str, body: Any
) -> None:
    usage = (await front.post(path, {**body, field: 32_000})).json["usage"]
    num_prompt_tokens = usage.get("prompt_tokens") or usage["input_tokens"]
    num_prompt_tokens += usage.get("cache_read_input_tokens") or 0  # which Anthropic's counts leave out
    assert usage["capped_max_tokens"] == MAX_CONTEXT - num_prompt_tokens
    assert "capped_max_tokens" not in (await front.post(path, {**body, field: 8})).json["usage"]


async def test_more_tokens_than_fit_the_context_are_refused_where_that_is_set(
    harness: GatewayHarness,
) -> None:
    await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway(harness.config(max_tokens_beyond_context="refuse"))
    with pytest.raises(CallError, match=r"max_tokens: 32000 more than the .* exceed the context of 512"):
        await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=32_000))


@pytest.mark.parametrize("streams", [False, True])
async def test_a_prompt_is_scored_without_an_output(front: HttpFrontHarness, streams: bool) -> None:
    """As lm-evaluation-harness asks for it."""
    body = {"prompt": "hello there", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": streams}
    options = {"stream_options": {"include_usage": True}} if streams else {}
    reply = await front.post("/v1/completions", {**body, **options})
    assert reply.status == 200, reply.body
    parts = [item for _, item in reply.events if item != "[DONE]"] if streams else [reply.json]
    choices = [choice for part in parts for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == "hello there"
    assert [it["finish_reason"] for it in choices if it["finish_reason"]] == ["length"]
    logprobs = [it["logprobs"] for it in choices if it.get("logprobs")]
    tokens = [token for item in logprobs for token in item["tokens"]]
    values = [value for item in logprobs for value in item["token_logprobs"]]
    usage = parts[-1]["usage"]
    assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(tokens))
    assert values == [None, *[-0.25] * (len(tokens) - 1)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "max_tokens"), ({"echo": True, "n": 2}, "n"), ({"echo": True, "min_tokens": 1}, "min_tokens")],
)
async def test_what_has_no_meaning_without_an_output_is_named(
    front: HttpFrontHarness, fields: dict[str, Any], param: str
) -> None:
    reply = await front.post("/v1/completions", {"prompt": "hello", "max_tokens": 0, **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
