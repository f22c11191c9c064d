"""Every kind of listener of the cluster, each as what owns it makes it, in one process of their own.

`python listeners.py FILES` (`TrustFiles` as JSON) prints their addresses as JSON, by kind, and serves until
standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.transfer_orders import TransferSettings
from workers.messages.rank_channel import RankSpec

KINDS = ("links", "ranks", "rank links", "store unix", "store tcp", "shm", "tcp")


class ListenerProcess:
    """The process as a test sees it: where it listens, and what it costs."""

    def __init__(self, files: TrustFiles) -> None:
        self.trust = Trust.read(files)
        command = [sys.executable, __file__, msgspec.json.encode(files).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.process_id = self._process.pid
        self.addresses: dict[str, str] = json.loads(self._process.stdout.readline())

    def connect(self, kind: str) -> socket.socket:
        """Return a fresh connection, with a patience of 20 s."""
        address = self.addresses[kind]
        host, _, port = address.rpartition(":")
        if port.isdecimal():
            sock = socket.create_connection((host, int(port)))
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(f"\0{address}")
        sock.settimeout(20)
        return sock

    def reset_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """The most memory that it had resident at a time since `reset_peak`."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    @property
    def num_descriptors(self) -> int:
        return psutil.Process(self._process.pid).num_fds()

    def __enter__(self) -> ListenerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


async def _serve(files: TrustFiles) -> None:
    from held_ranks import PuppetLauncher
    from service_harness import TARGET, Rank
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # the type stubs leave it out

    from kvtransfer.common.clock import SystemClock
    from kvtransfer.common.tasks import SupervisedTasks
    from kvtransfer.rpc.stream import FrameStream, LinkServer
    from kvtransfer.store.server.listeners import (
        LocalPeer,
        RemotePeer,
        await_end,
        listen_for_local,
        listen_for_remote,
    )
    from workers.messages.link import longest_link_frame
    from workers.rank.local_links import Switchboard
    from workers.replica.rank_group import RankGroup

    async def hold(stream: FrameStream) -> None:
        while await stream.receive() is not None:
            pass

    async def hold_local(peer: LocalPeer) -> None:
        await await_end(peer.sock)

    async def hold_remote(peer: RemotePeer) -> None:
        await hold(peer.stream)

    def end_store(error: BaseException) -> None:
        """As a store does when one of its tasks fails."""
        for door in doors:
            door.close()

    trust, clock, tasks = Trust.read(files), SystemClock(), SupervisedTasks(end_store)
    addresses: dict[str, str] = {}
    links = LinkServer(trust, hold, hold, longest_link_frame(1 << 17, 16, 1))
    addresses["links"] = f"127.0.0.1:{await links.start('127.0.0.1')}"

    launcher = PuppetLauncher()
    group = RankGroup(trust, launcher, lambda rank, message: None, lambda reason: None)
    starting = asyncio.create_task(group.start([_spec()], "127.0.0.1", lambda joined: ((0, 1),)))

    def end_ranks(starting: asyncio.Task[object]) -> None:
        """As an engine core does whose ranks do not start, or end."""
        if not starting.cancelled():
            tasks.spawn(group.stop(), "ranks-end")

    starting.add_done_callback(end_ranks)
    while not launcher.puppets:
        await SystemClock().sleep(0.01)
    addresses["ranks"] = launcher.puppets[0].spec.engine_core_address

    store = HashStore()
    board = Switchboard(store, 0, 1, "here", trust)
    addresses["rank links"] = "tandem-" + store.get("local 0").decode().rpartition(" ")[2]

    over_unix = socket.socket(socket.AF_UNIX)
    addresses["store unix"] = f"store-{secrets.token_hex(8)}"
    over_unix.bind(f"\0{addresses['store unix']}")
    over_unix.listen(128)
    over_tcp = socket.create_server(("127.0.0.1", 0), backlog=128)
    addresses["store tcp"] = f"127.0.0.1:{over_tcp.getsockname()[1]}"
    doors = [
        listen_for_local(over_unix, trust, hold_local, tasks.spawn, clock),
        listen_for_remote(over_tcp, trust, hold_remote, tasks.spawn, clock),
    ]

    with Rank(TARGET, trust=trust) as rank:
        addresses |= {each.transport: each.address for each in rank.agent.endpoints().endpoints}
        print(json.dumps(addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    for door in doors:
        door.close()
    board.close()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await group.stop()
    await links.stop()
    await tasks.close()


def _spec() -> RankSpec:
    return RankSpec(
        replica=ReplicaIdentity("replica", 1),
        rank=0,
        tp=1,
        pp=1,
        engine_core_address="",
        trust=TrustFiles(""),
        model_dir="",
        dtype="float32",
        device="cpu",
        num_threads=1,
        block_tokens=16,
        num_kv_tokens=16,
        max_batch_tokens=16,
        max_sequences=1,
        transfer=TransferSettings("127.0.0.1", ("tcp",)),
    )


if __name__ == "__main__":
    asyncio.run(_serve(msgspec.json.decode(sys.argv[1], type=TrustFiles)))
