"""The families' own chat templates, which are not ours to distribute: `--chat-templates FOLDER` names a
folder that has them. Each is rendered as transformers does, and what it writes of a model's turn is read
back."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import (
    GatewayHarness,
    ScriptedReplica,
    decode,
    encode,
    train_tokenizer,
    write_model,
)
from http_harness import HttpFrontHarness
from msgspec import structs
from transformers import PreTrainedTokenizerFast

from cluster.text.call_probe import CallProbe
from cluster.text.chat_template import (
    CalledTool,
    Chat,
    ChatRenderer,
    ChatTemplate,
    ChatTool,
    ChatTurn,
    Rendered,
    RenderOrder,
    render,
)
from cluster.text.marked_prompt import MarkedPromptEncoder, marks_in_answers, special_tokens
from cluster.text.output_parsers.choose import OutputParsers, ParserNeeds
from cluster.text.output_parsers.pieces import Content, Reasoning, ToolCallDelta
from cluster.text.special_text import SpecialText
from kvtransfer.common.clock import SystemClock

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# What ends a turn, and is no text of the answer.
TURN_ENDS = ("<|im_end|>\n", "<|im_end|>", "<|eot_id|>", "</s>", "<|return|>", "<|call|>")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
    },
    "required": ["city"],
}
TOOL = ChatTool("get_weather", "Tells the weather.", json.dumps(SCHEMA))
QUESTION = ChatTurn("user", "How is the weather?")
ARGUMENTS = ({"city": "Paris", "days": 2}, {"city": 'the "city"\nof lights', "days": 1})


@dataclass(frozen=True)
class Family:
    """How the models of a template answer."""

    notation: str
    reasoning: str = "none"
    allows_several: bool = True
    # The template is that of chats with tools alone.
    needs_tools: bool = False
    # The template shows the first call of a turn alone: ours gives each one a turn.
    shows_first_call: bool = False

    @property
    def num_calls(self) -> int:
        return 2 if self.allows_several else 1


TEMPLATES = {
    "Qwen-Qwen2.5-7B-Instruct": Family("hermes"),
    "Qwen-Qwen3-0.6B": Family("hermes", "think"),
    "Qwen3-Coder": Family("qwen3_coder"),
    "Qwen3.5-4B": Family("qwen3_coder", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Family("hermes", needs_tools=True),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Family("hermes", needs_tools=True),
    "meta-llama-Llama-3.1-8B-Instruct": Family("llama3", allows_several=False),
    "meta-llama-Llama-3.2-3B-Instruct": Family("llama3", allows_several=False),
    "meta-llama-Llama-3.3-70B-Instruct": Family("llama3", allows_several=False),
    "mistralai-Mistral-Nemo-Instruct-2407": Family("mistral"),
    "Mistral-Small-3.2-24B-Instruct-2506": Family("mistral_args"),
    "unsloth-mistral-Devstral-Small-2507": Family("mistral_args"),
    "mistralai-Ministral-3-14B-Reasoning-2512": Family("mistral_args", "mistral"),
    "openai-gpt-oss-120b": Family("harmony", "harmony", shows_first_call=True),
}


@pytest.fixture(params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(name: str, request: pytest.FixtureRequest) -> str:
    folder: Path | None = request.config.getoption("--chat-templates")
    if folder is None:
        pytest.skip("needs the families' chat templates: --chat-templates FOLDER")
    return (folder / f"{name}.jinja").read_text()


@pytest.fixture
def family(name: str) -> Family:
    return TEMPLATES[name]


@pytest.fixture
async def parsers(source: str) -> AsyncIterator[OutputParsers]:
    renderer = ChatRenderer(ChatTemplate(source, SPECIAL_TOKENS))
    marked = OutputParsers.choose(source, "auto", "auto")
    yield await CallProbe(marked, renderer, finds_notation=True).parsers(0.0)
    await renderer.close()


def called(num_calls: int) -> ChatTurn:
    """The model's turn with so many calls."""
    calls = [
        CalledTool(f"call0000{number}", TOOL.name, json.dumps(arguments))
        for number, arguments in enumerate(ARGUMENTS[:num_calls])
    ]
    return ChatTurn("assistant", "", tool_calls=tuple(calls))


FUNCTION = {"name": TOOL.name, "description": TOOL.description, "parameters": SCHEMA}


