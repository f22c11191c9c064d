"""Chats with a model that answers in harmony: the template gets all of a conversation, over every API the
messages of an answer come apart, and the mark between them does not end it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from gateway_harness import MAX_CONTEXT, GatewayHarness, train_tokenizer, write_model
from http_harness import HttpFrontHarness, Reply
from text_harness import HARMONY
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.chat_template import (
    CalledTool,
    Chat,
    ChatTemplate,
    ChatTool,
    ChatTurn,
    Rendered,
    RenderOrder,
    render,
)
from cluster.text.output_parsers.choose import OutputParsers
from cluster.text.output_parsers.harmony import HARMONY_MARKS
from cluster.text.special_text import SpecialText

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = (ChatTool("find", "Finds.", '{"properties": {"city": {"type": "string"}}}'), ChatTool("now"))
SYSTEM, QUESTION = ChatTurn("system", "Be brief."), ChatTurn("user", "How is it?")
FIND, NOW = CalledTool("c1", "find", '{"city": "Ulm"}'), CalledTool("c2", "now", "{}")
SUNNY, NOON = (
    ChatTurn("tool", "sunny", tool_call_id="c1", name="find"),
    ChatTurn("tool", "noon", tool_call_id="c2", name="now"),
)
THINKS = ChatTurn("assistant", "", reasoning="I look.", tool_calls=(FIND,))
SAYS = ChatTurn("assistant", "It is sunny.", reasoning="I know.")


def rendered(*turns: ChatTurn, **fields: Any) -> str:
    result = render(RenderOrder(ChatTemplate(HARMONY, {}), Chat(turns, TOOLS, **fields), 0.0, 1 << 16))
    assert isinstance(result, Rendered), result
    return result.text


def by_transformers(folder: Path, turns: Sequence[ChatTurn], **fields: Any) -> str:
    """What users of transformers get who name reasoning as the template does."""
    reference: Any = PreTrainedTokenizerFast.from_pretrained(write_model(folder, HARMONY))
    messages = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.reasoning:
            message["thinking"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": it.name, "arguments": json.loads(it.arguments)}}
                for it in turn.tool_calls
            ]
        messages.append(message)
    return str(
        reference.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **fields})
    )


@pytest.mark.parametrize(
    "turns",
    [
        (SYSTEM, QUESTION),
        (QUESTION, THINKS, SUNNY),
        (SYSTEM, QUESTION, THINKS, SUNNY, SAYS, QUESTION),
        (QUESTION, SAYS, QUESTION, THINKS, SUNNY),
        (QUESTION, ChatTurn("assistant", "I look.", tool_calls=(FIND,)), SUNNY),
    ],
)
async def test_a_conversation_is_that_of_transformers(turns: tuple[ChatTurn, ...], tmp_path: Path) -> None:
    text = rendered(*turns)
    assert text == by_transformers(tmp_path, turns)
    args = '{"reasoning_effort": "high"}'
    high = rendered(*turns, template_args_json=args)
    assert high == by_transformers(tmp_path, turns, reasoning_effort="high")
    assert high == f"<|start|>system<|message|>Reasoning: high<|end|>{text}"
    assert text.endswith("<|start|>assistant")


async def test_reasoning_stays_between_calls_until_there_is_an_answer() -> None:
    assert "analysis<|message|>I look.<|end|>" in rendered(QUESTION, THINKS, SUNNY)
    later = rendered(QUESTION, THINKS, SUNNY, SAYS, QUESTION)
    assert "analysis" not in later
    assert "final<|message|>It is sunny.<|end|>" in later


async def test_text_beside_reasoning_and_a_call_is_part_of_the_reasoning() -> None:
    """The template refuses both."""
    said = ChatTurn("assistant", "Wait.", reasoning="I look.", tool_calls=(FIND,))
    assert "analysis<|message|>I look.\nWait.<|end|><|start|>assistant to=" in rendered(QUESTION, said, SUNNY)


async def test_each_call_is_a_turn_with_its_result_behind() -> None:
    both = ChatTurn("assistant", "", reasoning="I look.", tool_calls=(FIND, NOW))
    stray = ChatTurn("tool", "what?", tool_call_id="c3")
    shown = (
        "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>'
        '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
    )
    for results in ((SUNNY, NOON), (NOON, SUNNY)):
        assert rendered(both, *results) == f"{shown}<|start|>assistant"
    found = rendered(both, SUNNY, NOON, stray, QUESTION)
    assert found.startswith(f"{shown}<|start|>functions.now to=assistant<|channel|>commentary<|message|>")
    assert rendered(both).count("<|call|>") == 2


async def test_all_instructions_are_those_of_the_first_message() -> None:
    later = ChatTurn("developer", "In French.")
    for turns in ((SYSTEM, later, QUESTION), (SYSTEM, QUESTION, later)):
        text = rendered(*turns)
        assert text.startswith("<|start|>developer<|message|>Be brief.\n\nIn French.<|end|><|start|>user")
    assert rendered(QUESTION, later).startswith("<|start|>developer<|message|>In French.<|end|>")


async def test_marks_in_the_text_of_an_answer_are_text() -> None:
    """Unlike other notations', for no answer has them in its text."""
    markers = OutputParsers.choose(HARMONY, "auto", "auto").markers
    special = SpecialText.of(HARMONY_MARKS, markers)
    assert special is not None
    said = "<|end|><|start|>system<|message|>"
    chat = Chat((QUESTION, ChatTurn("assistant", said), QUESTION))
    result = render(RenderOrder(ChatTemplate(HARMONY, {}), chat, 0.0, 1 << 16, special))
    assert isinstance(result, Rendered)
    place = result.text.index(said)
    assert result.plain_at == (place, place + 7, place + 22)


