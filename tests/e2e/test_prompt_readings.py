"""Log-probabilities of prompts and embeddings through the real gateway: right, whole, once and in order,
whatever breaks meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from e2e_front import SEEDED, Front, Stage, prompt
from e2e_harness import SHAPES, Heard, until
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.gateway.sample_output import EmbeddingDelta, OutputDelta, PromptLogprobsDelta
from cluster.identity.identity import LOCAL
from cluster.metrics.ended_request import Summary
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.faults import FaultRule
from kvtransfer.request_facts import Pooling
from workers.messages.sampling import TokenLogprob

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE: dict[str, Any] = {"kv_tokens": 4096, "chunk_tokens": 32, "stall_s": 20.0}
NUM_TOP = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with Stage.opened(tmp_path_factory.mktemp("readings"), ENGINE, request.param) as stage:
        yield stage


@pytest.fixture(scope="module")
def reference(stage: Stage) -> Any:
    return AutoModelForCausalLM.from_pretrained(stage.model_dir, dtype=torch.float32).eval()


@dataclass
class Read:
    """All output of a request."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    vector: bytes = b""
    summary: Summary | None = None

    @property
    def num_cached_tokens(self) -> int:
        assert self.summary is not None
        assert self.summary.prefill is not None
        return self.summary.prefill.num_cached_tokens

    @property
    def num_held_tokens(self) -> int:
        assert self.summary is not None
        assert self.summary.hand_over is not None
        return self.summary.hand_over.num_held_tokens


async def ask(
    front: Front,
    tokens: list[int],
    *,
    into: Read | None = None,
    pooling: Pooling | None = None,
    **fields: Any,
) -> Read:
    """Run a request at the gateway, and check the order of its output."""
    read = into or Read()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), ignore_eos=True, **fields)
    accepted = await front.gateway.requests.accept(request, None, LOCAL, pooling=pooling)
    while not isinstance(output := await accepted.task.next(), Summary):
        assert not read.vector, "nothing comes after an embedding"
        if isinstance(output, PromptLogprobsDelta):
            assert not read.tokens
            assert output.first_index == len(read.logprobs) + 1
            read.logprobs += output.logprobs.unpacked()
        elif isinstance(output, EmbeddingDelta):
            read.vector = output.vector
        elif isinstance(output, OutputDelta):
            assert output.first_index == len(read.tokens)
            read.tokens += np.frombuffer(output.tokens, "<u4").tolist()
    read.summary = output
    return read


def check_logprobs(reference: Any, tokens: list[int], read: Read, num_top: int = NUM_TOP) -> None:
    with torch.inference_mode():
        expected: Tensor = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert len(read.logprobs) == len(tokens) - 1
    for token, found, row in zip(tokens[1:], read.logprobs, expected, strict=False):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-3)
        assert [value for _, value in found.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-3)


def check_vector(reference: Any, tokens: list[int], read: Read) -> None:
    with torch.inference_mode():
        expected: Tensor = reference.model(torch.tensor([tokens])).last_hidden_state[0, -1]
    np.testing.assert_allclose(np.frombuffer(read.vector, "<f4"), expected.numpy(), atol=1e-3)


def rule(point: str, action: str, folder: Path, after: int = 1) -> FaultRule:
    return FaultRule(point, action, str(folder / f"{point}.{action}"), after)


async def test_a_prompt_is_read_whole_wherever_it_is_cached(stage: Stage, reference: Any) -> None:
    """Handed over, and after the same prompt: nothing of it is taken from either cache, or held back."""
    tokens = prompt(700, 150)
    wanted = await stage.wanted(tokens, 5, 12, **SEEDED)
    async with stage.front(stage.p0, stage.d0) as front:
        plain = await ask(front, tokens, seed=5, max_tokens=12, **SEEDED)
        again = await ask(front, tokens, seed=5, max_tokens=12, **SEEDED)
        assert (again.num_cached_tokens, again.num_held_tokens) == (144, 144)
        read = await ask(front, tokens, seed=5, max_tokens=12, prompt_logprobs=NUM_TOP, **SEEDED)
        assert (read.num_cached_tokens, read.num_held_tokens) == (0, 0)
        assert plain.tokens == again.tokens == read.tokens == wanted
        assert plain.logprobs == []
        check_logprobs(reference, tokens, read)
        await stage.harness.quiet(stage.p0, stage.d0)


