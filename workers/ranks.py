"""The brain's side of its ranks: start them, send plans and orders, receive reports, notice their death.

A rank connects back to the brain over TCP and proves the secret; one framed connection carries `RankDown`
and `RankUp`. Who starts the process is a `RankLauncher`: Ray actors in the cluster, plain processes in tests
and benchmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
from collections.abc import Callable, Coroutine
from typing import Protocol

from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.framing import prove_as_async_server, read_frame, write_frame
from workers.errors import RankDiedError
from workers.messages import (
    RANK_DOWN_CODEC,
    RANK_SPEC_CODEC,
    RANK_UP_CODEC,
    RankDown,
    RankFailed,
    RankReady,
    RankSpec,
    RankUp,
    Shutdown,
)

LEAVE_S = 1.0

_log = logging.getLogger("tandem.ranks")


class RankHandle(Protocol):
    """A started rank process."""

    async def wait(self) -> str:
        """Return when the process has ended, with the reason."""

    def kill(self) -> None:
        """End it at once, also when it is stopped or hangs in a kernel."""


class RankLauncher(Protocol):
    """Starts rank processes."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        """Start one rank; it will connect to `spec.brain_address`."""


class ProcessHandle:
    """A rank as a child process of the brain."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def wait(self) -> str:
        return f"rank process {self._process.pid} ended with status {await self._process.wait()}"

    def kill(self) -> None:
        if self._process.returncode is None:  # after its end the number may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


class ProcessLauncher:
    """Starts ranks as child processes on this host."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec.num_threads)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.engine.rank", stdin=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        frame = RANK_SPEC_CODEC.encode(spec)
        process.stdin.write(struct.pack("<I", len(frame)) + frame)
        process.stdin.close()
        return ProcessHandle(process)


class RankGroup:
    """All ranks of one replica. `on_message(rank, message)` and `on_died(reason)` are called on the loop."""

    def __init__(
        self,
        secret: bytes,
        launcher: RankLauncher,
        on_message: Callable[[int, RankUp], None],
        on_died: Callable[[str], None],
    ) -> None:
        self._secret = secret
        self._launcher = launcher
        self._on_message = on_message
        self._on_died = on_died
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._ready: dict[int, asyncio.Future[RankReady]] = {}
        self._handles: list[RankHandle] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self, specs: list[RankSpec], host: str) -> list[RankReady]:
        """Launch the ranks (their `brain_address` is filled in here) and wait until all are ready.

        Raises `RankDiedError` with the rank's own reason when one cannot serve.
        """
        self._server = await asyncio.start_server(self._accept, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        for spec in specs:
            self._ready[spec.rank] = loop.create_future()
        for spec in specs:
            located = RankSpec(
                **{name: getattr(spec, name) for name in spec.__struct_fields__ if name != "brain_address"},
                brain_address=f"{host}:{port}",
            )
            handle = await self._launcher.launch(located)
            self._handles.append(handle)
            self._spawn(self._watch(handle), f"rank-watch {spec.rank}")
        return list(await asyncio.gather(*self._ready.values()))

    def send(self, message: RankDown) -> None:
        """Send to every rank."""
        frame = RANK_DOWN_CODEC.encode(message)
        for writer in self._writers.values():
            write_frame(writer, frame)

    def kill(self) -> None:
        """End all rank processes at once."""
        for handle in self._handles:
            handle.kill()

    async def stop(self) -> None:
        """End the ranks without reporting their death: they are asked, and after `LEAVE_S` killed."""
        self._stopping = True
        self.send(Shutdown("the replica stops"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_S)
        self.kill()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        try:
            await prove_as_async_server(reader, writer, self._secret)
            while True:
                message = RANK_UP_CODEC.decode(await read_frame(reader))
                if isinstance(message, RankReady) and message.rank in self._ready:
                    rank = message.rank
                    self._writers[rank] = writer
                    self._settle_ready(rank, message)
                elif isinstance(message, RankFailed):
                    self._died(message.reason)
                elif rank >= 0:
                    self._on_message(rank, message)
        except PeerGoneError as error:
            if rank >= 0:
                self._died(f"rank {rank} left: {error}")
        except (TransferError, TimeoutError) as error:
            _log.warning("rank channel refused a connection: %s", error)
        finally:
            writer.close()
            if rank >= 0:
                self._died(f"the channel of rank {rank} closed")

    async def _watch(self, handle: RankHandle) -> None:
        self._died(await handle.wait())

    def _settle_ready(self, rank: int, message: RankReady) -> None:
        future = self._ready[rank]
        if not future.done():
            future.set_result(message)

    def _died(self, reason: str) -> None:
        if self._stopping:
            return
        pending = [future for future in self._ready.values() if not future.done()]
        for future in pending:
            future.set_exception(RankDiedError(reason))
        if not pending:
            self._on_died(reason)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
