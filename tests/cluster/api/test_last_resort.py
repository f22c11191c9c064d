"""Whatever is raised by whatever a call uses, over gRPC and HTTP: the call has exactly one end, nothing of it
is held, and the next call is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, NoReturn

import aiohttp
import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, until
from http_harness import CHAT, HttpFrontHarness, Reply

import cluster.http.chat_answer
import cluster.http.completions
import cluster.http.endpoints
import cluster.http.server
from cluster.admission.admission import RequestAdmission
from cluster.admission.admission_checks import AdmissionChecks
from cluster.admission.quotas import Quotas
from cluster.api.output_messages import OutputMessages
from cluster.api.replies import StatusService
from cluster.api.servicer import InferenceServicer
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_manager import RequestManager
from cluster.gateway.request_state import RequestState
from cluster.identity.authenticator import Authenticator
from cluster.identity.resume_tokens import ResumeTokens
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from cluster.text.preprocess import Preprocessor
from cluster.text.sample_text import SampleText
from cluster.text.tokenizer import ByteDetokenizer, ModelText
from router.service import RouterService

WAIT_S = 5.0


class Panic(BaseException):
    """What no `except Exception` sees."""


class Fault(NamedTuple):
    """A method that fails, always with the same kind of error."""

    where: Any
    name: str


# What calls of the gateway use, by what it is to them.
COLLABORATORS: dict[str, Fault] = {
    "authenticator": Fault(Authenticator, "identify"),
    "manager": Fault(RequestManager, "accept"),
    "limits": Fault(RequestManager, "limits"),
    "early admission": Fault(AdmissionChecks, "check_early"),
    "quota of requests": Fault(Quotas, "admit"),
    "tokenizer": Fault(Preprocessor, "encode_now"),
    "decoder": Fault(Preprocessor, "decode"),
    "chat template": Fault(Preprocessor, "render_chat"),
    "grammar": Fault(Preprocessor, "grammar"),
    "preprocessor": Fault(Preprocessor, "prepare"),
    "admission": Fault(RequestAdmission, "place"),
    "quota of prompts": Fault(Quotas, "take_prompt"),
    "counters": Fault(GatewayCounters, "arrived"),
    "start of the request": Fault(RequestState, "start"),
    "resume token": Fault(ResumeTokens, "issue"),
    "wait for a turn": Fault(RequestAdmission, "wait"),
    "routed": Fault(RequestState, "on_routed"),
    "connections": Fault(ReplicaConnections, "send"),
    "prefilled": Fault(RequestState, "on_prefilled"),
    "hand-over": Fault(RequestState, "on_handed_over"),
    "delta": Fault(RequestState, "on_delta"),
    "embedding": Fault(RequestState, "on_embedding"),
    "logprobs": Fault(RequestState, "on_prompt_logprobs"),
    "sample text": Fault(SampleText, "push"),
    "detokenizer": Fault(ByteDetokenizer, "push"),
    "detokenizer made": Fault(ModelText, "detokenizer"),
    "router's release": Fault(RouterService, "on_finished"),
    "summary": Fault(RequestState, "summary"),
    "first message": Fault(OutputMessages, "first"),
    "output message": Fault(OutputMessages, "of"),
    "last message": Fault(OutputMessages, "last"),
    "status": Fault(StatusService, "model"),
    "explanation": Fault(StatusService, "explain"),
    "listing": Fault(StatusService, "list_requests"),
}
HTTP_COLLABORATORS: dict[str, Fault] = {
    "decoding of bodies": Fault(cluster.http.endpoints, "decode"),
    "translation": Fault(cluster.http.chat, "translate"),
    "chat answer": Fault(cluster.http.chat_answer.ChatAnswer, "take"),
    "end of the chat answer": Fault(cluster.http.chat_answer.ChatAnswer, "last"),
    "whole chat answer": Fault(cluster.http.chat_answer.ChatAnswer, "whole"),
    "completion answer": Fault(cluster.http.completions.CompletionAnswer, "take"),
    "quota headers": Fault(cluster.http.server, "rate_limit_headers"),
    "servicer": Fault(InferenceServicer, "Generate"),
    "sending": Fault(cluster.http.server, "send_whole"),
}

RPCS: dict[str, Any] = {
    "Generate": pb.GenerateRequest(text=PROMPT, max_tokens=4),
    "Generate a chat": pb.GenerateRequest(
        chat=pb.ChatPrompt(
            messages=[pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="hello")])]
        ),
        max_tokens=4,
    ),
    "Embed": pb.EmbedRequest(inputs=[pb.EmbedInput(text="a b"), pb.EmbedInput(text="c")]),
    "Score": pb.ScoreRequest(text="a b", continuations=[pb.EmbedInput(text="c d"), pb.EmbedInput(text="e")]),
    "Tokenize": pb.TokenizeRequest(text="a b"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[5, 6]),
    "ListModels": pb.ListModelsRequest(),
    "Explain": pb.ExplainRequest(request_id="known"),
    "ListRequests": pb.ListRequestsRequest(),
}
CALLS: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": ("POST", "/v1/completions", {"model": "m", "prompt": ["a", "b"], "max_tokens": 4}),
    "completions stream": (
        "POST",
        "/v1/completions",
        {"model": "m", "prompt": "a", "max_tokens": 4, "stream": True},
    ),
    "responses": ("POST", "/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 4}),
    "messages stream": (
        "POST",
        "/v1/messages",
        {"model": "m", "messages": CHAT["messages"], "max_tokens": 4, "stream": True},
    ),
    "count": ("POST", "/v1/messages/count_tokens", {"model": "m", "messages": CHAT["messages"]}),
    "embeddings": ("POST", "/v1/embeddings", {"model": "m", "input": ["a", "b"]}),
    "tokenize": ("POST", "/tokenize", {"prompt": "a"}),
    "detokenize": ("POST", "/detokenize", {"tokens": [5, 6]}),
    "models": ("GET", "/v1/models", None),
}
# Of a fault that is nothing to the call, which is served all the same.
HARMLESS = {"router's release"}


@pytest.fixture
async def front(harness: GatewayHarness) -> AsyncIterator[HttpFrontHarness]:
    config = harness.config(auth={"tenants": {"*": {"concurrent_tokens": 100_000}}})
    async with HttpFrontHarness(harness, config) as built:
        yield built


class Raising:
    """Makes a collaborator raise, and counts how often it did."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error
        self.num_raised = 0

    def __call__(self, *args: object, **options: object) -> NoReturn:
        self.num_raised += 1
        raise self._error()


