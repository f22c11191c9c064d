"""`tandem demo`: the bundled model, one prefill and one decode replica, requests that share a prefix."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.api.client import Client, Collector
from cluster.api.generate_options import GenerateOptions
from cluster.cli.progress_report import progress_to, stages
from cluster.cli.terminal import NONE, made_table
from cluster.config import default_config
from cluster.errors import StartError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.serve.launcher import Service
from kvtransfer.common.clock import Clock
from workers.model.model_config import read_model_config

_OPTIONS = GenerateOptions(max_tokens=48, temperature=0.7, top_p=0.9, seed=1)
_HTTP_PROMPT = "import os"
_TIMEOUT_S = 60.0
_PREFIX = '''\
"""Reading and writing of configuration files."""

import collections
import os
import re
import sys


class ConfigError(Exception):
    """Raised when a configuration file cannot be read."""

    def __init__(self, filename, lineno, message):
        super().__init__(filename, lineno, message)
        self.filename = filename
        self.lineno = lineno
        self.message = message

    def __str__(self):
        return f"{self.filename}:{self.lineno}: {self.message}"


class ConfigReader:
    """Read options from a file, one section after another."""

    comment = re.compile(r"\\s*[#;].*$")
    option = re.compile(r"(?P<name>[^=:]+?)\\s*[=:]\\s*(?P<value>.*)$")

    def __init__(self, defaults=None, *, strict=True):
        self._sections = collections.OrderedDict()
        self._defaults = dict(defaults or {})
        self._strict = strict

    def sections(self):
        """Return the names of all sections, without the default one."""
        return list(self._sections.keys())

    def has_section(self, section):
        """Tell whether the section is there."""
        return section in self._sections

    def add_section(self, section):
        """Create a new section, which must not exist yet."""
        if section in self._sections:
            raise ValueError(f"section {section!r} already exists")
        self._sections[section] = {}

'''
_ENDINGS = (
    '''\
    def get(self, section, option, fallback=None):
        """Return the value of an option, or the fallback."""
''',
    '''\
    def read(self, filenames, encoding=None):
        """Read and parse a file, or each file of a list; files that
        cannot be opened are ignored, so that a list of places where a
        file may be is a fine argument. Return the names of the files
        that were read. The encoding is that of open(), and so is what
        happens when it does not fit the bytes of a file.
        """
        if isinstance(filenames, (str, bytes, os.PathLike)):
            filenames = [filenames]
        read_ok = []
''',
    '''\
    def remove_section(self, section):
        """Remove a section."""
''',
)


def run_demo(model: Path, clock: Clock, interrupted: threading.Event, console: Console) -> list[DemoRow]:
    """Start a cluster, send the requests one after the other, show the table, stop, and return its rows.
    `StartError` when interrupted."""
    context_tokens = read_model_config(model).max_context_tokens
    config = default_config(model, prefill=1, decode=1, port=0, context_tokens=context_tokens)
    service = Service(config, clock, ray_address="local")
    started_at = clock.now()
    try:
        with stages(console, "starting") as report:
            addresses = service.start(progress_to(report), interrupted)
        took_s = clock.now() - started_at
        console.print(f"one prefill and one decode replica serve {config.model_name!r} after {took_s:.0f} s")
        console.print(
            "the bundled model has 10 MB and writes nonsense: watch where each request runs", style="dim"
        )
        rows = asyncio.run(_send_all(addresses.gateways[0], console, interrupted))
        console.print(demo_table(rows))
        if addresses.http_urls:
            _show_http(addresses.http_urls[0], console)
    finally:
        with stages(console, "stopping"):
            service.stop()
    console.print("`tandem serve` (or `make serve`) keeps such a cluster up, for a request of your own")
    console.print("everything is stopped")
    return rows


async def _send_all(address: str, console: Console, interrupted: threading.Event) -> list[DemoRow]:
    rows = []
    async with Client(address) as client:
        for number, ending in enumerate(_ENDINGS, 1):
            if interrupted.is_set():
                raise StartError("interrupted")
            console.print(f"\n[bold]request {number}[/] continues\n[dim]{escape(ending.rstrip())}[/]")
            rows.append(await _send(client, _PREFIX + ending, console))
            console.print()
    return rows


async def _send(client: Client, prompt: str, console: Console) -> DemoRow:
    """Stream one request's text, and return the row of what the gateway's last message reports."""
    collector = Collector()
    async for event in client.generate(prompt, _OPTIONS, timeout_s=_TIMEOUT_S):
        collector.add(event)
        if isinstance(event, pb.Delta):
            console.print(event.text, end="", style="green", markup=False, highlight=False, soft_wrap=True)
    console.print()
    finished = collector.completion().finished
    usage, timing = finished.usage, finished.timing
    loaded = {tier: getattr(usage.cached, tier) for tier in ("dram", "nvme", "remote")}
    return DemoRow(
        prefill=finished.prefill_replica,
        decode=finished.decode_replica,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached.device + sum(loaded.values()),
        ttft_ms=timing.ttft_ms,
        itl_ms=(timing.e2e_ms - timing.ttft_ms) / max(usage.completion_tokens - 1, 1),
        transfer_gb_s=timing.transfer_gb_s,
        transport=timing.transport,
        loaded=loaded,
    )


def _show_http(url: str, console: Console) -> None:
    """Ask over HTTP as `curl` would, and print both."""
    body = json.dumps({"prompt": _HTTP_PROMPT, "max_tokens": 12, "temperature": 0})
    console.print("\nthe same over HTTP, for clients of OpenAI's API; this was sent, and its answer follows:")
    command = f"curl {url}/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print(command, markup=False, highlight=False, soft_wrap=True)
    request = urllib.request.Request(
        f"{url}/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        text = answer.read().decode()
    console.print(text, style="green", markup=False, highlight=False, soft_wrap=True)


class DemoRow(NamedTuple):
    """Represents one request of the demonstration. Times are milliseconds, rates 1e9 bytes a second."""

    prefill: str
    decode: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    itl_ms: float
    transfer_gb_s: float
    transport: str
    # By tier: the cached tokens that the store had.
    loaded: dict[str, int] = {}


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """Show where the requests of the demonstration ran and what they reused, one row each."""
    numbers = "cached\ntokens", "TTFT\nms", "ITL\nms", "transfer\nGB/s"
    table = made_table(
        "requests that share a prefix", "", "prefill replica", "decode replica", numbers=numbers
    )
    if any(row.prefill == row.decode for row in rows):
        table.caption = "the same replica twice: it held most of the prompt and computed the rest itself"
        table.caption_justify = "left"
    for number, row in enumerate(rows, 1):
        cached = f"{row.cached_tokens} of {row.prompt_tokens}"
        loaded = ", ".join(f"{num} {tier}" for tier, num in row.loaded.items() if num)
        table.add_row(
            str(number),
            row.prefill,
            row.decode,
            (f"[green]{cached}[/]" if row.cached_tokens else cached) + (f"\n{loaded}" if loaded else ""),
            f"{row.ttft_ms:.1f}",
            f"{row.itl_ms:.1f}",
            f"{row.transfer_gb_s:.2f} {row.transport}" if row.transport else NONE,
        )
    return table
