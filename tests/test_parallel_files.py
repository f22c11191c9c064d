"""Workers of `pytest -n` take files: what runs, fails and is left out is what one process would report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_path import import_path

ROOT = Path(__file__).resolve().parent.parent
# As tests/conftest.py has it, without the rules of this suite.
CONFTEST = """
import pytest
from parallel_files import become_worker, make_scheduling

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        become_worker(config)

def pytest_xdist_make_scheduler(config, log):
    return make_scheduling(config, log)

@pytest.fixture(scope="session")
def lasting(tmp_path_factory):
    yield
    open("ended", "a").write("x")
"""
FILES = {
    "inner/test_two.py": """
import pytest

def test_one(lasting): pass

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other(number): assert number == 1
""",
    "other/test_fails.py": "def test_fails(lasting): assert False, 'as it should'\n",
    "other/test_slow.py": "import pytest\n\n@pytest.mark.slow\ndef test_never(): assert False\n",
    "test_unreadable.py": "raise RuntimeError('this file cannot be imported')\n",
    "test_skipped.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
    "test_class.py": "class TestIt:\n    def test_in_a_class(self): pass\n",
}


def run(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Return the exit status of `pytest -n 2` over files, and what it says."""
    for name, text in {"conftest.py": CONFTEST, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow\n    timeout\nconsole_output_style = classic\n"
    )
    plugins = ("-p", "xdist.plugin", "-p", "no:cacheprovider")  # others would take most of the time
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-n", "2", *arguments]
    support = str(ROOT / "tests" / "support")
    environment = {**os.environ, "PYTHONPATH": import_path(support), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_files_are_read_by_the_worker_that_runs_them(tmp_path: Path) -> None:
    status, output = run(tmp_path, FILES, "-m", "not slow")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert re.search(r"1 failed, 3 passed, 1 skipped, 1 error in", output), output
    assert "FAILED other/test_fails.py::test_fails - AssertionError: as it should" in output
    assert "ERROR test_unreadable.py - RuntimeError: this file cannot be imported" in output
    assert "[100%]" in output
    assert set((tmp_path / "ended").read_text()) == {"x"}, "fixtures of the session end"


def test_a_selection_of_nothing_is_an_error(tmp_path: Path) -> None:
    status, output = run(tmp_path, FILES, "-k", "no_such_name", "--ignore=test_unreadable.py")
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED, output


def test_tests_are_named_one_by_one(tmp_path: Path) -> None:
    status, output = run(tmp_path, FILES, "inner/test_two.py::test_other[2]", "test_class.py::TestIt")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 1 passed in" in output


def test_a_file_that_kills_its_worker_is_run_once_and_all_others_are_run(tmp_path: Path) -> None:
    fatal = "import os\n\ndef test_it():\n    open('deaths', 'a').write('x')\n    os._exit(3)\n"
    others = {f"test_{number}.py": "def test_it(): pass\n" for number in range(9)}
    status, output = run(tmp_path, {"test_fatal.py": fatal, **others})
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "crashed while running 'test_fatal.py::*'" in output
    assert "1 failed, 9 passed in" in output
    assert (tmp_path / "deaths").read_text() == "x"
