"""The answers of all APIs, made of any output: a stream, put together again, is the whole answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from http_harness import parse_events
from hypothesis import given
from hypothesis import strategies as st

from cluster.http.answers import Answer, Maker
from cluster.http.chat_answer import ChatAnswer
from cluster.http.completions import CompletionAnswer
from cluster.http.errors import HttpProblem
from cluster.http.messages_answer import MessagesAnswer
from cluster.http.messages_schemas import MessagesRequest
from cluster.http.response_events import ResponsesAnswer
from cluster.http.responses import ResponsesRequest
from cluster.http.schemas import ChatRequest, CompletionRequest
from cluster.proto.tandem.v1 import inference_pb2 as pb

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
# A sample thinks, speaks, then calls: what parsers of output give, in parts of any size.
PHASES = st.tuples(
    st.lists(TEXTS, max_size=3),
    st.lists(TEXTS, max_size=3),
    st.lists(st.lists(TEXTS, max_size=3), max_size=3),
)
FINISHES = st.sampled_from([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH])


def deltas_of(phases: Any, finish: Any, sample: int = 0) -> list[pb.Delta]:
    reasoning, texts, calls = phases
    deltas = [pb.Delta(sample=sample, reasoning=part) for part in reasoning]
    deltas += [pb.Delta(sample=sample, text=part) for part in texts]
    for index, parts in enumerate(calls):
        first = pb.ToolCallDelta(index=index, id=f"call-{index}", name=f"tool-{index}")
        deltas.append(pb.Delta(sample=sample, tool_calls=[first]))
        for part in parts:
            deltas.append(pb.Delta(sample=sample, tool_calls=[pb.ToolCallDelta(index=index, arguments=part)]))
    if calls and finish == pb.FINISH_REASON_STOP:
        finish = pb.FINISH_REASON_TOOL_CALLS
    deltas.append(pb.Delta(sample=sample, finish_reason=finish))
    return deltas


def responses_of(deltas: Sequence[pb.Delta]) -> list[pb.GenerateResponse]:
    usage = pb.Usage(prompt_tokens=10, completion_tokens=len(deltas), cached=pb.CachedTokens(dram=4))
    return [
        pb.GenerateResponse(accepted=pb.Accepted(request_id="r", num_prompt_tokens=10)),
        *(pb.GenerateResponse(delta=delta) for delta in deltas),
        pb.GenerateResponse(finished=pb.Finished(usage=usage)),
    ]


def whole_of(answer: Answer, responses: Sequence[pb.GenerateResponse]) -> Any:
    assert all(answer.take(0, response) == b"" for response in responses)
    return json.loads(answer.whole())


def events_of(answer: Answer, responses: Sequence[pb.GenerateResponse]) -> list[Any]:
    sent = b"".join(answer.take(0, response) for response in responses) + answer.last()
    return [event for _, event in parse_events(sent)]


def maker() -> Maker:
    return Maker("", 1, "m")


def chat(**fields: Any) -> ChatAnswer:
    body = msgspec.convert({"messages": [], **fields}, ChatRequest)
    return ChatAnswer(body, maker())


@given(st.lists(PHASES, min_size=1, max_size=3), FINISHES)
def test_a_streamed_chat_is_the_whole_one(samples: list[Any], finish: int) -> None:
    deltas = [delta for index, it in enumerate(samples) for delta in deltas_of(it, finish, index)]
    responses = responses_of(deltas)
    whole = whole_of(chat(n=len(samples)), responses)
    *chunks, done = events_of(chat(n=len(samples), stream=True), responses)
    assert done == "[DONE]"
    for choice in whole["choices"]:
        parts = [it["choices"][0] for it in chunks if it["choices"][0]["index"] == choice["index"]]
        message = choice["message"]
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == (message["content"] or "")
        thought = "".join(part["delta"].get("reasoning_content", "") for part in parts)
        assert thought == message.get("reasoning_content", "")
        assert _tools_of(parts) == [
            (it["id"], it["function"]["name"], it["function"]["arguments"])
            for it in message.get("tool_calls", [])
        ]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert (message["content"] is None) == (not text and "tool_calls" in message)


def _tools_of(parts: Sequence[Any]) -> list[tuple[str, str, str]]:
    """The calls of a choice, as OpenAI's client puts them together."""
    calls: dict[int, list[str]] = {}
    for part in parts:
        for call in part["delta"].get("tool_calls", []):
            known = calls.setdefault(call["index"], ["", "", ""])
            known[0] += call.get("id", "")
            known[1] += call["function"].get("name", "")
            known[2] += call["function"].get("arguments", "")
    return [(call[0], call[1], call[2]) for _, call in sorted(calls.items())]


