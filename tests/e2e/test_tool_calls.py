"""Tool calls that a request demands, through the real gateway and ranks: the model of these tests knows no
tools, so that what it writes is the work of the grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
from e2e_front import Front, copy_tiny
from e2e_harness import E2eHarness, Replica, fired, rule, until

from cluster.api.client import Completion
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.proto.tandem.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = {"kv_tokens": 8192, "chunk_tokens": 64}
SCHEMA = {
    "type": "object",
    "properties": {"mode": {"enum": ["r", "w"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mode", "size"],
    "additionalProperties": False,
}
TOOLS = [pb.Tool(name=name, parameters_json=json.dumps(SCHEMA)) for name in ("open_file", "close_file")]
REQUIRED = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)


@pytest.fixture(scope="module")
def calling_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a template that writes calls as Hermes does, and may begin the reasoning. One
    marker is a special token, in the place of the padding; the others are text."""
    folder = copy_tiny(tmp_path_factory.mktemp("e2e"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "{# <tool_call> #}<think>\n{% if not think %}\n</think>\n\n{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|pad|>", "<tool_call>"))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(calling_dir: Path) -> AsyncIterator[Front]:
    """p0 (prefill) and d0 (decode) behind a gateway."""
    async with AsyncExitStack() as ends:
        harness = await ends.enter_async_context(E2eHarness(calling_dir))
        p0, d0 = await harness.add_all({"p0": "prefill", "d0": "decode"}, engine=ENGINE)
        built = Front(harness, calling_dir)
        await built.open()
        ends.push_async_callback(built.close)
        await built.register(p0, d0)
        yield built


async def ask(front: Front, seed: int, max_tokens: int = 100, **chat: Any) -> Completion:
    user = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="open the file")])
    prompt = pb.ChatPrompt(messages=[user], **{"tools": TOOLS, **chat})
    return await front.client.complete(
        prompt, GenerateOptions(max_tokens=max_tokens, temperature=1.0, seed=seed)
    )


async def test_a_required_call_is_made_by_the_schema_of_its_tool(front: Front) -> None:
    names = set()
    for seed in range(6):
        done = await ask(front, seed, tool_choice=REQUIRED, parallel_tool_calls=False)
        assert (done.finish_reasons, done.texts) == (("tool_calls",), ("",))
        ((call,),) = done.tool_calls
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        names.add(call.name)
    assert names == {"open_file", "close_file"}


async def test_a_named_tool_is_called_once(front: Front) -> None:
    for name in ("open_file", "close_file"):
        done = await ask(front, 1, tool_choice=pb.ToolChoice(name=name))
        assert [call.name for call in done.tool_calls[0]] == [name]
        assert done.finish_reasons == ("tool_calls",)


async def test_a_cut_answer_has_the_beginning_of_its_call(front: Front) -> None:
    whole = await ask(front, 2, tool_choice=REQUIRED, parallel_tool_calls=False)
    cut = await ask(
        front, 2, max_tokens=len(whole.token_ids[0]) - 15, tool_choice=REQUIRED, parallel_tool_calls=False
    )
    assert cut.finish_reasons == ("length",)
    assert cut.texts == ("",)
    ((begun,),) = cut.tool_calls
    assert whole.tool_calls[0][0].arguments.startswith(begun.arguments)
    assert len(begun.arguments) < len(whole.tool_calls[0][0].arguments)


async def test_the_model_may_think_before_a_required_call(front: Front) -> None:
    """It never ends to, by itself; nothing makes it call within its reasoning."""
    done = await ask(front, 3, max_tokens=20, tool_choice=REQUIRED, template_args_json='{"think": true}')
    assert (done.finish_reasons, done.texts, done.tool_calls) == (("length",), ("",), ((),))
    assert done.reasonings[0]


