"""The private folders of runs: who may enter them, and what happens to those of killed ones."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import environment
from stranger import NOBODY, needs_root

from cluster.serve.private_folder import RAY_FOLDER, PrivateFolder, living_folders

OWNER = """
import sys
from cluster.serve.private_folder import PrivateFolder
folder = PrivateFolder()
folder.write("cluster-secret", "of another run")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


class OtherRun:
    """A process that owns a private folder until it ends, or is killed."""

    def __init__(self, temporary_folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env={**environment(), "TMPDIR": str(temporary_folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.path = Path(self._process.stdout.readline().strip())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def other(temporary_folder: Path) -> Iterator[OtherRun]:
    run = OtherRun(temporary_folder)
    yield run
    run.kill()


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_only_its_user_enters_the_folder_and_reads_its_files() -> None:
    before = os.umask(0o022)
    folder = PrivateFolder()
    folder.write("secret", "text")
    os.umask(before)
    assert modes(folder.path) == {folder.path.name: 0o700, "secret": 0o600}
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700
    folder.close()
    assert not folder.path.exists()


def test_one_run_at_a_time_has_the_same_path_and_others_the_next() -> None:
    first, second = PrivateFolder(), PrivateFolder()
    assert [first.path.name, second.path.name] == ["1", "2"]
    assert living_folders() == [first.path, second.path]
    first.close()
    assert living_folders() == [second.path]
    third = PrivateFolder()
    assert third.path == first.path
    for folder in (second, third):
        folder.close()
    assert living_folders() == []


def test_the_folder_of_a_killed_run_is_removed_and_that_of_a_living_one_is_not(
    other: OtherRun, temporary_folder: Path
) -> None:
    living = OtherRun(temporary_folder)
    assert living_folders() == [other.path, living.path]
    other.kill()
    assert living_folders() == [living.path]
    assert (other.path / "cluster-secret").exists(), "looking removes nothing"
    own = PrivateFolder()
    assert own.path == other.path
    assert not (own.path / "cluster-secret").exists()
    assert (living.path / "cluster-secret").read_text() == "of another run"
    own.close()
    living.kill()


def test_the_logs_of_the_last_runs_stay() -> None:
    kept: Path | None = None
    for number in range(5):
        folder = PrivateFolder()
        logs = folder.path / RAY_FOLDER / f"session_2026-11-2{number}" / "logs"
        logs.mkdir(parents=True)
        (folder.path / RAY_FOLDER / "session_latest").symlink_to(logs.parent)
        (logs / "raylet.out").write_text(str(number))
        kept = folder.close()
        assert kept is not None
        assert (kept / "raylet.out").read_text() == str(number)
    assert kept is not None
    assert sorted(path.name for path in kept.parent.iterdir()) == [f"session_2026-11-2{n}" for n in (2, 3, 4)]
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert PrivateFolder().close() is None


def test_a_link_in_place_of_the_folder_is_refused(temporary_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (temporary_folder / f"tandem-runs-{os.getuid()}").symlink_to(elsewhere)
    for look in (PrivateFolder, living_folders):
        with pytest.raises(OSError, match="is not a folder that only this user can write to"):
            look()
    assert list(elsewhere.iterdir()) == []


@needs_root
def test_a_folder_that_another_user_has_made_is_refused_and_left_alone(temporary_folder: Path) -> None:
    made = temporary_folder / f"tandem-runs-{os.getuid()}"
    (made / "1").mkdir(parents=True)
    made.chmod(0o700)
    os.chown(made, NOBODY, NOBODY)
    for look in (PrivateFolder, living_folders):
        with pytest.raises(OSError, match="is not a folder that only this user can write to"):
            look()
    assert (made / "1").exists()
