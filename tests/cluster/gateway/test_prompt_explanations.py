"""What `Explain` says of a prompt: why its blocks were computed, its nearest relative, and that the choice
follows from what is recorded."""

from __future__ import annotations

import math
import random

import pytest
from gateway_harness import BLOCK_TOKENS, FINGERPRINT, GatewayHarness, until

from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.gateway.prompt_relatives import PromptRelatives
from cluster.metrics.ended_request import NO_RELATIVE, Relative
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import PreparedRequest, SampleStart
from kvtransfer.blocks.keys import extend_keys, root_key
from kvtransfer.kv_events import BlocksRemoved, BlocksStored
from kvtransfer.request_facts import RequestFacts
from router.messages import Candidate, Decision, TimeLimit
from router.policies.cheapest_choice import recompute
from workers.messages.sampling import SamplingParams


def tokens(*blocks: int, rest: int = 1) -> list[int]:
    """A prompt of whole blocks, each of one token, and a few tokens behind."""
    return [token for block in blocks for token in [block] * BLOCK_TOKENS] + [1] * rest


def keys_of(prompt: list[int]) -> tuple[bytes, ...]:
    raw = b"".join(token.to_bytes(4, "little") for token in prompt)
    return extend_keys(root_key(bytes(32), FINGERPRINT, ""), raw, BLOCK_TOKENS)


async def explained(client: Client, prompt: list[int]) -> pb.ExplainResponse:
    done = await client.complete(prompt, GenerateOptions(max_tokens=1))
    return await client.explain(done.request_id)


async def test_why_blocks_were_computed_and_what_could_have_been_cached(harness: GatewayHarness) -> None:
    for name in ("d0", "d1"):
        await harness.add_replica(name, "decode")
    gateway, address = await harness.add_gateway(harness.config(console_port=0))
    client = harness.client(address)
    prompt = tokens(3, 4, 5, 6)
    keys = keys_of(prompt)
    tree = gateway.connections._router.tree
    await until(lambda: not any(map(tree.needs_snapshot, harness.replicas)), "the first snapshots")
    for replica in harness.replicas.values():
        replica.publish(stored=(BlocksStored(b"", keys[:3]),))
        replica.publish(removed=(BlocksRemoved(keys[1:3], reason="space"),))
    await until(lambda: not tree.places(keys[1], "") and len(tree.places(keys[0], "")) == 2, "the removals")
    reply = await explained(client, prompt)
    (decision,) = reply.decisions
    removed, new = decision.missed
    assert (removed.first, removed.num_blocks, removed.fate) == (1, 2, pb.BLOCK_FATE_REMOVED)
    assert (removed.reason, removed.places[0].replica_id in harness.replicas) == ("space", True)
    assert (new.first, new.num_blocks, new.fate) == (3, 1, pb.BLOCK_FATE_NEW)
    assert decision.prefill_cached_tokens == BLOCK_TOKENS
    assert decision.achievable_tokens == 3 * BLOCK_TOKENS
    assert gateway.requests.counters.num_achievable_cached_tokens == 3 * BLOCK_TOKENS
    assert (reply.prompt.num_tokens, reply.prompt.block_tokens) == (len(prompt), BLOCK_TOKENS)


async def test_the_nearest_relative_is_named_to_its_own_tenant_alone(harness: GatewayHarness) -> None:
    await harness.add_replica("d0", "decode")
    tenants = {name: {"sharing_group": "all"} for name in ("ours", "theirs")}
    config = harness.config(auth={"tenants": tenants}, console_port=0)
    _, address = await harness.add_gateway(config)
    client = harness.client(address)

    async def ask(prompt: list[int], tenant: str) -> pb.PromptReuse:
        done = await client.complete(prompt, GenerateOptions(max_tokens=1, tenant=tenant))
        admin = harness.admin(harness.gateways[0])
        return (await admin.explain(done.request_id)).prompt

    assert (await ask(tokens(3, 4, 5, rest=7), "ours")).num_relative_tokens == 0
    own = await ask(tokens(3, 4, 9), "ours")
    assert (own.num_shared_tokens, own.num_relative_tokens) == (2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 7)
    assert own.relative_id
    other = await ask(tokens(3, 4, 9, 2), "theirs")
    assert (other.num_shared_tokens, other.relative_id) == (3 * BLOCK_TOKENS, "")


