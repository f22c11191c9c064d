"""How fast other transfer engines move the same blocks between two processes of this machine, as JSON lines.

NIXL over UCX, one-sided from and into host memory: with the transports that UCX picks within a host, and over
TCP on the loopback device alone; read and write; with NIXL's progress thread, which keeps a core busy, and
without it. Mooncake over TCP, where `mooncake-transfer-engine-non-cuda` can be imported. What cannot run is
a line that says why. Every cell compares all bytes once. Beside them, in the same repetitions, memcpy, the
plain socket loop and our own shared memory and TCP of `benchmarks.transfer`, with half of the cores for each
process. `to_memcpy` and `to_best_nixl` (the cell with the highest median) are medians of ratios within one
repetition.

    python -m benchmarks.transfer_nixl [--mib 256] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.transfer import ALL_HEADS, Way, Writer, layout
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.common.clock import SystemClock
from kvtransfer.errors import PathError
from kvtransfer.transfer_orders import TransferSettings

CLOCK = SystemClock()
MEMCPY = "memcpy, sums: none"
_POLL_PAUSE_S = 100e-6
# Mooncake refuses batches of a few thousand blocks.
_MOONCAKE_BATCH = 1024
# Each by the environment of its processes.
_SYSTEMS: dict[str, dict[str, str]] = {
    "nixl": {},
    "nixl lo": {"UCX_TLS": "^sm,cuda_ipc", "UCX_NET_DEVICES": "lo"},
    "mooncake tcp": {},
}

Bytes = npt.NDArray[np.uint8]


class Cell(NamedTuple):
    """One way of one system: its pair of processes, operation, and whether NIXL's own thread progresses."""

    system: str
    operation: str
    has_thread: bool

    @property
    def name(self) -> str:
        thread = ("", ", progress thread")[self.has_thread]
        return f"{self.system} {self.operation}{thread}"


CELLS = (
    *(
        Cell(system, operation, has_thread)
        for system in ("nixl", "nixl lo")
        for operation in ("write", "read")
        for has_thread in (False, True)
    ),
    *(Cell("mooncake tcp", operation, False) for operation in ("write", "read")),
)


class Pair:
    """A target process and a writer process of one system, which do one pass at a time."""

    def __init__(self, system: str, num_bytes: int, block_bytes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer_nixl", "--system", system]
        command += ["--bytes", str(num_bytes), "--block-bytes", str(block_bytes)]
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        self._processes = [
            subprocess.Popen(
                [*command, "--role", role, "--cores", ",".join(map(str, its_cores or cores))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_SYSTEMS[system], "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR"},
            )
            for role, its_cores in (("target", cores[half:]), ("writer", cores[:half]))
        ]
        self.absent = next((reason for reason in map(self._answer, self._processes) if reason != "ready"), "")

    def run(self, operation: str, has_thread: bool, *, compare: bool = False) -> float:
        """Run one pass over all blocks; return its seconds. With `compare` the bytes are checked after the
        pass."""
        target, writer = self._processes
        offer = self._call(target, "open", has_thread)
        self._call(writer, "open", has_thread)
        self._call(writer, "connect", offer)
        if compare:
            self._call(target if operation == "write" else writer, "clear")
        seconds = float(self._call(writer, "pass", operation))
        if compare and self._call(target, "sum") != self._call(writer, "sum"):
            raise AssertionError(f"{operation}: the bytes that arrived are not those that were sent")
        self._call(writer, "close")
        self._call(target, "close")
        return seconds

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _call(self, process: subprocess.Popen[str], *words: object) -> Any:
        assert process.stdin is not None
        print(json.dumps(words), file=process.stdin, flush=True)
        return self._answer(process)

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"a process ended with status {process.wait()}")
        return json.loads(line)


class Rivals:
    """Run all cells that can run here; `absent` says why other systems cannot."""

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        self._pairs = {system: Pair(system, num_bytes, block_bytes) for system in _SYSTEMS}
        self.absent = {system: pair.absent for system, pair in self._pairs.items() if pair.absent}
        self.cells = tuple(cell for cell in CELLS if cell.system not in self.absent)
        for cell in self.cells:
            self._pairs[cell.system].run(cell.operation, cell.has_thread, compare=True)

    def run(self, cell: Cell) -> float:
        """Return the seconds of one pass over all blocks, without setting up."""
        return self._pairs[cell.system].run(cell.operation, cell.has_thread)

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()