async def call_rpc(stubs: Any, name: str) -> tuple[grpc.StatusCode, int]:
    """Return the status of a call and the number of its messages; a call without an end is a failure."""
    request, call = RPCS[name], getattr(stubs, name.partition(" ")[0])(RPCS[name])
    num_messages = 0
    async with asyncio.timeout(WAIT_S):
        try:
            if isinstance(request, pb.GenerateRequest):
                async for _ in call:
                    num_messages += 1
            else:
                await call
                num_messages = 1
        except grpc.aio.AioRpcError:
            pass
        return await call.code(), num_messages


async def nothing_is_held(front: HttpFrontHarness) -> None:
    """Wait until the gateway and the replicas hold nothing of any call."""
    manager = front.gateway.requests
    await until(lambda: manager.num_running == 0, "no request runs")
    await until(lambda: not front.harness.busy(), "no replica works")
    await until(lambda: manager.admission.bytes.num_bytes == 0, "no bytes are queued")
    await until(lambda: manager.unread.num_bytes == 0, "no output is unread")
    quotas = manager.charges.quotas._tenants
    assert {name: it.reserved for name, it in quotas.items() if it.reserved} == {}
    assert manager.acceptance.running._num_arriving == 0
    assert [it.get_name() for it in asyncio.all_tasks() if it.get_name() == "request-timer"] == []


def open_stubs(front: HttpFrontHarness, port: int) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    return channel, inference_pb2_grpc.InferenceStub(channel)


KINDS = ("panic", "exception", "cancellation of something else")


def errors() -> dict[str, Callable[[], BaseException]]:
    return {
        "panic": lambda: Panic("with words of the prompt"),
        "exception": lambda: RuntimeError("with words of the prompt"),
        "cancellation of something else": asyncio.CancelledError,
    }


