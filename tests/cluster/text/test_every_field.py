"""Every field of every request of `tandem.v1.Inference` has an effect that shows, or is refused by name.

The fields come from the descriptors: one without an entry here fails. Each entry is a request without the
field and how the field is set; what shows the effect must be false of the first and true of the second.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from gateway_harness import PROMPT, GatewayHarness, Pair, decode, encode, write_model
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from http_harness import EmbeddingReplica
from tokenizers import Tokenizer, processors

from cluster.errors import bad_fields
from cluster.metrics.ended_request import EndedRequest
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import PreparedRequest
from workers.messages.link import RequestFailed, Submission

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Shows all that a chat has, calls also as the model writes them; the comment says how it writes thoughts.
TEMPLATE = (
    "{# <think> #}{{ extra | default('') }}"
    "{% for t in tools or [] %}({{ t.function.name }}; {{ t.function.description }}; "
    "{{ t.function.parameters | tojson }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}; {{ m.name }}; {{ m.tool_call_id }}; {{ m.reasoning_content }}; "
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}; {{ m.content }}"
    "{% if not loop.last or not continue_final_message %}]{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ANSWER {% endif %}"
)


@dataclass
class Outcome:
    """What became of a request: what the gateway made of it, what replicas got, what the client got."""

    # Paths of the fields that are named as bad.
    bad: list[str] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)

    @property
    def prepared(self) -> PreparedRequest:
        """The first of the requests that were accepted."""
        found = [it.prepared for it in self.ended if it.prepared is not None]
        assert found, f"refused: {self.ended}"
        return found[0]

    @property
    def prompt(self) -> str:
        return decode(np.frombuffer(self.prepared.prompt, "<u4").tolist())

    @property
    def grammar(self) -> str:
        return self.prepared.grammar.text if self.prepared.grammar else ""

    @property
    def deltas(self) -> list[pb.Delta]:
        return [it.delta for it in self.replies if it.HasField("delta")]

    @property
    def text(self) -> str:
        return "".join(it.text for it in self.deltas)


# Stands for a token that this gateway has issued.
VALID = "valid"

Change = Callable[[Any], None]
Shows = Callable[[Outcome], bool]


class FieldEffect(NamedTuple):
    """How a field is set, what shows it, and the request without it. `writes` is the model's answer."""

    change: Change
    shows: Shows
    base: Callable[[], Message]
    writes: str = "yes, it stops here"


def plain() -> pb.GenerateRequest:
    return pb.GenerateRequest(text=PROMPT, seed=1, max_tokens=12)


def turn(text: str, role: pb.Role = pb.ROLE_USER, **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text)], **fields)


def a_chat(*turns: pb.ChatMessage, **fields: Any) -> Callable[[], pb.GenerateRequest]:
    def make() -> pb.GenerateRequest:
        chat = pb.ChatPrompt(messages=turns or [turn("fox")], **fields)
        return pb.GenerateRequest(chat=chat, seed=1, max_tokens=80)

    return make


def assign(path: str, value: Any) -> Change:
    """Set the field at the path: names, and indices of repeated fields."""

    def change(request: Any) -> None:
        *way, last = path.split(".")
        for step in way:
            request = request[int(step)] if step.isdecimal() else getattr(request, step)
        if isinstance(value, Message):
            getattr(request, last).CopyFrom(value)
        elif isinstance(value, list):
            getattr(request, last).extend(value)
        elif isinstance(value, dict):
            getattr(request, last).update(value)
        else:
            setattr(request, last, value)

    return change


def case(
    path: str, value: Any, shows: Shows, base: Callable[[], Message] = plain, **more: Any
) -> FieldEffect:
    return FieldEffect(assign(path, value), shows, base, **more)


def sampled(name: str, value: Any, wanted: Any = None, path: str = "") -> FieldEffect:
    """A field that replicas get as it is."""
    expected = value if wanted is None else wanted
    return case(path or name, value, lambda it: getattr(it.submissions[0].sampling, name) == expected)


def in_prompt(path: str, value: Any, text: str, base: Callable[[], Message]) -> FieldEffect:
    return case(path, value, lambda it: text in it.prompt, base)