@contextmanager
def rivals(num_bytes: int, block_bytes: int) -> Iterator[Rivals]:
    """Start the other systems' processes and yield them when they are ready."""
    others = Rivals(num_bytes, block_bytes)
    try:
        yield others
    finally:
        others.close()


# --------------------------------------------------------------------------- in the processes of a pair


class NixlPeer:
    """One side of a NIXL pair; an agent for each pass, so that no progress thread runs next to others."""

    def __init__(self, memory: Bytes, block_bytes: int) -> None:
        from kvtransfer.transports.nixl import load_nixl

        self._api = load_nixl().api
        self._memory = memory
        starts = np.arange(0, memory.size, block_bytes, dtype=np.uint64)
        self._blocks = np.zeros((starts.size, 3), dtype=np.uint64)
        self._blocks[:, 0], self._blocks[:, 1] = starts, block_bytes
        self._order = np.random.default_rng(1).permutation(starts.size).astype(np.int32)
        self._agent: Any = None

    def open(self, has_thread: bool) -> list[object]:
        config = self._api.nixl_agent_config(enable_prog_thread=has_thread, backends=[])
        self._agent = self._api.nixl_agent(f"bench-{os.getpid()}-{has_thread}", config)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        address = self._memory.ctypes.data
        self._agent.register_memory([(address, self._memory.size, 0, "")], "DRAM")
        return [self._agent.get_agent_metadata().hex(), address]

    def serve(self, closing: threading.Event) -> None:
        """Answer UCX, as the target's part without a progress thread."""
        while not closing.wait(_POLL_PAUSE_S):
            self._agent.get_new_notifs()

    def connect(self, offer: Sequence[Any]) -> None:
        peer = self._agent.add_remote_agent(bytes.fromhex(offer[0]))
        self._agent.make_connection(peer)
        self._ours = self._prepare("NIXL_INIT_AGENT", self._memory.ctypes.data)
        self._theirs = self._prepare(peer, int(offer[1]))
        self._move("WRITE", self._order[:16])  # the first transfer sets up what the others use

    def run(self, operation: str) -> float:
        started = CLOCK.now()
        self._move(operation.upper(), self._order)
        return CLOCK.now() - started

    def close(self) -> None:
        self._ours = self._theirs = None
        self._agent.agent = None
        self._agent = None

    def _prepare(self, agent: str, address: int) -> Any:
        blocks = self._blocks.copy()
        blocks[:, 0] += np.uint64(address)
        return self._agent.prep_xfer_dlist(agent, self._agent.get_xfer_descs(blocks, "DRAM"))

    def _move(self, operation: str, blocks: npt.NDArray[np.int32]) -> None:
        handle = self._agent.make_prepped_xfer(operation, self._ours, blocks, self._theirs, blocks)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()


