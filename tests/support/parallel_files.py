"""How `pytest -n` shares the suite out. A worker takes file by file, and reads only the files that it takes:
until then, one `WholeFile` stands for the tests of a file. All files that start Ray go to the same worker,
before any others, so that there is one Ray cluster at a time."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_MARK = "pytest.mark.cluster"


class FileScheduling(LoadFileScheduling):
    """Give each worker the next file while it runs the last that it has, and count the tests, of which the
    workers' collections say nothing."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._root = config.rootpath
        self._reporter: pytest.TerminalReporter = config.pluginmanager.getplugin("terminalreporter")
        self._session: pytest.Session = config.pluginmanager.getplugin("session")
        self._num_files_done = self._num_tests = 0

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if starts_ray(self._root / file) else file

    def _reschedule(self, node: WorkerController) -> None:
        # A worker begins with a file when it knows the next. More in reserve would wait while others idle.
        is_open = not node.shutting_down
        while is_open and self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            super()._reschedule(node)

    def schedule(self) -> None:
        self._session.testscollected = self._num_tests
        super().schedule()

    def pytest_runtest_logstart(self) -> None:
        self._num_tests += 1
        self._session.testscollected = self._num_tests

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """End the line of results after each twentieth of the files."""
        super().mark_test_complete(node, item_index, duration)
        num_files = len(self.collection or ())
        before, self._num_files_done = self._num_files_done, self._num_files_done + 1
        if before * 20 // num_files < self._num_files_done * 20 // num_files:
            self._reporter.write(f" [{self._num_files_done * 100 // num_files:3}%]\n")

    def remove_node(self, node: WorkerController) -> str | None:
        """Drop the file during which a worker died: what killed the worker would kill the next one too."""
        units = self.assigned_work[node]
        waiting = [file for unit in units.values() for file, is_done in unit.items() if not is_done]
        crashed = waiting[0] if waiting else None
        for unit in units.values():
            if crashed in unit:
                unit[crashed] = True
        self.assigned_work[node] = {scope: unit for scope, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return crashed


class WholeFile(pytest.Item):
    """Stand for all tests of a file that this worker has not read."""

    @property
    def file(self) -> pytest.Collector:
        """The collector of the file's tests."""
        assert isinstance(self.parent, UnreadFile)
        return self.parent.file

    def runtest(self) -> None:
        raise AssertionError("a FileWorker runs the tests of the file instead")


class UnreadFile(pytest.File):
    """Collect one `WholeFile` in place of the tests of `file`, which is not imported yet."""

    def __init__(self, *, file: pytest.Collector, **options: Any) -> None:
        super().__init__(**options)
        self.file = file

    def collect(self) -> Iterator[pytest.Item]:
        whole = WholeFile.from_parent(self, name="*")
        whole.add_marker(pytest.mark.timeout(0))  # each test has a limit of its own
        yield whole


class FileWorker:
    """Make a worker collect files, and the tests of a file when it runs the file."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        found = yield
        return [UnreadFile.from_parent(parent, path=file_path, file=file) for file in found]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """Keep the files from what selects tests, and put those that start Ray, which take longest, first."""
        files = [item for item in items if isinstance(item, WholeFile)]
        items[:] = [item for item in items if not isinstance(item, WholeFile)]
        yield
        items += sorted(files, key=lambda item: (not starts_ray(item.path), str(item.path)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, WholeFile):
            return None
        session = item.session
        tests = list(session.genitems(item.file))
        item.config.hook.pytest_collection_modifyitems(session=session, config=item.config, items=tests)
        place = session.items.index(item)
        for test, following in zip(tests, [*tests, nextitem][1:], strict=True):
            session.items[place] = test  # whose reports xdist expects
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = item
        if not tests:  # what was kept for a test of this file ends here
            session._setupstate.teardown_exact(nextitem)
        return True


@functools.cache
def starts_ray(file: Path) -> bool:
    """Return whether tests of this file are marked as those of a cluster."""
    return _MARK in file.read_text()


def make_scheduling(config: pytest.Config, log: object) -> FileScheduling:
    """Return what shares the files out, in the process that does so."""
    scheduling = FileScheduling(config, log)
    config.pluginmanager.register(scheduling)
    return scheduling


def become_worker(config: pytest.Config) -> None:
    """Make this process read the files that it takes, unless tests are named one by one."""
    if not any("::" in argument for argument in config.args):
        config.pluginmanager.register(FileWorker())
