"""A running replica, and gateways and peers that know the secret and send well-formed nonsense over Links."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from e2e_harness import BLOCK_TOKENS, ROOT_KEY, E2eHarness, prompt, raw
from patience import WAIT_S

from kvtransfer.blocks.keys import extend_keys
from kvtransfer.kv_events import KvSnapshot, KvSnapshotRequest
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.peer_messages import LandingRefusal, LandingRequest, PeerHello
from kvtransfer.rpc.stream import open_link
from kvtransfer.rpc.trust import Trust
from tests.fuzz.message_grammar import MessageGrammar
from tests.fuzz.target import FindingError, Target, stderr_in
from workers.errors import RankDiedError
from workers.messages.link import LINK_DOWN_CODEC, LINK_UP_CODEC, GatewayHello
from workers.messages.peer_link import PEER_CODEC

_MODEL = Path(__file__).parents[2] / "models" / "tiny"
_MAX_MESSAGES = 8
_LAST_LANDING = bytes(16)
# What comes last, and is answered where the connection is still open.
_LAST = {
    "link": LINK_DOWN_CODEC.encode(KvSnapshotRequest("last")),
    "peer": PEER_CODEC.encode(LandingRequest(_LAST_LANDING, "last", 0, "", 0, (), 0, 1, None)),
}


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return targets of a gateway and of a peer that send a running replica nonsense."""
    replica = _Replica(stack, folder)
    return [
        Target("gateway, replica", partial(replica.run, "link"), 40),
        Target("peer, replica", partial(replica.run, "peer"), 40),
    ]


class _Replica:
    """A replica of one rank. Whatever a proven sender says costs that sender its connection at most."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._runner = stack.enter_context(asyncio.Runner())
        self._harness = E2eHarness(_MODEL)
        stack.callback(lambda: self._runner.run(self._harness.close()))
        with stderr_in(folder / "replica.log"):
            self._replica = self._runner.run(self._harness.add("r0", engine={"kv_tokens": 1024}))
        core = self._replica.core
        self._num_runs = 0
        self._peer = PeerHello(
            ReplicaIdentity("peer", 1), core.compatibility, tuple(each.endpoints for each in core.ready)
        )
        tokens = prompt(1, 3 * BLOCK_TOKENS)
        keys = list(extend_keys(ROOT_KEY, raw(tokens), BLOCK_TOKENS))
        likely: dict[str, list[Any]] = {
            "request_id": ["a", "a", "a", "b"],
            "attempt": [0, 0, 0, 1],
            "sharing_group": ["", "", "g"],
            "landing_id": [bytes([number]) * 16 for number in (1, 1, 1, 2)],
            "prompt": [raw(tokens), raw(tokens), raw(tokens[:7]), b"", raw(tokens[:1])],
            "root_key": [ROOT_KEY],
            "block_keys": [keys, keys, keys[:1], []],
            "output": [b"", raw([5]), raw([5]), raw([5, 6])],
            "samples": [[[0, 7, raw([5])]], [[0, 7]], [[0, 7], [1, 8]], [[0, 7, raw([5])], [1, 8, raw([6])]]],
            "seed": [0, (1 << 64) - 1],
            "deadline_s": [None, None, 1e300, 0.0],
            "priority": [0, 1, -(1 << 31)],
            "temperature": [0.0, 0.5, 1e-45, 1e38],
            "top_k": [0, 1, 5, (1 << 31) - 1],
            "top_p": [1.0, 0.5, 0.0],
            "min_p": [0.0, 1.0],
            "repetition_penalty": [1.0, 1.0, 1e-45, 1e38],
            "presence_penalty": [0.0, -2.0, 1e38],
            "frequency_penalty": [0.0, 2.0, -1e38],
            "logit_bias": [{}, {5: 1e38}, {1 << 31: 1.0}, {5: -1e38, 6: -1e38}],
            "min_tokens": [0, 3, (1 << 31) - 1],
            "stop_token_ids": [[], [7], [(1 << 32) - 1]],
            "num_logprobs": [None, 1, 5, 190],
            "max_tokens": [1, 4, 8],
            "num_tokens": [1, 16, 48, 48],
            "num_samples": [1, 1, 2],
            "block_index": [0, 1, 2],
            "rank": [0],
            "shard": [_plain(each.endpoints.shard) for each in core.ready],
            "decode": [None, None, [["peer", 1], "127.0.0.1:1"]],
            "identity": [["peer", 1], ["r0", 1]],
            "address": ["127.0.0.1:1"],
            "gateway_id": ["walk", "another"],
        }
        self._grammars = {
            "link": MessageGrammar(LINK_DOWN_CODEC.union, likely),
            "peer": MessageGrammar(PEER_CODEC.union, likely),
        }

    def run(self, kind: Any, rng: Random) -> str:
        """Send some messages behind an honest introduction, and see that the replica still serves."""
        return self._runner.run(self._run(kind, rng))

    async def _run(self, kind: Any, rng: Random) -> str:
        core = self._replica.core
        stream = await open_link(core.address, kind, Trust.read(self._harness.trust), "liar")
        if kind == "link":
            stream.send(LINK_DOWN_CODEC.encode(GatewayHello("liar", 1)))
        else:
            stream.send(PEER_CODEC.encode(self._peer))
        for _ in range(rng.randint(1, _MAX_MESSAGES)):
            stream.send(self._grammars[kind].message(rng))
        stream.send(_LAST[kind])
        try:
            async with asyncio.timeout(WAIT_S):
                while (frame := await stream.receive()) is not None and not _is_answer(kind, frame):
                    pass
        finally:
            stream.close()
        await self._check()
        return "closed" if frame is None else "open"

    async def _check(self) -> None:
        self._num_runs += 1
        harness, replica = self._harness, self._replica
        try:
            replica.core.check_health()
            honest = harness.submission(f"honest-{self._num_runs}", prompt(self._num_runs, 20), max_tokens=2)
            heard = await harness.run(replica, honest)
        except RankDiedError as error:
            raise FindingError(f"the replica ended: {error}") from error
        if heard.failure is not None:
            replica.core.check_health()
            raise FindingError(f"an honest request failed: {heard.failure}")


def _is_answer(kind: str, frame: bytes) -> bool:
    if kind == "link":
        return isinstance(LINK_UP_CODEC.decode(frame), KvSnapshot)
    message = PEER_CODEC.decode(frame)
    return isinstance(message, LandingRefusal) and message.landing_id == _LAST_LANDING


def _plain(value: object) -> object:
    decoded: object = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return decoded