async def test_a_tool_whose_schema_is_refused_is_named(front: Front) -> None:
    broken = pb.Tool(name="broken", parameters_json='{"type": "array"}')
    with pytest.raises(CallError, match="'broken'") as caught:
        await ask(front, 4, tools=[*TOOLS, broken], tool_choice=REQUIRED)
    assert caught.value.reason == "INVALID_TOOLS"
    assert [violation.field for violation in caught.value.fields] == ["chat.tools"]


LONG_SCHEMA = {
    "type": "object",
    "properties": {
        "paths": {
            "type": "array",
            "items": {"type": "string", "pattern": "^/[a-z]{6,9}$"},
            "minItems": 24,
            "maxItems": 24,
        }
    },
    "required": ["paths"],
    "additionalProperties": False,
}
LONG_TOOL = pb.Tool(name="open_files", parameters_json=json.dumps(LONG_SCHEMA))
# Of decoding: the arguments have begun then, and are far from their end.
NUM_STEPS_BEFORE = 40


class CallStream:
    """A request for a long call, and what its stream brought."""

    def __init__(self, front: Front) -> None:
        self.parts: list[pb.ToolCallDelta] = []
        self.text = ""
        self.finished: pb.Finished | None = None
        self._front = front

    @property
    def arguments(self) -> str:
        return "".join(part.arguments for part in self.parts)

    @property
    def name(self) -> str:
        return "".join(part.name for part in self.parts)

    async def listen(self) -> None:
        user = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="open the files")])
        chat = pb.ChatPrompt(
            messages=[user], tools=[LONG_TOOL], tool_choice=REQUIRED, parallel_tool_calls=False
        )
        options = GenerateOptions(max_tokens=600, temperature=1.0, seed=5)
        async for event in self._front.client.generate(chat, options):
            if isinstance(event, pb.Delta):
                self.parts += event.tool_calls
                self.text += event.text
            elif isinstance(event, pb.Finished):
                self.finished = event

    def assert_one_call(self) -> None:
        assert self.finished is not None
        assert [end.finish_reason for end in self.finished.samples] == [pb.FINISH_REASON_TOOL_CALLS]
        assert ({part.index for part in self.parts}, self.name, self.text) == ({0}, "open_files", "")
        assert len([part for part in self.parts if part.id]) == 1
        jsonschema.validate(json.loads(self.arguments), LONG_SCHEMA)


@asynccontextmanager
async def front_of(front: Front, model_dir: Path, *replicas: Replica) -> AsyncIterator[Front]:
    """A gateway of its own over these replicas."""
    built = Front(front.harness, model_dir)
    await built.open()
    try:
        await built.register(*replicas)
        yield built
    finally:
        await built.close()


@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_a_call_continues_when_its_replica_leaves_amid_the_arguments(
    front: Front, calling_dir: Path, tmp_path: Path, how: str
) -> None:
    alone = CallStream(front)
    await alone.listen()
    alone.assert_one_call()
    at = front.harness.replicas
    fault = rule("rank.step.decode", "kill", tmp_path, NUM_STEPS_BEFORE if how == "killed" else 10**9)
    victim = await front.harness.add(f"{how}0", "decode", engine=ENGINE, faults=[fault])
    async with front_of(front, calling_dir, at["p0"], victim) as other:
        stream = CallStream(other)
        task = asyncio.create_task(stream.listen())
        if how == "killed":
            await until(lambda: fired(fault), "its rank is killed")
        else:
            await until(lambda: len(stream.arguments) >= 20, "the arguments have begun")
        assert 0 < len(stream.arguments) < len(alone.arguments)
        await other.register(at["d0"])
        if how == "drained":
            await victim.core.drain(60.0)
            assert victim.core.migration.num_migrated == 1
        await task
    assert stream.finished is not None
    assert stream.finished.timing.attempts == (2 if how == "killed" else 1)
    assert stream.finished.decode_replica == "d0"
    stream.assert_one_call()
    assert stream.arguments == alone.arguments