async def test_the_choice_of_a_hundred_requests_follows_from_their_explanations(
    harness: GatewayHarness,
) -> None:
    """From nothing but the message that a client gets, over pairs and replicas alone, with and without cached
    prefixes and backlogs."""
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "both")):
        await harness.add_replica(name, role)
    _, address = await harness.add_gateway(harness.config(console_port=0))
    client = harness.client(address)
    draw = random.Random(36)
    choices = set()
    for number in range(100):
        if number % 5 == 0:
            for replica in harness.replicas.values():
                replica.script.num_backlog_tokens = draw.choice([0, 0, 200, 3000])
                replica.report(())
        prompt = tokens(*(draw.randrange(2, 5) for _ in range(draw.randrange(1, 7))))
        reply = await explained(client, prompt)
        for decision in reply.decisions:
            chosen = decision.prefill, decision.decode
            assert recompute(decision_of(decision)) == chosen
            choices.add(chosen)
    assert len(choices) > 2


def decision_of(message: pb.Decision) -> Decision:
    """The decision with what is needed to make it again."""
    limit = None
    if message.HasField("limit_wait_s") or message.HasField("limit_ttft_s"):
        wait_s = message.limit_wait_s if message.HasField("limit_wait_s") else math.inf
        limit = TimeLimit(wait_s, message.limit_ttft_s if message.HasField("limit_ttft_s") else math.inf)
    candidates = [
        Candidate(
            replica_id=it.replica_id,
            side=it.side,
            matched_tokens=it.matched_tokens,
            uncached_tokens=it.uncached_tokens,
            queue_s=it.queue_s,
            transfer_s=it.transfer_s,
            pressure_s=it.pressure_s,
            cost_s=it.cost_s,
            load_s=it.load_s,
            prefill_s=it.prefill_s,
        )
        for it in message.candidates
    ]
    return Decision("r", message.policy, "", "", 0, 0, candidates, "", limit=limit)


# --------------------------------------------------------------------------------------- relatives alone


def prepared(prompt: list[int], *, is_private: bool = False) -> PreparedRequest:
    return PreparedRequest(
        request_id="wire",
        facts=RequestFacts(tenant="t", is_private=is_private),
        prompt=bytes(4 * len(prompt)),
        root_key=b"",
        block_keys=keys_of(prompt),
        sampling=SamplingParams(max_tokens=1),
        samples=(SampleStart(0, 0),),
        deadline_at=None,
    )


def test_the_latest_of_the_nearest_relatives_is_named() -> None:
    relatives = PromptRelatives(BLOCK_TOKENS)
    assert relatives.meet(prepared(tokens(2, 3, 4)), "a") == NO_RELATIVE
    assert relatives.meet(prepared(tokens(2, 3, 9)), "b").request_id == "a"
    assert relatives.meet(prepared(tokens(2, 3, 8)), "c").request_id == "b"
    assert relatives.meet(prepared(tokens(2, 3, 4, 7)), "d") == Relative("a", "t", 49, 48)
    assert relatives.meet(prepared(tokens(5)), "e") == NO_RELATIVE
    assert relatives.meet(prepared([1, 2]), "short") == NO_RELATIVE


def test_prompts_without_a_full_block_are_not_remembered() -> None:
    """They count no blocks, and there would be no end of them."""
    relatives = PromptRelatives(BLOCK_TOKENS)
    for number in range(3):
        relatives.meet(prepared([1, 2]), str(number))
    assert not relatives._prompts


def test_private_prompts_have_no_relatives_and_are_none() -> None:
    relatives = PromptRelatives(BLOCK_TOKENS)
    relatives.meet(prepared(tokens(2, 3), is_private=True), "secret")
    assert relatives.meet(prepared(tokens(2, 3)), "a") == NO_RELATIVE
    assert relatives.meet(prepared(tokens(2, 3), is_private=True), "b") == NO_RELATIVE


@pytest.mark.parametrize("seed", range(5))
def test_the_oldest_prompts_are_forgotten_with_what_only_they_have(seed: int) -> None:
    """As by comparing with each of the latest prompts that fit."""
    relatives, draw = PromptRelatives(BLOCK_TOKENS, max_blocks=12), random.Random(seed)
    latest: list[tuple[str, tuple[int, ...]]] = []
    for number in range(200):
        blocks = tuple(draw.randrange(2, 4) for _ in range(draw.randrange(1, 5)))
        found = relatives.meet(prepared(tokens(*blocks)), str(number))
        shared = [_num_shared(blocks, each) for _, each in latest]
        most = max(shared, default=0)
        assert found.num_shared_tokens == most * BLOCK_TOKENS
        if most:
            nearest = [name for (name, _), num in zip(latest, shared, strict=True) if num == most]
            assert found.request_id == nearest[-1]
        latest.append((str(number), blocks))
        while sum(len(each) for _, each in latest) > 12:
            del latest[0]


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