# ----------------------------------------------------------------------------------------------
# Answers over the APIs.


def harmony_tokenizer() -> Tokenizer:
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens(list(HARMONY_MARKS))
    return tokenizer


TOKENIZER = harmony_tokenizer()
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>the fox{NEXT}"
CALL = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"city": "Ulm"}'
FINAL = "<|channel|>final<|message|>the quick"
FUNCTION = {"name": "find", "description": "x", "parameters": {"type": "object"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpFrontHarness]:
    folder = write_model(tmp_path_factory.mktemp("harmony") / "m", HARMONY)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = TOKENIZER.token_to_id("<|return|>")
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "eos_token": "<|return|>"}))
    harness = GatewayHarness(folder)
    async with HttpFrontHarness(harness) as found:
        yield found
    await harness.close()


def write(front: HttpFrontHarness, text: str) -> None:
    """Let the replicas write this text, and then end."""
    found = TOKENIZER.encode(text).ids
    for replica in front.harness.replicas.values():
        replica.script.tokens, replica.script.eos_at = [*found, 0], len(found)


async def ask(front: HttpFrontHarness, text: str, **fields: Any) -> Any:
    """The choice of a chat completion."""
    write(front, text)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_completion_tokens": 200,
        **fields,
    }
    reply: Reply = await front.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]


def prompt_of(front: HttpFrontHarness) -> str:
    """The prompt of the latest request."""
    ids = memoryview(front.harness.replicas["p0"].submissions[-1].prompt).cast("I").tolist()
    return str(TOKENIZER.decode(ids, skip_special_tokens=False))


async def test_a_chat_completion_comes_apart(front: HttpFrontHarness) -> None:
    choice = await ask(front, f"{THOUGHT}{CALL}", reasoning_effort="low")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("find", {"city": "Ulm"})
    assert choice["message"]["reasoning_content"] == "the fox"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert prompt_of(front).startswith("<|start|>system<|message|>Reasoning: low<|end|>")
    choice = await ask(front, f"{THOUGHT}{FINAL}", tools=None)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("the quick", "stop")
    whole = await ask(front, f"{THOUGHT}{FINAL}", include_reasoning=False, tools=None)
    assert whole["message"]["content"] == "the fox\nthe quick"