def in_grammar(path: str, value: Any, text: str, base: Callable[[], Message] = plain) -> FieldEffect:
    return case(path, value, lambda it: text in it.grammar, base)


def refused(path: str, value: Any, name: str, base: Callable[[], Message] = plain) -> FieldEffect:
    return case(path, value, lambda it: name in it.bad, base)


TOOL = pb.Tool(name="find", parameters_json='{"type": "object"}')
with_tool = a_chat(tools=[TOOL])
with_call = a_chat(turn("", pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(id="i", name="g")]))
CALL = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'


def with_tags(**fields: Any) -> Callable[[], pb.GenerateRequest]:
    def make() -> pb.GenerateRequest:
        tag = pb.StructuralTag(**{"begin": "<f>", "end": "</f>", "json_schema": '{"type": "null"}', **fields})
        tags = pb.StructuralTags(tags=[tag], triggers=["<f"])
        request = plain()
        request.constraint.structural_tags.CopyFrom(tags)
        return request

    return make


def resumable() -> pb.GenerateRequest:
    """A stream that is resumed with the first token of its answer."""
    request = plain()
    request.request_id = "again"
    request.resume.add(sample=0, token_ids=encode("yes")[:1])
    return request


def embed() -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.EmbedInput(text="fox")])


def score() -> pb.ScoreRequest:
    return pb.ScoreRequest(text="the", continuations=[pb.EmbedInput(text=" fox")])


def tokenize() -> pb.TokenizeRequest:
    return pb.TokenizeRequest(text="<|end|>")


def values_of(outcome: Outcome) -> list[float]:
    return list(outcome.replies[0].embeddings[0].values)


def length(outcome: Outcome) -> float:
    return float(np.linalg.norm(values_of(outcome)))


def tokens_of(outcome: Outcome) -> list[int]:
    return list(outcome.replies[0].token_ids)


def unknown(outcome: Outcome) -> bool:
    return outcome.bad == ["NOT_FOUND"]


def of_caller(kind: str, base: Callable[[], Any]) -> dict[str, FieldEffect]:
    """The fields that Embed and Score have of Generate."""
    return {
        f"{kind}.model": case("model", "other", unknown, base),
        f"{kind}.priority": case("priority", 3, lambda it: it.submissions[0].priority == 3, base),
        f"{kind}.tenant": case("tenant", "acme", lambda it: it.submissions[0].tenant == "acme", base),
        f"{kind}.request_id": case("request_id", "mine", lambda it: it.ended[0].request_id == "mine:0", base),
        f"{kind}.service_class": case(
            "service_class",
            pb.SERVICE_CLASS_BATCH,
            lambda it: it.submissions[0].service_class == "batch",
            base,
        ),
    }


