"""What an answer consists of over gRPC: content, reasoning and tool calls, where it stops, and what it used,
in front of replicas that write what the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from gateway_harness import MAX_CONTEXT, PROMPT, VOCAB, GatewayHarness, Pair, encode, until, write_model
from http_harness import EmbeddingReplica

from cluster.admission.degradation import Degradation
from cluster.api.client import Completion
from cluster.api.generate_options import GenerateOptions, generate_request
from cluster.errors import CallError
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.sample_text import SampleText, TextStep
from workers.messages.link import RequestFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} <tool_call>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
TOOLS = [pb.Tool(name="find", parameters_json='{"type": "object"}'), pb.Tool(name="open")]
THOUGHT = "<think>\nthe fox, and über\n</think>\n\n"
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "fox stop"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "open", "arguments": {}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """A pair whose model reasons, and writes calls as Hermes does."""
    harness = GatewayHarness(write_model(tmp_path_factory.mktemp("thinking") / "m", TEMPLATE))
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = harness.replicas[replica_id] = EmbeddingReplica(harness, replica_id, role)
        await replica.start()
    gateway, address = await harness.add_gateway()
    yield Pair(harness, gateway, harness.client(address))
    await harness.close()


def chat(text: str = "find the fox", **fields: Any) -> pb.ChatPrompt:
    user = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text=text)])
    return pb.ChatPrompt(**{"messages": [user], "tools": TOOLS, **fields})


def write(pair: Pair, text: str) -> int:
    """Let the replicas write this text, and then end; return the number of its tokens."""
    found = encode(text)
    for replica in (pair.prefill, pair.decode):
        replica.script.tokens = [*found, 0]
        replica.script.eos_at = len(found)
    return len(found)


async def ask(pair: Pair, text: str, prompt: Any = None, **fields: Any) -> Completion:
    num_tokens = write(pair, text)
    asked = GenerateOptions(max_tokens=fields.pop("max_tokens", num_tokens + 1), **fields)
    return await pair.client.complete(chat() if prompt is None else prompt, asked)


def calls_of(done: Completion, sample: int = 0) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in done.tool_calls[sample]]


async def test_reasoning_content_and_parallel_calls_come_apart(thinking: Pair) -> None:
    done = await ask(thinking, f"{THOUGHT}Let me see.\n{CALL}\n{OTHER}")
    assert (done.reasonings, done.texts) == (("the fox, and über",), ("Let me see.",))
    assert calls_of(done) == [("find", {"q": "fox stop"}), ("open", {})]
    assert len({call.id for call in done.tool_calls[0]}) == 2
    assert done.finish_reasons == ("tool_calls",)
    usage = done.finished.usage
    assert 0 < usage.reasoning_tokens < usage.completion_tokens


async def test_each_sample_has_its_own_parts_and_usage_has_all(thinking: Pair) -> None:
    done = await ask(thinking, f"{THOUGHT}{CALL}", n=3, logprobs=1)
    alone = await ask(thinking, f"{THOUGHT}{CALL}")
    assert done.finish_reasons == ("tool_calls",) * 3
    assert [calls_of(done, sample) for sample in range(3)] == [[("find", {"q": "fox stop"})]] * 3
    assert len({done.tool_calls[sample][0].id for sample in range(3)}) == 3
    assert done.finished.usage.reasoning_tokens == 3 * alone.finished.usage.reasoning_tokens
    assert done.finished.usage.completion_tokens == 3 * alone.finished.usage.completion_tokens
    assert [len(items) for items in done.logprobs] == [len(ids) for ids in done.token_ids]


async def test_reasoning_is_cut_by_length_and_stays_reasoning(thinking: Pair) -> None:
    done = await ask(thinking, f"{THOUGHT}yes", max_tokens=len(encode("<think>\nthe fo")))
    assert (done.finish_reasons, done.texts) == (("length",), ("",))
    assert done.reasonings[0]
    assert "the fox, and über".startswith(done.reasonings[0])
    usage = done.finished.usage
    assert usage.reasoning_tokens == usage.completion_tokens - len(encode("<think>"))


@pytest.mark.parametrize("includes", [False, True])
async def test_stop_strings_are_found_in_the_content_alone(thinking: Pair, includes: bool) -> None:
    """Across tokens; "fox stop" is in the call, and "fox" in the reasoning."""
    done = await ask(
        thinking,
        f"{THOUGHT}I call it.{CALL} the brown fox stops",
        stop=["fox stop"],
        include_stop=includes,
    )
    end = "the brown fox stop" if includes else "the brown "
    assert (done.texts[0], done.reasonings[0]) == (f"I call it.{end}", "the fox, and über")
    assert calls_of(done) == [("find", {"q": "fox stop"})]
    assert done.finish_reasons == ("tool_calls",)


async def test_reasoning_and_calls_stay_text_where_nobody_wants_them_apart(thinking: Pair) -> None:
    text = f"{THOUGHT}{CALL}"
    none = pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)
    done = await ask(thinking, text, chat(tool_choice=none), separate_reasoning=False)
    assert (done.texts, done.reasonings, done.finish_reasons) == ((text,), ("",), ("stop",))
    assert not done.tool_calls[0]
    plain = await ask(thinking, text, PROMPT)
    assert (plain.texts, plain.reasonings) == ((text,), ("",))
    opened = await ask(thinking, "so\n</think>\nyes", f"{PROMPT}<think>\n", separate_reasoning=True)
    assert (opened.reasonings, opened.texts) == (("so",), ("yes",))


async def test_a_template_argument_turns_reasoning_off(thinking: Pair) -> None:
    """The model may not think, and what it writes is the answer from its first token."""
    prompt = chat(template_args_json='{"enable_thinking": false}')
    done = await ask(thinking, "yes", prompt, echo=True, keep_special_tokens=True)
    assert done.prompt_text.endswith("<think>\n\n</think>\n\n")
    assert (done.texts, done.reasonings) == (("yes",), ("",))


async def test_a_final_message_is_continued_beside_tools_and_within_reasoning(thinking: Pair) -> None:
    def continued(text: str) -> pb.ChatPrompt:
        begun = pb.ChatMessage(role=pb.ROLE_ASSISTANT, content=[pb.ContentPart(text=text)])
        return chat(messages=[*chat().messages, begun], continue_final_message=True)

    done = await ask(thinking, f" see.\n{CALL}", continued("Let me"), echo=True)
    assert done.prompt_text.endswith("Let me")
    assert (done.texts, calls_of(done)) == ((" see.",), [("find", {"q": "fox stop"})])
    within = await ask(thinking, "fox\n</think>\n\nyes", continued("<think>\nthe "))
    assert (within.reasonings, within.texts) == (("fox",), ("yes",))
    behind = await ask(thinking, " indeed", continued("<think>\nthe fox\n</think>\n\nyes"))
    assert (behind.reasonings, behind.texts) == (("",), (" indeed",))


async def test_a_resumed_stream_goes_on_within_a_call_and_within_reasoning(thinking: Pair) -> None:
    """At any token: what was given before does not come again, and nothing is missing."""
    num_tokens = write(thinking, f"{THOUGHT}Let me see. {CALL}\n{OTHER}")
    options = GenerateOptions(max_tokens=num_tokens + 1, seed=3, request_id="whole")
    whole = Parts()
    async for event in thinking.client.generate(chat(), options):
        whole.add(event)
    assert (whole.text, whole.reasoning, len(whole.calls)) == ("Let me see.", "the fox, and über", 2)
    for stop_at in range(1, num_tokens, 5):
        found = await resumed_at(thinking, replace(options, request_id=f"cut-{stop_at}"), stop_at)
        assert (found.text, found.reasoning, found.ids) == (whole.text, whole.reasoning, whole.ids), stop_at
        assert [call[1:] for call in found.calls] == [call[1:] for call in whole.calls], stop_at


@pytest.mark.parametrize("ends", [f"{THOUGHT}{CALL}", f"{THOUGHT}yes", "<think>\nthe fox"])
async def test_a_resumed_stream_has_the_usage_and_the_ends_of_an_unbroken_one(
    thinking: Pair, ends: str
) -> None:
    """Of two samples one has ended, and one is cut; the last answer thinks to its end."""
    num_tokens = write(thinking, ends)
    options = GenerateOptions(max_tokens=num_tokens + 1, seed=3, n=2, request_id="all")
    whole = await thinking.client.complete(chat(), options)
    request = generate_request(chat(), replace(options, request_id="part"))
    thinking.harness.allow_resume(request)
    request.resume.add(
        sample=0,
        token_ids=whole.token_ids[0],
        finish_reason=value_of(pb.FinishReason, whole.finish_reasons[0]),
    )
    request.resume.add(sample=1, token_ids=whole.token_ids[1][:5])
    replies = [reply async for reply in thinking.client.stub().Generate(request)]
    finished = replies[-1].finished
    assert finished.samples == whole.finished.samples
    assert finished.usage.completion_tokens == whole.finished.usage.completion_tokens
    assert finished.usage.reasoning_tokens == whole.finished.usage.reasoning_tokens > 0


@pytest.mark.parametrize("stop_at", [1, 3])
async def test_what_load_cut_is_no_longer_where_it_is_resumed(
    thinking: Pair, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """The load has gone by then; at 3 the end alone is missing."""
    caps = iter([3])
    monkeypatch.setattr(Degradation, "max_tokens", lambda self, service_class, asked: next(caps))
    write(thinking, "abcdefgh")
    request = generate_request(PROMPT, GenerateOptions(max_tokens=8, seed=3, request_id="cut"))
    whole = [reply async for reply in thinking.client.stub().Generate(request)]
    request.resume_token = whole[0].accepted.resume_token
    request.resume.add(token_ids=encode("abc"[:stop_at]))
    resumed = [reply async for reply in thinking.client.stub().Generate(request)]
    assert "".join(reply.delta.text for reply in resumed) == "abc"[stop_at:]
    for replies in (whole, resumed):
        finished = replies[-1].finished
        assert finished.usage.capped_max_tokens == 3
        assert [it.finish_reason for it in finished.samples] == [pb.FINISH_REASON_LENGTH]


async def test_what_the_context_cut_is_no_longer_where_it_is_resumed(
    thinking: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that resumes it has replicas with more room, and would refuse a new request."""
    write(thinking, "a" * (2 * MAX_CONTEXT))
    request = generate_request(PROMPT, GenerateOptions(max_tokens=32_000, seed=3, request_id="roomy"))
    whole = [reply async for reply in thinking.client.stub().Generate(request)]
    room = MAX_CONTEXT - len(encode(PROMPT))
    request.resume_token = whole[0].accepted.resume_token
    request.resume.add(token_ids=encode("a" * (room - 2)))
    limits = thinking.gateway.requests.limits()
    roomier = replace(limits, max_context_tokens=2 * MAX_CONTEXT, caps_max_tokens=False)
    monkeypatch.setattr(thinking.gateway.requests, "limits", lambda: roomier)
    resumed = [reply async for reply in thinking.client.stub().Generate(request)]
    assert sum(len(reply.delta.token_ids) for reply in resumed) == 2
    for replies in (whole, resumed):
        finished = replies[-1].finished
        assert finished.usage.capped_max_tokens == finished.usage.completion_tokens == room
        assert [it.finish_reason for it in finished.samples] == [pb.FINISH_REASON_LENGTH]


