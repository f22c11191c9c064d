"""`python -m tests.fuzz`: run cases of all targets for some time, and print what happened as JSON lines.

The cases run in a child process, which says in a shared page which one it runs. So the parent can name the
case that ended the child or hung in it, and go on with another child.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import mmap
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.fuzz.groups import GROUPS
from tests.fuzz.target import HANG_S, HangError, Target, bounded, rng_of

# A target's turn.
_TURN_S = 0.2
_REPORT_S = 30.0
# The first part of a run, in which caches fill. Growth is measured from its end.
_WARM_UP = 0.3
_PAGE_BYTES = 4096
# More than any case may allocate.
_MEMORY_BYTES = 4 << 30
_MOST_GROWTH_BYTES = 32 << 20
_MOST_MORE_DESCRIPTORS = 8
_MOST_MORE_THREADS = 4
# Failures of one target by one error that are printed.
_MOST_PRINTED = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, default=0, help="end after so many; 0: when the time is over")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--target", default="", help="only targets whose name has this in it")
    parser.add_argument("--case", default="", help="run this one case again, as a failure names it")
    parser.add_argument("--page", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.case:
        return _repeat(options.case)
    if options.page:
        return _Child(options).run()
    return _watch(options)


def _repeat(case: str) -> int:
    """Run one case, whose error is shown as it comes."""
    name, seed, number = case.rsplit(":", 2)
    with ExitStack() as stack:
        for target in _open(stack, name):
            if target.name == name:
                print(target.run(rng_of(name, int(seed), int(number))))
                return 0
    sys.exit(f"there is no target {name!r}")


def _open(stack: ExitStack, part: str) -> list[Target]:
    """Open every group; return the targets whose name has `part` in it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-fuzz-")))
    targets: list[Target] = []
    for name, open_targets in GROUPS.items():
        (folder / name).mkdir()
        targets += open_targets(stack, folder / name)
    return [target for target in targets if part in target.name]