GENERATE = {
    "model": case("model", "other", unknown),
    "text": case("text", "the fox", lambda it: it.prompt == "the fox"),
    "token_ids": case("token_ids", pb.TokenIds(ids=[5, 6]), lambda it: len(it.prepared.prompt) == 8),
    "chat": in_prompt("chat", pb.ChatPrompt(messages=[turn("fox")]), "[user; ; ; ; ; fox]", plain),
    "truncate_prompt_tokens": case(
        "truncate_prompt_tokens", 2, lambda it: it.prepared.num_prompt_tokens == 2
    ),
    "temperature": sampled("temperature", 0.7),
    "top_k": sampled("top_k", 7),
    "top_p": sampled("top_p", 0.7),
    "min_p": sampled("min_p", 0.1),
    "repetition_penalty": sampled("repetition_penalty", 1.5),
    "presence_penalty": sampled("presence_penalty", 0.5),
    "frequency_penalty": sampled("frequency_penalty", 0.25),
    "logit_bias": sampled("logit_bias", {7: 2.0}),
    "seed": case("seed", 77, lambda it: it.submissions[0].samples[0].seed == 77),
    "n": case("n", 3, lambda it: {delta.sample for delta in it.deltas} == {0, 1, 2}),
    "logprobs": case(
        "logprobs", 2, lambda it: len(it.deltas[0].logprobs[0].top) == 2 if it.deltas[0].logprobs else False
    ),
    "constraint": in_grammar("constraint", pb.Constraint(regex="[ab]+"), "[ab]+"),
    "max_tokens": case("max_tokens", 3, lambda it: len([t for d in it.deltas for t in d.token_ids]) == 3),
    "min_tokens": sampled("min_tokens", 4),
    "stop": case("stop", ["stop"], lambda it: it.text == "yes, it "),
    "stop_token_ids": sampled("stop_token_ids", [9], (9,)),
    "ignore_eos": sampled("ignore_eos", True),
    "include_stop": case("include_stop", True, lambda it: it.text == "yes, it stop", lambda: with_stop()),
    "prompt_logprobs": FieldEffect(
        assign("prompt_logprobs", 0),
        lambda it: it.prepared.sampling.num_prompt_logprobs == 0,
        lambda: pb.GenerateRequest(text=PROMPT, seed=1, max_tokens=12),
    ),
    "echo": case("echo", True, lambda it: any(r.prompt.text == PROMPT for r in it.replies)),
    "keep_special_tokens": case(
        "keep_special_tokens", True, lambda it: it.text == "<|im_start|>a", writes="<|im_start|>a"
    ),
    "include_usage": case(
        "include_usage", True, lambda it: all(delta.usage.completion_tokens for delta in it.deltas)
    ),
    "separate_reasoning": case(
        "separate_reasoning",
        True,
        lambda it: "".join(delta.reasoning for delta in it.deltas) == "so",
        lambda: pb.GenerateRequest(text=PROMPT, seed=1, max_tokens=60),
        writes="<think>so</think>yes",
    ),
    "priority": case("priority", 3, lambda it: it.submissions[0].priority == 3),
    "tenant": case("tenant", "acme", lambda it: it.submissions[0].tenant == "acme"),
    "request_id": case("request_id", "mine", lambda it: it.replies[0].accepted.request_id == "mine"),
    "resume": case(
        "resume",
        [pb.ResumedSample(token_ids=[5])],
        lambda it: "resume_token" in it.bad,
        lambda: pb.GenerateRequest(text=PROMPT, seed=1, request_id="x"),
    ),
    "pins": case("pins", pb.Pins(decode="d0"), lambda it: it.prepared.pinned_decode == "d0"),
    "resume_token": case("resume_token", VALID, lambda it: not it.bad, lambda: resumable()),
    "service_class": case(
        "service_class", pb.SERVICE_CLASS_BATCH, lambda it: it.submissions[0].service_class == "batch"
    ),
    "session_id": case("session_id", "talk", lambda it: it.prepared.facts.session.endswith(" talk")),
    "cache_control": case(
        "cache_control", pb.CACHE_CONTROL_NO_STORE, lambda it: it.submissions[0].is_private
    ),
}


def with_stop() -> pb.GenerateRequest:
    return pb.GenerateRequest(text=PROMPT, seed=1, max_tokens=12, stop=["stop"])


