"""The Python clients: streams that go on at another gateway, deadlines, and the one without an event loop."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from gateway_house import GatewayHouse, Pair, until
from gateway_model import PROMPT, decode, expected

from cluster.blocking_client import BlockingClient
from cluster.client import Client, Collector, GenerateOptions, GenerateStream, generate_request
from cluster.errors import CallError
from cluster.proto import tandem_pb2 as pb
from cluster.samples import sample_seed


async def collect(stream: GenerateStream, collector: Collector) -> None:
    async for event in stream:
        collector.add(event)


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
async def test_a_stream_goes_on_at_another_gateway(house: GatewayHouse, stop: tuple[str, ...]) -> None:
    replica = await house.add_replica("d0", "decode")
    replica.script.stop_after = 9
    first, address = await house.add_gateway()
    _, other_address = await house.add_gateway()
    client = house.client(address, other_address)
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
    request.resume.add(sample=0, token_ids=tokens[0][:5], finish_reason="stop")
    request.resume.add(sample=1, token_ids=tokens[1][:5])
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


@pytest.mark.parametrize(("ending", "reason"), [([0], "stop"), ([], "length")])
async def test_a_resume_with_nothing_to_do_finishes(pair: Pair, ending: list[int], reason: str) -> None:
    """Also for a client that does not tell the finish: an end token, or max_tokens, speaks for itself."""
    request = generate_request(PROMPT, GenerateOptions(seed=4, max_tokens=6))
    request.resume.add(sample=0, token_ids=[*expected(4, 6 - len(ending)), *ending])
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
    call = aiter(pair.client.stub().Generate(request))
    assert (await anext(call)).HasField("accepted")
    pair.decode.script.resume.set()
    ids = [token async for response in call for token in response.delta.token_ids]
    assert ids == expected(4, 8)[2:]
    with pytest.raises(CallError, match="CANCELLED"):
        [event async for event in old]
    first, second = pair.prefill.submissions
    assert first.request_id != second.request_id


async def test_without_resume_the_loss_is_told(house: GatewayHouse) -> None:
    replica = await house.add_replica("d0", "decode")
    replica.script.stop_after = 3
    gateway, address = await house.add_gateway()
    stream = house.client(address).generate(PROMPT, resume=False).events()
    await anext(stream)
    await gateway.stop()
    with pytest.raises(CallError, match="UNAVAILABLE"):
        [event async for event in stream]


async def test_an_unreachable_gateway_is_tried_until_the_deadline() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(CallError) as caught:
            await client.complete(PROMPT, timeout_s=0.5)
    assert caught.value.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


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
            found.append(client.explain(done.request_id).state)
            found.append((client.status().ready, client.models()[0].name))
            events = client.generate("x", GenerateOptions(max_tokens=400))
            next(events)
            events.close()  # type: ignore[attr-defined]

    thread = threading.Thread(target=use, args=(pair.client._addresses[0],))
    thread.start()
    await until(lambda: not thread.is_alive(), "the thread has done its calls")
    thread.join()
    assert found == [
        "the fox",
        expected(2, 5, "the fox"),
        ["Accepted", "Delta", "Finished"],
        "finished",
        (True, "m"),
    ]
