"""Sessions of the serving benchmark, and the servers that it measures: a gateway over gRPC and over HTTP, and
a small server that speaks OpenAI's wire format."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from gateway_harness import GatewayHarness, ScriptedReplica, raw, truth
from http_harness import HttpFrontHarness
from patience import WAIT_S
from serving import tandem
from typer.testing import CliRunner

from cluster.api.channel import ClientCredentials
from cluster.api.generate_options import Turn
from cluster.bench.bench_command import cli
from cluster.bench.bench_runs import turns_table
from cluster.bench.http_target import http_target, http_url
from cluster.bench.serving_figures import MAX_TURN, Objectives, by_turn, summarize
from cluster.bench.serving_load import (
    AnswerEnd,
    BenchPrompt,
    BenchRequest,
    PlannedTurn,
    Session,
    run_sessions,
)
from cluster.bench.targets import Target, TargetModel
from cluster.errors import CallError
from kvtransfer.common.clock import ManualClock

# ---------------------------------------------------------------------------------------- sessions


def turn(*tokens: int, think_s: float = 0.0, num_output: int = 2) -> PlannedTurn:
    return PlannedTurn(lambda: tokens, num_output, think_s)


async def run_all(
    sessions: list[Session],
    send: Callable[[BenchPrompt, int, str], AsyncIterator[int | AnswerEnd]],
    clock: ManualClock,
    concurrency: int = 0,
) -> list[BenchRequest]:
    """Run them in the clock's time."""
    work = asyncio.create_task(run_sessions(sessions, concurrency, send, clock, lambda _: None))
    while not work.done():
        await asyncio.sleep(0)
        clock.advance(0.05)
    return await work