@pytest.mark.parametrize("num_tokens", [3, 300])
async def test_much_output_of_a_resumed_request_is_read_beside_the_event_loop(
    thinking: Pair, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    threads: list[int] = []
    push = SampleText.push

    def noted(text: SampleText, tokens: bytes, finish: str) -> TextStep:
        threads.append(threading.get_ident())
        return push(text, tokens, finish)

    monkeypatch.setattr(SampleText, "push", noted)
    write(thinking, "a" * num_tokens + " and so on")
    request = generate_request(
        PROMPT, GenerateOptions(max_tokens=400, seed=3, request_id=f"long-{num_tokens}")
    )
    thinking.harness.allow_resume(request)
    request.resume.add(token_ids=encode("a" * num_tokens))
    replies = [reply async for reply in thinking.client.stub().Generate(request)]
    assert "".join(reply.delta.text for reply in replies) == " and so on"
    assert (threads[0] == threading.get_ident()) == (num_tokens < 100)
    assert set(threads[1:]) == {threading.get_ident()}


@dataclass
class Parts:
    """What has come of the one sample of a stream; calls are (id, name, arguments)."""

    text: str = ""
    reasoning: str = ""
    ids: list[int] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, event: Any) -> None:
        if not isinstance(event, pb.Delta):
            return
        self.text += event.text
        self.reasoning += event.reasoning
        self.ids += event.token_ids
        for part in event.tool_calls:
            if part.index == len(self.calls):
                assert part.id
                self.calls.append(("", "", ""))
            before = self.calls[part.index]
            self.calls[part.index] = before[0] + part.id, before[1] + part.name, before[2] + part.arguments


