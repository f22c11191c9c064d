"""A running gateway, and a replica that knows the secret and sends well-formed nonsense over its Link."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from gateway_harness import PROMPT, GatewayHarness, until, write_model
from patience import WAIT_S

from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from tests.fuzz.message_grammar import MessageGrammar
from tests.fuzz.target import FindingError, Target
from workers.messages.link import LINK_UP_CODEC

_MAX_MESSAGES = 6


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return the target of a replica that sends a running gateway nonsense."""
    return [Target("replica, gateway", _Gateway(stack, folder).run, 25)]


class _Gateway:
    """A gateway with an honest replica and one that lies, each time anew."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._runner = stack.enter_context(asyncio.Runner())
        write_model(folder / "model")
        self._harness = GatewayHarness(folder / "model")
        stack.callback(lambda: self._runner.run(self._harness.close()))
        self._runner.run(self._start())
        likely: dict[str, list[Any]] = {
            "request_id": ["a", "a", "b"],
            "attempt": [0, 0, 1],
            "identity": [["liar", 1], ["honest", 1]],
            "publisher": [["liar", 1], ["honest", 1]],
            "sample": [0, 0, 1, -1],
            "first_index": [0, 1, 2],
            "tokens": [b"", b"\5\0\0\0", b"\5\0\0\0\6\0\0\0", b"\xff\xff\xff\xff"],
            "finish": ["", "", "stop", "length"],
            "role": ["decode", "prefill", "both", "nothing"],
            "role_epoch": [0, 1],
        }
        self._grammar = MessageGrammar(LINK_UP_CODEC.union, likely)

    async def _start(self) -> None:
        await self._harness.add_replica("honest", "decode")
        await self._harness.add_replica("liar", "decode")
        self._gateway, address = await self._harness.add_gateway()
        self._client = self._harness.client(address)

    def run(self, rng: Random) -> str:
        """Send some messages while a request runs, and see that the gateway still serves."""
        return self._runner.run(self._run(rng))

    async def _run(self, rng: Random) -> str:
        liar = self._harness.replicas["liar"]
        view = self._gateway.connections.find("liar")
        assert view is not None
        liar.script.stop_after = 1
        options = GenerateOptions(request_id="a", max_tokens=4, pinned_decode="liar", pinned_prefill="liar")
        lied_to = asyncio.create_task(self._client.complete(PROMPT, options, timeout_s=WAIT_S))
        await until(lambda: bool(liar.submissions) or lied_to.done(), "the request is at the liar")
        for _ in range(rng.randint(1, _MAX_MESSAGES)):
            liar.broadcast(LINK_UP_CODEC.decode(self._grammar.message(rng)))
        liar.script.resume.set()
        try:
            await lied_to
            outcome = "answered"
        except CallError as error:
            outcome = error.code.name
        honest = GenerateOptions(max_tokens=2, pinned_decode="honest", pinned_prefill="honest")
        try:
            await self._client.complete(PROMPT, honest, timeout_s=WAIT_S)
        except CallError as error:
            raise FindingError(f"an honest request failed: {error}") from error
        liar.submissions.clear()
        liar.script.resume.clear()
        stream = view.stream
        if stream is not None:  # it may leave by now, or have another role: a new Link begins anew
            stream.close()
        await until(lambda: view.takes_requests and view.stream is not stream, "the liar is connected again")
        return outcome