def loop(num_calls: int) -> tuple[ChatTurn, ...]:
    """A question, the calls, and their results."""
    turn = called(num_calls)
    results = [ChatTurn("tool", '"sunny"', tool_call_id=it.id, name=it.name) for it in turn.tool_calls]
    return (QUESTION, turn, *results)


def rendered(source: str, chat: Chat, wall_s: float = 0.0) -> str:
    result = render(RenderOrder(ChatTemplate(source, SPECIAL_TOKENS), chat, wall_s, 1 << 20))
    assert isinstance(result, Rendered), result
    return result.text


def by_transformers(folder: Path, source: str, chat: Chat) -> str:
    reference: Any = PreTrainedTokenizerFast.from_pretrained(write_model(folder, source), **SPECIAL_TOKENS)
    tools = [{"type": "function", "function": FUNCTION}] if chat.tools else None
    found = reference.apply_chat_template(
        [_message(turn) for turn in chat.turns],
        tools=tools,
        tokenize=False,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )
    return str(found)


def _message(turn: ChatTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": it.id,
                "type": "function",
                "function": {"name": it.name, "arguments": json.loads(it.arguments)},
            }
            for it in turn.tool_calls
        ]
    for field in ("tool_call_id", "name"):
        if value := getattr(turn, field):
            message[field] = value
    return message


async def test_the_template_says_how_its_model_answers(parsers: OutputParsers, family: Family) -> None:
    found = parsers.call_notation, parsers.reasoning, parsers.allows_several
    assert found == (family.notation, family.reasoning, family.allows_several)


def test_the_text_is_that_of_transformers(tmp_path: Path, source: str, family: Family) -> None:
    system = ChatTurn("system", "Be brief.")
    turns = (system, QUESTION, ChatTurn("assistant", "Sunny, I think."), ChatTurn("user", "And then?"))
    begun = (*turns, ChatTurn("assistant", "Then it"))
    clock = SystemClock()
    chats = [
        Chat((QUESTION,)),
        Chat(turns),
        Chat(turns, (TOOL,)),
        Chat((system, *loop(1)), (TOOL,)),
        Chat(loop(1 if family.shows_first_call else family.num_calls), (TOOL,)),
        Chat(begun, add_generation_prompt=False, continue_final_message=True),
        Chat(begun, (TOOL,), add_generation_prompt=False, continue_final_message=True),
    ]
    for chat in [it for it in chats if it.tools or not family.needs_tools]:
        assert rendered(source, chat, clock.wall()) == by_transformers(tmp_path, source, chat)


def test_what_a_developer_says_is_shown(source: str) -> None:
    said = "Answer in French."
    shown = rendered(source, Chat((ChatTurn("developer", said), QUESTION), (TOOL,)))
    assert said in shown
    assert shown == rendered(source, Chat((ChatTurn("system", said), QUESTION), (TOOL,)))


def test_what_the_template_writes_is_read_back(source: str, family: Family, parsers: OutputParsers) -> None:
    tools = (TOOL,)
    turns = [called(number) for number in range(1, family.num_calls + 1)]
    turns.append(ChatTurn("assistant", "It is sunny."))
    if family.reasoning == "think":
        turns.append(ChatTurn("assistant", "It is sunny.", reasoning="Let me\nsee."))
    for turn in turns:
        prompt = rendered(source, Chat((QUESTION,), tools))
        whole = rendered(source, Chat((QUESTION, turn), tools, add_generation_prompt=False))
        assert whole.startswith(prompt)
        answer = whole[len(prompt) :]
        for end in TURN_ENDS:
            answer = answer.removesuffix(end)
        for pieces in ([answer], list(answer)):
            assert _read(parsers, pieces, prompt) == (
                turn.content,
                turn.reasoning,
                [(it.name, json.loads(it.arguments)) for it in turn.tool_calls],
            )


