"""`tandem chat` and `tandem models`: through pipes, as programs use them, and on a terminal, as people do."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_person import CTRL_C, CTRL_D, Person
from gateway_harness import GatewayHarness, ScriptedReplica, decode, encode, until, write_model
from patience import WAIT_S
from rich.console import Console
from serving import ROOT, environment, tandem

from cluster.api.client import Completion
from cluster.api.generate_options import Turn
from cluster.cli.chat_pipe import PipeScreen, pipe_lines
from cluster.cli.chat_session import Conversation, SpokenAnswer
from cluster.cli.chat_terminal import TerminalScreen, printable, stats_line
from cluster.proto.tandem.v1 import inference_pb2 as pb


async def start(harness: GatewayHarness, **gateway: Any) -> tuple[ScriptedReplica, str]:
    """A replica, and the address of its gateway, with these settings."""
    replica = await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway(harness.config(**gateway))
    return replica, address


async def piped(address: str, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, given these lines."""
    command = [sys.executable, "-m", "cluster", "chat", "--address", address, *options]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=ROOT,
        env=environment(),
        input=lines,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def prompts(replica: ScriptedReplica) -> list[str]:
    """The prompts that reached the replica, without the markers of turns."""
    texts = [decode(memoryview(it.prompt).cast("I").tolist()) for it in replica.submissions]
    return [text.replace("<|im_start|>", "").replace("<|im_end|>", "") for text in texts]


# ------------------------------------------------------------------------------------------ pipes


async def test_each_line_of_a_pipe_is_answered_by_one_line(harness: GatewayHarness) -> None:
    replica, address = await start(harness)
    done = await piped(address, "the quick\n\nfox\n", "--max-tokens", "3", "--system", "brown")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.split("\n")
    assert len(lines) == 3
    assert lines[2] == ""
    first, second = prompts(replica)
    assert first == "system\nbrown\nuser\nthe quick\nassistant\n"
    # What was answered goes before the second message.
    assert second.startswith(first)
    assert second.endswith("\nuser\nfox\nassistant\n")
    assert len(second) > len(first) + len("\nuser\nfox\nassistant\n")


async def test_json_has_the_whole_answer(harness: GatewayHarness) -> None:
    _, address = await start(harness)
    done = await piped(address, "a\nb", "--max-tokens", "4", "--json", "--seed", "3")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(it["finish_reason"], len(it["token_ids"]), it["seed"]) for it in answers] == [
        ("length", 4, 3)
    ] * 2


