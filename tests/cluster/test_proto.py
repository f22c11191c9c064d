"""The files of the public API, by buf: their style, and that no change breaks a client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "cluster/proto"
BUF = Path(sys.executable).with_name("buf")


def buf(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the API in which the number of a field is another."""
    folder = tmp_path / "proto"
    for path in (*FOLDER.rglob("*.proto"), FOLDER / "buf.yaml"):
        copy = folder / path.relative_to(FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("string request_id = 1;", "string request_id = 91;"))
    return folder


def test_the_files_are_in_style() -> None:
    done = buf("lint")
    assert not done.returncode, done.stdout + done.stderr


def test_no_change_breaks_a_client(changed: Path) -> None:
    done = buf("breaking", "--against", str(FOLDER / "tandem.v1.binpb"))
    assert not done.returncode, done.stdout + done.stderr
    broken = buf("breaking", "--against", str(FOLDER / "tandem.v1.binpb"), folder=changed)
    assert "request_id" in broken.stdout
