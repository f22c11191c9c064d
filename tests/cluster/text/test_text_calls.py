"""Tokenize and Detokenize: so many at once, in threads of their own, which let the event loop go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from callers import key_of
from gateway_harness import BLOCK_TOKENS, MAX_CONTEXT, GatewayHarness, Pair, encode, write_model
from http_harness import CHAT, HttpFrontHarness

from cluster.api import servicer
from cluster.api.servicer import MAX_CALLS, MAX_TENANT_CALLS, TextCalls
from cluster.errors import CallError, OverloadedError
from cluster.identity.key_roots import KeyRoots
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.bounded_process import BoundedProcess
from cluster.text.chat_template import Rendered
from cluster.text.preprocess import Preprocessor
from cluster.text.tokenizer import ModelText

WAIT_S = 20.0


class HeldPreprocessor(Preprocessor):
    """Waits within each call, and notes the threads."""

    held = threading.Event()
    threads: set[str]

    def encode_now(self, prompt: str | Rendered, *, add_special_tokens: bool) -> bytes:
        self.threads.add(threading.current_thread().name)
        assert self.held.wait(WAIT_S)
        return super().encode_now(prompt, add_special_tokens=add_special_tokens)


@pytest.fixture
def preprocessor(tmp_path: Path) -> HeldPreprocessor:
    harness = GatewayHarness(write_model(tmp_path / "m"))
    gateway = harness.config().gateway
    roots = KeyRoots(None, bytes, BLOCK_TOKENS, len)
    made = HeldPreprocessor(
        harness.model_dir, "m", gateway, harness.clock, lambda: 1, key_roots=roots, allow_pins=True
    )
    made.held, made.threads = threading.Event(), set()
    return made


async def test_one_call_too_many_is_refused_and_the_next_is_served(preprocessor: HeldPreprocessor) -> None:
    """Of a tenant, beside whom others have their share; and of all together."""
    calls, limits = TextCalls(preprocessor), preprocessor.limits(MAX_CONTEXT)
    request, ids = pb.TokenizeRequest(text="the fox"), pb.DetokenizeRequest(token_ids=encode("fox"))
    running = []
    for tenant in ("acme", "other"):
        for _ in range(MAX_TENANT_CALLS):
            running.append(asyncio.create_task(calls.tokenize(request, limits, tenant)))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match=f"has {MAX_TENANT_CALLS} .* of this tenant"):
            await calls.tokenize(request, limits, tenant)
        with pytest.raises(OverloadedError):
            await calls.detokenize(ids, limits, tenant)
    assert len(running) == MAX_CALLS
    with pytest.raises(OverloadedError, match=f"has {MAX_CALLS} calls of Tokenize and Detokenize"):
        await calls.tokenize(request, limits, "a third")
    running[-1].cancel()
    await asyncio.wait([running[-1]])
    preprocessor.held.set()
    assert [list((await task).token_ids) for task in running[:-1]] == [encode("the fox")] * (MAX_CALLS - 1)
    assert (await calls.detokenize(ids, limits, "other")).text == "fox"
    calls.close()


async def test_chats_of_tenants_take_turns_at_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one tenant wait behind each other, and another's behind one of them."""
    harness = GatewayHarness(write_model(tmp_path / "m"))
    parties: list[str] = []
    exchange = BoundedProcess.exchange

    async def noted(process: BoundedProcess, order: bytes, party: str = "") -> bytes:
        if party:  # nobody's is the chat by which the end of a turn is found
            parties.append(party)
        return await exchange(process, order, party)

    monkeypatch.setattr(BoundedProcess, "exchange", noted)
    keys = {tenant: key_of(tmp_path / "keys.yaml", tenant) for tenant in ("acme", "other")}
    auth = {"mode": "required", "keys_file": str(tmp_path / "keys.yaml")}
    async with HttpFrontHarness(harness, harness.config(auth=auth)) as front:
        for tenant, key in keys.items():
            headers = {"x-api-key": key}
            for path in ("/v1/chat/completions", "/tokenize"):
                body = {"messages": CHAT["messages"]} | ({"max_tokens": 2} if "chat" in path else {})
                assert (await front.post(path, body, headers=headers)).status == 200
            assert parties == [tenant] * 2
            parties.clear()
    await harness.close()


async def test_threads_are_not_those_of_generate(preprocessor: HeldPreprocessor) -> None:
    preprocessor.held.set()
    calls, limits = TextCalls(preprocessor), preprocessor.limits(MAX_CONTEXT)
    await calls.tokenize(pb.TokenizeRequest(text="the fox"), limits, "acme")
    assert all(name.startswith("text_") for name in preprocessor.threads)
    preprocessor.threads.clear()
    await preprocessor.encode("the fox " * 1000)
    assert not any(name.startswith("text_") for name in preprocessor.threads)
    calls.close()


async def test_more_ids_than_are_copied_at_once_come_back_whole(
    preprocessor: HeldPreprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_NUM_TOKENS", 3)
    preprocessor.held.set()
    calls, limits = TextCalls(preprocessor), preprocessor.limits(MAX_CONTEXT)
    text = "the quick brown fox, the answer"
    ids = (await calls.tokenize(pb.TokenizeRequest(text=text), limits, "acme")).token_ids
    assert list(ids) == encode(text)
    assert len(ids) % 3
    assert (await calls.detokenize(pb.DetokenizeRequest(token_ids=ids), limits, "acme")).text == text
    calls.close()


async def test_what_is_too_large_names_the_field(pair: Pair) -> None:
    with pytest.raises(CallError, match=f"token_ids: has {MAX_CONTEXT + 1} tokens; at most") as found:
        await pair.client.detokenize([5] * (MAX_CONTEXT + 1))
    assert found.value.code is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(CallError, match=r"text: is \d+ bytes long; at most"):
        await pair.client.tokenize("x" * (64 * MAX_CONTEXT))


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_converted(tmp_path: Path, what: str) -> None:
    text = ModelText.load(write_model(tmp_path / "m"))
    long = "def main(): return the answer, the quick brown fox\n" * 6_000
    tokens = text.encode(long) if what == "decode" else b""
    began, ended = threading.Event(), threading.Event()

    def convert() -> None:
        began.set()
        if what == "encode":
            text.encode(long)
        else:
            text.decode(tokens)
        ended.set()

    thread = threading.Thread(target=convert)
    thread.start()
    assert began.wait(WAIT_S)
    num_turns = 0
    while not ended.wait(0.001):  # with the interpreter held there would be one turn or none
        num_turns += 1
    thread.join()
    assert num_turns > 2