async def test_commands_work_in_a_pipe_and_say_nothing_there(harness: GatewayHarness, tmp_path: Path) -> None:
    replica, address = await start(harness)
    file = tmp_path / "chat.json"
    lines = f"a\n/reset\n/system fox\nb\n/explain\n//help\n/save {file}\n/nonsense\n"
    done = await piped(address, lines, "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3
    assert prompts(replica)[1] == "system\nfox\nuser\nb\nassistant\n"
    assert prompts(replica)[2].endswith("user\n/help\nassistant\n")
    saved = json.loads(file.read_text())["messages"]
    assert [it["role"] for it in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert [it["content"] for it in saved[:2]] == ["fox", "b"]
    assert "timeline" in done.stderr
    assert "unknown command: /nonsense" in done.stderr


async def test_a_request_that_fails_ends_a_pipe(harness: GatewayHarness) -> None:
    _, address = await start(harness)
    done = await piped(address, "a\n" + "the fox " * 900 + "\nb\n", "--max-tokens", "2")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 2
    assert "INVALID_ARGUMENT" in done.stderr


async def test_a_model_without_a_template_cannot_chat(tmp_path: Path) -> None:
    harness = GatewayHarness(write_model(tmp_path / "model", None))
    try:
        _, address = await start(harness)
        done = await piped(address, "a\n")
        assert done.returncode == 1
        assert "m has no chat template, so it cannot chat" in " ".join(done.stderr.split())
    finally:
        await harness.close()


async def test_a_model_that_is_not_served_is_named(harness: GatewayHarness) -> None:
    _, address = await start(harness)
    done = await piped(address, "a\n", "--model", "other")
    assert done.returncode == 1
    assert "'other' is not served here; m is" in " ".join(done.stderr.split())


def test_values_that_no_gateway_accepts_are_refused_at_once() -> None:
    done = tandem("chat", "--temperature", "-1", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "temperature: is -1" in done.stderr


def test_lines_of_a_pipe_are_bounded_and_text() -> None:
    assert list(pipe_lines(io.StringIO("a\r\n \n\nb"))) == ["a", "b"]
    with pytest.raises(Exception, match="longer than"):
        list(pipe_lines(io.StringIO("x" * (1 << 24) + "yz\n")))
    with pytest.raises(Exception, match="not UTF-8"):
        list(pipe_lines(io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")))


# ----------------------------------------------------------------------------------------- terminal


async def test_a_person_chats_cancels_an_answer_and_leaves(harness: GatewayHarness, tmp_path: Path) -> None:
    replica, address = await start(harness)

    def begin() -> None:
        person.reads("m, 512 tokens of context")
        person.types("/explain\r")
        person.reads("nothing was asked yet")
        person.types("the quick\r")
        person.reads(" answer,")
        person.presses(CTRL_C)
        person.reads("(the answer is not complete)")

    def finish() -> None:
        person.types("/system brown\r")
        person.reads("with this system prompt")
        person.types("half a line")
        person.reads("half a line")
        person.interrupts_the_editor("Ctrl-D ends the chat")
        person.types("fox\r")
        person.reads("300 tokens (length), first after")
        person.reads("prompt tokens cached")
        person.types("/explain\r")
        person.reads("timeline")
        person.types(f"/save {tmp_path / 'chat.json'}\r")
        person.reads("4 messages are in")
        person.types(f"/save {tmp_path}\r")
        person.reads("exists already")
        person.types(CTRL_D)
        assert person.leaves() == 0

    replica.script.tokens = encode("the answer, " * 400)
    replica.script.stop_after = 20
    with Person(address, tmp_path, "--max-tokens", "300") as person:
        await asyncio.to_thread(begin)
        await until(lambda: bool(replica.cancels), "the replica was told")
        replica.script.stop_after = None
        replica.script.resume.set()
        await asyncio.to_thread(finish)
    first, second = prompts(replica)
    assert first == "user\nthe quick\nassistant\n"
    assert second.startswith("system\nbrown\nuser\nthe quick\nassistant\nthe answer")
    assert second.endswith("\nuser\nfox\nassistant\n")
    history = tmp_path / "tandem" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    typed = [line for line in history.read_text().splitlines() if not line.startswith("_HiStOrY_")]
    assert typed[:5] == ["/explain", "the quick", "/system brown", "fox", "/explain"]


async def test_a_failed_request_leaves_a_person_s_chat_as_it_was(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    replica, address = await start(harness, max_tokens_beyond_context="refuse")

    def talk() -> int:
        with Person(address, tmp_path, "--max-tokens", "500", "--history", "") as person:
            person.types("the quick brown fox, the answer\r")
            person.reads("INVALID_ARGUMENT")
            person.reads("the chat is as before that message")
            person.types(CTRL_D)
            return person.leaves()

    assert await asyncio.to_thread(talk) == 0
    assert replica.submissions == []
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- parts


def test_reasoning_is_dim_and_comes_before_the_text() -> None:
    shown = io.StringIO()
    screen = TerminalScreen(Console(file=shown, force_terminal=True, color_system="standard", width=80))
    for delta in (pb.Delta(reasoning="hmm"), pb.Delta(reasoning=" yes"), pb.Delta(text="An answer")):
        screen.show(delta)
    assert shown.getvalue() == ("\x1b[2;3mhmm\x1b[0m\x1b[2;3m yes\x1b[0m\n\n\x1b[32mAn answer\x1b[0m")


def test_reasoning_in_a_pipe_is_in_the_json_alone() -> None:
    finished = pb.Finished(samples=[pb.SampleEnd(finish_reason=pb.FINISH_REASON_STOP)])
    completion = Completion("r", 1, ("yes",), ((7,),), ("stop",), finished, ((),), ("hmm",))
    for as_json in (True, False):
        output = io.StringIO()
        screen = PipeScreen(output, Console(file=io.StringIO()), as_json=as_json)
        screen.show(pb.Delta(reasoning="hmm"))
        screen.show(pb.Delta(text="yes\nno\r\n"))
        screen.end(SpokenAnswer("yes", completion))
        if as_json:
            shown: dict[str, Any] = json.loads(output.getvalue())
            assert (shown["text"], shown["reasoning"]) == ("yes", "hmm")
        else:
            assert output.getvalue() == "yes no  \n"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\tb\n\x9bc\x07é") == "a\ufffd[2J\tb\n\ufffdc\ufffdé"


def test_figures_of_an_answer() -> None:
    usage = pb.Usage(prompt_tokens=80, completion_tokens=11, cached=pb.CachedTokens(device=48, nvme=16))
    finished = pb.Finished(usage=usage, timing=pb.Timing(ttft_ms=30, e2e_ms=1030))
    shown = stats_line(Completion("r", 1, ("x",), ((1,),), ("stop",), finished))
    assert shown == "11 tokens (stop), first after 0.03 s, then 10.0 a second; 64 of 80 prompt tokens cached"


def test_a_conversation_is_sent_with_its_system_prompt() -> None:
    chat = Conversation("brief")
    chat.add("a", "b")
    assert chat.prompt("c") == [
        Turn("system", "brief"),
        Turn("user", "a"),
        Turn("assistant", "b"),
        Turn("user", "c"),
    ]
    assert Conversation().prompt("c") == [Turn("user", "c")]


# ------------------------------------------------------------------------------------------- models


async def test_the_served_models_are_listed(harness: GatewayHarness) -> None:
    _, address = await start(harness)
    shown = await asyncio.to_thread(tandem, "models", "--address", address)
    assert shown.returncode == 0, shown.stderr
    row = next(line.split() for line in shown.stdout.splitlines() if line.split()[:1] == ["m"])
    assert (row[1], row[3:]) == ("yes", ["512", "400", "16"])
    listed = await asyncio.to_thread(tandem, "models", "--json", "--address", address)
    (model,) = json.loads(listed.stdout)["models"]
    assert (model["name"], model["has_chat_template"], model["max_context_tokens"]) == ("m", True, 512)
