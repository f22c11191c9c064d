"""The Python clients: streams that go on at another gateway, deadlines, and the one without an event loop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gateway_harness import PROMPT, GatewayHarness, Pair, decode, expected, until
from patience import WAIT_S

from cluster.api import client as client_module
from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Client, Collector, GenerateStream, PromptParts
from cluster.api.generate_options import GenerateOptions, Prompt, Turn, generate_request
from cluster.errors import CallError, InvalidRequestError
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import sample_seed
from kvtransfer.common.clock import ManualClock
from workers.messages.link import RequestFailed


@contextmanager
def silent_gateway() -> Iterator[tuple[str, threading.Semaphore]]:
    """Take every call and answer none. Yield the address, and what is released for each call."""
    called, is_over = threading.Semaphore(0), threading.Event()

    def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
        called.release()
        is_over.wait(WAIT_S)
        return b""

    class Silence(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(wait)

    server = grpc.server(ThreadPoolExecutor(4), handlers=(Silence(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", called
    finally:
        is_over.set()
        server.stop(None).wait()


async def collect(stream: GenerateStream, collector: Collector) -> None:
    async for event in stream:
        collector.add(event)


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
async def test_a_stream_goes_on_at_another_gateway(harness: GatewayHarness, stop: tuple[str, ...]) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.stop_after = 9
    first, address = await harness.add_gateway()
    _, other_address = await harness.add_gateway()
    client = harness.client(address, other_address)
    stream = client.generate(PROMPT, GenerateOptions(n=2, max_tokens=30, stop=stop))
    collector = Collector()
    work = asyncio.create_task(collect(stream, collector))
    await until(lambda: collector.num_tokens == 20, "some tokens are there")
    await first.stop()
    replica.script.resume.set()
    await work
    done = collector.completion()
    assert stream.num_resumes == 1
    assert [list(ids) for ids in done.token_ids] == [
        expected(sample_seed(done.seed, index), 30) for index in range(2)
    ]
    assert done.texts == tuple(decode(ids) for ids in done.token_ids)
    resumed = [it.samples for it in replica.submissions if it.samples[0].output]
    assert [len(state.output) // 4 for (state,) in resumed] == [10, 10]


async def test_a_finished_sample_is_not_continued(pair: Pair) -> None:
    request = generate_request(PROMPT, GenerateOptions(n=2, seed=4, max_tokens=8, request_id="again"))
    tokens = [expected(sample_seed(4, index), 8) for index in range(2)]
    request.resume.add(sample=0, token_ids=tokens[0][:5], finish_reason=pb.FINISH_REASON_STOP)
    request.resume.add(sample=1, token_ids=tokens[1][:5])
    pair.harness.allow_resume(request)
    collector = Collector()
    call = pair.client.stub().Generate(request)
    indices = []
    async for response in call:
        if response.HasField("delta"):
            indices.append((response.delta.sample, response.delta.first_index))
        if response.HasField("finished"):
            collector.add(response.finished)
    assert indices[0] == (1, 5)
    assert {sample for sample, _ in indices} == {1}
    assert collector.completion().finish_reasons == ("stop", "length")
    (submission,) = pair.prefill.submissions
    assert [(it.index, len(it.output) // 4) for it in submission.samples] == [(1, 5)]


@pytest.mark.parametrize(("ending", "reason"), [([0], pb.FINISH_REASON_STOP), ([], pb.FINISH_REASON_LENGTH)])
async def test_a_resume_with_nothing_to_do_finishes(
    pair: Pair, ending: list[int], reason: pb.FinishReason
) -> None:
    """Also for a client that does not tell the finish: an end token, or max_tokens, speaks for itself."""
    request = generate_request(PROMPT, GenerateOptions(seed=4, max_tokens=6))
    request.resume.add(sample=0, token_ids=[*expected(4, 6 - len(ending)), *ending])
    pair.harness.allow_resume(request)
    events = [response async for response in pair.client.stub().Generate(request)]
    assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"]
    assert [end.finish_reason for end in events[1].finished.samples] == [reason]
    assert not pair.prefill.submissions


async def test_a_resumed_call_takes_over_the_old_one(pair: Pair) -> None:
    pair.decode.script.stop_after = 3
    options = GenerateOptions(seed=4, max_tokens=8, request_id="same")
    old = pair.client.generate(PROMPT, options, resume=False).events()
    while not isinstance(await anext(old), pb.Delta):
        pass
    request = generate_request(PROMPT, options)
    request.resume.add(sample=0, token_ids=expected(4, 2))
    pair.harness.allow_resume(request)
    call = aiter(pair.client.stub().Generate(request))
    assert (await anext(call)).HasField("accepted")
    pair.decode.script.resume.set()
    ids = [token async for response in call for token in response.delta.token_ids]
    assert ids == expected(4, 8)[2:]
    with pytest.raises(CallError, match="CANCELLED"):
        [event async for event in old]
    first, second = pair.prefill.submissions
    assert first.request_id != second.request_id


async def test_without_resume_the_loss_is_reported(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.stop_after = 3
    gateway, address = await harness.add_gateway()
    stream = harness.client(address).generate(PROMPT, resume=False).events()
    await anext(stream)
    await gateway.stop()
    with pytest.raises(CallError, match="UNAVAILABLE"):
        [event async for event in stream]


async def test_an_unreachable_gateway_is_tried_until_the_deadline() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(CallError) as caught:
            await client.complete(PROMPT, timeout_s=0.5)
    assert caught.value.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_deadline_does_not_hide_why_it_took_so_long(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.failure = RequestFailed("", 0, "peer", "it broke")
    replica.script.stop_after = 3  # the second time it begins, and does not end
    _, address = await harness.add_gateway(harness.config(max_attempts=1))
    with pytest.raises(CallError, match="the failure before: d0: it broke") as caught:
        await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=9), timeout_s=2.5)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_bad_requests_are_not_repeated(pair: Pair) -> None:
    stream = pair.client.generate("", GenerateOptions())
    with pytest.raises(CallError, match="prompt") as caught:
        [event async for event in stream]
    assert [name for name, _ in caught.value.fields] == ["prompt"]
    assert stream.num_resumes == 0


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="at least one gateway"):
        Client([])


async def test_the_blocking_client_does_the_same(pair: Pair) -> None:
    found: list[object] = []

    def use(address: str) -> None:
        with BlockingClient(address) as client:
            ids = client.tokenize("the fox")
            found.append(client.detokenize(ids))
            done = client.complete(ids, GenerateOptions(seed=2, max_tokens=5))
            found.append(list(done.token_ids[0]))
            found.append(
                [type(event).__name__ for event in client.generate("x", GenerateOptions(max_tokens=1))]
            )
            found.append(name_of(pb.RequestState, client.explain(done.request_id).state))
            found.append(client.models()[0].name)
            found.append(done.request_id in [it.request_id for it in client.requests()])
            events = client.generate("x", GenerateOptions(max_tokens=400))
            next(events)
            events.close()

    thread = threading.Thread(target=use, args=(pair.client._addresses[0],))
    thread.start()
    await until(lambda: not thread.is_alive(), "the thread has done its calls")
    thread.join()
    assert found == [
        "the fox",
        expected(2, 5, "the fox"),
        ["Accepted", "Delta", "Finished"],
        "finished",
        "m",
        True,
    ]


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ("x", GenerateOptions(seed=-1), "seed"),
        ("x", GenerateOptions(priority=1 << 40), "priority"),
        ("x", GenerateOptions(stop_token_ids=[-1]), "stop_token_ids"),
        ("\ud800", GenerateOptions(), "text"),
        ([-1], GenerateOptions(), "ids"),
        ([Turn("user", "\ud800")], GenerateOptions(), "text"),
        ([Turn("nobody", "x")], GenerateOptions(), "chat.messages[0].role"),
        ("x", GenerateOptions(service_class="best"), "service_class"),
    ],
)
def test_what_does_not_fit_in_its_field_is_named(prompt: Prompt, options: GenerateOptions, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(prompt, options)
    assert [violation.field for violation in caught.value.violations] == [name]


def test_token_ids_may_be_any_integers() -> None:
    ids: Any = np.array([3, 5], dtype=np.int64)
    request = generate_request(ids, GenerateOptions())
    assert list(request.token_ids.ids) == [3, 5]


async def test_a_stream_that_has_ended_leaves_nothing_to_close(pair: Pair) -> None:
    hooks = sys.get_asyncgen_hooks()
    left: list[Any] = []
    sys.set_asyncgen_hooks(finalizer=left.append)
    try:
        await pair.client.complete(PROMPT, GenerateOptions(max_tokens=2))
        async for _ in pair.client.generate(PROMPT, GenerateOptions(max_tokens=2)):
            pass
    finally:
        sys.set_asyncgen_hooks(*hooks)
    assert [generator.__qualname__ for generator in left if "cluster" in generator.ag_code.co_filename] == []


async def test_logprobs_are_collected(pair: Pair) -> None:
    options = GenerateOptions(seed=4, n=2, max_tokens=6, logprobs=2)
    done = await pair.client.complete(PROMPT, options)
    assert [len(items) for items in done.logprobs] == [6, 6]
    bare = await pair.client.complete(PROMPT, GenerateOptions(max_tokens=6))
    assert bare.logprobs == ((),)


async def test_an_accepted_stream_outlives_a_long_absence_of_its_gateway(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience is measured in time: a gateway that is replaced slowly must not end its streams."""
    monkeypatch.setattr(client_module, "_FIRST_PATIENCE_S", 0.0)
    monkeypatch.setattr(client_module, "_BACKOFF_S", 0.001)
    monkeypatch.setattr(client_module, "_MAX_BACKOFF_S", 0.001)
    replica = await harness.add_replica("d0", "decode")
    replica.script.stop_after = 2
    first, address = await harness.add_gateway()
    _, other_address = await harness.add_gateway()
    stream = harness.client(address, *["127.0.0.1:1"] * 30, other_address).generate(
        PROMPT, GenerateOptions(seed=4, max_tokens=8)
    )
    collector = Collector()
    work = asyncio.create_task(collect(stream, collector))
    await until(lambda: collector.num_tokens >= 1, "a token is there")
    await first.stop()
    replica.script.resume.set()
    await work
    assert list(collector.completion().token_ids[0]) == expected(4, 8)
    assert stream.num_resumes == 31
    with pytest.raises(CallError, match="UNAVAILABLE"):
        await harness.client("127.0.0.1:1").complete(PROMPT)