class MooncakePeer:
    """One side of a Mooncake pair over TCP."""

    def __init__(self, memory: Bytes, block_bytes: int) -> None:
        try:
            from mooncake.engine import TransferEngine  # type: ignore[import-not-found]
        except ImportError as error:
            raise PathError(str(error)) from error
        self._memory, self._block_bytes = memory, block_bytes
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise PathError("Mooncake does not initialize")
        self._engine.register_memory(memory.ctypes.data, memory.size)
        self._order = np.random.default_rng(1).permutation(memory.size // block_bytes)

    def open(self, has_thread: bool) -> list[object]:
        return [f"127.0.0.1:{self._engine.get_rpc_port()}", self._memory.ctypes.data]

    def serve(self, closing: threading.Event) -> None:
        """Return at once: Mooncake has threads of its own."""

    def connect(self, offer: Sequence[Any]) -> None:
        self._peer, self._address = str(offer[0]), int(offer[1])

    def run(self, operation: str) -> float:
        move = getattr(self._engine, f"batch_transfer_sync_{operation}")
        started = CLOCK.now()
        for first in range(0, self._order.size, _MOONCAKE_BATCH):
            offsets = (self._order[first : first + _MOONCAKE_BATCH] * self._block_bytes).tolist()
            ours = [self._memory.ctypes.data + offset for offset in offsets]
            theirs = [self._address + offset for offset in offsets]
            assert move(self._peer, ours, theirs, [self._block_bytes] * len(offsets)) == 0
        return CLOCK.now() - started

    def close(self) -> None:
        """Return without closing anything: the engine stays."""


def serve_pair(system: str, role: str, num_bytes: int, block_bytes: int) -> None:
    """Serve as a process of a pair: words come in on standard input, answers go to standard output."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    memory: Bytes = np.frombuffer(KvMemory.allocate(num_bytes).buffer, dtype=np.uint8)
    memory[:] = np.random.default_rng(0 if role == "writer" else 2).integers(
        0, 256, num_bytes, dtype=np.uint8
    )
    try:
        peer = (MooncakePeer if system.startswith("mooncake") else NixlPeer)(memory, block_bytes)
    except PathError as error:
        _say(out, str(error))
        sys.stdin.read()
        return
    _say(out, "ready")
    side = _Side(peer, role == "target", memory)
    for line in sys.stdin:
        _say(out, side.do(*json.loads(line)))
    os._exit(0)  # see kvtransfer.transports.nixl


class _Side:
    """Does one word after the other."""

    def __init__(self, peer: NixlPeer | MooncakePeer, is_target: bool, memory: Bytes) -> None:
        self._peer, self._is_target, self._memory = peer, is_target, memory
        self._closing = threading.Event()
        self._serving = threading.Thread()

    def do(self, word: str, *arguments: Any) -> object:
        match word:
            case "open":
                offer = self._peer.open(*arguments)
                self._closing.clear()
                if self._is_target and not arguments[0]:
                    self._serving = threading.Thread(target=self._peer.serve, args=(self._closing,))
                    self._serving.start()
                return offer
            case "connect":
                self._peer.connect(*arguments)
            case "pass":
                return self._peer.run(*arguments)
            case "clear":
                self._memory[:] = 0
            case "sum":
                return int(self._memory.view(np.uint64).sum())
            case "close":
                self._closing.set()
                if self._serving.ident is not None:
                    self._serving.join()
                self._serving = threading.Thread()
                self._peer.close()
        return None


def _say(out: IO[str], answer: object) -> None:
    print(json.dumps(answer), file=out, flush=True)


# ------------------------------------------------------------------------------------------- the table


def measure(num_bytes: int, block_bytes: int, repeat: int) -> None:
    """Print a line for each way of ours, for each cell, and for each system that is absent."""
    settings = TransferSettings("127.0.0.1", ("shm", "tcp"))
    with rivals(num_bytes, block_bytes) as others:
        writer = Writer(num_bytes // block_bytes, settings)  # it takes half of the cores for this process
        ours = [way for way in writer.ways() if way.shape == "equal" and way.checksum in ("none", "writer")]
        ways: dict[str, Callable[[], float]] = {
            f"{way.name}, sums: {way.checksum}": _timed(way) for way in ours
        }
        for cell in others.cells:
            ways[cell.name] = partial(others.run, cell)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(repeat + 1):
            for name, move in ways.items():
                rate = num_bytes / move() / 1e9
                if number:  # the first pass takes the pages
                    rates[name].append(rate)
        writer.close()
    for system, reason in others.absent.items():
        print(json.dumps({"benchmark": "transfer_nixl", "system": system, "absent": reason}))
    of_nixl = [rates[cell.name] for cell in others.cells if cell.system.startswith("nixl")]
    best = max(of_nixl, key=statistics.median, default=rates[MEMCPY])
    for name, values in rates.items():
        line = {
            "benchmark": "transfer_nixl",
            "system": name,
            "gb_s": round(statistics.median(values), 3),
            "best_gb_s": round(max(values), 3),
            "to_memcpy": round(_ratio(values, rates[MEMCPY]), 3),
            "to_best_nixl": round(_ratio(values, best), 3),
            "num_bytes": num_bytes,
            "block_bytes": block_bytes,
            "repeat": repeat,
        }
        print(json.dumps(line), flush=True)


def _timed(way: Way) -> Callable[[], float]:
    def move() -> float:
        started = CLOCK.now()
        way.move()
        return CLOCK.now() - started

    return move


def _ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios within one repetition."""
    return statistics.median([value / other for value, other in zip(values, others, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    for hidden in ("--system", "--role", "--cores"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--bytes", "--block-bytes"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
        serve_pair(args.system, args.role, args.bytes, args.block_bytes)
    else:
        measure(args.mib << 20, layout(ALL_HEADS).block_bytes, args.repeat)


if __name__ == "__main__":
    main()
