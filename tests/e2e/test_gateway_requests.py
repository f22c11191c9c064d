"""Real requests through the real gateway, engine cores and ranks: each client gets the tokens of the
model."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch
import transformers
from e2e_front import Front, copy_tiny, prompt, tokens_alone
from e2e_harness import E2eHarness, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api.client import GenerateStream
from cluster.api.generate_options import Turn
from cluster.api.public_ports import SERVICE_NAME
from cluster.errors import CallError
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import sample_seed

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = {"kv_tokens": 8192, "chunk_tokens": 64}
TEXT = "import os\n\ndef read_lines(path):\n    with open(path) as file:\n        return"
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}


class Reference:
    """The same weights in transformers, in fp32."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir)

    @torch.inference_mode()
    def greedy(self, tokens: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """The continuation, and its log-probabilities [num_tokens, V]."""
        given = torch.tensor([tokens])
        output = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = output.sequences[0, len(tokens) :].tolist()
        return ids, torch.cat(output.logits).log_softmax(-1)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tiny(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Reference:
    return Reference(tiny_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tiny_dir: Path) -> AsyncIterator[Front]:
    """p0 (prefill) and d0 (decode) behind a gateway; b0 (both) beside it, for what one engine gives alone."""
    roles = {"p0": "prefill", "d0": "decode", "b0": "both"}
    async with AsyncExitStack() as ends:
        harness = await ends.enter_async_context(E2eHarness(tiny_dir))
        p0, d0, _ = await harness.add_all(roles, engine=ENGINE)
        built = Front(harness, tiny_dir)
        await built.open()
        ends.push_async_callback(built.close)
        await built.register(p0, d0)
        yield built


def alone(front: Front) -> Callable[..., Any]:
    return functools.partial(tokens_alone, front.harness.replicas["b0"], front.harness)


# ------------------------------------------------------------------------------------------ the tokens


async def test_a_stream_is_transformers_greedy_continuation(front: Front, reference: Reference) -> None:
    call = await front.complete(TEXT, max_tokens=40)
    tokens = reference.tokenizer(TEXT)["input_ids"]
    wanted, _ = reference.greedy(tokens, 40)
    assert call.sequence == wanted
    assert call.texts[0] == reference.tokenizer.decode(wanted)
    assert call.accepted is not None
    assert call.accepted.num_prompt_tokens == len(tokens)
    assert call.finished is not None
    assert (call.finished.prefill_replica, call.finished.decode_replica) == ("p0", "d0")
    assert [end.finish_reason for end in call.finished.samples] == [pb.FINISH_REASON_LENGTH]
    assert call.finished.usage.completion_tokens == 40
    timing = call.finished.timing
    assert (timing.transport, timing.attempts) == ("shm", 1)
    assert timing.transfer_bytes > 0
    assert 0 < timing.ttft_ms < timing.e2e_ms
    await front.harness.quiet()


async def test_a_long_prompt_in_many_chunks_gives_the_same(front: Front, reference: Reference) -> None:
    tokens = prompt(1, 700)
    call = await front.complete(tokens, max_tokens=24)
    assert call.sequence == reference.greedy(tokens, 24)[0]
    await front.harness.quiet()


async def test_a_shared_prefix_is_cached_the_second_time(front: Front) -> None:
    shared = prompt(2, 160)
    calls = [await front.complete(shared + prompt(3 + i, 20), max_tokens=4) for i in range(2)]
    usages = [call.finished.usage for call in calls if call.finished is not None]
    assert [usage.prompt_tokens for usage in usages] == [180, 180]
    assert [usage.cached.device for usage in usages] == [0, 160]
    moved = [call.finished.timing.transfer_bytes for call in calls if call.finished is not None]
    assert moved[1] * 6 == moved[0], "2 of 12 blocks are missing at the decode side"
    other = await front.complete(shared + prompt(5, 20), max_tokens=4, tenant="other")
    assert other.finished is not None
    assert other.finished.usage.cached.device == 0, "tenants share nothing"
    await front.harness.quiet()


async def test_a_chat_goes_through_the_models_template(front: Front, reference: Reference) -> None:
    turns = [Turn("system", "You write Python."), Turn("user", "Sort a list of words by their length.")]
    text = reference.tokenizer.apply_chat_template(
        [turn._asdict() for turn in turns], tokenize=False, add_generation_prompt=True
    )
    tokens = reference.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert await front.client.tokenize(turns) == tokens
    call = await front.complete(turns, max_tokens=16)
    assert call.sequence == reference.greedy(tokens, 16)[0]


async def test_three_samples_are_reproducible_and_each_is_its_own(front: Front) -> None:
    tokens = prompt(6, 70)
    calls = [await front.complete(tokens, n=3, seed=5, max_tokens=20, **SAMPLING) for _ in range(2)]
    assert calls[0].tokens == calls[1].tokens
    harness = front.harness
    for index in range(3):
        single = harness.submission(
            f"sample{index}", tokens, seed=sample_seed(5, index), max_tokens=20, **SAMPLING
        )
        assert calls[0].tokens[index] == (await harness.run(harness.replicas["b0"], single)).sequence()
    assert len({tuple(calls[0].tokens[index]) for index in range(3)}) == 3
    await harness.quiet()


async def test_logprobs_are_those_of_the_model(front: Front, reference: Reference) -> None:
    call = await front.complete(TEXT, max_tokens=6, logprobs=3)
    tokens, logprobs = reference.greedy(reference.tokenizer(TEXT)["input_ids"], 6)
    assert len(call.logprobs) == 6
    for step, item in enumerate(call.logprobs):
        best = logprobs[step].topk(3)
        assert item.logprob == pytest.approx(float(logprobs[step, tokens[step]]), abs=1e-3)
        assert [top.token_id for top in item.top] == best.indices.tolist()
        assert [top.logprob for top in item.top] == pytest.approx(best.values.tolist(), abs=1e-3)


async def test_a_stop_string_ends_text_and_work(front: Front, reference: Reference) -> None:
    text = reference.tokenizer.decode(reference.greedy(reference.tokenizer(TEXT)["input_ids"], 60)[0])
    stop = text[12:17]
    call = await front.complete(TEXT, max_tokens=60, stop=["never to be seen", stop])
    assert call.texts[0] == text[: text.index(stop)]
    assert call.finished is not None
    assert call.finished.samples[0].finish_reason == pb.FINISH_REASON_STOP
    assert call.finished.samples[0].num_tokens < 60
    await front.harness.quiet()


async def test_64_streams_at_once_do_not_mix(front: Front) -> None:
    shared = prompt(7, 32)
    prompts = [shared + prompt(100 + i, 3 + i % 40) for i in range(64)]
    samplings: list[dict[str, Any]] = [SAMPLING if i % 2 else {} for i in range(64)]
    calls = [
        front.call(tokens, seed=i, max_tokens=16, **sampling)
        for i, (tokens, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    for call in calls:
        await call.done()
    assert [len(call.sequence) for call in calls] == [16] * 64
    for i in range(0, 64, 7):
        assert calls[i].sequence == await alone(front)(prompts[i], i, 16, **samplings[i]), f"stream {i}"
    await front.harness.quiet()


# ------------------------------------------------------------------------------------ what is refused

MALFORMED: list[tuple[str, pb.GenerateRequest, str, str]] = [
    ("no prompt", pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    ("empty text", pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "prompt"),
    ("empty ids", pb.GenerateRequest(token_ids=pb.TokenIds()), "INVALID_ARGUMENT", "prompt"),
    ("long", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 3000)), "INVALID_ARGUMENT", "prompt"),
    ("4 MB", pb.GenerateRequest(text="word " * 800_000), "INVALID_ARGUMENT", "prompt"),
    ("10 MB", pb.GenerateRequest(text="word " * 2_000_000), "RESOURCE_EXHAUSTED", ""),
    ("NaN", pb.GenerateRequest(text="x", temperature=float("nan")), "INVALID_ARGUMENT", "temperature"),
    ("no such token", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4096])), "INVALID_ARGUMENT", "token_ids"),
    ("no such model", pb.GenerateRequest(text="x", model="huge"), "NOT_FOUND", ""),
    ("negative", pb.GenerateRequest(text="x", max_tokens=-1), "INVALID_ARGUMENT", "max_tokens"),
    ("top_p", pb.GenerateRequest(text="x", top_p=0.0), "INVALID_ARGUMENT", "top_p"),
    ("no turns", pb.GenerateRequest(chat=pb.ChatPrompt()), "INVALID_ARGUMENT", "chat"),
]


