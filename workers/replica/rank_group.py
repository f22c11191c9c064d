"""The engine core's side of its ranks: start them together, send plans and orders, receive reports, notice
their death.

A rank connects back to the engine core over TCP and proves the secret; one framed connection carries
`RankDown` and `RankUp`. Who starts the process is a `RankLauncher`: Ray actors in the cluster, plain
processes in tests and benchmarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from kvtransfer.codec import MAX_FRAME_BYTES, framed
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import PeerGoneError, ProofError, TransferError, WireError
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import FrameStream, frame_stream
from kvtransfer.rpc.trust import Trust
from workers.errors import RankDiedError, WorkerError
from workers.messages.rank_channel import (
    RANK_DOWN_CODEC,
    RANK_SPEC_CODEC,
    RANK_UP_CODEC,
    FormGroup,
    RankDown,
    RankFailed,
    RankJoined,
    RankProgress,
    RankReady,
    RankSpec,
    RankTicket,
    RankUp,
    Shutdown,
)

LEAVE_S = 1.0
_TICKET_BYTES = 16
# The most bytes of a frame of a connection that has not shown a rank's ticket.
_HELLO_BYTES = 256
# The time that the end of a connection waits for the news of who ended it.
_CULPRIT_S = 0.5

_SYSTEM_CLOCK = SystemClock()

# Returns the layers [start, end) of each stage from the reports of the ranks when they joined, in rank order.
PlanStages = Callable[[Sequence[RankJoined]], tuple[tuple[int, int], ...]]

_log = logging.getLogger("tandem.ranks")


class RankHandle(Protocol):
    """A started rank process."""

    async def wait(self) -> str:
        """Return when the process has ended, with the reason."""

    def kill(self) -> None:
        """End the process at once, also when it is stopped or hangs in a kernel."""


class RankLauncher(Protocol):
    """Starts rank processes."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        """Start one rank; it will connect to `spec.engine_core_address`."""


class ProcessHandle:
    """A rank as a child process of the engine core."""

    def __init__(self, process: asyncio.subprocess.Process, rank: int) -> None:
        self._process = process
        self._rank = rank

    async def wait(self) -> str:
        status = await self._process.wait()
        return f"rank {self._rank}, process {self._process.pid}, ended with status {status}"

    def kill(self) -> None:
        if self._process.returncode is None:  # after its end the number may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


class RankCommand(NamedTuple):
    """The command that starts a rank as a child process: its arguments, its environment, and the input that
    is written to its standard input."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    spec_frame: bytes

    @staticmethod
    def of(spec: RankSpec) -> RankCommand:
        return RankCommand(
            (sys.executable, "-m", "workers.rank.start"),
            {**os.environ, "OMP_NUM_THREADS": str(spec.num_threads)},
            framed(RANK_SPEC_CODEC.encode(spec)),
        )


