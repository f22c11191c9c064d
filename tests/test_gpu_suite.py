"""The suite of `tests/gpu`, in a process of its own, and again where only its packages are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# All that the suite, and what it imports of the product, is given.
PACKAGES = ("torch", "triton", "numpy", "safetensors", "msgspec", "pydantic", "llguidance", "pytest")
# What it must not need. `transformers` is the reference of the tests that find it installed.
ABSENT = ("ray", "grpc", "redis", "psutil", "hypothesis", "aiohttp", "cryptography", "typer", "rich")
_MAIN = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import pytest; sys.exit(pytest.main())"


def run_suite(python: Path | str, *options: str) -> str:
    """Run `tests/gpu` without plugins and without the packages of `ABSENT`. Returns what it printed; fails
    with that when a test fails."""
    arguments = ["-c", "tests/gpu/pytest.ini", "tests/gpu", "-q", "-rs", *options]
    unset = {"PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "TRITON_INTERPRET"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [str(python), "-c", _MAIN, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


def num_passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def skip_without_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: .venv/bin/pip install -c constraints.txt -e '.[gpu-tests]'")


@pytest.mark.timeout(900)
def test_the_gpu_suite_passes_in_a_process_of_its_own() -> None:
    skip_without_triton()
    output = run_suite(sys.executable)
    assert num_passed(output) > 0, output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_gpu_suite_needs_no_other_packages(tmp_path: Path) -> None:
    """A machine with a GPU may have none of the others, and no way to install them."""
    skip_without_triton()
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "-c", "constraints.txt"]
    done = subprocess.run([*install, *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    script = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    found = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert "test_device_transfer.py" in run_suite(python, "--collect-only")
    assert num_passed(run_suite(python)) > 0


def test_the_extra_of_the_suite_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["gpu-tests"]
    assert requirement.startswith("triton>=3.6")
    assert re.findall(r"^triton==", (ROOT / "constraints.txt").read_text(), re.MULTILINE) == ["triton=="]
