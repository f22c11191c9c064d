"""Every command that a page prints works: the shell blocks of the pages, in order, beside a real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import WAIT_S
from serving import ROOT, environment, free_port
from shell_blocks import NEEDS, PAGES, Block, blocks, runnable

SUPPORT = ROOT / "tests" / "support"
BLOCK_S = 240.0
# What the pages call `cluster.yaml`: yours, so each page's text stands beside any file of this kind.
CLUSTER = """
model: models/tiny
pools:
  - {name: prefill, role: prefill, dtype: fp32, cpus_per_rank: 0.1, engine: {kv_tokens: 4096}}
  - {name: decode, role: decode, dtype: fp32, cpus_per_rank: 0.1, engine: {kv_tokens: 4096}}
store: {dram_gb: 0.1}
"""
# And `v2.yaml`: another version of the model, beside it.
SECOND = CLUSTER + "app: tandem-v2\ngateway: {port: 0, admin_port: 0, http: {port: 0}}\n"
# Commands that call no cluster.
ALONE = re.compile(r"tandem (?:key|serve|doctor -f|bench (?:engine|scaling))\b")
CALLS = re.compile(r"\b(?:tandem \w+|curl |ray status)")
COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")


def test_every_block_of_commands_says_that_it_is_for_a_shell_and_what_it_needs() -> None:
    unmarked, unknown = [], []
    for page in PAGES:
        for block in blocks(page):
            unmarked += [block.name] if block.has_commands and not block.is_shell else []
            unknown += [
                f"{block.name} {need}" for need in block.needs if need not in NEEDS and block.is_shell
            ]
    assert unmarked == []
    assert unknown == []


class Folder:
    """A folder as that of a clone after `make demo`, in which blocks run as a user would paste them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ports = {option: free_port() for option in ("--port", "--admin-port", "--http-port")}
        (path / "models").symlink_to(ROOT / "models")
        port, admin_port, http_port = self._ports.values()
        listening = {"port": port, "admin_port": admin_port, "console_port": 0, "http": {"port": http_port}}
        (path / "cluster.yaml").write_text(f"{CLUSTER}gateway: {json.dumps(listening)}\n")
        (path / "v2.yaml").write_text(SECOND)
        ports = path / "ports.json"
        ports.write_text(json.dumps(self._ports))
        programs = path / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name in ("ray", "python"):
            (programs / name).symlink_to(Path(sys.executable).parent / name)
        tandem = programs / "tandem"
        words = (sys.executable, SUPPORT / "documented_shell.py", ports)
        tandem.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
        tandem.chmod(0o755)

    def run(self, block: Block) -> None:
        """Run the block, beside a cluster where it calls one and starts none; end what it has started."""
        text = self._settled(block.text)
        commands = COMMENT.sub("", text)
        is_served = re.search(r"tandem serve\b(?!.*--print-config)(?!.*--ray-address)", commands)
        if CALLS.search(ALONE.sub("", commands)) and not is_served:
            text = f"tandem serve -f cluster.yaml\n{text}"
        try:
            self._bash(block, text)
        finally:
            self._end()

    def _settled(self, text: str) -> str:
        """The block with what its placeholders stand for."""
        text = re.sub(
            r"(\S*tandem) explain REQUEST_ID",
            r"\1 generate Hi --max-tokens 2 --request-id documented > /dev/null; \1 explain documented",
            text,
        )
        text = re.sub(  # a cluster that has recorded requests, and measured its steps
            r"(\S*tandem) simulate --from",
            r"\1 bench serve --concurrency 1 > /dev/null; \1 simulate --from",
            text,
        )
        for shown, option in (("8780", "--port"), ("8782", "--admin-port"), ("8784", "--http-port")):
            text = re.sub(rf"\b(?:HOST|127\.0\.0\.1):{shown}\b", f"127.0.0.1:{self._ports[option]}", text)
        printed = r"$(sed -nE 's/^{}  +(in )?//p' serve-*.log | head -1)"
        ray, token = printed.format("Ray"), printed.format("Ray token")
        text = re.sub(r"(?:HOST|127\.0\.0\.1):PORT", lambda _: ray, text)
        text = text.replace("http://127.0.0.1:8265", printed.format("dashboard"))
        text = re.sub(r"/tmp/tandem-runs-[\w/-]+/ray-token", lambda _: token, text)
        return text.replace("RAY_AUTH_TOKEN_PATH=FILE", f"RAY_AUTH_TOKEN_PATH={token}")

    def _bash(self, block: Block, text: str) -> None:
        variables = environment()
        variables["PATH"] = f"{self.path / '.venv' / 'bin'}{os.pathsep}{variables['PATH']}"
        variables["TANDEM_ADDRESS"] = f"127.0.0.1:{self._ports['--port']}"
        variables["TANDEM_ADMIN_ADDRESS"] = f"127.0.0.1:{self._ports['--admin-port']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"{block.name} ended with {done.returncode}:\n{text}\n{done.stdout}"

    def _end(self) -> None:
        serving = self.path / "serving"
        if not serving.exists():
            return
        for process_id in map(int, reversed(serving.read_text().split())):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(process_id)
                process.send_signal(signal.SIGINT)
                process.wait(WAIT_S)
        serving.unlink()
        for file in self.path.glob("serve-*.log"):
            file.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made._end()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_work(page: Path, folder: Folder) -> None:
    for block in runnable(page):
        folder.run(block)