@pytest.mark.parametrize(
    ("request_", "code", "field"), [pytest.param(*it, id=name) for name, *it in MALFORMED]
)
async def test_a_malformed_request_gets_its_own_error_and_the_next_works(
    front: Front, request_: pb.GenerateRequest, code: str, field: str
) -> None:
    stream = GenerateStream(front.client, request_, None, False)
    with pytest.raises(CallError, match=code) as caught:
        async for _ in stream:
            pass
    assert [violation.field for violation in caught.value.fields] == ([field] if field else [])
    good = await front.complete("def f(", max_tokens=3)
    assert len(good.sequence) == 3


HOSTILE = {
    "endless": "{% for a in range(99999999) %}{% for b in range(99999999) %}{% endfor %}{% endfor %}",
    "huge": "{{ 'x' * 99999999999 }}",
    "escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "raises": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_chat_template_is_the_chats_error_alone(
    front: Front, tiny_dir: Path, tmp_path: Path, kind: str
) -> None:
    hostile_dir = copy_tiny(tmp_path)
    (hostile_dir / "chat_template.jinja").write_text(HOSTILE[kind])
    (hostile_dir / "model.safetensors").unlink()  # a gateway never reads the weights
    other = Front(front.harness, hostile_dir)
    await other.open()
    try:
        await other.register(front.harness.replicas["p0"], front.harness.replicas["d0"])
        call = await other.call([Turn("user", "hello")]).ended()
        assert call.error is not None
        assert call.error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in call.error.fields] == ["chat"]
        assert len((await other.complete("def f(", max_tokens=3)).sequence) == 3
    finally:
        await other.close()


