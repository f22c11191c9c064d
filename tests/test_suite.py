"""What the whole suite promises: set-ups that fail leave no process, and optional programs are optional."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from arena_harness import MODEL, RankProcess
from child_processes import assert_ended, children, close_all, killed_on_error
from e2e_harness import E2eHarness, Replica
from index_harness import RawRedis
from optional_programs import PROGRAM_TO_PACKAGE, check_marks, find_program, missing_programs
from serving import RunningCluster
from store_harness import StoreHarness
from transfer_harness import AgentProcess, TransferHarness

from benchmarks.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).resolve().parent.parent


class Broken(Exception):
    """What the tests make a set-up fail with."""


def fail(*_: object, **__: object) -> Any:
    raise Broken


def a_cluster(patch: pytest.MonkeyPatch, folder: Path) -> None:
    RunningCluster("--no-such-option")


def a_store(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(asyncio.StreamReader, "readline", fail)
    asyncio.run(StoreHarness(folder).start())


def two_agents_of_which_one_starts(patch: pytest.MonkeyPatch, folder: Path) -> None:
    start = AgentProcess.__init__
    started: list[AgentProcess] = []

    def start_one(agent: AgentProcess) -> None:
        if started:
            raise Broken
        started.append(agent)
        start(agent)

    patch.setattr(AgentProcess, "__init__", start_one)
    TransferHarness("shm")


def a_redis_that_does_not_take_its_settings(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with RawRedis(folder) as server:
        server.client(password="it wants none").ping()
        raise Broken


def a_replica_that_nobody_reaches(patch: pytest.MonkeyPatch, folder: Path) -> None:
    async def start() -> None:
        write_random_checkpoint(folder, "llama", seed=3)
        before = ranks_of_the_fork_server()
        with pytest.raises(ExceptionGroup) as failed:
            async with E2eHarness(folder) as harness:
                await harness.add_all({"a": "prefill", "b": "decode"})
        assert_ended(ranks_of_the_fork_server() - before, timeout_s=10)
        raise failed.value.exceptions[0]

    patch.setattr(Replica, "connect", fail)
    asyncio.run(start())


def a_rank_that_gets_no_order(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(RankProcess, "_send", fail)
    RankProcess(MODEL, seed=1)


def ranks_of_the_fork_server() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True)) - children()


SETUPS = (
    a_cluster,
    a_store,
    two_agents_of_which_one_starts,
    a_redis_that_does_not_take_its_settings,
    a_replica_that_nobody_reaches,
    a_rank_that_gets_no_order,
)


@pytest.mark.parametrize("set_up", SETUPS, ids=lambda set_up: set_up.__name__)
def test_a_set_up_that_fails_leaves_no_process(
    set_up: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = children()
    with pytest.raises((Broken, AssertionError)):
        set_up(monkeypatch, tmp_path)
    assert_ended(children() - before, timeout_s=0)


def test_who_fails_takes_the_family_along() -> None:
    script = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    with pytest.raises(Broken), killed_on_error(process):
        fail()
    assert process.returncode is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_all_are_closed_although_one_fails() -> None:
    class Opened:
        def __init__(self, error: type[Exception] | None) -> None:
            self.error = error
            self.is_closed = False

        def close(self) -> int:
            self.is_closed = True
            if self.error is not None:
                raise self.error
            return 7

    each = [Opened(None), Opened(Broken), Opened(None)]
    with pytest.raises(Broken):
        close_all(each)
    assert all(opened.is_closed for opened in each)
    assert close_all([Opened(None), Opened(None)]) == [7, 7]


def test_a_process_that_is_left_is_named_and_ended() -> None:
    before = children()
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(AssertionError, match=r"left behind: .*sleep 60"):
        assert_ended(children() - before, timeout_s=0.1)
    assert process.wait() != 0


# --------------------------------------------------------------------------------- optional programs


def marks(*given: pytest.MarkDecorator) -> list[pytest.Mark]:
    return [each.mark for each in given]


def test_a_missing_program_is_the_reason_to_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = pytest.mark.optional_program
    one, other = program("redis-server", "valkey-server"), program("promtool")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_programs(marks(one, other)) == (
        "not on PATH: redis-server or valkey-server (Debian: redis-server), promtool (Debian: prometheus)"
    )
    assert missing_programs(marks(program("c++", otherwise="torch computes"))) == ""
    for name in ("valkey-server", "promtool"):
        (tmp_path / name).touch(0o755)
    assert missing_programs(marks(one, other)) == ""
    assert find_program("promtool") == str(tmp_path / "promtool")
    with pytest.raises(AssertionError, match=r"mark this test with optional_program\('helm'\)"):
        find_program("helm")
    assert set(PROGRAM_TO_PACKAGE) > {
        "redis-server",
        "valkey-server",
        "prometheus",
        "promtool",
        "chromium",
        "helm",
    }


@pytest.mark.parametrize("words", ["", "'no-such-program'", "'helm', unless=''"])
def test_a_mark_that_says_nothing_is_refused(request: pytest.FixtureRequest, words: str) -> None:
    item = request.node
    item.add_marker(eval(f"pytest.mark.optional_program({words})"))
    with pytest.raises(pytest.UsageError, match="optional_program takes names of redis-server"):
        check_marks(item)


def test_the_bare_path_has_no_optional_program() -> None:
    """`.ci/bare` looks for the very programs that tests may be marked with."""
    bare = ROOT / ".ci" / "bare"
    (listed,) = re.findall(r"^optional=\((.*)\)$", bare.read_text(), re.MULTILINE)
    assert set(listed.split()) == PROGRAM_TO_PACKAGE.keys()
    script = f"""
        for name in {listed}; do if command -v "$name"; then exit 3; fi; done
        git --version && make --version && test "${{CXX-none}}" = none || exit 4
        test -z "$(ls "$TMPDIR")" || exit 5
        python3 -c 'import sys; sys.exit(7)'
    """
    command = ["/bin/bash", str(bare), "sh", "-c", script]
    done = subprocess.run(
        command, env={**os.environ, "CXX": "c++"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stdout + done.stderr