async def test_a_prompt_has_what_was_said_before_and_waits_for_it() -> None:
    clock = ManualClock()
    began_at = clock.now()
    sent: list[tuple[float, list[Any]]] = []

    async def send(
        prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        sent.append((clock.now() - began_at, list(prompt)))
        await clock.sleep(0.5)
        yield num_tokens
        known = (90, 91) if len(prompt) < 3 else ()
        yield AnswerEnd(len(prompt), len(prompt) - 1, num_tokens, known)

    session = Session(
        (turn(1, 2), turn(3, think_s=1.0), turn(4)), arrival_s=2.0, stand_in=lambda num: [7] * num
    )
    records = await run_all([session], send, clock)
    # The ids of the second answer are not known: others stand in their place.
    assert [prompt for _, prompt in sent] == [[1, 2], [1, 2, 90, 91, 3], [1, 2, 90, 91, 3, 7, 7, 4]]
    assert [at for at, _ in sent] == pytest.approx([2.0, 3.5, 4.0], abs=0.2)
    assert [(it.turn, it.num_input, it.num_cached) for it in records] == [(1, 2, 1), (2, 5, 4), (3, 8, 7)]


async def test_recorded_answers_are_not_said_twice() -> None:
    async def send(
        prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        prompts.append([tuple(it) for it in prompt if isinstance(it, Turn)])
        yield 1
        yield AnswerEnd(token_ids=(5,))

    prompts: list[Any] = []
    first, second = [Turn("user", "a")], [Turn("assistant", "b"), Turn("user", "c")]
    plan = (PlannedTurn(lambda: first, 1), PlannedTurn(lambda: second, 1))
    await run_all([Session(plan)], send, ManualClock())
    assert prompts == [[("user", "a")], [("user", "a"), ("assistant", "b"), ("user", "c")]]


async def test_a_session_ends_with_a_turn_that_has_no_answer_and_holds_its_place_until_then() -> None:
    running, most = set(), 0

    async def send(
        prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        nonlocal most
        running.add(prompt[0])
        most = max(most, len(running))
        if list(prompt) == [1, 1]:
            running.discard(prompt[0])
            raise CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        await clock.sleep(0.1)
        yield 1
        if len(prompt) == 3:
            running.discard(prompt[0])

    clock = ManualClock()
    sessions = [Session((turn(number), turn(number), turn(number))) for number in range(6)]
    records = await run_all(sessions, send, clock, concurrency=2)
    assert most == 2
    assert [(it.turn, it.outcome) for it in records[3:5]] == [(1, "ok"), (2, "refused")]
    assert len(records) == 17


async def test_tokens_that_no_part_showed_are_counted_with_the_last() -> None:
    async def send(
        prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        yield 1
        yield 1
        yield AnswerEnd(num_output=5)

    (record,) = await run_all([Session((turn(1),))], send, ManualClock())
    assert len(record.token_times) == 5
    assert record.num_input == 1


def test_turns_have_their_times_and_cached_shares() -> None:
    def record(number: int, ttft_s: float, num_cached: int) -> BenchRequest:
        return BenchRequest(0.0, 9.0, 100, (ttft_s,), "ok", turn=number, num_cached=num_cached)

    records = [record(1, 1.0, 0), record(1, 3.0, 10), record(2, 0.5, 90)]
    records += [record(MAX_TURN, 0.1, 100), record(MAX_TURN + 3, 0.3, 98)]
    turns = by_turn([*records, BenchRequest(0, 1, 1, (), "failed", turn=2)])
    assert [(it["turn"], it["num_ok"], it["cached_share"]) for it in turns] == [
        (1, 2, 0.05),
        (2, 1, 0.9),
        (MAX_TURN, 2, 0.99),
    ]
    assert turns[0]["ttft_ms"]["mean"] == 2000.0
    assert summarize(records, Objectives(1, 1)).cached_share == pytest.approx(298 / 500)
    assert by_turn(records[:2]) == []
    cells = list(turns_table([("4 at once", turns)]).columns[1].cells)
    assert cells == ["1", "2", f"{MAX_TURN} on"]


# ----------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--dataset", "alpaca:x"], "--dataset: expected sharegpt:FILE"),
        (["--dataset", "mooncake:x", "--rate", "3"], "--rate: no effect with --dataset mooncake:x"),
        (["--dataset", "sessions", "--requests", "3"], "--requests: no effect with --dataset sessions"),
        (["--dataset", "lengths:fixed", "--length-spread", "1"], "--length-spread: no effect with"),
        (["--dataset", f"lengths:{__file__}", "--input-tokens", "1"], "--input-tokens: no effect with"),
        (["--dataset", "lengths:normal"], "'normal' is none of fixed, uniform, lognormal, and no file"),
        (["--turns", "3"], "--turns: no effect with prompts of one length; name a --dataset"),
        (["--overload", "--dataset", "sessions"], "--dataset: no effect with --overload"),
        (["--sweep", "1,2", "--rate", "3"], "--sweep, --rate: contradict each other"),
        (["--rate", "3", "--concurrency", "2"], "--rate, --concurrency: contradict each other"),
    ],
)
def test_options_without_effect_are_refused_by_name(options: list[str], error: str) -> None:
    done = CliRunner().invoke(cli, ["serve", *options])
    assert done.exit_code == 2
    assert error in " ".join(done.output.replace("│", " ").split())


# -------------------------------------------------------------------------------------------- gRPC


def token_ids(replica: ScriptedReplica) -> list[list[int]]:
    return [memoryview(it.prompt).cast("I").tolist() for it in replica.submissions]


async def test_sessions_over_grpc(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway()
    shape = ("--sessions", "2", "--turns", "3", "--input-tokens", "20", "--output-tokens", "4")
    arguments = ("bench", "serve", "--dataset", "sessions", "--shared-prefix", "32", "--concurrency", "1")
    done = await asyncio.to_thread(tandem, *arguments, *shape, "--json", "--address", address)
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)
    assert (stats["num_ok"], stats["num_sessions"], stats["dataset"]) == (6, 2, "sessions")
    assert [(it["turn"], it["num_ok"], it["input_tokens"]) for it in stats["turns"]] == [
        (1, 2, 52.0),
        (2, 2, 76.0),
        (3, 2, 100.0),
    ]
    prompts = token_ids(replica)
    assert prompts[0][:32] == prompts[3][:32]
    for earlier, later in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert prompts[later][: len(prompts[earlier])] == prompts[earlier]
    # The answers are those that the replica gave.
    assert prompts[1][52:56] == truth(raw(prompts[0]), replica.submissions[0].samples[0].seed, 4)
    table = await asyncio.to_thread(tandem, *arguments, *shape, "--address", address)
    assert "turns of sessions" in table.stdout
    assert "prompt tokens cached" in table.stdout


async def test_conversations_and_traces_over_grpc(harness: GatewayHarness, tmp_path: Path) -> None:
    replica = await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway()
    talks = tmp_path / "talks.json"
    messages = [{"from": who, "value": "the fox"} for who in ("human", "gpt", "human", "gpt")]
    talks.write_text(json.dumps([{"conversations": messages}] * 3))
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * number, "input_length": 300, "output_length": 5, "hash_ids": [number % 2]}
        for number in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    common = ("--json", "--address", address)
    done = await asyncio.to_thread(
        tandem, "bench", "serve", "--dataset", f"sharegpt:{talks}", "--requests", "5", *common
    )
    stats = json.loads(done.stdout)
    assert (stats["num_ok"], [it["num_ok"] for it in stats["turns"]]) == (5, [3, 2])
    before = len(replica.submissions)
    done = await asyncio.to_thread(
        tandem, "bench", "serve", "--dataset", f"mooncake:{trace}", "--time-scale", "0.1", *common
    )
    stats = json.loads(done.stdout)
    assert (stats["num_ok"], stats["num_left_out"], stats["concurrency"]) == (4, 0, None)
    first, second, third, _ = sorted(token_ids(replica)[before:])
    assert first == second != third
    assert len(first) == 300


# -------------------------------------------------------------------------------------------- HTTP


class OpenAiServer:
    """Speaks the wire format of OpenAI's completions; `answer` writes what follows the headers."""

    def __init__(self, answer: Callable[[web.StreamResponse], Awaitable[None]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.url = ""
        self._answer = answer

    async def models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("Authorization", ""))
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append({"path": request.path, **await request.json()})
        if self.bodies[-1]["max_tokens"] == 429:
            return web.json_response({"error": {"message": "too many", "type": "x"}}, status=429)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await self._answer(answer)
        return answer


@asynccontextmanager
async def served(answer: Callable[[web.StreamResponse], Awaitable[None]]) -> AsyncIterator[OpenAiServer]:
    server = OpenAiServer(answer)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


def data(value: Any) -> bytes:
    return b"data: %b\n\n" % (value if isinstance(value, bytes) else json.dumps(value).encode())


async def plain(answer: web.StreamResponse) -> None:
    """Three tokens in two chunks, as completions and chats have them, and usage."""
    await answer.write(b": a comment\n\n")
    await answer.write(data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    await answer.write(data({"choices": [{"index": 0, "text": "one"}]}))
    await answer.write(data({"choices": [{"index": 0, "delta": {"reasoning_content": "two"}}]}))
    await answer.write(
        data({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": None})
    )
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    await answer.write(data({"choices": [], "usage": usage}) + data(b"[DONE]"))


async def received(target: Target, prompt: BenchPrompt, num_tokens: int = 3) -> list[int | AnswerEnd]:
    return [event async for event in target.send(prompt, num_tokens, "batch")]


async def test_the_wire_format_is_openai_s() -> None:
    async with (
        served(plain) as server,
        http_target(server.url, 10.0, ClientCredentials(bearer="k")) as target,
    ):
        assert target.model == TargetModel("m", 1000, 0)
        assert await received(target, [1, 2, 3]) == [0, 1, 1, AnswerEnd(9, 4, 3)]
        await received(target, [Turn("user", "hello")])
    completion, chat = server.bodies
    expected = {
        "model": "m",
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": "flex",
    }
    assert completion == {**expected, "path": "/v1/completions", "prompt": [1, 2, 3]}
    messages = [{"role": "user", "content": "hello"}]
    assert chat == {**expected, "path": "/v1/chat/completions", "messages": messages}
    assert server.headers == ["Bearer k"]


async def _fails(answer: web.StreamResponse) -> None:
    await answer.write(data({"error": {"message": "it broke", "type": "server_error"}}))


async def _is_cut(answer: web.StreamResponse) -> None:
    await answer.write(data({"choices": [{"text": "one"}]}))


async def _is_nonsense(answer: web.StreamResponse) -> None:
    await answer.write(data(b"{nonsense"))


async def _is_endless(answer: web.StreamResponse) -> None:
    for _ in range(9):
        await answer.write(b"x" * (1 << 20))


async def _is_silent(answer: web.StreamResponse) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (_fails, grpc.StatusCode.INTERNAL, "it broke"),
        (_is_cut, grpc.StatusCode.UNAVAILABLE, "the stream ended without [DONE]"),
        (_is_nonsense, grpc.StatusCode.INTERNAL, "answer is not as expected"),
        (_is_endless, grpc.StatusCode.INTERNAL, "a line of the stream is too long"),
        (_is_silent, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"),
    ],
)
async def test_a_stream_that_fails_says_how(
    answer: Callable[[web.StreamResponse], Awaitable[None]], code: grpc.StatusCode, message: str
) -> None:
    timeout_s = 1.0 if answer is _is_silent else 60.0
    async with served(answer) as server, http_target(server.url, timeout_s, None) as target:
        with pytest.raises(CallError) as raised:
            await received(target, [1])
    assert raised.value.code is code
    assert message in raised.value.message


async def test_a_refusal_is_one_and_a_server_that_is_not_there_is_unavailable() -> None:
    async with served(plain) as server, http_target(server.url, 10.0, None) as target:
        with pytest.raises(CallError) as raised:
            await received(target, [1], num_tokens=429)
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raised.value.message == "HTTP 429: too many"
    with pytest.raises(CallError) as raised:
        async with http_target(server.url, 10.0, None):
            raise AssertionError("nobody listens there")
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("address", ["host:8000", "http://host:8000", "http://host:8000/v1/"])
def test_addresses_of_servers(address: str) -> None:
    assert http_url(address) == "http://host:8000"
    assert http_url("https://host/v1") == "https://host"


async def measured(front: HttpFrontHarness, dataset: str, *options: str) -> list[dict[str, Any]]:
    """What `tandem bench serve` says of the gateway, by run."""
    command = ["serve", "--json", "--http", f"127.0.0.1:{front.gateway.http_port}", "--dataset", dataset]
    done = await asyncio.to_thread(CliRunner().invoke, cli, [*command, *options])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_a_gateway_is_measured_over_http(harness: GatewayHarness, tmp_path: Path) -> None:
    talks, trace, table = tmp_path / "talks.jsonl", tmp_path / "trace.jsonl", tmp_path / "lengths.csv"
    messages = [{"role": who, "content": "the fox"} for who in ("user", "assistant", "user", "assistant")]
    talks.write_text(json.dumps({"messages": messages}))
    asked = {"input_length": 20, "output_length": 4, "hash_ids": [1]}
    trace.write_text("".join(json.dumps({"timestamp": at, **asked}) + "\n" for at in (0, 10, 20)))
    table.write_text("input,output\n20,4\n30,2\n")
    ids, drawn = ("--vocab-size", "250"), ("--input-tokens", "20", "--output-tokens", "4")
    async with HttpFrontHarness(harness) as front:
        (stats,) = await measured(front, "sessions", "--sessions", "2", "--turns", "2", *drawn, *ids)
        assert (stats["num_ok"], stats["model"]) == (4, "m")
        assert [(it["turn"], it["input_tokens"]) for it in stats["turns"]] == [(1, 20.0), (2, 44.0)]
        assert stats["output_tok_s"] * stats["seconds"] == pytest.approx(16)
        (stats,) = await measured(front, f"sharegpt:{talks}")
        assert stats["num_ok"] == 2
        (stats,) = await measured(front, f"mooncake:{trace}", *ids)
        assert (stats["num_ok"], stats["output_tok_s"] * stats["seconds"]) == (3, pytest.approx(12))
        (stats,) = await measured(front, f"lengths:{table}", "--requests", "4", *ids)
        assert (stats["num_ok"], stats["output_tok_s"] * stats["seconds"]) == (4, pytest.approx(12))
        classes = ("--service-class", "interactive,batch", "--requests", "4")
        (stats,) = await measured(front, "lengths:lognormal", *classes, *drawn, *ids)
        assert {name: found["num_ok"] for name, found in stats["classes"].items()} == {
            "interactive": 2,
            "batch": 2,
        }
        *runs, knee = await measured(front, "lengths:uniform", "--sweep", "200,400", *drawn, *ids)
        assert [run["offered_per_s"] for run in runs] == [200, 400]
        assert knee["what"] == "knee"


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(CallError, match=f"cannot connect to {address}: Connection refused"):
            async with http_target(address, WAIT_S, ClientCredentials()):
                pass