async def test_an_unknown_request_cannot_be_explained(front: Front) -> None:
    with pytest.raises(CallError, match="NOT_FOUND"):
        await front.client.explain("unheard-of")


# --------------------------------------------------------------------------------------- how it ends


async def test_the_deadline_ends_the_stream_and_frees_everything(front: Front) -> None:
    call = await front.call(prompt(8, 100), max_tokens=1900, timeout_s=0.6).ended()
    assert call.error is not None
    assert call.error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(call.sequence) < 1900
    await front.harness.quiet()


@pytest.mark.parametrize("num_heard", [-1, 0, 1, 2, 12])
async def test_a_cancel_at_any_stage_frees_everything(front: Front, num_heard: int) -> None:
    """-1: before anything is accepted; 0: accepted, no token yet."""
    call = front.call(prompt(10 + num_heard, 400), max_tokens=1000)
    if num_heard >= 0:
        await until(
            lambda: call.accepted is not None and call.num_tokens >= num_heard, f"{num_heard} tokens are here"
        )
    call.stream.cancel()
    await call.ended()
    assert call.error is not None
    assert call.error.code is grpc.StatusCode.CANCELLED
    await until(lambda: front.gateway.requests.num_running == 0, "the gateway forgets it")
    await front.harness.quiet()


# ------------------------------------------------------------------------------------- what is told


