"""The gateway over real gRPC and real Links, in front of scripted replicas."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, Pair, decode, encode, expected, raw, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from patience import WAIT_S

from cluster.admission.config import AdmissionConfig
from cluster.api.client import Collector, GenerateStream
from cluster.api.generate_options import GenerateOptions, Turn
from cluster.api.public_ports import SERVICE_NAME
from cluster.errors import CallError
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import sample_seed
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import RequestFailed, StepFrame
from workers.stats_record import PathMeasure


async def collect(stream: GenerateStream, collector: Collector) -> None:
    async for event in stream:
        collector.add(event)


async def test_a_stream_is_prefilled_at_one_replica_and_decoded_at_another(pair: Pair) -> None:
    events = [event async for event in pair.client.generate(PROMPT, GenerateOptions(seed=7, max_tokens=12))]
    accepted, *deltas, finished = events
    assert isinstance(accepted, pb.Accepted)
    assert (accepted.seed, accepted.num_prompt_tokens) == (7, len(encode(PROMPT)))
    ids = [token for delta in deltas if isinstance(delta, pb.Delta) for token in delta.token_ids]
    assert ids == expected(7, 12)
    assert "".join(delta.text for delta in deltas if isinstance(delta, pb.Delta)) == decode(ids)
    assert isinstance(finished, pb.Finished)
    assert (finished.prefill_replica, finished.decode_replica) == ("p0", "d0")
    assert [(end.finish_reason, end.num_tokens) for end in finished.samples] == [
        (pb.FINISH_REASON_LENGTH, 12)
    ]
    usage, timing = finished.usage, finished.timing
    assert (usage.prompt_tokens, usage.cached.device, usage.completion_tokens) == (11, 10, 12)
    assert (timing.queue_ms, timing.prefill_ms) == (250.0, 750.0)
    assert timing.transfer_ms == pytest.approx(500.0)
    assert (timing.transport, timing.transfer_gb_s, timing.transfer_bytes) == ("shm", 8.192e-06, 4096)
    assert timing.attempts == 1
    assert 0 < timing.ttft_ms <= timing.e2e_ms
    assert timing.e2e_ms == pytest.approx(timing.ttft_ms + timing.decode_ms)


async def test_usage_tells_which_tier_had_the_cached_tokens(pair: Pair) -> None:
    pair.prefill.script.loaded = {"dram": 4, "nvme": 3, "remote": 1}
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=7, max_tokens=2))
    cached = done.finished.usage.cached
    assert (cached.device, cached.dram, cached.nvme, cached.remote) == (2, 4, 3, 1)
    timeline = (await pair.client.explain(done.request_id)).timeline
    (detail,) = (event.detail for event in timeline if event.name == "prefilled")
    assert detail == "10 tokens cached, 4 of them from dram, 3 of them from nvme, 1 of them from remote"


async def test_a_drawn_seed_is_told_and_gives_the_same_again(pair: Pair) -> None:
    first = await pair.client.complete(PROMPT, GenerateOptions(max_tokens=8))
    again = await pair.client.complete(PROMPT, GenerateOptions(max_tokens=8, seed=first.seed))
    assert first.token_ids == again.token_ids
    assert first.request_id != again.request_id


async def test_samples_have_their_own_seeds_and_share_the_submission(pair: Pair) -> None:
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=3, n=3, max_tokens=9))
    assert [list(ids) for ids in done.token_ids] == [expected(sample_seed(3, i), 9) for i in range(3)]
    assert [len(it.samples) for it in pair.prefill.submissions] == [3]
    assert done.finished.usage.completion_tokens == 27


async def test_text_token_ids_and_chat_are_the_same_prompt(pair: Pair) -> None:
    options = GenerateOptions(seed=1, max_tokens=4)
    text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    await pair.client.complete(text, options)
    await pair.client.complete([Turn("user", "the fox")], options)
    await pair.client.complete(encode(text), options)
    prompts = {it.prompt for replica in pair.harness.replicas.values() for it in replica.submissions}
    assert len(prompts) == 1


async def test_the_text_ends_before_a_stop_string_and_the_replicas_are_told(pair: Pair) -> None:
    ids = encode("the answer: stop here and nowhere else, the quick brown fox jumps over and over")
    text = decode(ids)
    for replica in pair.harness.replicas.values():
        replica.script.tokens = ids
    cut = text.index("nowhere")
    done = await pair.client.complete(
        PROMPT, GenerateOptions(max_tokens=len(ids), stop=["fox", "nowhere", "xyz"])
    )
    assert done.texts == (text[:cut],)
    assert done.finish_reasons == ("stop",)
    assert list(done.token_ids[0]) == ids[: len(done.token_ids[0])]
    assert len(done.token_ids[0]) < len(ids)
    await until(lambda: bool(pair.decode.cancels), "the decode replica is told to stop")


async def test_the_end_token_is_counted_and_not_shown(pair: Pair) -> None:
    pair.prefill.script.eos_at = pair.decode.script.eos_at = 5
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=2, max_tokens=50))
    assert done.finish_reasons == ("stop",)
    assert list(done.token_ids[0]) == [*expected(2, 5), 0]
    assert done.texts[0] == decode(expected(2, 5))


async def test_logprobs_come_with_their_tokens(pair: Pair) -> None:
    stream = pair.client.generate(PROMPT, GenerateOptions(seed=2, max_tokens=3, logprobs=2))
    deltas = [event async for event in stream if isinstance(event, pb.Delta)]
    found = [item for delta in deltas for item in delta.logprobs]
    assert [(it.logprob, [top.token_id for top in it.top]) for it in found] == [(-0.5, [0, 1])] * 3


async def test_decode_tokens_that_overtake_the_first_one_wait_for_it(pair: Pair) -> None:
    pair.prefill.script.hand_over_first = True
    work = asyncio.create_task(pair.client.complete(PROMPT, GenerateOptions(seed=4, max_tokens=6)))
    await until(lambda: pair.decode.is_idle() and bool(pair.decode._running), "decode has sent everything")
    assert not work.done()
    pair.prefill.script.resume.set()
    assert list((await work).token_ids[0]) == expected(4, 6)


async def test_a_cancel_reaches_both_replicas(pair: Pair) -> None:
    pair.decode.script.stop_after = 3
    stream = pair.client.generate(PROMPT, GenerateOptions(seed=4, max_tokens=100))
    events = stream.events()
    while not isinstance(await anext(events), pb.Delta):
        pass
    stream.cancel()
    with pytest.raises(CallError, match="CANCELLED"):
        await anext(events)
    await until(lambda: pair.decode.is_idle(), "the decode replica stops")
    assert pair.decode.cancels
    assert pair.prefill.cancels
    await until(lambda: pair.gateway.requests.num_running == 0, "the gateway forgets it")
    assert pair.gateway.requests.record(stream.request_id, "").state == "cancelled"


async def test_leaving_the_iteration_cancels(pair: Pair) -> None:
    pair.decode.script.stop_after = 3
    events = pair.client.generate(PROMPT, GenerateOptions(max_tokens=100)).events()
    await anext(events)
    await anext(events)
    await events.aclose()
    await until(lambda: bool(pair.decode.cancels), "the decode replica is told")


async def test_the_deadline_ends_the_stream_and_the_work(pair: Pair) -> None:
    pair.decode.script.stop_after = 3
    stream = pair.client.generate(PROMPT, GenerateOptions(max_tokens=100), timeout_s=0.4)
    with pytest.raises(CallError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    (submission,) = pair.prefill.submissions
    assert submission.deadline_s is not None
    assert 0 < submission.deadline_s < 0.41  # gRPC rounds
    await until(lambda: bool(pair.decode.cancels), "the decode replica is told")


@pytest.mark.parametrize("dying", ["prefill", "decode"])
async def test_a_request_survives_the_death_of_a_replica(harness: GatewayHarness, dying: str) -> None:
    for replica_id, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        script = (await harness.add_replica(replica_id, role)).script
        script.hand_over_first = dying == "prefill"  # and its first token never comes
        script.stop_after = 10 if dying == "decode" else None
    _, address = await harness.add_gateway()
    client = harness.client(address)
    stream = client.generate(PROMPT, GenerateOptions(seed=9, n=2, max_tokens=40))
    collector = Collector()
    work = asyncio.create_task(collect(stream, collector))
    await until(lambda: [it.role for it in harness.busy()] == [dying], "only the victim still works")
    await until(lambda: collector.num_tokens == (0 if dying == "prefill" else 22), "its tokens are here")
    (victim,) = harness.busy()
    await victim.die()
    for replica in harness.replicas.values():
        replica.script.resume.set()
    await work
    done = collector.completion()
    assert [list(ids) for ids in done.token_ids] == [expected(sample_seed(9, i), 40) for i in range(2)]
    assert done.texts == tuple(decode(ids) for ids in done.token_ids)
    assert done.finished.timing.attempts == 2
    explanation = await client.explain(done.request_id)
    assert [it.attempt for it in explanation.decisions] == [1, 2]
    second = explanation.decisions[1]
    assert victim.identity.replica_id not in (second.prefill, second.decode)


async def test_the_prefill_replica_is_not_missed_after_the_hand_over(harness: GatewayHarness) -> None:
    prefill = await harness.add_replica("p0", "prefill")
    decode_replica = await harness.add_replica("d0", "decode")
    decode_replica.script.stop_after = 5
    _, address = await harness.add_gateway()
    client = harness.client(address)
    seen: list[int] = []
    async for event in client.generate(PROMPT, GenerateOptions(seed=5, max_tokens=20)):
        if isinstance(event, pb.Delta):
            seen.extend(event.token_ids)
            if len(seen) >= 5 and not decode_replica.script.resume.is_set():
                await prefill.die()
                decode_replica.script.resume.set()
        if isinstance(event, pb.Finished):
            assert event.timing.attempts == 1
    assert seen == expected(5, 20)


async def test_replicas_hear_how_long_a_request_may_still_wait_also_after_a_retry(pair: Pair) -> None:
    pair.prefill.script.num_refusals = pair.decode.script.num_refusals = 1
    await pair.client.complete(PROMPT, GenerateOptions(seed=6, max_tokens=5))
    aging_s = AdmissionConfig().standard.aging_s
    due_s = [it.due_s for it in (*pair.prefill.submissions, *pair.decode.submissions)]
    assert len(due_s) >= 2
    assert all(each is not None and aging_s - 5.0 < each < aging_s for each in due_s)


async def test_a_refused_request_waits_and_tries_again(pair: Pair) -> None:
    pair.prefill.script.num_refusals = pair.decode.script.num_refusals = 1  # d0 is asked to do it alone
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=6, max_tokens=5))
    assert list(done.token_ids[0]) == expected(6, 5)
    assert done.finished.timing.attempts == 3


async def test_a_refused_request_goes_at_once_to_a_replica_that_has_capacity(harness: GatewayHarness) -> None:
    replicas = [await harness.add_replica(name, "decode") for name in ("d0", "d1", "d2")]
    gateway, address = await harness.add_gateway()
    for replica in replicas:
        replica.script.num_refusals = 1
    options = GenerateOptions(seed=6, max_tokens=3)
    began_at = harness.clock.now()
    done = await harness.client(address).complete(PROMPT, options)
    # Refused by each of the three, then by none. A replica that refused is heard again within 0.2 s.
    assert done.finished.timing.attempts == 4
    asked = [replica for replica in replicas for _ in replica.submissions]
    assert {it.identity.replica_id for it in asked[:3]} <= {"d0", "d1", "d2"}
    assert all(len(replica.submissions) >= 1 for replica in replicas), "none was asked twice before all were"
    assert harness.clock.now() - began_at < 1.0
    assert len(gateway.requests.admission.retries.queue) == 0


async def test_a_request_that_waits_for_capacity_can_be_cancelled(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    gateway, address = await harness.add_gateway()
    replica.script.num_refusals = 1000
    stream = harness.client(address).generate(PROMPT, resume=False)
    work = asyncio.create_task(anext(stream.events()))
    retries = gateway.requests.admission.retries.queue
    await until(lambda: len(retries) == 1, "it was refused, and waits until the replica is heard again")
    await gateway.requests.close()
    await until(lambda: gateway.requests.num_running == 0, "it has ended")
    assert len(retries) == 0
    gateway.requests.admission.check()
    await asyncio.gather(work, return_exceptions=True)


async def test_endless_refusal_is_resource_exhausted_with_a_time_to_retry(pair: Pair) -> None:
    pair.prefill.script.num_refusals = pair.decode.script.num_refusals = 1000
    with pytest.raises(CallError) as caught:
        await pair.client.complete(PROMPT, GenerateOptions(max_tokens=5), resume=False)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.retry_after_s is not None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid", grpc.StatusCode.INVALID_ARGUMENT),
        ("grammar", grpc.StatusCode.INVALID_ARGUMENT),
        ("deadline", grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_what_cannot_be_retried_fails_at_once(pair: Pair, code: str, status: grpc.StatusCode) -> None:
    pair.prefill.script.failure = RequestFailed("", 0, code, "because")
    with pytest.raises(CallError, match="because") as caught:
        await pair.client.complete(PROMPT, GenerateOptions(max_tokens=5))
    assert caught.value.code is status
    fields = {"invalid": "prompt", "grammar": "constraint"}
    assert [it.field for it in caught.value.fields] == ([fields[code]] if code in fields else [])
    assert len(pair.prefill.submissions) == 1


async def test_what_a_request_had_used_is_in_the_status_of_its_failure(pair: Pair) -> None:
    pair.decode.script.stop_after = 2
    events = pair.client.generate(PROMPT, GenerateOptions(max_tokens=5)).events()
    num_tokens = 0
    while num_tokens < 3:
        event = await anext(events)
        num_tokens += len(event.token_ids) if isinstance(event, pb.Delta) else 0
    made = pair.prefill.submissions[-1]
    late = RequestFailed(made.request_id, made.attempt, "deadline", "too late")
    pair.decode.broadcast(StepFrame(failures=(late,)))
    with pytest.raises(CallError, match="too late") as caught:
        await anext(events)
    usage = caught.value.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(encode(PROMPT)), 3)
    assert usage.cached.device == min(16, usage.prompt_tokens - 1)
    listed = (await pair.client.requests())[0]
    assert (listed.state, listed.num_output_tokens) == (pb.REQUEST_STATE_FAILED, 3)
    assert listed.num_cached_tokens == usage.cached.device


async def test_a_request_that_was_not_accepted_has_used_nothing(pair: Pair) -> None:
    with pytest.raises(CallError) as caught:
        await pair.client.complete(PROMPT, GenerateOptions(max_tokens=5, temperature=-1.0))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.usage is None


async def test_without_replicas_requests_are_unavailable_and_health_says_so(harness: GatewayHarness) -> None:
    _, address = await harness.add_gateway()
    client = harness.client(address)
    stream = client.generate(PROMPT, resume=False)
    with pytest.raises(CallError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.retry_after_s is not None
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await harness.add_replica("d0", "decode")
        watch = stub.Watch(request)
        async for reply in watch:
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
    done = await client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=4))
    assert list(done.token_ids[0]) == expected(1, 4)
    assert done.finished.prefill_replica == done.finished.decode_replica == "d0"


async def test_64_streams_at_once_do_not_mix(pair: Pair) -> None:
    prompts = [f"the fox number {index} jumps" for index in range(64)]
    jobs = [
        pair.client.complete(prompt, GenerateOptions(seed=index, max_tokens=24))
        for index, prompt in enumerate(prompts)
    ]
    results = await asyncio.gather(*jobs)
    for index, (prompt, done) in enumerate(zip(prompts, results, strict=True)):
        assert list(done.token_ids[0]) == expected(index, 24, prompt)
    assert pair.gateway.requests.counters.num_ended("finished") == 64
    assert pair.gateway.requests.num_running == 0


async def test_a_client_that_does_not_read_holds_up_nobody(pair: Pair) -> None:
    idle = pair.client.generate(PROMPT, GenerateOptions(seed=1, max_tokens=200, logprobs=20)).events()
    await anext(idle)
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=2, max_tokens=20))
    assert list(done.token_ids[0]) == expected(2, 20)
    rest = [event async for event in idle]
    ids = [token for event in rest if isinstance(event, pb.Delta) for token in event.token_ids]
    assert ids == expected(1, 200)


async def test_blocks_that_a_replica_reports_count_as_cached(pair: Pair) -> None:
    prompt = encode(PROMPT * 4)
    before = await pair.client.complete(prompt, GenerateOptions(seed=1, max_tokens=2, tenant="a"))
    decisions = (await pair.client.explain(before.request_id)).decisions
    assert decisions[0].decode_cached_tokens == 0
    pair.decode.hold(raw(prompt), "b")
    await pair.client.complete("x", GenerateOptions(max_tokens=4))  # later on the same Link
    held = await pair.client.complete(prompt, GenerateOptions(seed=1, max_tokens=2, tenant="b"))
    decision = (await pair.client.explain(held.request_id)).decisions[0]
    assert decision.decode_cached_tokens == len(prompt) // 16 * 16
    assert {it.side for it in decision.candidates} == {"prefill", "decode", "local"}


async def test_a_decode_replica_that_cannot_be_written_to_does_all_itself(pair: Pair) -> None:
    pair.harness.replicas["p0"].script.failure = RequestFailed("", 0, "peer", "no path")
    done = await pair.client.complete(PROMPT, GenerateOptions(max_tokens=4))
    assert (done.finished.prefill_replica, done.finished.decode_replica) == ("d0", "d0")
    assert done.finished.timing.attempts == 2


async def shown_paths(pair: Pair, num_paths: int) -> list[admin_pb.Path]:
    """Of p0, as soon as there are so many."""
    clock = SystemClock()
    async with asyncio.timeout(WAIT_S):
        while True:
            (written,) = await pair.admin.paths(["p0"])
            if len(written.paths) == num_paths:
                return list(written.paths)
            await clock.sleep(0.01)


async def test_missing_paths_are_told_of_those_to_replicas_that_there_are(pair: Pair) -> None:
    p0, d0 = pair.harness.replicas["p0"], pair.harness.replicas["d0"]
    gone = ReplicaIdentity("d9", 1)
    paths = [PathMeasure(peer, 0, 0, "", 0.0, 0.0, "", "too slow") for peer in (d0.identity, gone)]
    p0.report(paths)
    found = await shown_paths(pair, 1)
    assert [(it.peer_replica_id, it.transport, it.instead_of) for it in found] == [("d0", "", "too slow")]
    p0.report([])
    assert await shown_paths(pair, 0) == []
    assert [it.replica_id for it in await pair.admin.paths()] == ["d0", "p0"]
    assert await pair.admin.paths(["d9"]) == []


async def test_status_names_replicas_and_models(pair: Pair) -> None:
    status = await pair.admin.status()
    assert [(it.replica_id, it.role, it.state) for it in status.replicas] == [
        ("d0", admin_pb.REPLICA_ROLE_DECODE, admin_pb.REPLICA_STATE_READY),
        ("p0", admin_pb.REPLICA_ROLE_PREFILL, admin_pb.REPLICA_STATE_READY),
    ]
    assert status.replicas[0].load.num_total_blocks == 1000
    assert status.ready
    assert status.versions["grpcio"] == grpc.__version__
    (model,) = await pair.client.models()
    assert (model.name, model.max_context_tokens, model.vocab_size) == ("m", 512, 400)


async def test_a_leaving_replica_gets_nothing_new(harness: GatewayHarness) -> None:
    first = await harness.add_replica("d0", "decode")
    await harness.add_replica("d1", "decode")
    gateway, address = await harness.add_gateway()
    first.leave()
    leaving = lambda: [it.state for it in gateway.connections.views()] == ["leaving", "ready"]  # noqa: E731
    await until(leaving, "it leaves")
    client = harness.client(address)
    for _ in range(4):
        done = await client.complete(PROMPT, GenerateOptions(max_tokens=2))
        assert done.finished.decode_replica == "d1"


async def test_tokenize_and_detokenize(pair: Pair) -> None:
    ids = await pair.client.tokenize("the fox €")
    assert ids == encode("the fox €")
    assert await pair.client.detokenize([*ids, 0]) == "the fox €"
    chat = await pair.client.tokenize([Turn("user", "hi")])
    assert chat == encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_request_id_is_unique_while_it_runs(pair: Pair) -> None:
    pair.decode.script.stop_after = 3
    events = pair.client.generate(PROMPT, GenerateOptions(max_tokens=10, request_id="mine")).events()
    await anext(events)
    with pytest.raises(CallError, match="ALREADY_EXISTS"):
        await pair.client.complete(PROMPT, GenerateOptions(max_tokens=10, request_id="mine"))
    assert (await pair.client.explain("mine")).state == pb.REQUEST_STATE_RUNNING
    await events.aclose()
    with pytest.raises(CallError, match="NOT_FOUND"):
        await pair.client.explain("unheard-of")


async def test_more_requests_than_allowed_are_refused_with_a_time_to_retry(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.stop_after = 3
    gateway, address = await harness.add_gateway(harness.config(max_requests=2))
    client = harness.client(address)
    running = [client.generate(PROMPT, GenerateOptions(max_tokens=9)).events() for _ in range(2)]
    for events in running:
        await anext(events)
    with pytest.raises(CallError, match="RESOURCE_EXHAUSTED") as caught:
        await client.complete(PROMPT, resume=False)
    assert caught.value.is_refusal
    assert "gateway.max_requests" in caught.value.message
    assert gateway.requests.admission.refusals.counts == {("requests", "standard"): 1}
    # Streams of another gateway that has ended are taken all the same.
    _, other = await harness.add_gateway()
    stream = harness.client(other, address).generate(PROMPT, GenerateOptions(max_tokens=9, seed=3))
    events = stream.events()
    for _ in range(2):
        await anext(events)
    await harness.gateways.pop().stop()

    async def read() -> None:
        async for _ in events:
            pass

    reading = asyncio.create_task(read())
    await until(lambda: gateway.requests.num_running == 3, "it is resumed here")
    replica.script.resume.set()
    await reading
    for events in running:
        await events.aclose()


async def test_reflection_names_the_service(harness: GatewayHarness) -> None:
    _, address = await harness.add_gateway()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        reply = await anext(aiter(call))
    names = {service.name for service in reply.list_services_response.service}
    assert {"tandem.v1.Inference", "grpc.health.v1.Health"} <= names