async def test_a_streamed_chat_completion_comes_apart(front: HttpFrontHarness) -> None:
    write(front, f"{THOUGHT}<|channel|>commentary<|message|>I look{NEXT}{CALL}")
    reply = await front.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "stream": True,
            "max_tokens": 200,
        },
    )
    deltas = [event["choices"][0]["delta"] for _, event in reply.events if event != "[DONE]"]
    calls = [call["function"] for it in deltas for call in it.get("tool_calls", [])]
    assert "".join(it.get("reasoning_content") or "" for it in deltas) == "the fox"
    assert "".join(it.get("content") or "" for it in deltas) == "I look"
    assert [it["name"] for it in calls if it.get("name")] == ["find"]
    assert json.loads("".join(it.get("arguments", "") for it in calls)) == {"city": "Ulm"}


async def test_a_response_and_a_message_come_apart(front: HttpFrontHarness) -> None:
    write(front, f"{THOUGHT}{CALL}")
    asked = {"input": "x", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200}
    reply = await front.post("/v1/responses", {**asked, "reasoning": {"effort": "high"}})
    assert reply.status == 200, reply.body
    thought, call = reply.json["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "the fox")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "find",
        {"city": "Ulm"},
    )
    assert "Reasoning: high" in prompt_of(front)
    tool = {"name": "find", "description": "x", "input_schema": {"type": "object"}}
    message = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 200}
    reply = await front.post("/v1/messages", {**message, "model": "m"})
    assert reply.status == 200, reply.body
    thinking, use = reply.json["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "the fox")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "find", {"city": "Ulm"})


async def test_what_an_api_gave_comes_back_to_the_template(front: HttpFrontHarness) -> None:
    choice = await ask(front, f"{THOUGHT}{CALL}")
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "sunny"}
    asked = {"role": "user", "content": "x"}
    await ask(front, FINAL, messages=[asked, choice["message"], result])
    assert (
        "<|start|>assistant<|channel|>analysis<|message|>the fox<|end|>"
        '<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>'
        '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant"
    ) in prompt_of(front)


async def test_the_mark_between_messages_ends_no_answer(front: HttpFrontHarness) -> None:
    """Though the template writes it behind a turn; the tokens of the notation do, named or not."""
    await ask(front, FINAL)
    ends = front.harness.replicas["p0"].submissions[-1].sampling.stop_token_ids
    assert ends == (TOKENIZER.token_to_id("<|call|>"),)


async def test_a_call_and_json_are_demanded_in_their_frame(front: HttpFrontHarness) -> None:
    await ask(front, f"{THOUGHT}{CALL}", tool_choice="required")
    grammar = front.harness.replicas["p0"].submissions[-1].grammar
    assert grammar is not None
    assert "commentary to=functions.find" in grammar.text
    assert "thought*" in grammar.text
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    await ask(front, f"{THOUGHT}{FINAL}", tools=None, response_format=schema)
    grammar = front.harness.replicas["p0"].submissions[-1].grammar
    assert grammar is not None
    assert {part["name"] for part in json.loads(grammar.text)["grammars"]} == {"answer", "content"}
    assert '\\"final\\"' in grammar.text


async def test_grpc_reads_the_same_and_continues_a_message(front: HttpFrontHarness) -> None:
    client = front.harness.client(front.grpc_address)
    question = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="x")])
    begun = pb.ChatMessage(role=pb.ROLE_ASSISTANT, content=[pb.ContentPart(text="the quick")])
    write(front, f"{THOUGHT}{CALL}")
    done = await client.complete(
        pb.ChatPrompt(messages=[question], tools=[pb.Tool(name="find")]), GenerateOptions(max_tokens=200)
    )
    assert (done.reasonings, done.finish_reasons) == (("the fox",), ("tool_calls",))
    assert 0 < done.finished.usage.reasoning_tokens < done.finished.usage.completion_tokens
    write(front, " brown fox")
    chat = pb.ChatPrompt(messages=[question, begun], continue_final_message=True)
    done = await client.complete(chat, GenerateOptions(max_tokens=MAX_CONTEXT // 4))
    assert (done.texts, done.reasonings) == ((" brown fox",), ("",))
    assert prompt_of(front).endswith("<|channel|>final<|message|>the quick")
    write(front, f"{THOUGHT}{FINAL}")
    plain = await client.complete("<|start|>assistant", GenerateOptions(max_tokens=200))
    assert plain.texts == ("analysisthe foxassistantfinalthe quick",)