CASES: dict[str, FieldEffect] = {
    **{f"GenerateRequest.{name}": it for name, it in GENERATE.items()},
    "TokenIds.ids": case("token_ids.ids", [6], lambda it: len(it.prepared.prompt) == 8, lambda: ids_alone()),
    "ContentPart.text": in_prompt("chat.messages.0.content.0.text", "hen", "; hen]", a_chat()),
    "ChatMessage.role": in_prompt("chat.messages.0.role", pb.ROLE_DEVELOPER, "[system", a_chat()),
    "ChatMessage.content": in_prompt(
        "chat.messages.0.content", [pb.ContentPart(text="x")], "; foxx]", a_chat()
    ),
    "ChatMessage.reasoning": in_prompt(
        "chat.messages.0.reasoning", "hm", "; hm;", a_chat(turn("a", pb.ROLE_ASSISTANT))
    ),
    "ChatMessage.tool_calls": in_prompt(
        "chat.messages.0.tool_calls",
        [pb.ToolCall(id="j", name="g")],
        "j g {}",
        a_chat(turn("a", pb.ROLE_ASSISTANT)),
    ),
    "ChatMessage.tool_call_id": in_prompt(
        "chat.messages.0.tool_call_id", "call1", "; call1;", a_chat(turn("a", pb.ROLE_TOOL))
    ),
    "ChatMessage.name": in_prompt("chat.messages.0.name", "bob", "; bob;", a_chat()),
    "ToolCall.id": in_prompt("chat.messages.0.tool_calls.0.id", "k", "k g", with_call),
    "ToolCall.name": in_prompt("chat.messages.0.tool_calls.0.name", "h", "i h", with_call),
    "ToolCall.arguments": in_prompt(
        "chat.messages.0.tool_calls.0.arguments", '{"q": 1}', '{"q": 1}', with_call
    ),
    "Tool.name": in_prompt("chat.tools.0.name", "open", "(open;", with_tool),
    "Tool.description": in_prompt("chat.tools.0.description", "finds", "; finds;", with_tool),
    "Tool.parameters_json": in_prompt(
        "chat.tools.0.parameters_json", '{"type": "object", "properties": {"q": {}}}', '{"q": {}}', with_tool
    ),
    "Tool.strict": in_grammar("chat.tools.0.strict", True, "find", with_tool),
    "ToolChoice.mode": in_grammar("chat.tool_choice.mode", pb.ToolChoice.MODE_REQUIRED, "find", with_tool),
    "ToolChoice.name": in_grammar("chat.tool_choice.name", "find", "find", with_tool),
    "ChatPrompt.messages": in_prompt("chat.messages", [turn("second")], "; second]", a_chat()),
    "ChatPrompt.add_generation_prompt": case(
        "chat.add_generation_prompt", False, lambda it: "ANSWER" not in it.prompt, a_chat()
    ),
    "ChatPrompt.tools": case(
        "chat.tools",
        [TOOL],
        lambda it: "(find;" in it.prompt and any(delta.tool_calls for delta in it.deltas),
        a_chat(),
        writes=CALL,
    ),
    "ChatPrompt.tool_choice": case(
        "chat.tool_choice",
        pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE),
        lambda it: "find" not in it.prompt and it.text == CALL,
        with_tool,
        writes=CALL,
    ),
    "ChatPrompt.parallel_tool_calls": in_grammar("chat.parallel_tool_calls", False, "find", with_tool),
    "ChatPrompt.template_args_json": in_prompt(
        "chat.template_args_json", '{"extra": "more"}', "more", a_chat()
    ),
    "ChatPrompt.continue_final_message": case(
        "chat.continue_final_message",
        True,
        lambda it: it.prompt.endswith("; so far"),
        a_chat(turn("so far", pb.ROLE_ASSISTANT)),
    ),
    "Constraint.json_schema": in_grammar("constraint.json_schema", '{"const": "xyz"}', "xyz"),
    "Constraint.json_object": in_grammar("constraint.json_object", True, "object"),
    "Constraint.regex": in_grammar("constraint.regex", "[xyz]+", "[xyz]+"),
    "Constraint.choice": in_grammar("constraint.choice", pb.Choices(choices=["xyz"]), "xyz"),
    "Constraint.grammar": in_grammar("constraint.grammar", 'start: "xyz"', "xyz"),
    "Constraint.structural_tags": in_grammar(
        "constraint.structural_tags",
        pb.StructuralTags(tags=[pb.StructuralTag(begin="<f>", end="</f>")], triggers=["<f"]),
        "</f>",
    ),
    "Choices.choices": in_grammar("constraint.choice.choices", ["xyz"], "xyz", lambda: with_choice()),
    "StructuralTags.tags": in_grammar(
        "constraint.structural_tags.tags", [pb.StructuralTag(begin="<fz>", end="</z>")], "</z>", with_tags()
    ),
    "StructuralTags.triggers": refused(
        "constraint.structural_tags.triggers", ["<z"], "constraint", with_tags()
    ),
    "StructuralTag.begin": in_grammar("constraint.structural_tags.tags.0.begin", "<fx>", "x>", with_tags()),
    "StructuralTag.json_schema": in_grammar(
        "constraint.structural_tags.tags.0.json_schema", '{"const": "xyz"}', "xyz", with_tags()
    ),
    "StructuralTag.end": in_grammar("constraint.structural_tags.tags.0.end", "</g>", "</g>", with_tags()),
    "ResumedSample.sample": refused("resume.0.sample", 4, "resume[0].sample", resumable),
    "ResumedSample.token_ids": refused("resume.0.token_ids", [1 << 20], "resume[0].token_ids", resumable),
    "ResumedSample.finish_reason": refused(
        "resume.0.finish_reason", pb.FINISH_REASON_ABORT, "resume[0].finish_reason", resumable
    ),
    "Pins.prefill": case("pins.prefill", "p0", lambda it: it.prepared.pinned_prefill == "p0"),
    "Pins.decode": case("pins.decode", "d0", lambda it: it.prepared.pinned_decode == "d0"),
    "EmbedInput.text": in_prompt("inputs.0.text", "hen", "hen", embed),
    "EmbedInput.token_ids": case(
        "inputs.0.token_ids", pb.TokenIds(ids=[5, 6]), lambda it: it.prompt == decode([5, 6]), embed
    ),
    **of_caller("EmbedRequest", embed),
    "EmbedRequest.inputs": case(
        "inputs", [pb.EmbedInput(text="hen")], lambda it: len(it.replies[0].embeddings) == 2, embed
    ),
    "EmbedRequest.normalize": case("normalize", False, lambda it: length(it) > 2, embed),
    "EmbedRequest.dimensions": case(
        "dimensions", 3, lambda it: len(values_of(it)) == 3 and abs(length(it) - 1) < 1e-5, embed
    ),
    "EmbedRequest.truncate_prompt_tokens": case(
        "truncate_prompt_tokens",
        2,
        lambda it: it.prepared.num_prompt_tokens == 2,
        lambda: pb.EmbedRequest(inputs=[pb.EmbedInput(text=PROMPT)]),
    ),
    **of_caller("ScoreRequest", score),
    "ScoreRequest.text": in_prompt("text", "a", "a fox", score),
    "ScoreRequest.token_ids": case(
        "token_ids", pb.TokenIds(ids=[5, 6]), lambda it: it.prompt.startswith(decode([5, 6])), score
    ),
    "ScoreRequest.chat": in_prompt("chat", pb.ChatPrompt(messages=[turn("hen")]), "; hen]ANSWER  fox", score),
    "ScoreRequest.continuations": case(
        "continuations", [pb.EmbedInput(text=" hen")], lambda it: len(it.ended) == 2, score
    ),
    "TokenizeRequest.model": case("model", "other", unknown, tokenize),
    "TokenizeRequest.text": case("text", "fox", lambda it: tokens_of(it)[1:] == encode("fox"), tokenize),
    "TokenizeRequest.chat": case(
        "chat",
        pb.ChatPrompt(messages=[turn("hen")]),
        lambda it: decode(tokens_of(it)).startswith("[user;"),
        tokenize,
    ),
    "TokenizeRequest.add_special_tokens": case(
        "add_special_tokens", False, lambda it: tokens_of(it) == [0], tokenize
    ),
    "DetokenizeRequest.model": case("model", "other", unknown, lambda: detokenize()),
    "DetokenizeRequest.token_ids": case(
        "token_ids", encode("fox"), lambda it: it.replies[0].text == "fox", lambda: detokenize()
    ),
    "DetokenizeRequest.keep_special_tokens": case(
        "keep_special_tokens", True, lambda it: it.replies[0].text == "<|end|>", lambda: detokenize()
    ),
    "ExplainRequest.request_id": case(
        "request_id", "known", lambda it: it.replies[0].request_id == "known", pb.ExplainRequest
    ),
    # Of Admin.Explain; here the tenant is the caller's, which `test_red_team` holds.
    "ExplainRequest.tenant": case(
        "tenant",
        "somebody",
        lambda it: it.replies[0].tenant != "somebody",
        lambda: pb.ExplainRequest(request_id="known"),
    ),
    "ListRequestsRequest.limit": case(
        "limit", 1, lambda it: len(it.replies[0].requests) == 1, pb.ListRequestsRequest
    ),
}
# Without an effect in this service: what is shown is true without them as well.
SAME = frozenset(("ExplainRequest.tenant",))