@given(PHASES, FINISHES)
def test_a_streamed_message_is_the_whole_one(phases: Any, finish: int) -> None:
    fields = {"messages": [], "max_tokens": 5}
    responses = responses_of(deltas_of(phases, finish))
    body = msgspec.convert(fields, MessagesRequest)
    whole = whole_of(MessagesAnswer(body, maker()), responses)
    streamed = MessagesAnswer(msgspec.convert({**fields, "stream": True}, MessagesRequest), maker())
    start, *parts, delta, stop = events_of(streamed, responses)
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message = start["message"]
    partial: dict[int, str] = {}
    opened = -1
    for part in parts:
        if part["type"] == "content_block_start":
            opened += 1
            assert part["index"] == opened, "one block after another"
            message["content"].append(part["content_block"])
            continue
        assert part["index"] == opened
        if part["type"] == "content_block_delta":
            block, change = message["content"][opened], part["delta"]
            if change["type"] == "input_json_delta":
                partial[opened] = partial.get(opened, "") + change["partial_json"]
            else:
                field = {"text_delta": "text", "thinking_delta": "thinking"}[change["type"]]
                block[field] += change[field]
    for index, text in partial.items():
        message["content"][index]["input"] = _object(text)
    message.update(delta["delta"], usage=delta["usage"])
    assert message == whole
    assert whole["usage"] == {
        "input_tokens": 6,
        "output_tokens": len(responses) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
    }


def _object(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@given(PHASES, FINISHES)
def test_a_streamed_response_is_the_whole_one(phases: Any, finish: int) -> None:
    responses = responses_of(deltas_of(phases, finish))
    whole = whole_of(ResponsesAnswer(msgspec.convert({"input": "x"}, ResponsesRequest), maker()), responses)
    body = msgspec.convert({"input": "x", "stream": True}, ResponsesRequest)
    events = events_of(ResponsesAnswer(body, maker()), responses)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["response"] == whole
    assert events[-1]["type"] == f"response.{whole['status']}"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for index, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == index]
        grown = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert grown == item["arguments"]
        else:
            assert grown == "".join(part["text"] for part in item["content"])


# Of one sample: thoughts, then text and calls in any order.
MIXED = st.tuples(
    st.lists(TEXTS, max_size=2),
    st.lists(st.one_of(TEXTS, st.lists(TEXTS, max_size=3)), max_size=5),
    st.lists(st.integers(1, 4), max_size=12),
)


def merged_deltas(parts: Any) -> list[pb.Delta]:
    """Deltas as gateways send them to clients that read slowly: several in one, each token with its
    log-probability."""
    thoughts, spoken, sizes = parts
    single = [pb.Delta(reasoning=part) for part in thoughts]
    num_calls = 0
    for part in spoken:
        if isinstance(part, str):
            single.append(pb.Delta(text=part))
            continue
        name = f"{num_calls}"
        single.append(
            pb.Delta(tool_calls=[pb.ToolCallDelta(index=num_calls, id=f"call-{name}", name=f"tool-{name}")])
        )
        single += [pb.Delta(tool_calls=[pb.ToolCallDelta(index=num_calls, arguments=it)]) for it in part]
        num_calls += 1
    single.append(pb.Delta(finish_reason=pb.FINISH_REASON_STOP))
    for number, delta in enumerate(single):  # also those of thoughts and calls
        delta.logprobs.add(logprob=-1.0, text=f"t{number}")
    groups = []
    while single:
        size = sizes.pop() if sizes else 1
        groups.append(single[:size])
        single = single[size:]
    found = []
    for group in groups:
        delta = pb.Delta()
        for part in group:
            delta.text += part.text
            delta.reasoning += part.reasoning
            delta.logprobs.extend(part.logprobs)
            delta.finish_reason = part.finish_reason
            for call in part.tool_calls:
                if delta.tool_calls and delta.tool_calls[-1].index == call.index and not call.name:
                    delta.tool_calls[-1].arguments += call.arguments
                else:
                    delta.tool_calls.append(call)
        found.append(delta)
    return found