async def resumed_at(pair: Pair, options: GenerateOptions, stop_at: int) -> Parts:
    """The parts of a stream that is left when so many tokens have come, and resumed."""
    parts, request = Parts(), generate_request(chat(), options)
    pair.decode.script.stop_after, pair.prefill.script.stop_after = stop_at, stop_at
    call = pair.client.stub().Generate(request)
    async for response in call:
        if response.HasField("accepted"):
            request.resume_token = response.accepted.resume_token
        parts.add(response.delta)
        if len(parts.ids) >= stop_at:
            break
    call.cancel()
    pair.decode.script.stop_after = pair.prefill.script.stop_after = None
    request.resume.add(token_ids=parts.ids)
    async for response in pair.client.stub().Generate(request):
        assert response.WhichOneof("event") != "prompt"
        parts.add(response.delta)
    return parts


# What a gateway refuses: the path of the field, which the error has beside its reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": (
        {"messages": [pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart()])]},
        "chat.messages[0].content[0]",
    ),
    "a call of the user": (
        {"messages": [pb.ChatMessage(role=pb.ROLE_USER, tool_calls=[pb.ToolCall(name="f")])]},
        "chat.messages[0].role",
    ),
    "a tool that is none": ({"tool_choice": pb.ToolChoice(name="x")}, "chat.tool_choice.name"),
    "two of a name": ({"tools": [TOOLS[0], TOOLS[0]]}, "chat.tools[1].name"),
    "no schema": ({"tools": [pb.Tool(name="f", parameters_json="[]")]}, "chat.tools[0].parameters_json"),
    "no arguments": ({"template_args_json": "[]"}, "chat.template_args_json"),
    "nothing to continue": ({"continue_final_message": True}, "chat.continue_final_message"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_chat_that_is_refused_names_its_field(thinking: Pair, what: str) -> None:
    fields, path = REFUSED[what]
    with pytest.raises(CallError) as caught:
        await thinking.client.complete(chat(**fields), GenerateOptions(max_tokens=1))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert path in [violation.field for violation in caught.value.fields]
    assert caught.value.usage is None


async def test_an_input_that_is_refused_is_named(thinking: Pair) -> None:
    for call, path in (
        (thinking.client.embed(["a", [VOCAB]]), "inputs[1]"),
        (thinking.client.embed(["a", "b", "x " * MAX_CONTEXT]), "inputs[2]"),
        (thinking.client.score("a", ["b", [VOCAB]]), "continuations[1]"),
        (thinking.client.score("a", ["b", "x " * MAX_CONTEXT]), "continuations[1]"),
        (thinking.client.score([VOCAB], ["b"]), "token_ids"),
    ):
        with pytest.raises(CallError) as caught:
            await call
        assert [violation.field for violation in caught.value.fields] == [path], path
    await until(lambda: thinking.prefill.is_idle() and thinking.decode.is_idle(), "nothing is left running")


async def test_what_a_call_with_several_inputs_had_used_is_in_its_failure(thinking: Pair) -> None:
    thinking.prefill.script.failure = RequestFailed("", 0, "invalid", "because")
    with pytest.raises(CallError, match="because") as caught:
        await thinking.client.score("the fox", ["a"])
    assert caught.value.usage is not None
    assert caught.value.usage.prompt_tokens == len(encode("the fox")) + len(encode("a"))


async def test_nobody_expects_the_kv_of_a_request_that_is_not_stored(thinking: Pair) -> None:
    """It is not found at its replica, so no later request may be sent there for it."""
    write(thinking, "yes")
    for no_store, finds in ((True, False), (False, False), (True, True), (False, True)):
        text = "def main(): return the answer " * 4
        done = await thinking.client.complete(text, GenerateOptions(max_tokens=2, no_store=no_store))
        explained = await thinking.client.explain(done.request_id)
        matched = [it.matched_tokens for decision in explained.decisions for it in decision.candidates]
        assert any(matched) == finds, (no_store, matched)