def _read(
    parsers: OutputParsers, pieces: list[str], prompt: str
) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Content, reasoning and calls."""
    needs = ParserNeeds({TOOL.name: TOOL.parameters_json}, True)
    parser = parsers.make(needs, "r", 0, opens_reasoning=parsers.opens_reasoning(prompt))
    assert parser is not None
    found = [*(piece for text in pieces for piece in parser.push(text)), *parser.flush()]
    calls: dict[int, tuple[str, str]] = {}
    for piece in found:
        if isinstance(piece, ToolCallDelta):
            before = calls.get(piece.index, ("", ""))
            calls[piece.index] = before[0] + piece.name, before[1] + piece.arguments
    return (
        "".join(it.text for it in found if isinstance(it, Content)).strip("\n"),
        "".join(it.text for it in found if isinstance(it, Reasoning)).strip("\n"),
        [(tool, json.loads(arguments)) for tool, arguments in calls.values()],
    )


_MARK = re.compile(r"<[^<>{}'\"\s%=\\\\]{1,30}>|\[/?[A-Z_]{3,20}\]")


def test_special_tokens_in_users_text_are_text(source: str, family: Family) -> None:
    """Of each mark that the template has, wherever a user may write it."""
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>", *sorted(set(_MARK.findall(source)))])
    named = SPECIAL_TOKENS.values()
    special = special_tokens(tokenizer, source, named)
    encoder = MarkedPromptEncoder(tokenizer, special)
    text = SpecialText.of(special, marks_in_answers(source))

    def num_special(chat: Chat) -> Counter[str]:
        found = render(RenderOrder(ChatTemplate(source, SPECIAL_TOKENS), chat, 0.0, 1 << 20, text))
        assert isinstance(found, Rendered), found
        ids = encoder.encode(found.text, found.plain_at, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == found.text
        return Counter(name for it in ids if (name := tokenizer.id_to_token(it)) in special)

    def chats(said: str) -> list[Chat]:
        question, *turns = loop(1)
        asked = structs.replace(question, content=f"a {said} b")
        call = CalledTool("call00000", TOOL.name, json.dumps({"city": f"c {said}", f"k{said}": [said]}))
        answered = structs.replace(turns[0], tool_calls=(call,))
        result = structs.replace(turns[1], content=f"d{said}", tool_call_id=call.id)
        tool = structs.replace(TOOL, description=said, parameters_json=json.dumps({"properties": {said: {}}}))
        return [
            Chat((ChatTurn("system", said), asked), (TOOL,)),
            Chat((asked, answered, result), (TOOL,)),
            Chat((asked,), (tool,)),
        ]

    own = [num_special(chat) for chat in chats("xyz")]
    for mark in special:
        assert [num_special(chat) for chat in chats(mark)] == own, mark


async def test_a_client_s_loop_of_calls_comes_to_an_answer(
    tmp_path: Path, source: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: the calls that the model writes, sent back with their results."""
    monkeypatch.setattr("gateway_harness.MAX_CONTEXT", 8192)
    folder = write_model(tmp_path / "m", source)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, **SPECIAL_TOKENS}))
    harness = GatewayHarness(folder)
    try:
        async with HttpFrontHarness(harness) as front:
            asked: dict[str, Any] = {
                "messages": [{"role": "user", "content": QUESTION.content}],
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": TOOL.name,
                            "description": TOOL.description,
                            "parameters": SCHEMA,
                        },
                    }
                ],
                "max_tokens": 2000,
            }
            prompt = rendered(source, Chat((QUESTION,), (TOOL,)))
            turn = called(family.num_calls)
            whole = rendered(source, Chat((QUESTION, turn), (TOOL,), add_generation_prompt=False))
            _write(harness, whole[len(prompt) :])
            reply = await front.post("/v1/chat/completions", asked)
            assert reply.status == 200, reply.body
            (choice,) = reply.json["choices"]
            calls = choice["message"]["tool_calls"]
            assert [json.loads(it["function"]["arguments"]) for it in calls] == list(ARGUMENTS)[: len(calls)]
            assert (len(calls), choice["finish_reason"]) == (family.num_calls, "tool_calls")
            asked["messages"].append({"role": "assistant", "content": None, "tool_calls": calls})
            for call in calls:
                result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
                asked["messages"].append(result)
            _write(harness, "It is sunny.")
            reply = await front.post("/v1/chat/completions", asked)
            assert reply.status == 200, reply.body
            ids = memoryview(harness.replicas["p0"].submissions[-1].prompt).cast("I").tolist()
            assert decode(ids).count("sunny") == family.num_calls
    finally:
        await harness.close()


def _write(harness: GatewayHarness, text: str) -> None:
    """Let the replicas write this text, and then end."""
    found = encode(text.removesuffix("</s>"))
    replicas: list[ScriptedReplica] = list(harness.replicas.values())
    for replica in replicas:
        replica.script.tokens, replica.script.eos_at = [*found, 0], len(found)