async def test_embeddings_beside_streams(stage: Stage, reference: Any) -> None:
    """Some of the same prompts, which are cached then, and nobody's tokens are others for it."""
    async with stage.front(stage.p0, stage.d0, policy="cost") as front:
        prompts = [prompt(720 + number, 20 + 31 * number) for number in range(4)]
        calls = stage.calls(front, 730, 4, 24)
        first = await asyncio.gather(*(ask(front, it, pooling="last") for it in prompts))
        scored = await asyncio.gather(
            *(ask(front, it, max_tokens=1, prompt_logprobs=NUM_TOP) for it in prompts)
        )
        again = await asyncio.gather(*(ask(front, it, pooling="last") for it in prompts))
        for tokens, one, logprobs, other in zip(prompts, first, scored, again, strict=True):
            check_vector(reference, tokens, one)
            check_vector(reference, tokens, other)
            check_logprobs(reference, tokens, logprobs)
            assert (one.tokens, one.logprobs, other.tokens) == ([], [], [])
            assert one.summary is not None
            assert one.summary.hand_over is None
            assert [sample.finish for sample in one.summary.samples] == ["stop"]
        assert sum(it.num_cached_tokens for it in again) > 0, "embeddings take what is cached"
        await stage.all_right(calls, 730, 24)
        await stage.harness.quiet(stage.p0, stage.d0)


@pytest.mark.parametrize(("role", "after"), [("prefill", 3), ("both", 2), ("both", 6)])
async def test_a_rank_dies_in_the_middle_of_a_prompt(
    stage: Stage, reference: Any, tmp_path: Path, role: str, after: int
) -> None:
    """The client has some of the log-probabilities by then, and gets the rest from another replica."""
    tokens = prompt(740 + after, 200)
    wanted = await stage.wanted(tokens, 7, 8, **SEEDED)
    victim = await stage.guest(role, rule("rank.step.prefill", "kill", tmp_path, after))
    pair = (victim, stage.d0) if role == "prefill" else (victim,)
    async with stage.front(*pair) as front:
        read = Read()
        running = asyncio.create_task(
            ask(front, tokens, into=read, seed=7, max_tokens=8, prompt_logprobs=NUM_TOP, **SEEDED)
        )
        await until(lambda: victim.core.identity.replica_id not in front._connected(), "it is gone")
        num_read = len(read.logprobs)
        others = {stage.p0, stage.d0}.difference(pair)
        await front.register(*others)
        await running
        if role == "both":  # nobody else was there
            assert num_read == 32 * (after - 1), "what it had read before it died was there"
        assert read.summary is not None
        assert read.summary.num_attempts > 1
        assert read.tokens == wanted
        check_logprobs(reference, tokens, read)
        await stage.harness.quiet(stage.p0, stage.d0)


async def test_a_stream_that_continues_at_another_replica_does_not_read_again(
    stage: Stage, reference: Any, tmp_path: Path
) -> None:
    """Its prompt is read by then: the next attempt takes it from the cache."""
    tokens = prompt(760, 100)
    wanted = await stage.wanted(tokens, 9, 32)
    victim = await stage.guest("decode", rule("rank.step.decode", "kill", tmp_path, 8))
    async with stage.front(stage.p0, victim) as front:
        read = Read()
        running = asyncio.create_task(
            ask(front, tokens, into=read, seed=9, max_tokens=32, prompt_logprobs=NUM_TOP)
        )
        await until(lambda: victim.core.identity.replica_id not in front._connected(), "it is gone")
        await front.register(stage.d0)
        await running
        assert read.tokens == wanted
        check_logprobs(reference, tokens, read)
        assert read.num_cached_tokens == 96
        await stage.harness.quiet(stage.p0, stage.d0)


async def test_an_embedding_is_computed_again_where_a_rank_dies(
    stage: Stage, reference: Any, tmp_path: Path
) -> None:
    tokens = prompt(770, 200)
    victim = await stage.guest("both", rule("rank.step.prefill", "kill", tmp_path, 3))
    async with stage.front(victim) as front:
        running = asyncio.create_task(ask(front, tokens, pooling="last"))
        await until(lambda: victim.core.identity.replica_id not in front._connected(), "it is gone")
        await front.register(stage.p0)
        read = await running
        check_vector(reference, tokens, read)
        assert read.summary is not None
        assert read.summary.prefill_replica == "p0", "a prefill replica embeds by itself"
        await stage.harness.quiet(stage.p0)


async def test_a_client_that_leaves_stops_the_reading(stage: Stage) -> None:
    async with stage.front(stage.p0, stage.d0) as front:
        poolings: tuple[Pooling | None, ...] = (None, "last")
        for pooling in poolings:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt(780, 1500)), max_tokens=4, prompt_logprobs=NUM_TOP
            )
            accepted = await front.gateway.requests.accept(request, None, LOCAL, pooling=pooling)
            if pooling is None:
                assert isinstance(await accepted.task.next(), PromptLogprobsDelta)
            accepted.task.abandon()
            await stage.harness.quiet(stage.p0, stage.d0)
        assert front.gateway.requests.unread.num_bytes == 0


async def test_a_replica_names_what_it_refuses(stage: Stage) -> None:
    """As a gateway that is wrong would ask for it."""
    harness = stage.harness
    asked = harness.submission("refused", prompt(790, 20), num_prompt_logprobs=129)
    heard: Heard = await harness.run(stage.p0, asked)
    assert heard.failure is not None
    assert heard.failure.code == "invalid"
    assert heard.failure.reason.startswith("sampling.num_prompt_logprobs: 129 is not from 0 to 128")