def ids_alone() -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), seed=1, max_tokens=12)


def with_choice() -> pb.GenerateRequest:
    request = plain()
    request.constraint.choice.choices.append("no")
    return request


def detokenize() -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(token_ids=[0])


def fields_of(message: Descriptor, found: set[str]) -> set[str]:
    """The fields of a message and of all that it has, as `Message.field`."""
    for its in message.fields:
        name = f"{message.name}.{its.name}"
        if name in found:
            continue
        found.add(name)
        if its.message_type is not None and not its.message_type.GetOptions().map_entry:
            fields_of(its.message_type, found)
    return found


@pytest.fixture(scope="module")
def calls() -> Mapping[str, Any]:
    """The methods, by the names of their requests."""
    methods = pb.DESCRIPTOR.services_by_name["Inference"].methods
    return {method.input_type.name: method.name for method in methods}


async def test_every_field_has_an_entry() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Inference"].methods
    found: set[str] = set()
    for method in methods:
        fields_of(method.input_type, found)
    assert set(CASES) == found, "add a case for a new field: its effect, or the name by which it is refused"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = write_model(tmp_path_factory.mktemp("every-field") / "m", TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = "<|im_start|>"  # before every text
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=None, special_tokens=[(start, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    harness = GatewayHarness(folder)
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = harness.replicas[replica_id] = EmbeddingReplica(harness, replica_id, role)
        await replica.start()
    gateway, address = await harness.add_gateway()
    made = Pair(harness, gateway, harness.client(address))
    made.decode.script.tokens = made.prefill.script.tokens = encode("yes")
    await made.client.stub().Generate(pb.GenerateRequest(text="x", request_id="known", max_tokens=1)).read()
    yield made
    await harness.close()


async def outcome_of(pair: Pair, method: str, request: Message, writes: str) -> Outcome:
    found = Outcome()
    requests = pair.gateway.requests
    before, requests._observers = requests._observers, (*requests._observers, found.ended.append)
    ids = encode(writes)
    for replica in (pair.prefill, pair.decode):
        replica.submissions.clear()
        replica.script.tokens, replica.script.eos_at = [*ids, *[0] * 40], len(ids)
    if method == "Score" or (getattr(request, "prompt_logprobs", None) is not None and _asks(request)):
        # Scripted replicas do not read prompts: what they are asked is enough.
        pair.prefill.script.failure = RequestFailed("", 0, "invalid", "asked")
    try:
        call = getattr(pair.client.stub(), method)(request, timeout=30)
        if method == "Generate":
            found.replies = [reply async for reply in call]
        else:
            found.replies = [await call]
    except grpc.aio.AioRpcError as error:
        paths = [name for name, _ in bad_fields(tuple(error.trailing_metadata() or ()))]
        found.bad = paths or [error.code().name]
    finally:
        requests._observers = before
        pair.prefill.script.failure = None
    found.submissions = [*pair.prefill.submissions, *pair.decode.submissions]
    return found


def _asks(request: Message) -> bool:
    return isinstance(request, pb.GenerateRequest) and request.HasField("prompt_logprobs")


@pytest.mark.parametrize("name", CASES)
async def test_a_field_has_its_effect_or_is_refused(pair: Pair, calls: Mapping[str, str], name: str) -> None:
    tested = CASES[name]
    base, changed = tested.base(), tested.base()
    tested.change(changed)
    if isinstance(changed, pb.GenerateRequest) and changed.resume_token == VALID:
        pair.harness.allow_resume(changed)
    method = calls[type(base).__name__]
    after = await outcome_of(pair, method, changed, tested.writes)
    assert tested.shows(after), after
    if name not in SAME:
        before = await outcome_of(pair, method, base, tested.writes)
        assert not _shows(tested, before), "what shows the effect is there without the field"


def _shows(tested: FieldEffect, outcome: Outcome) -> bool:
    """Whether the outcome shows the effect; one without what is looked at does not."""
    return bool(outcome.replies or outcome.ended) and tested.shows(outcome)
