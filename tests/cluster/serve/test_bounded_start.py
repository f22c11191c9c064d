"""A start of Ray that never returns ends the process, with the reason, also where nothing of Python runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from patience import WAIT_S

from cluster.serve.bounded_start import bounded_start

ROOT = Path(__file__).resolve().parent.parent.parent.parent
# Locks a mutex twice, which waits for ever, with the interpreter's lock held.
_HANG = """
import ctypes, signal, sys, threading
from cluster.serve.bounded_start import bounded_start
mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
interrupted = threading.Event()
signal.signal(signal.SIGINT, lambda *_: interrupted.set())
if sys.argv[3] == "before":
    interrupted.set()
with bounded_start(interrupted, start_s=float(sys.argv[1]), interrupted_s=float(sys.argv[2])):
    print("starts", flush=True)
    lock(mutex)
    lock(mutex)
"""


@pytest.mark.parametrize(
    ("bounds", "interrupted", "said"),
    [
        (("0.2", "60"), "never", "tandem: Ray did not answer within 0.2 s: this host is too busy"),
        (("60", "0.2"), "meanwhile", "tandem: interrupted while waiting for Ray"),
        (("60", "0.2"), "before", "tandem: interrupted while waiting for Ray"),
    ],
)
def test_a_start_that_hangs_is_ended_with_its_reason(
    bounds: tuple[str, str], interrupted: str, said: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HANG, *bounds, interrupted],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        if interrupted == "meanwhile":
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    assert errors.startswith(said)
    assert errors.count("\n") == 1


def test_a_start_that_somebody_has_stopped_is_not_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HANG, "0.3", "60", "never"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGCONT)
        assert process.wait(WAIT_S) == -signal.SIGKILL


def test_a_start_that_fails_leaves_no_watch() -> None:
    before = set(psutil.Process().children())
    with pytest.raises(OSError, match="for the test"), bounded_start(threading.Event()):
        raise OSError("for the test")
    assert set(psutil.Process().children()) <= before


def test_outside_the_main_thread_it_is_refused_and_leaves_nothing() -> None:
    descriptors, refusals = os.listdir("/proc/self/fd"), list[str]()

    def start() -> None:
        try:
            with bounded_start(threading.Event()):
                pass
        except ValueError as error:
            refusals.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in refusals[0]
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_a_start_that_returns_ends_nothing_and_leaves_nothing() -> None:
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    descriptors = os.listdir("/proc/self/fd")
    with bounded_start(threading.Event(), start_s=60.0):
        assert signal.set_wakeup_fd(-1) != before
    after = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    assert after == before
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
