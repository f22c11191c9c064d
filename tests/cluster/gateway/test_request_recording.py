"""The recording of a gateway's latest requests: what is kept, how much of it, and that no text and no key
leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gateway_harness import BLOCK_TOKENS, PROMPT, GatewayHarness, until
from serving import tandem

from cluster.api.generate_options import GenerateOptions
from cluster.api.recordings import BlockNumbers
from cluster.bench.trace_file import read_trace
from cluster.errors import CallError
from cluster.gateway.request_recording import SHORT_KEY_BYTES, RecordingPage, RequestRecording
from cluster.metrics.config import RecordingConfig
from cluster.metrics.ended_request import Caller, EndedRequest
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.text.preprocess import PreparedRequest, SampleStart
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import ManualClock
from kvtransfer.request_facts import RequestFacts
from workers.messages.sampling import SamplingParams

KEYS = extend_keys(b"root", bytes(4 * BLOCK_TOKENS * 3), BLOCK_TOKENS)


def ended(clock: ManualClock, tenant: str, *, is_private: bool = False, e2e_s: float = 1.0) -> EndedRequest:
    """It ends now, and had three blocks."""
    prepared = PreparedRequest(
        request_id="r",
        facts=RequestFacts(tenant=tenant, is_private=is_private),
        prompt=bytes(4 * BLOCK_TOKENS * 3),
        root_key=b"root",
        block_keys=KEYS,
        sampling=SamplingParams(max_tokens=11),
        samples=(SampleStart(0, 0),),
        deadline_at=None,
    )
    now = clock.now()
    return EndedRequest(
        "r", "r", tenant, Caller(), "failed", "INTERNAL", "", now - e2e_s, now, prepared=prepared
    )


def tenants(page: RecordingPage) -> list[str]:
    return [request.tenant for request in page.requests]


def test_the_oldest_are_forgotten_for_lack_of_space_and_by_age() -> None:
    clock = ManualClock()
    recording = RequestRecording(RecordingConfig(max_mb=0.002, max_age_s=100.0), clock)
    began_at = clock.now()
    assert recording.page(0.0) == RecordingPage((), None, began_at)
    for name in "abcdef":
        clock.advance(10.0)
        recording.ended(ended(clock, name))
    assert recording.num_bytes <= 2000
    page = recording.page(0.0)
    assert tenants(page) == ["c", "d", "e", "f"]
    assert page.complete_since == began_at + 20.0 - 1.0  # when b arrived
    clock.advance(85.0)
    assert tenants(recording.page(0.0)) == ["e", "f"]
    assert recording.num_requests == 2
    clock.advance(75.0)
    assert (recording.num_requests, recording.num_bytes) == (0, 0)
    assert recording.page(0.0).complete_since == began_at + 60.0 - 1.0


def test_requests_that_arrived_before_are_left_out() -> None:
    clock = ManualClock()
    recording = RequestRecording(RecordingConfig(), clock)
    since = clock.now() + 15.0
    for name, e2e_s in (("a", 1.0), ("long", 8.0), ("c", 1.0)):
        clock.advance(10.0)
        recording.ended(ended(clock, name, e2e_s=e2e_s))
    assert tenants(recording.page(since)) == ["c"]
    assert tenants(recording.page(since - 3.0)) == ["long", "c"]


def test_pages_continue_while_requests_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.gateway.request_recording._MAX_PAGE_REQUESTS", 2)
    clock = ManualClock()
    recording = RequestRecording(RecordingConfig(max_age_s=50.0), clock)
    for name in "abcde":
        clock.advance(10.0)
        recording.ended(ended(clock, name))
    first = recording.page(0.0)
    assert (tenants(first), first.next_number) == (["a", "b"], 2)
    clock.advance(32.0)  # a, b and c are forgotten
    recording.ended(ended(clock, "f"))
    second = recording.page(0.0, 2)
    assert (tenants(second), second.next_number) == (["d", "e"], 5)
    third = recording.page(0.0, 5)
    assert (tenants(third), third.next_number) == (["f"], None)


def test_of_what_is_private_and_of_what_is_off_nothing_is_kept() -> None:
    clock = ManualClock()
    recording = RequestRecording(RecordingConfig(), clock)
    clock.advance(10.0)
    recording.ended(ended(clock, "open"))
    recording.ended(ended(clock, "secret", is_private=True))
    first, secret = recording.page(0.0).requests
    assert first.short_keys == b"".join(key[:SHORT_KEY_BYTES] for key in KEYS)
    assert (secret.short_keys, secret.num_prompt_tokens) == (b"", 3 * BLOCK_TOKENS)
    off = RequestRecording(RecordingConfig(max_mb=0), clock)
    off.ended(ended(clock, "open"))
    assert (off.is_on, off.num_requests) == (False, 0)


def test_blocks_have_other_numbers_in_every_answer() -> None:
    short = b"".join(key[:SHORT_KEY_BYTES] for key in KEYS)
    one, other = BlockNumbers(bytes(16)), BlockNumbers(b"k" * 16)
    numbers = one.of(short)
    assert len(set(numbers)) == 3
    assert one.of(short[SHORT_KEY_BYTES:]) == numbers[1:]
    assert set(other.of(short)).isdisjoint(numbers)
    assert all(0 <= number < 1 << 53 for number in numbers)
    assert one.of(b"") == []


# -------------------------------------------------------------------------------- recordings of a cluster


async def recordings(harness: GatewayHarness, last_s: float = 0.0) -> list[admin_pb.RecordingPart]:
    return [part async for part in harness.admin(harness.gateways[1]).recording(last_s)]


async def start_two(harness: GatewayHarness) -> list[str]:
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    addresses = []
    for _ in range(2):
        _, address = await harness.add_known_gateway(harness.config(console_port=0))
        addresses.append(address)
    return addresses


async def test_any_gateway_gives_the_requests_of_all_without_keys(harness: GatewayHarness) -> None:
    """One prompt at two gateways has the same blocks."""
    for address in await start_two(harness):
        await harness.client(address).complete(PROMPT * 9, GenerateOptions(max_tokens=3, tenant="acme"))
    parts = await recordings(harness)
    assert {part.gateway_id for part in parts} == {"g0", "g1"}
    first, second = (request for part in parts for request in part.requests)
    assert list(first.block_ids) == list(second.block_ids)
    assert len(first.block_ids) == first.num_prompt_tokens // BLOCK_TOKENS > 1
    assert all(part.block_tokens == BLOCK_TOKENS and part.complete_since > 0 for part in parts)
    for request in (first, second):
        assert (request.state, request.code, request.tenant) == ("finished", "OK", "acme")
        assert (request.num_output_tokens, request.max_output_tokens) == (3, 3)
        assert 0 < request.ttft_s <= request.e2e_s
    shown = b"".join(part.SerializeToString() for part in parts)
    for submission in harness.replicas["p0"].submissions:
        assert submission.block_keys
        assert not any(key[:SHORT_KEY_BYTES] in shown for key in submission.block_keys)


async def test_refused_requests_are_recorded_and_bad_spans_are_refused(harness: GatewayHarness) -> None:
    (address, _) = await start_two(harness)
    with pytest.raises(CallError, match="INVALID_ARGUMENT"):
        await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=3, temperature=-1))
    parts = await recordings(harness, 60.0)
    (request,) = (request for part in parts for request in part.requests)
    assert (request.state, request.code, request.max_output_tokens) == ("refused", "INVALID_ARGUMENT", 3)
    with pytest.raises(CallError, match="last_s"):
        await recordings(harness, -1.0)


async def test_a_gateway_that_records_nothing_is_named(harness: GatewayHarness) -> None:
    addresses = await start_two(harness)
    await harness.client(addresses[0]).complete(PROMPT, GenerateOptions(max_tokens=3))
    config = harness.config(console_port=0).model_copy(update={"recording": RecordingConfig(max_mb=0)})
    await harness.add_known_gateway(config)
    await until(lambda: len(harness.gateways[1].connections.gateways) == 3, "the third gateway")
    parts = await recordings(harness)
    assert [part.gateway_id for part in parts if part.requests] == ["g0"]
    assert {part.gateway_id: part.problem for part in parts if part.problem} == {
        "g2": "records nothing: its recording.max_mb is 0"
    }


@pytest.mark.slow
async def test_the_command_writes_a_trace_and_says_how_its_requests_were_served(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    addresses = await start_two(harness)
    for address in addresses:
        await harness.client(address).complete(PROMPT * 9, GenerateOptions(max_tokens=3))
    file = tmp_path / "trace.jsonl"
    admin = f"127.0.0.1:{harness.gateways[1].admin_port}"
    arguments = "bench", "record", "--admin-address", admin, "--out", str(file), "--last", "10m"
    done = await asyncio.to_thread(tandem, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["what"], figures["num_ok"], figures["block_tokens"]) == ("record", 2, BLOCK_TOKENS)
    assert figures["ttft_ms"]["p50"] > 0
    first, second = read_trace(file)
    assert first.hash_ids[:-1] == second.hash_ids[:-1]
    assert (first.output_length, first.block_tokens) == (3, BLOCK_TOKENS)
    none = await asyncio.to_thread(tandem, *arguments[:-1], "0.001s")
    assert none.returncode == 1
    assert "no request was recorded in that time" in none.stderr
