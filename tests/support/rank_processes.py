"""Ranks of the tests, as forks of one process that has imported everything: a start costs no import of torch.

The test process sends specs to a fork server (one thread, computes nothing), which forks a rank for each and
reports when ranks start and end.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from patience import START_S

from kvtransfer.codec import framed, read_frame
from workers.messages.rank_channel import RANK_SPEC_CODEC, RankSpec
from workers.replica.rank_group import RankHandle

_START_S = START_S
Loop = asyncio.AbstractEventLoop


class NurseryLauncher:
    """A `RankLauncher` whose ranks are forked by the only fork server of this process."""

    async def launch(self, spec: RankSpec) -> RankHandle:
        loop = asyncio.get_running_loop()
        born: asyncio.Future[int] = loop.create_future()
        ended: asyncio.Future[int] = loop.create_future()
        launch = _Launch(functools.partial(_resolve, loop, born), functools.partial(_resolve, loop, ended))
        _fork_server().order(launch, RANK_SPEC_CODEC.encode(spec))
        return _Rank(await born, ended, spec.rank)


class ForkedRank:
    """A rank that the fork server forked, with what tests without a loop use of `subprocess.Popen`."""

    def __init__(self, spec: RankSpec) -> None:
        born: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[int] = concurrent.futures.Future()
        launch = _Launch(born.set_result, self._ended.set_result)
        _fork_server().order(launch, RANK_SPEC_CODEC.encode(spec))
        self.pid = born.result(_START_S)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the rank's end. Returns its exit status; negative: the signal that killed it."""
        return self._ended.result(timeout_s)

    def kill(self) -> None:
        if not self._ended.done():  # after its end the number may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Rank:
    def __init__(self, process_id: int, ended: asyncio.Future[int], rank: int) -> None:
        self._process_id = process_id
        self._ended = ended
        self._rank = rank

    async def wait(self) -> str:
        status = await asyncio.shield(self._ended)
        return f"rank {self._rank}, process {self._process_id}, ended with status {status}"

    def kill(self) -> None:
        if not self._ended.done():  # after its end the number may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process_id, signal.SIGKILL)


class _Launch(NamedTuple):
    """The functions that are called, in the reading thread, with the process id and with the exit status."""

    on_born: Callable[[int], None]
    on_ended: Callable[[int], None]


class _Born(msgspec.Struct, tag=True):
    process_id: int


class _Ended(msgspec.Struct, tag=True):
    process_id: int
    status: int


_NEWS = msgspec.msgpack.Decoder(_Born | _Ended)


class _ForkServer:
    """The test process's side of the fork server, which ends with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._launches: list[_Launch] = []
        self._alive: dict[int, _Launch] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self._close)

    def order(self, launch: _Launch, frame: bytes) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._launches.append(launch)
            self._process.stdin.write(framed(frame))

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (frame := read_frame(self._process.stdout)) is not None:
            match _NEWS.decode(frame):
                case _Born(process_id):
                    with self._lock:
                        launch = self._launches.pop(0)
                        self._alive[process_id] = launch
                    launch.on_born(process_id)
                case _Ended(process_id, status):
                    launch = self._alive.pop(process_id)
                    launch.on_ended(status)


@functools.cache
def _fork_server() -> _ForkServer:
    return _ForkServer()


def _resolve(loop: Loop, future: asyncio.Future[int], value: int) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(value)

    with contextlib.suppress(RuntimeError):  # the loop of a test that has ended
        loop.call_soon_threadsafe(resolve)


# --------------------------------------------------------------------------- the fork server's own process


def _tell(news: _Born | _Ended) -> None:
    frame = msgspec.msgpack.encode(news)
    os.write(1, framed(frame))


def _live(spec: RankSpec) -> None:
    """As `workers.rank.start.main`, in the fork; its standard output is ours no more."""
    from workers.rank.process import run_rank

    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
        run_rank(spec)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Fork a rank for every spec, until standard input ends."""
    import workers.rank.process  # noqa: F401  # what the forks shall have

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    stdin = os.fdopen(0, "rb", buffering=0, closefd=False)
    selector = selectors.DefaultSelector()
    selector.register(stdin, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == wake_read:
                os.read(wake_read, 4096)
                _reap()
                continue
            frame = read_frame(stdin)
            if frame is None:
                return
            spec = RANK_SPEC_CODEC.decode(frame)
            assert isinstance(spec, RankSpec)
            process_id = os.fork()
            if process_id == 0:
                _live(spec)
            _tell(_Born(process_id))


def _reap() -> None:
    while True:
        try:
            process_id, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process_id == 0:
            return
        _tell(_Ended(process_id, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