def _print(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# ------------------------------------------------------------------------------------------------- parent


def _watch(options: argparse.Namespace) -> int:
    """Run children until the time is over or all cases have run; return how many did not end well."""
    ends_at = time.monotonic() + options.minutes * 60
    num_bad, num_cases = 0, 0
    with tempfile.NamedTemporaryFile(prefix="tandem-fuzz-") as file:
        file.truncate(_PAGE_BYTES)
        page = mmap.mmap(file.fileno(), _PAGE_BYTES)
        seed = options.seed
        while True:
            left_s = ends_at - time.monotonic()
            left = options.cases - num_cases
            if left_s <= 0 or (options.cases and left <= 0):
                return min(num_bad, 1)
            command = [sys.executable, "-m", "tests.fuzz", "--page", file.name, "--seed", str(seed)]
            command += [
                "--minutes",
                str(left_s / 60),
                "--cases",
                str(max(left, 0)),
                "--target",
                options.target,
            ]
            status = _watch_child(subprocess.Popen(command), page)
            total, case = _read_page(page)
            num_cases += total
            if status in (0, 1):  # it came to the end
                return max(status, min(num_bad, 1))
            num_bad += 1
            _print(failure=f"the process ended with status {status}", case=case)
            seed += 1


def _watch_child(child: subprocess.Popen[bytes], page: mmap.mmap) -> int:
    """Return the child's status; it is aborted when one case lasts too long."""
    before, since = "", time.monotonic()
    while True:
        try:
            return child.wait(1.0)
        except subprocess.TimeoutExpired:
            _, case = _read_page(page)
            if case != before:
                before, since = case, time.monotonic()
            elif time.monotonic() - since > 3 * HANG_S and case:
                child.send_signal(signal.SIGABRT)  # its threads are printed


def _write_page(page: mmap.mmap, num_cases: int, case: str) -> None:
    text = f"{num_cases} {case}".encode()
    page[: len(text) + 1] = text + b"\0"


def _read_page(page: mmap.mmap) -> tuple[int, str]:
    text = page[: page.find(b"\0")].decode()
    number, _, case = text.partition(" ")
    return int(number or 0), case


# -------------------------------------------------------------------------------------------------- child


class _Usage:
    """What this process and those of the targets use."""

    def __init__(self, processes: set[int]) -> None:
        gc.collect()
        all_of_them = [psutil.Process(), *map(psutil.Process, processes)]
        self.rss_bytes = sum(each.memory_info().rss for each in all_of_them)
        self.num_descriptors = sum(each.num_fds() for each in all_of_them)
        self.num_threads = threading.active_count()

    def fields(self) -> dict[str, Any]:
        return {
            "rss_mb": round(self.rss_bytes / 1e6, 1),
            "descriptors": self.num_descriptors,
            "threads": self.num_threads,
        }

    def growth_since(self, earlier: _Usage) -> str:
        """Return what has grown too much; "" when nothing has."""
        grown = {
            "memory": self.rss_bytes > earlier.rss_bytes + _MOST_GROWTH_BYTES,
            "descriptors": self.num_descriptors > earlier.num_descriptors + _MOST_MORE_DESCRIPTORS,
            "threads": self.num_threads > earlier.num_threads + _MOST_MORE_THREADS,
        }
        return ", ".join(name for name, is_too_much in grown.items() if is_too_much)


class _Child:
    """Runs cases of each target in turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._seed: int = options.seed
        self._most: int = options.cases or 1 << 62
        self._part: str = options.target
        self._time_s: float = options.minutes * 60
        with open(options.page, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE_BYTES)
        self._num_cases = 0
        self._numbers: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = {}
        self._failures: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> int:
        faulthandler.enable()
        _write_page(self._page, 0, "")
        with ExitStack() as stack:
            targets = _open(stack, self._part)
            self._limit_memory()
            processes = {process for target in targets for process in target.processes}
            _print(seed=self._seed, targets=len(targets))
            started_at = reported_at = time.monotonic()
            warm: _Usage | None = None
            while (now := time.monotonic()) < started_at + self._time_s and self._num_cases < self._most:
                for target in targets:
                    self._turn(target)
                done = max((now - started_at) / self._time_s, self._num_cases / self._most)
                if warm is None and done > _WARM_UP:
                    warm = _Usage(processes)
                if now > reported_at + _REPORT_S:
                    reported_at = now
                    self._report(now - started_at, _Usage(processes))
            return self._summary(time.monotonic() - started_at, warm, _Usage(processes))

    def _limit_memory(self) -> None:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))

    def _turn(self, target: Target) -> None:
        outcomes = self._outcomes.setdefault(target.name, Counter())
        started_at = time.monotonic()
        while time.monotonic() < started_at + _TURN_S and self._num_cases < self._most:
            number = self._numbers[target.name]
            self._numbers[target.name] += 1
            self._num_cases += 1
            case = f"{target.name}:{self._seed}:{number}"
            _write_page(self._page, self._num_cases, case)
            try:
                with bounded():
                    outcomes[target.run(rng_of(target.name, self._seed, number))] += 1
            except (Exception, HangError) as error:
                self._failed(target, case, error)
        self._seconds[target.name] += time.monotonic() - started_at

    def _failed(self, target: Target, case: str, error: BaseException) -> None:
        key = target.name, type(error).__name__
        self._failures[key] += 1
        if self._failures[key] <= _MOST_PRINTED:
            lines = traceback.format_exception(error, limit=-4)
            _print(failure=repr(error)[:500], case=case, trace="".join(lines)[-2000:])

    def _report(self, seconds: float, usage: _Usage) -> None:
        _print(
            seconds=round(seconds),
            cases=self._num_cases,
            cases_s=round(self._num_cases / seconds),
            **usage.fields(),
            failures=self._failures.total(),
        )

    def _summary(self, seconds: float, warm: _Usage | None, usage: _Usage) -> int:
        for name, outcomes in self._outcomes.items():
            failures = sum(count for (target, _), count in self._failures.items() if target == name)
            _print(
                target=name,
                cases=self._numbers[name],
                cases_s=round(self._numbers[name] / max(self._seconds[name], 1e-9)),
                outcomes=dict(outcomes.most_common()),
                failures=failures,
            )
        grown = "" if warm is None else usage.growth_since(warm)
        self._report(seconds, usage)
        if warm is not None:
            _print(warm=warm.fields(), end=usage.fields(), grown=grown)
        return int(bool(self._failures) or bool(grown))


if __name__ == "__main__":
    sys.exit(main())