def said_in(parts: Any) -> tuple[str, str, list[tuple[str, str, str]]]:
    thoughts, spoken, _ = parts
    text = "".join(it for it in spoken if isinstance(it, str))
    calls = ["".join(it) for it in spoken if not isinstance(it, str)]
    named = [(f"call-{number}", f"tool-{number}", it) for number, it in enumerate(calls)]
    return "".join(thoughts), text, named


@given(MIXED)
def test_text_behind_a_call_leaves_the_call_whole_in_a_message(parts: Any) -> None:
    wanted, responses = said_in(parts), responses_of(merged_deltas(parts))
    body = msgspec.convert({"messages": [], "max_tokens": 5, "stream": True}, MessagesRequest)
    thought = text = ""
    calls: list[list[str]] = []
    for event in events_of(MessagesAnswer(body, maker()), responses):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["id"], event["content_block"]["name"], ""])
        if event["type"] == "content_block_delta":
            thought += event["delta"].get("thinking", "")
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[-1][2] += event["delta"]["partial_json"]
    assert (thought, text, [tuple(call) for call in calls]) == wanted


@given(MIXED, st.booleans())
def test_text_behind_a_call_leaves_the_call_whole_in_a_response(parts: Any, has_logprobs: bool) -> None:
    wanted, responses = said_in(parts), responses_of(merged_deltas(parts))
    fields = {"input": "x", "stream": True} | ({"top_logprobs": 1} if has_logprobs else {})
    answer = ResponsesAnswer(msgspec.convert(fields, ResponsesRequest), maker())
    output = events_of(answer, responses)[-1]["response"]["output"]
    kinds = [item["type"] for item in output]
    assert kinds.count("reasoning") == bool(wanted[0])
    messages = [item for item in output if item["type"] == "message"]
    assert (
        "".join(it["content"][0]["text"] for it in output if it["type"] == "reasoning"),
        "".join(it["content"][0]["text"] for it in messages),
        [(it["call_id"], it["name"], it["arguments"]) for it in output if it["type"] == "function_call"],
    ) == wanted
    if has_logprobs and wanted[1] and not wanted[2] and not wanted[0]:
        shown = [entry["token"] for it in messages for entry in it["content"][0]["logprobs"]]
        num_tokens = sum(len(it.delta.logprobs) for it in responses)
        assert shown == [f"t{number}" for number in range(num_tokens)]


@given(st.lists(TEXTS, max_size=4), FINISHES)
def test_a_streamed_completion_is_the_whole_one(texts: list[str], finish: int) -> None:
    responses = responses_of(deltas_of(([], texts, []), finish))
    fields = {"prompt": "x"}
    whole = whole_of(CompletionAnswer(msgspec.convert(fields, CompletionRequest), 1, maker()), responses)
    body = msgspec.convert({**fields, "stream": True}, CompletionRequest)
    *chunks, done = events_of(CompletionAnswer(body, 1, maker()), responses)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("kind", [ChatAnswer, MessagesAnswer, ResponsesAnswer])
def test_a_stream_that_breaks_off_says_so_and_has_no_end(kind: Any) -> None:
    schema = {ChatAnswer: ChatRequest, MessagesAnswer: MessagesRequest, ResponsesAnswer: ResponsesRequest}[
        kind
    ]
    fields = {"messages": [], "max_tokens": 5} if kind is not ResponsesAnswer else {"input": "x"}
    answer = kind(msgspec.convert({**fields, "stream": True}, schema), maker())
    for response in responses_of(deltas_of(([], ["a"], []), pb.FINISH_REASON_STOP))[:2]:
        answer.take(0, response)
    ((name, event),) = parse_events(answer.failed(HttpProblem(503, "gone", kind="server_error")))
    assert "gone" in json.dumps(event)
    assert name == {ChatAnswer: "", MessagesAnswer: "error", ResponsesAnswer: "response.failed"}[kind]


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_a_failed_response_says_whether_to_come_back_and_what_it_has_used(status: int, code: str) -> None:
    body = msgspec.convert({"input": "x", "stream": True}, ResponsesRequest)
    answer = ResponsesAnswer(body, maker())
    for response in responses_of([pb.Delta(text="a")])[:2]:
        answer.take(0, response)
    usage = pb.Usage(prompt_tokens=10, completion_tokens=7)
    for known, num_output in ((usage, 7), (None, 0)):
        ((_, event),) = parse_events(answer.failed(HttpProblem(status, "gone", usage=known)))
        assert event["response"]["error"] == {"code": code, "message": "gone"}
        assert event["response"]["usage"]["input_tokens"] == 10
        assert event["response"]["usage"]["output_tokens"] == num_output


