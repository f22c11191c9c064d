"""`tandem chat MODEL`: a server of its own for one chat, or the one that serves the model already."""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chat_person import CTRL_C, CTRL_D, Person
from child_processes import killed_on_error
from gateway_harness import GatewayHarness, write_model
from patience import SETTLE_S, START_S, WAIT_S
from serving import ROOT, TINY, environment, tandem

from benchmarks.random_checkpoint import write_random_checkpoint

# Where nobody listens.
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def mark() -> Iterator[str]:
    """A variable of the environment that all processes of a command inherit; none of them may remain."""
    found = f"CHAT_{secrets.token_hex(8)}"
    yield found
    assert marked(found) == []


def marked(mark: str) -> list[str]:
    """The processes that have the mark."""
    names = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ():
                names.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue
    return names


def begun(mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster", "chat", *arguments, "--address", NOWHERE],
        cwd=ROOT,
        env={**environment(), mark: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.cluster
def test_a_pipe_is_answered_by_a_server_of_its_own(mark: str) -> None:
    process = begun(mark, str(TINY), "--max-tokens", "3")
    with killed_on_error(process):
        answers, notes = process.communicate("the quick\nfox\n", timeout=START_S)
    assert process.returncode == 0, notes
    assert answers.count("\n") == 2
    shown = notes.splitlines()
    assert shown[0] == "loading tiny"
    assert "loading: both 1 of 1" in shown
    assert shown[-1] == "stopping"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stage"), [(signal.SIGINT, "checking resources"), (signal.SIGTERM, "deploying")]
)
def test_an_interruption_while_it_loads_ends_all(mark: str, number: signal.Signals, stage: str) -> None:
    process = begun(mark, str(TINY))
    with killed_on_error(process):
        assert process.stderr is not None
        assert any(line.startswith(stage) for line in process.stderr)
        process.send_signal(number)
        answers, notes = process.communicate(timeout=START_S)
    assert (process.returncode, answers) == (128 + number, "")
    assert "interrupted" in notes


@pytest.mark.cluster
@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_not_the_server(mark: str, tmp_path: Path) -> None:
    with Person(
        NOWHERE, tmp_path, str(TINY), "--ignore-eos", "--history", "", variables={mark: "1"}
    ) as person:
        person.reads("tokens of context", within_s=START_S)
        person.types("def\r")
        person.reads("\x1b[32m")
        person.presses(CTRL_C)
        person.reads("(the answer is not complete)")
        person.types("class\r")
        person.reads("first after")
        person.types(CTRL_D)
        assert person.leaves() == 0


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_chats_run_side_by_side_and_one_may_be_ended(mark: str) -> None:
    first = begun(mark, str(TINY), "--max-tokens", "3")
    with killed_on_error(first):
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("the quick\n")
        first.stdin.flush()
        assert first.stdout.readline()
        second = begun(mark, str(TINY), "--max-tokens", "3")
        with killed_on_error(second):
            answers, notes = second.communicate("fox\n", timeout=SETTLE_S)
            assert (second.returncode, answers.count("\n")) == (0, 1), notes
        first.stdin.write("fox\n")
        first.stdin.flush()
        assert first.stdout.readline()
        first.send_signal(signal.SIGTERM)
        _, notes = first.communicate(timeout=WAIT_S)
        assert first.returncode == 128 + signal.SIGTERM, notes


async def test_a_model_that_is_served_already_is_not_served_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    harness = GatewayHarness(folder)
    try:
        await harness.add_replica("d0", "decode")
        _, address = await harness.add_gateway(harness.config())
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "cluster", "chat", str(folder), "--address", address, "--max-tokens", "3"],
            cwd=ROOT,
            env=environment(),
            input="the quick\n",
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == f"m is served at {address} already\n"
        assert done.stdout.count("\n") == 1
    finally:
        await harness.close()


def refused(*arguments: str) -> str:
    """The one line with which the command ends before it starts anything."""
    done = tandem("chat", *arguments, "--address", NOWHERE)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    assert "no-such-model" in refused(str(tmp_path / "no-such-model"))
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(str(tmp_path / "empty"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "other", "architectures": ["Other"]}')
    assert "other" in refused(str(tmp_path / "other")).lower()


def test_a_model_without_a_template_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    write_random_checkpoint(folder, "llama", seed=1, tokenizer_from=TINY)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    assert "plain has no chat template, so it cannot chat" in refused(str(folder))


def test_a_device_is_that_of_a_model() -> None:
    done = tandem("chat", "--device", "cpu", "--address", NOWHERE)
    assert done.returncode == 2
    assert "name one" in done.stderr


def test_values_of_no_request_are_refused_before_anything_is_loaded() -> None:
    done = tandem("chat", str(TINY), "--temperature", "-1", "--address", NOWHERE)
    assert done.returncode == 1
    assert "temperature" in done.stderr
    assert "loading" not in done.stderr