@pytest.mark.parametrize("kind", KINDS)
async def test_each_grpc_call_has_one_status_whatever_is_raised(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ports = front.gateway._ports
    assert ports.clients is not None
    channel, stubs = open_stubs(front, ports.clients.number)
    wrong, reached = [], set()
    for name, fault in COLLABORATORS.items():
        for rpc in RPCS:
            raising = Raising(errors()[kind])
            with monkeypatch.context() as context:
                context.setattr(fault.where, fault.name, raising)
                try:
                    code, _ = await call_rpc(stubs, rpc)
                except TimeoutError:
                    wrong.append((name, rpc, "no end"))
                    continue
            if raising.num_raised:
                reached.add(name)
                if code is not grpc.StatusCode.INTERNAL and name not in HARMLESS:
                    wrong.append((name, rpc, code.name))
            elif code is not grpc.StatusCode.OK and rpc != "Explain":
                wrong.append((name, rpc, code.name))
        await nothing_is_held(front)
    assert wrong == []
    assert set(COLLABORATORS) - reached == set()
    for rpc in RPCS.keys() - {"Explain"}:
        assert (await call_rpc(stubs, rpc))[0] is grpc.StatusCode.OK
    await channel.close()


def is_whole(reply: Reply, streams: bool) -> bool:
    """Whether an answer is complete, or says that it is not."""
    if reply.status == 200 and streams:
        name, last = reply.events[-1]
        return last == "[DONE]" or name in ("message_stop", "error") or "error" in last
    return reply.status in (200, 500)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_http_request_has_one_answer_whatever_is_raised(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    wrong, reached = [], set()
    faults = {**COLLABORATORS, **HTTP_COLLABORATORS}
    for name, fault in faults.items():
        for call, (method, path, body) in CALLS.items():
            raising = Raising(errors()[kind])
            options = {} if body is None else {"json": body}
            with monkeypatch.context() as context:
                context.setattr(fault.where, fault.name, raising)
                try:
                    reply = await front.send(method, path, **options)
                except aiohttp.ClientError as error:  # the client sees that the answer was cut off
                    if not raising.num_raised:
                        wrong.append((name, call, repr(error)))
                    elif name != "sending":  # of which nothing is left to answer with
                        wrong.append((name, call, "cut off"))
                    continue
            if raising.num_raised:
                reached.add(name)
                if (
                    name != "sending"
                    and reply.status == 500
                    and b"something went wrong in the gateway" not in reply.body
                ):
                    wrong.append((name, call, reply.body.decode()))
            if b"words of the prompt" in reply.body or not is_whole(reply, "stream" in call):
                wrong.append((name, call, reply.body.decode()))
            if raising.num_raised and reply.status == 200 and "stream" not in call and name not in HARMLESS:
                wrong.append((name, call, "served"))
        await nothing_is_held(front)
    assert wrong == []
    unreached = {"explanation", "listing", "logprobs", "sending"}
    assert set(faults) - reached <= unreached
    assert (await front.chat()).status == 200


# ------------------------------------------------------------------------------------------ the tokenizer


PANIC: type[BaseException] = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


async def test_a_panic_of_the_tokenizer_is_an_error_of_the_prompt(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = front.gateway._ports
    assert ports.clients is not None
    channel, stubs = open_stubs(front, ports.clients.number)
    monkeypatch.setattr(ModelText, "_encode", Raising(lambda: PANIC("on words of the prompt")))
    for rpc in ("Generate", "Generate a chat", "Embed", "Score", "Tokenize"):
        assert (await call_rpc(stubs, rpc))[0] is grpc.StatusCode.INVALID_ARGUMENT
    for call in ("chat", "chat stream", "completions", "count", "embeddings", "tokenize"):
        method, path, body = CALLS[call]
        reply = await front.send(method, path, json=body)
        assert reply.status == 400
        assert b"tokenizer fails on this text" in reply.body
    await nothing_is_held(front)
    await channel.close()


async def test_a_request_that_breaks_ends_alone(
    front: HttpFrontHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbour's part comes in the same frames."""
    front.harness.replicas["d0"].script.stop_after = 2
    neighbour = asyncio.create_task(front.chat(seed=2, max_tokens=8))
    broken = asyncio.create_task(front.chat(seed=1, max_tokens=8, stream=True))
    await until(lambda: len(front.harness.replicas["d0"].decoding) == 2, "both decode")
    on_delta = RequestState.on_delta

    def break_one(state: RequestState, source: Any, delta: Any, now: float) -> None:
        if state.prepared.seed == 1:
            raise Panic
        on_delta(state, source, delta, now)

    monkeypatch.setattr(RequestState, "on_delta", break_one)
    front.harness.replicas["d0"].script.resume.set()
    assert (await neighbour).status == 200
    reply = await broken
    # As an event, if the stream had begun by then.
    error = reply.events[-1][1]["error"] if reply.events else reply.error
    assert error["code"] == "internal_error"
    await until(lambda: bool(front.harness.replicas["d0"].cancels), "the replica is told to stop")
    await nothing_is_held(front)