@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize("streams", [False, True])
def test_the_chosen_token_is_among_the_logprobs_of_a_completion(streams: bool, num_top: int) -> None:
    chosen = pb.TokenLogprob(logprob=-3.0, text="c", token_id=3)
    if num_top:
        chosen.top.add(token_id=1, logprob=-0.5, text="a")
    delta = pb.Delta(text="c", logprobs=[chosen], finish_reason=pb.FINISH_REASON_STOP)
    fields = {"prompt": "x", "logprobs": num_top, "stream": streams}
    answer = CompletionAnswer(msgspec.convert(fields, CompletionRequest), 1, maker())
    responses = responses_of([delta])
    whole = events_of(answer, responses)[0] if streams else whole_of(answer, responses)
    (top,) = whole["choices"][0]["logprobs"]["top_logprobs"]
    assert top == ({"a": -0.5, "c": -3.0} if num_top else {"c": -3.0})


def test_a_stop_that_matched_is_told() -> None:
    end = pb.Delta(finish_reason=pb.FINISH_REASON_STOP, matched_stop=pb.MatchedStop(text="END"))
    responses = responses_of([pb.Delta(text="a"), end])
    assert whole_of(chat(), responses)["choices"][0]["stop_reason"] == "END"
    assert events_of(chat(stream=True), responses)[-2]["choices"][0]["stop_reason"] == "END"
    body = msgspec.convert({"messages": [], "max_tokens": 5}, MessagesRequest)
    message = whole_of(MessagesAnswer(body, maker()), responses)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    responses[-2].delta.finish_reason = pb.FINISH_REASON_TOOL_CALLS
    message = whole_of(MessagesAnswer(body, maker()), responses)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", "END")


def _logprob(text: str, logprob: float | None, token_id: int) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=-0.25, text=text, token_bytes=text.encode())]
    found = pb.TokenLogprob(token_id=token_id, text=text, token_bytes=text.encode())
    if logprob is not None:
        found.logprob = logprob
        found.top.extend(top)
    return found


def test_logprobs_of_prompt_and_output_follow_each_other_in_an_echoed_completion() -> None:
    prompt = pb.PromptPart(text="ab", logprobs=[_logprob("a", None, 1), _logprob("b", -0.5, 2)])
    delta = pb.Delta(text="c", logprobs=[_logprob("c", -0.75, 3)], finish_reason=pb.FINISH_REASON_STOP)
    first, *rest = responses_of([delta])
    responses = [first, pb.GenerateResponse(prompt=prompt), *rest]
    fields = {"prompt": "ab", "echo": True, "logprobs": 1}
    whole = whole_of(CompletionAnswer(msgspec.convert(fields, CompletionRequest), 1, maker()), responses)
    expected = {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -0.5, -0.75],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [None, {"b": -0.25}, {"c": -0.25}],
    }
    assert (whole["choices"][0]["text"], whole["choices"][0]["logprobs"]) == ("abc", expected)
    body = msgspec.convert({**fields, "stream": True}, CompletionRequest)
    chunk = events_of(CompletionAnswer(body, 1, maker()), responses)[0]
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["logprobs"]) == ("abc", expected)


def test_logprobs_of_a_prompt_are_vllms() -> None:
    prompt = pb.PromptPart(logprobs=[_logprob("a", None, 1), _logprob("b", -0.25, 2)])
    first, *rest = responses_of([pb.Delta(text="c", finish_reason=pb.FINISH_REASON_STOP)])
    whole = whole_of(chat(prompt_logprobs=1), [first, pb.GenerateResponse(prompt=prompt), *rest])
    entry = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    assert whole["prompt_logprobs"] == [None, {"2": entry}]
