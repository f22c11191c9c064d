"""The device of these tests: CUDA, or where there is none, the CPU with Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so this module sets it before any test is.
"""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1of1", help="run the I-th of N parts of the tests: 2of3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one part; the parts have all tests once."""
    given = str(config.getoption("--part"))
    found = re.fullmatch(r"([1-9]\d*)of([1-9]\d*)", given)
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--part {given}: not the I-th of N parts, such as 2of3")
    items[:] = items[int(found[1]) - 1 :: int(found[2])]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` before any of its fixtures is set up."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where tensors of the tests lie: kernels run there, on the CPU in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (the extra gpu-tests)")
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's products be those of tensor cores."""
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        from ordered_dots import use_ordered_dots

        use_ordered_dots(monkeypatch)
