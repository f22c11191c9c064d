"""The command line without a cluster: what it refuses, and how it says so."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from gateway_harness import PROMPT, GatewayHarness
from serving import ROOT, TINY, environment, free_port, tandem
from typer.main import get_command

from cluster.api.generate_options import GenerateOptions
from cluster.cli.main import cli


def test_help_names_every_command() -> None:
    shown = tandem("--help").stdout
    calls = {"generate", "chat", "models", "status", "explain"}
    others = {
        "serve",
        "demo",
        "update",
        "traffic",
        "scale",
        "doctor",
        "plan",
        "simulate",
        "bench",
        "store",
        "key",
    }
    assert calls | others <= set(re.findall(r"^\W+(\w+)", shown, re.MULTILINE))


# They say one line, or what happens while they run.
WITHOUT_TABLES = {"serve", "key revoke", "key root"}


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command below this one, by the words that call it."""
    if not hasattr(command, "list_commands"):
        yield " ".join(path), command
        return
    context = typer.Context(command)
    for name in command.list_commands(context):
        yield from commands_of(command.get_command(context, name), (*path, name))


def test_every_command_with_a_table_has_its_json() -> None:
    known = dict(commands_of(get_command(cli)))
    assert {"demo", "scale", "bench serve", "store ls", *WITHOUT_TABLES} <= set(known)
    options = {name: [text for it in command.params for text in it.opts] for name, command in known.items()}
    assert {name for name, texts in options.items() if "--json" not in texts} == WITHOUT_TABLES


def test_a_call_of_the_gateway_imports_nothing_that_only_other_commands_need() -> None:
    """Else each call on the command line takes seconds of a core before it begins."""
    shown = subprocess.run(
        [sys.executable, "-c", "import sys, cluster.cli.main; print(*sys.modules)"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    others = {
        "ray",
        "torch",
        "redis",
        "plotext",
        "aiohttp",
        "router.service",
        "cluster.config",
        "cluster.scaling",
    }
    assert not others & set(shown.stdout.split())


def test_a_bad_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {TINY}\npools:\n  - {{name: d, role: decode, tp: 0}}\n")
    done = tandem("serve", "--file", str(file))
    assert done.returncode == 1
    assert "pools[0].tp: must be at least" in done.stderr.replace("\n", "")


def test_a_split_that_the_model_does_not_allow_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: {TINY}\npools:\n  - {{name: d, role: decode, tp: 16}}\n")
    done = tandem("serve", "--file", str(file))
    assert done.returncode == 1
    assert "tp is more than the model's 8 attention heads" in " ".join(done.stderr.split())


def test_a_folder_that_holds_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = tandem("serve", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "config.json" in done.stderr


@pytest.mark.parametrize("command", [("status", "--admin-address"), ("explain", "r", "--address")])
def test_an_unreachable_gateway_is_one_line(command: tuple[str, ...]) -> None:
    done = tandem(*command, f"127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert done.stderr.startswith("tandem: UNAVAILABLE")
    assert "Traceback" not in done.stderr


async def test_a_refusal_is_one_line_with_its_reason_and_when_to_come_back(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    replica.script.stop_after = 3
    _, address = await harness.add_gateway(harness.config(max_requests=1))
    running = harness.client(address).generate(PROMPT, GenerateOptions(max_tokens=9)).events()
    await anext(running)
    done = await asyncio.to_thread(tandem, "generate", "x", "--timeout", "2", "--address", address)
    await running.aclose()
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert told.startswith("tandem: refused: this gateway has 1 requests, the most it takes")
    assert re.search(r"; try again in \d+\.\d s$", told)


async def test_the_class_of_a_request_is_an_option(harness: GatewayHarness) -> None:
    replica = await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway()
    arguments = ("generate", "x", "--service-class", "batch", "--max-tokens", "2", "--address", address)
    done = await asyncio.to_thread(tandem, *arguments)
    assert done.returncode == 0, done.stderr
    assert [it.service_class for it in replica.submissions] == ["batch"]
    wrong = await asyncio.to_thread(tandem, "generate", "x", "--service-class", "urgent")
    assert wrong.returncode == 1
    assert "service_class: is 'urgent'; use one of batch, interactive" in " ".join(wrong.stderr.split())


def test_the_deadline_bounds_the_wait_for_a_gateway() -> None:
    done = tandem("generate", "x", "--timeout", "0.5", "--address", f"127.0.0.1:{free_port()}", timeout_s=30)
    assert done.returncode == 1
    assert done.stderr.startswith("tandem: ")


def test_a_sweep_of_nonsense_is_refused() -> None:
    done = tandem("bench", "serve", "--sweep", "1,fast")
    assert done.returncode == 2
    assert "fast" in done.stderr


def test_a_folder_without_a_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    done = tandem("serve", "--model", str(tmp_path), "--ray-address", "local")
    assert done.returncode == 1
    assert "tokenizer.json is missing" in " ".join(done.stderr.split())
    assert "starting Ray" not in done.stderr


@pytest.mark.slow
def test_a_ray_address_where_nothing_answers_is_refused_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    done = tandem("serve", "--model", str(TINY), "--ray-address", address, timeout_s=30)
    assert done.returncode == 1
    assert f"no Ray cluster answers at {address}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--seed", "-1"), "seed: "),
        (("--priority", "99999999999"), "priority: "),
        (("--stop-token-id", "-1"), "stop_token_ids: "),
        (("--timeout", "-1"), "--timeout"),
    ],
)
def test_an_option_that_cannot_be_sent_is_named(arguments: tuple[str, str], named: str) -> None:
    done = tandem("generate", "x", *arguments)
    assert done.returncode in (1, 2)
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_that_is_not_utf8_is_refused() -> None:
    command = [sys.executable, "-m", "cluster", "generate", "-"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), input=b"caf\xe9", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr


def test_an_unreachable_gateway_comes_with_a_hint() -> None:
    done = tandem("status", "--admin-address", f"127.0.0.1:{free_port()}")
    assert "does `tandem serve` run there?" in done.stderr


def test_the_version_is_printed() -> None:
    done = tandem("--version")
    assert done.stdout == f"tandem {importlib.metadata.version('tandem-serve')}\n"
    assert done.returncode == 0


def test_values_that_no_gateway_accepts_are_refused_before_a_connection() -> None:
    done = tandem("generate", "x", "--temperature", "-1", "--n", "0", "--address", f"127.0.0.1:{free_port()}")
    assert done.returncode == 1
    reported = " ".join(done.stderr.split())
    assert reported == "tandem: temperature: is -1; must be 0 (greedy) or more; n: is 0; must be 1 or more"


@pytest.mark.slow
def test_a_shell_completes_commands_and_their_options() -> None:
    def completed(words: str) -> list[str]:
        number = str(len(words.split(" ")) - 1)
        variables = {"_TANDEM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
        code = "import sys; sys.argv[0] = 'tandem'; from cluster.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**environment(), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout.split()

    assert completed("tandem s") == ["serve", "status", "scale", "simulate", "store"]
    assert "--kv-tokens" in completed("tandem serve --kv")


@pytest.mark.slow
def test_what_goes_through_a_pipe_has_no_colors() -> None:
    for arguments in (
        ("--help",),
        ("serve", "--help"),
        ("srve",),
        ("doctor", "--admin-address", "127.0.0.1:1"),
    ):
        done = tandem(*arguments)
        assert "\x1b" not in done.stdout + done.stderr, arguments