class ProcessLauncher:
    """Starts ranks as child processes on this host."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        command = RankCommand.of(spec)
        process = await asyncio.create_subprocess_exec(
            *command.arguments, stdin=asyncio.subprocess.PIPE, env=command.environment
        )
        assert process.stdin is not None
        process.stdin.write(command.spec_frame)
        process.stdin.close()
        return ProcessHandle(process, spec.rank)


class RankGroup:
    """All ranks of one replica. `on_message(rank, message)` and `on_died(reason)` are called on the loop.

    A rank that dies takes its neighbours' connections with it, and they may say so first. So a report of
    a lost peer or of a closed channel waits `_CULPRIT_S` for a reason of its own from some rank.
    """

    def __init__(
        self,
        trust: Trust,
        launcher: RankLauncher,
        on_message: Callable[[int, RankUp], None],
        on_died: Callable[[str], None],
        *,
        clock: Clock = _SYSTEM_CLOCK,
        start_stall_s: float = 600.0,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """The start fails when no rank has come further for `start_stall_s` seconds. `on_phase` is told the
        phase of the rank that has made no progress for longest, whenever a rank has come further."""
        self.trust = trust
        self._launcher = launcher
        self._on_message = on_message
        self._on_died = on_died
        self._clock = clock
        self._start_stall_s = start_stall_s
        self._on_phase = on_phase
        self.phases: dict[int, str] = {}  # how far each rank's start is; who came further last is last
        self._num_ranks = 0
        self._tickets: dict[int, bytes] = {}  # of the ranks that have not connected
        self._joined: dict[int, RankJoined] = {}
        self._ready: dict[int, RankReady] = {}
        self._streams: dict[int, FrameStream] = {}
        self._handles: list[RankHandle] = []
        self._listener: ProvenListener | None = None
        self._watching = SupervisedTasks()
        self._connections = SupervisedTasks()
        self._channel_ends: dict[int, asyncio.Event] = {}
        self._victims: set[int] = set()
        self._death = ""
        self._progress = asyncio.Event()
        self._serving = False
        self._killed = False
        self._stopping = False

    async def start(self, specs: Sequence[RankSpec], host: str, plan_stages: PlanStages) -> list[RankReady]:
        """Launch the ranks (their `engine_core_address` is filled in here), let `plan_stages` decide the
        layers of each stage when all have joined, and wait until all are ready.

        Raises `RankDiedError` with the rank's own reason when one cannot serve, or with the ranks that have
        not arrived and their phases when none makes progress, and whatever `plan_stages` raises; then all
        ranks are killed.
        """
        self._num_ranks = len(specs)
        self._channel_ends = {spec.rank: asyncio.Event() for spec in specs}
        specs = [replace(spec, ticket=secrets.token_bytes(_TICKET_BYTES)) for spec in specs]
        self._tickets = {spec.rank: spec.ticket for spec in specs}
        sock = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        address = f"{host}:{sock.getsockname()[1]}"
        self._listener = ProvenListener(
            sock, self.trust, self._serve, self._connections.spawn, self._clock, "ranks"
        )
        try:
            located = [replace(spec, engine_core_address=address) for spec in specs]
            await self._launch_all(located)
            await self._until(lambda: len(self._joined) == self._num_ranks)
            joined = [self._joined[spec.rank] for spec in specs]
            self.send(FormGroup(joined[0].store_address, plan_stages(joined)))
            for spec in specs:
                self._came_further(spec.rank, "told to form groups")
            await self._until(lambda: len(self._ready) == self._num_ranks)
            ready = [self._ready[spec.rank] for spec in specs]
            _refuse_unlike(ready)
            self._serving = True
        finally:
            if not self._serving:
                self.kill()
        return ready

    def send(self, message: RankDown) -> None:
        """Send a message to every rank."""
        frame = _encoded(message)
        for stream in self._streams.values():
            stream.send(frame)

    def send_to(self, rank: int, message: RankDown) -> None:
        """Send a message to one rank; a rank that has left receives nothing."""
        if rank in self._streams:
            self._streams[rank].send(_encoded(message))

    def kill(self) -> None:
        """End all rank processes at once."""
        self._killed = True
        for handle in self._handles:
            handle.kill()

    async def stop(self) -> None:
        """End the ranks without reporting their death: they are asked, and after `LEAVE_S` killed."""
        self._stopping = True
        self.send(Shutdown("the replica stops"))
        await self._watching.wait(LEAVE_S)
        self.kill()
        if self._listener is not None:
            self._listener.close()
        for stream in self._streams.values():
            stream.abort()
        await self._watching.wait()
        await self._connections.wait()

    # ----------------------------------------------------------------------------------------- start

    async def _launch_all(self, specs: Sequence[RankSpec]) -> None:
        for spec in specs:
            self._came_further(spec.rank, "being launched")
        launching = asyncio.gather(*(self._launch(spec) for spec in specs))
        launching.add_done_callback(lambda _: self._progress.set())
        try:
            await self._until(launching.done)
        finally:
            launching.cancel()  # no effect on what is done
            await asyncio.wait([launching])
        launching.result()

    async def _launch(self, spec: RankSpec) -> None:
        handle = await self._launcher.launch(spec)
        self._handles.append(handle)
        if self.phases.get(spec.rank) == "being launched":
            self._came_further(spec.rank, "starting its process")
        self._watching.spawn(self._watch(spec.rank, handle), f"rank-watch {spec.rank}")
        if self._killed:  # another could not be launched
            handle.kill()

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if self._death:
                raise RankDiedError(self._death)
            self._progress.clear()
            news = asyncio.ensure_future(self._progress.wait())
            overdue = asyncio.ensure_future(self._clock.sleep(self._start_stall_s))
            try:
                await asyncio.wait((news, overdue), return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
                overdue.cancel()
            if overdue.done() and not overdue.cancelled() and not self._progress.is_set():
                raise RankDiedError(self._stalled())

    def _came_further(self, rank: int, phase: str) -> None:
        self.phases.pop(rank, None)
        self.phases[rank] = phase
        self._progress.set()
        self._on_phase(next(iter(self.phases.values())))

    def _stalled(self) -> str:
        arrived = self._ready if len(self._joined) == self._num_ranks else self._joined
        missing = [f"rank {rank} ({phase})" for rank, phase in self.phases.items() if rank not in arrived]
        return (
            f"the ranks do not start: no progress for {self._start_stall_s:g} s; not ready, the longest "
            f"without progress first: {', '.join(missing)}. Where they are slow rather than hung, raise "
            f"engine.start_stall_s"
        )

    # ----------------------------------------------------------------------------------- connections

    async def _serve(self, sock: socket.socket, name: str) -> None:
        """Read a rank's proven connection, to its end; end that of anybody else."""
        stream = await frame_stream(sock, name, self.trust.server_tls(sock), max_first_bytes=_HELLO_BYTES)
        rank = -1
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = RANK_UP_CODEC.decode(await stream.next_frame())
            rank = self._admit(hello)
            while True:
                self._take(rank, RANK_UP_CODEC.decode(await stream.next_frame()), stream)
        except PeerGoneError as error:
            if rank >= 0:
                self._suspect(f"rank {rank} left: {error}")
        except (TransferError, TimeoutError) as error:
            _log.warning("the rank channel of %s was closed: %s", name, error or "it does not say who it is")
        finally:
            stream.abort()
            if rank >= 0:
                self._channel_ends[rank].set()
                self._suspect(f"the channel of rank {rank} closed")

    def _admit(self, hello: RankUp) -> int:
        """Return which rank of this replica has connected, for the first time; `ProofError` where none
        has."""
        if isinstance(hello, RankTicket):
            ticket = self._tickets.get(hello.rank, b"")
            if ticket and hmac.compare_digest(ticket, hello.ticket):
                del self._tickets[hello.rank]
                return hello.rank
        raise ProofError("it is not a rank that this replica waits for")

    def _take(self, rank: int, message: RankUp, stream: FrameStream) -> None:
        match message:
            case RankFailed():
                self._failed(rank, message)
            case RankProgress():
                self._came_further(rank, message.phase)
            case RankJoined() if rank not in self._joined:
                if message.rank != rank:
                    raise WireError(f"rank {rank} joined as rank {message.rank}")
                self._streams[rank] = stream
                self._joined[rank] = message
                self._came_further(rank, "joined")
            case RankReady() if rank in self._joined:
                self._ready[rank] = message
                self._came_further(rank, "ready")
            case _ if rank in self._joined:
                self._on_message(rank, message)
            case _:
                raise WireError(f"rank {rank} sent a {type(message).__name__} before it joined")

    # ----------------------------------------------------------------------------------------- death

    async def _watch(self, rank: int, handle: RankHandle) -> None:
        reason = await handle.wait()
        with contextlib.suppress(TimeoutError):  # it may have said more than its status does
            await asyncio.wait_for(self._channel_ends[rank].wait(), _CULPRIT_S)
        if rank not in self._victims:
            self._died(reason)

    def _failed(self, rank: int, message: RankFailed) -> None:
        reason = f"rank {rank}: {message.reason}"
        if message.lost_peer:
            self._victims.add(rank)
            self._suspect(reason)
        else:
            self._died(reason)

    def _suspect(self, reason: str) -> None:
        """Note that something has ended; if no better reason comes, `reason` is why."""
        if not self._stopping and not self._death:
            asyncio.get_running_loop().call_later(_CULPRIT_S, self._died, reason)

    def _died(self, reason: str) -> None:
        if self._stopping or self._death:
            return
        self._death = reason
        self._progress.set()
        if self._serving:
            self._on_died(reason)


def _encoded(message: RankDown) -> bytes:
    """Encode a message; raise `WorkerError` rather than send one that no rank would read: it would end them
    all."""
    frame = RANK_DOWN_CODEC.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WorkerError(
            f"a {type(message).__name__} of {len(frame)} bytes for the ranks exceeds {MAX_FRAME_BYTES}"
        )
    return frame


def _refuse_unlike(ready: Sequence[RankReady]) -> None:
    """Raise `RankDiedError` when ranks, which may be on several hosts, have loaded unlike models."""
    for other in ready[1:]:
        if differences := ready[0].compatibility.differences(other.compatibility):
            raise RankDiedError(f"rank {other.rank} is not of rank 0's model: {'; '.join(differences)}")
