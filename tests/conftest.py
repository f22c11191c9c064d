"""Options of the whole suite, and what holds for every test: optional programs, and processes that end."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import assert_ended, children
from hypothesis import settings
from optional_programs import MARK, check_marks, missing_programs
from slow_cases import FAST_PROFILE

# Threads that wait for each other leave the cores to the other processes of `pytest -n`, and do not spin: so
# tests of kernels take a fifth of the time there. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# An example may take long where other processes have the cores; the limit of the whole test holds.
settings.register_profile("without a deadline", deadline=None)
# The fast suite draws fewer examples where a test does not say how many, or says so by `slow_cases.examples`.
settings.register_profile(FAST_PROFILE, deadline=None, max_examples=20)
settings.load_profile("without a deadline")

# A suite of its own, with its own settings (tests/gpu/pytest.ini): `test_gpu_suite.py` runs it.
collect_ignore = ["gpu"]


# The limit of a test that is marked slow and has none of its own; pyproject.toml has that of the others.
SLOW_TIMEOUT_S = 300

# A shell ignores SIGINT in what it runs in the background, and children of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        settings.load_profile(FAST_PROFILE)
    if hasattr(config, "workerinput"):  # this is a worker of `-n`
        from parallel_files import become_worker

        become_worker(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kuberay-crds",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="with KubeRay's rayservices.yaml, against which the chart's RayService is checked",
    )
    parser.addoption(
        "--chat-templates",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="with the chat templates of model families, as llama.cpp names them",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        check_marks(item)
        if item.get_closest_marker("slow") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from parallel_files import make_scheduling

    return make_scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture is set up."""
    if reason := missing_programs(item.iter_markers(MARK)):
        pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_not_collected() -> None:
    """Free the garbage of earlier modules, and spare what is left of them, all imports and whatever caches
    hold, in the collections of this module: these visit every object that they may free."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fail the module that leaves a process behind, instead of whichever test the warning meets."""
    before = children()
    yield
    assert_ended(children() - before)
