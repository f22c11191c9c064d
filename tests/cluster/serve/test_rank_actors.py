"""How a rank's process is ended: also when it is stopped, and never another one of the same number."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from patience import WAIT_S

from cluster.serve.rank_actors import end_process


@pytest.fixture
def stopped() -> Iterator[psutil.Popen]:
    process = psutil.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    yield process
    if process.is_running():
        process.kill()
        process.wait()


def test_a_stopped_process_is_ended(stopped: psutil.Popen) -> None:
    started_at = stopped.create_time()
    end_process(stopped.pid, started_at)
    assert stopped.wait(WAIT_S) == -signal.SIGKILL
    end_process(stopped.pid, started_at)  # it is gone


def test_another_process_of_that_number_is_left_alone(stopped: psutil.Popen) -> None:
    end_process(stopped.pid, stopped.create_time() - 5.0)
    with pytest.raises((psutil.TimeoutExpired, subprocess.TimeoutExpired)):
        stopped.wait(0.2)
