"""Somebody at a terminal, who chats."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from patience import WAIT_S
from serving import ROOT, environment

from kvtransfer.common.clock import SystemClock

CTRL_C, CTRL_D = "\x03", "\x04"
# Takes the pseudo-terminal as that of its session, so that Ctrl-C is a signal, and becomes the command.
_ON_TERMINAL = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("cluster", run_name="__main__", alter_sys=True)
"""


class Person:
    """Types into `tandem chat` on a pseudo-terminal, and reads what it shows."""

    def __init__(
        self, address: str, state: Path, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, "chat", "--address", address, *arguments],
            cwd=ROOT,
            env={**environment(), "XDG_STATE_HOME": str(state), "TERM": "xterm", "NO_COLOR": "", **variables},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""
        self._clock = SystemClock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the command where a test has failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        os.close(self._master)

    def types(self, text: str) -> None:
        """Type at the next prompt: before it, the terminal is not in the editor's hands."""
        self.reads("> ")
        self.presses(text)

    def presses(self, text: str) -> None:
        os.write(self._master, text.encode())

    def reads(self, text: str, within_s: float = WAIT_S) -> str:
        """What is shown up to this text, and from the text that was read before."""
        end = self._clock.now() + within_s
        while text not in self.shown:
            left_s = end - self._clock.now()
            assert left_s > 0, f"not shown: {text!r}; shown: {self.shown!r}"
            if not select.select([self._master], [], [], left_s)[0]:
                continue
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other side is closed
                data = b""
            assert data, f"it ended without {text!r}; shown: {self.shown!r}"
            self.shown += data.decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def interrupts_the_editor(self, answer: str) -> None:
        """Press Ctrl-C, and again where nothing happens: Python's `input` sees a signal that comes while it
        handles a key only with the next one."""
        end = self._clock.now() + WAIT_S
        while answer not in self.shown and self._clock.now() < end:
            self.presses(CTRL_C)
            if select.select([self._master], [], [], 1.0)[0]:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
        self.reads(answer)

    def leaves(self) -> int:
        return self.process.wait(WAIT_S)
