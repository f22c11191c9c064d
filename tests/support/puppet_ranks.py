"""Ranks of a replica that a test plays: no processes, only their connections to the engine core."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from kvtransfer.rpc.handshake import prove_as_client, send_frame
from workers.messages import RANK_UP_CODEC, RankJoined, RankSpec, RankUp, StageCost
from workers.replica.rank_group import RankHandle

SECRET = b"s" * 32


@dataclass
class Puppet:
    """A rank that a test plays."""

    spec: RankSpec
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_killed: bool = False
    sock: socket.socket | None = None

    async def wait(self) -> str:
        return await self.ended

    def kill(self) -> None:
        self.is_killed = True
        self.leave()
        if not self.ended.done():
            self.ended.set_result("killed")

    async def join(self) -> None:
        await self.connect()
        self.say(RankJoined(self.spec.rank, 1, "", StageCost(), 0.0))

    async def connect(self) -> None:
        host, _, port = self.spec.engine_core_address.rpartition(":")
        self.sock = sock = socket.create_connection((host, int(port)))
        await asyncio.to_thread(prove_as_client, sock, SECRET, "puppet")

    def say(self, message: RankUp) -> None:
        assert self.sock is not None
        send_frame(self.sock, RANK_UP_CODEC.encode(message))

    def leave(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class PuppetLauncher:
    def __init__(self) -> None:
        self.puppets: list[Puppet] = []

    async def launch(self, spec: RankSpec) -> RankHandle:
        self.puppets.append(Puppet(spec))
        return self.puppets[-1]
