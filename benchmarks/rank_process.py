"""One rank process, started as a replica starts it and driven by this process in place of an engine core.

The connection is read here rather than by `workers.replica.rank_group.RankGroup`, which keeps only the phase
in which a rank is: a benchmark notes when each phase began, with no event loop beside the rank.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from benchmarks.drawn_trust import draw_trust
from kvtransfer.common.clock import SystemClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.handshake import prove_as_server, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import TransferSettings
from workers.messages.rank_channel import (
    RANK_DOWN_CODEC,
    RANK_UP_CODEC,
    FormGroup,
    RankFailed,
    RankJoined,
    RankProgress,
    RankReady,
    RankSpec,
    RankUp,
    Shutdown,
    StepPlan,
    StepReport,
)
from workers.model.model_config import read_model_config
from workers.replica.rank_group import RankCommand

_Message = TypeVar("_Message", RankJoined, RankReady)

_START_S = 300.0
_CLOCK = SystemClock()


class StartPhase(NamedTuple):
    """A phase of a rank's start, and the seconds after the launch at which it began."""

    name: str
    began_s: float


class RankProcess:
    """A rank that holds a whole model. `phases` are those of its start, in order; the last one is "ready"."""

    def __init__(
        self, model_dir: Path, dtype: str, environment: Mapping[str, str] = {}, **changes: Any
    ) -> None:
        """Start the rank and wait until it is ready. `changes` are fields of its `RankSpec`. Raises
        `RuntimeError` with the rank's reason if it fails."""
        self.phases: list[StartPhase] = []
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(_START_S)
        fields: dict[str, Any] = {
            "replica": ReplicaIdentity("replica", 1),
            "rank": 0,
            "tp": 1,
            "pp": 1,
            "engine_core_address": f"127.0.0.1:{listener.getsockname()[1]}",
            "trust": draw_trust(),
            "model_dir": str(model_dir),
            "dtype": dtype,
            "device": "cpu",
            "num_threads": os.cpu_count() or 1,
            "block_tokens": 64,
            "num_kv_tokens": 4096,
            "max_batch_tokens": 512,
            "max_sequences": 16,
            "transfer": TransferSettings("127.0.0.1", ("tcp",)),
        }
        spec = RankSpec(**{**fields, **changes})
        command = RankCommand.of(spec)
        self._launched_at = _CLOCK.now()
        self.process = subprocess.Popen(
            command.arguments, stdin=subprocess.PIPE, env={**command.environment, **environment}
        )
        try:
            self._sock = self._connect(listener, command, Trust.read(spec.trust))
            self.joined = self._expect(RankJoined)
            self._send(FormGroup("", ((0, read_model_config(model_dir).num_layers),)))
            self.ready = self._expect(RankReady)
            self._note("ready")
            # The seconds of cores that the start took.
            self.start_cpu_s = self._cpu_s()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            listener.close()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._send(Shutdown("the benchmark ends"))
        else:
            self.process.kill()
        self.process.wait()
        self._sock.close()

    def run(self, plan: StepPlan) -> StepReport:
        """Run one step."""
        self._send(plan)
        while not isinstance(message := self._receive(), StepReport):
            pass
        return message

    def resident_bytes(self) -> int:
        """Return the process's resident memory, shared memory included."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _cpu_s(self) -> float:
        """Return the time of cores that the process, and its children that have ended, took."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def phase_s(self) -> dict[str, float]:
        """Return how long each phase of the start took; phases that share a first word are one."""
        durations: dict[str, float] = {}
        for phase, later in zip(self.phases, self.phases[1:], strict=False):
            name = phase.name.partition(",")[0]
            durations[name] = durations.get(name, 0.0) + later.began_s - phase.began_s
        return durations

    @property
    def start_s(self) -> float:
        """The seconds from the launch of the process until it was ready."""
        return self.phases[-1].began_s

    def _connect(self, listener: socket.socket, command: RankCommand, trust: Trust) -> socket.socket:
        assert self.process.stdin is not None
        self._note("importing")
        with self.process.stdin as stream:
            stream.write(command.spec_frame)
        sock, _ = listener.accept()
        prove_as_server(sock, trust)
        sock.settimeout(_START_S)
        self._note("joining")
        return sock

    def _expect(self, kind: type[_Message]) -> _Message:
        while not isinstance(message := self._receive(), kind):
            pass
        return message

    def _receive(self) -> RankUp:
        message = RANK_UP_CODEC.decode(receive_frame(self._sock))
        if isinstance(message, RankFailed):
            raise RuntimeError(f"the rank failed: {message.reason}")
        if isinstance(message, RankProgress):
            self._note(message.phase)
        return message

    def _note(self, phase: str) -> None:
        self.phases.append(StartPhase(phase, _CLOCK.now() - self._launched_at))

    def _send(self, message: FormGroup | StepPlan | Shutdown) -> None:
        send_frame(self._sock, RANK_DOWN_CODEC.encode(message))