def test_ctrl_c_ends_a_blocking_call_and_nothing_else() -> None:
    """Also in the middle of a stream, whose generator is then still running."""
    # A shell's background job starts with Ctrl-C ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    timer = threading.Timer(0.3, signal.pthread_kill, (main_thread, signal.SIGINT))
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        BlockingClient(f"127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(client.generate("x"))
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_between_the_call_and_its_wait_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was scheduled by then is not known to the thread that is interrupted, and has to end all the same:
    the stream has nothing more to say."""
    schedule = asyncio.run_coroutine_threadsafe
    with silent_gateway() as (address, called), BlockingClient(address) as client:

        def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", schedule)
            schedule(work, loop)
            assert called.acquire(timeout=WAIT_S)
            raise KeyboardInterrupt

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(client.generate("x"))


def test_closing_a_blocking_client_ends_the_calls_of_other_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They neither wait for ever nor leave pending tasks, which asyncio reports when they are destroyed."""
    with silent_gateway() as (address, called), ThreadPoolExecutor(2) as threads:
        client = BlockingClient(address)
        calls: list[Future[Any]] = [threads.submit(client.complete, "x"), threads.submit(client.models)]
        for _ in calls:
            assert called.acquire(timeout=WAIT_S)
        client.close()
        for call in calls:
            with pytest.raises(CallError, match="CANCELLED: this client was closed"):
                call.result(timeout=WAIT_S)
        client.close()
        with pytest.raises(CallError, match="CANCELLED: this client was closed"):
            client.models()
    del client, calls, call
    gc.collect()
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


def test_closing_a_blocking_client_ends_a_call_that_has_no_connection_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody answers on the connection, so the call is retried until the client is closed."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        client = BlockingClient(f"127.0.0.1:{silent.getsockname()[1]}")
        call: Future[Any] = threads.submit(client.complete, "x")
        silent.accept()[0].close()  # the call has begun; the next connection stays without an answer
        client.close()
        with pytest.raises(CallError, match="CANCELLED: this client was closed"):
            call.result(timeout=WAIT_S)
    del client, call
    gc.collect()
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


def test_a_refused_connection_leaves_no_pending_task(caplog: pytest.LogCaptureFixture) -> None:
    client = BlockingClient("127.0.0.1:1")
    with pytest.raises(CallError, match=r"UNAVAILABLE|DEADLINE_EXCEEDED"):
        client.complete("x", timeout_s=0.3)
    with pytest.raises(CallError, match="UNAVAILABLE"):
        client.models()
    client.close()
    del client
    gc.collect()
    assert not [record.message for record in caplog.records if record.name == "asyncio"]


async def test_the_readmes_example_works(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    assert example.count('"127.0.0.1:8780"') == 1
    own = example.replace("127.0.0.1:8780", pair.client.address)
    await asyncio.to_thread(exec, compile(own, "README.md", "exec"), {})
    prompt, question = "def read_file(path):", "import os\n"
    text = f"{decode(expected(1, 60, prompt))} length\n{decode(expected(1, 60, question))}\n"
    assert capsys.readouterr().out == text


# ----------------------------------------------------------------------------------------- refusals


async def test_a_refused_call_comes_again_when_the_gateway_says_so(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.stop_after = 3
    _, address = await harness.add_gateway(harness.config(max_requests=1))
    client = harness.client(address)
    first = client.generate(PROMPT, GenerateOptions(max_tokens=9)).events()
    await anext(first)
    stream = client.generate(PROMPT, GenerateOptions(seed=4, max_tokens=6))
    collector = Collector()
    work = asyncio.create_task(collect(stream, collector))
    await until(lambda: stream.num_resumes >= 1, "it was refused, and has waited")
    await first.aclose()
    replica.script.resume.set()
    await work
    assert list(collector.completion().token_ids[0]) == expected(4, 6)


class PausesOnly(ManualClock):
    """Remembers what was slept."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.advance(seconds)


async def test_a_refusal_is_obeyed_and_no_two_clients_come_back_at_once() -> None:
    clock = PausesOnly()
    client = Client("127.0.0.1:1", clock)
    for _ in range(50):
        await client.pause(CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 5.0), 1)
    assert all(5.0 <= pause <= 5.0 * 1.25 for pause in clock.pauses)
    assert max(clock.pauses) > 1.05 * min(clock.pauses)
    await client.pause(CallError(grpc.StatusCode.UNAVAILABLE, "gone", 5.0), 1)
    assert clock.pauses[-1] <= 2.5, "what is unavailable may be there earlier"


@pytest.mark.parametrize(
    ("retry_after_s", "timeout_s", "is_tried_again"),
    [(3.0, None, True), (9.0, None, False), (3.0, 3.5, False), (None, None, False), (0.0, None, False)],
)
async def test_a_refusal_is_waited_for_within_patience_and_deadline(
    retry_after_s: float | None, timeout_s: float | None, is_tried_again: bool
) -> None:
    """Without a time to retry, or with none left, waiting is pointless."""
    clock = PausesOnly()
    stream = Client("127.0.0.1:1", clock).generate(PROMPT, timeout_s=timeout_s)
    error = CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s)
    assert stream._should_resume(error, clock.now()) is is_tried_again
    assert not Client("127.0.0.1:1", clock).generate(PROMPT, resume=False)._should_resume(error, clock.now())


def test_the_class_of_a_request_is_an_option() -> None:
    request = generate_request(PROMPT, GenerateOptions(service_class="batch"))
    assert request.service_class == pb.SERVICE_CLASS_BATCH


def test_parts_of_a_prompt_that_come_again_are_given_once() -> None:
    """Whatever cuts they have in the second call; the text of a part may end before that of its tokens."""
    parts = PromptParts()
    texts = ["a", "bc", "", "dé", "f", "g"]  # of each token, as far as it is certain

    def part(start: int, end: int) -> pb.PromptPart:
        logprobs = [pb.TokenLogprob(token_id=index) for index in range(start, end)]
        return pb.PromptPart(
            first_index=start, token_ids=range(start, end), text="".join(texts[start:end]), logprobs=logprobs
        )

    found: list[pb.PromptPart] = []
    for cuts in ([0, 2, 3], [0, 1, 4], [0, 3, 5, 6]):
        parts.begin_call()
        for start, end in itertools.pairwise(cuts):
            if (new := parts.new(part(start, end))) is not None:
                found.append(new)
    assert [token for it in found for token in it.token_ids] == list(range(6))
    assert [item.token_id for it in found for item in it.logprobs] == list(range(6))
    assert "".join(it.text for it in found) == "".join(texts)