async def test_a_decision_can_be_recomputed_from_what_explain_tells(front: Front, tiny_dir: Path) -> None:
    costly = Front(front.harness, tiny_dir, policy="cost", skip_prefill_tokens=64)
    await costly.open()
    try:
        await costly.register(*(front.harness.replicas[name] for name in ("p0", "d0", "b0")))
        seen = set()
        shared = prompt(20, 320)
        for asked in (prompt(21, 600), prompt(22, 10), shared, shared, shared[:300] + prompt(23, 30)):
            call = await costly.complete(asked, max_tokens=3)
            assert call.accepted is not None
            told = await costly.client.explain(call.accepted.request_id)
            assert told.state == pb.REQUEST_STATE_FINISHED
            assert {"accepted", "routed", "first token", "finished"} <= {it.name for it in told.timeline}
            (decision,) = told.decisions
            assert (decision.prefill, decision.decode) == least(decision)
            assert call.finished is not None
            assert call.finished.decode_replica == decision.decode
            assert call.finished.prefill_replica == (decision.prefill or decision.decode)
            seen.add(bool(decision.prefill))
        assert False in seen, "a short prompt skips the prefill pool"
    finally:
        await costly.close()


def least(decision: pb.Decision) -> tuple[str, str]:
    """Prefill and decode of the least cost, from the candidates alone, as the API's text says."""
    sides: dict[str, list[Any]] = {"prefill": [], "decode": [], "local": []}
    for candidate in decision.candidates:
        sides[candidate.side].append(candidate)
    options = [(local.cost_s, "", local.replica_id) for local in sides["local"]]
    for prefill in sides["prefill"]:
        for decode in sides["decode"]:
            lacking = decode.uncached_tokens / (decode.matched_tokens + decode.uncached_tokens)
            cost = prefill.cost_s + decode.cost_s + prefill.transfer_s * lacking
            if prefill.replica_id != decode.replica_id:
                options.append((cost, prefill.replica_id, decode.replica_id))
    _, prefill_id, decode_id = min(options, key=lambda option: option[0])
    return prefill_id, decode_id


async def test_status_names_replicas_and_measured_paths(front: Front) -> None:
    status = await front.admin.status()
    assert status.ready
    replicas = {replica.replica_id: replica for replica in status.replicas}
    assert {(name, it.role, it.state) for name, it in replicas.items()} == {
        ("p0", admin_pb.REPLICA_ROLE_PREFILL, admin_pb.REPLICA_STATE_READY),
        ("d0", admin_pb.REPLICA_ROLE_DECODE, admin_pb.REPLICA_STATE_READY),
    }
    (written,) = await front.admin.paths(["p0"])
    path = next(path for path in written.paths if path.peer_replica_id == "d0")
    assert path.transport == "shm"
    assert path.gb_s > 0
    assert path.latency_us > 0
    assert replicas["d0"].load.num_total_blocks == 512
    assert replicas["d0"].load.num_leaked_blocks == 0
    assert (status.model.name, status.model.vocab_size, status.model.max_context_tokens) == (
        "tiny",
        4096,
        2048,
    )
    assert status.model.has_chat_template
    assert status.num_running_requests == 0


async def test_health_follows_the_replicas(front: Front, tiny_dir: Path) -> None:
    empty = Front(front.harness, tiny_dir)
    await empty.open()
    replies = health_pb2.HealthCheckResponse
    try:
        async with grpc.aio.insecure_channel(empty.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            assert (await stub.Check(asked)).status == replies.NOT_SERVING
            await empty.register(front.harness.replicas["d0"])
            assert await becomes(stub, asked, replies.SERVING)
            assert len((await empty.complete(prompt(30, 20))).sequence) == 8
    finally:
        await empty.close()


async def becomes(stub: Any, asked: Any, status: int) -> bool:
    watch = stub.Watch(asked)
    async for reply in watch:
        if reply.status == status:
            watch.cancel()
            return True
    return False


async def test_nothing_of_ours_lies_in_dev_shm(front: Front) -> None:
    """No file there is mapped or open in any rank or here. (An unlinked semaphore is no file.)"""
    ranks = [pid for replica in front.harness.replicas.values() for pid in replica.core.rank_process_ids]
    for process_id in (os.getpid(), *ranks):
        assert named_shm_files(process_id) == set()


def named_shm_files(process_id: int) -> set[str]:
    found = set(re.findall(r"/dev/shm/.*", Path(f"/proc/{process_id}/maps").read_text()))
    for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found |= set(re.findall(r"^/dev/shm/.*", os.readlink(descriptor)))
    return {name for name in found if not name.endswith(" (deleted)")}
