"""The fingerprint of a checkpoint, and the cache of digests that the ranks of a node share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_parts import ON_CPU
from safetensors.torch import load_file, save_file

from kvtransfer.common.clock import SystemClock
from workers.errors import CheckpointError, WorkerError
from workers.model import fingerprint as fingerprint_module
from workers.model.fingerprint import DigestCache, FingerprintTask, hub_digest, model_fingerprint
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

MakeCheckpoint = Callable[..., Path]
TINY = Path(__file__).resolve().parents[2] / "models/tiny"


def fingerprint(model_dir: Path) -> bytes:
    return model_fingerprint(model_dir, DigestCache(None, SystemClock()))


def num_read() -> int:
    """Bytes that this process has read so far, by the kernel's count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir()
    return path


@pytest.fixture
def cache(folder: Path) -> DigestCache:
    """Remembers files that were written just now, too."""
    return DigestCache(folder, SystemClock(), settled_s=0.0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Of 3 MB each."""
    paths = [tmp_path / f"model-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 3_000_000)
    return paths


def _edit(model_dir: Path, **config: Any) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config), encoding="utf-8")


# ------------------------------------------------------------------------------------- the fingerprint


def test_rows_beside_the_middle_of_a_tensor_change_the_fingerprint(tmp_path: Path) -> None:
    """Seven tensors of the bundled model differ, none of them in its middle page."""
    model_dir = shutil.copytree(TINY, tmp_path / "model")
    weights = load_file(TINY / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(0)
    embedding[-64:] = torch.randn(embedding[-64:].shape, generator=generator).to(embedding.dtype)
    for name in [name for name in weights if name.endswith("mlp.down_proj.weight")]:
        weights[name][: len(weights[name]) // 4] *= -1
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(model_dir) != fingerprint(TINY)


def test_the_fingerprint_is_of_what_makes_the_kv(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint("llama", seed=3)
    model_dir = shutil.copytree(source, tmp_path / "model")
    first = fingerprint(model_dir)
    assert len(first) == 16
    assert first == fingerprint(source)
    _edit(model_dir, eos_token_id=77, transformers_version="9", max_position_embeddings=4096)
    assert fingerprint(model_dir) == first
    _edit(model_dir, rope_theta=20000.0)
    assert fingerprint(model_dir) != first
    assert fingerprint(make_checkpoint("llama", seed=4)) != first
    assert fingerprint(make_checkpoint("llama", seed=3, dtype="bfloat16")) != first


def test_one_fine_tuned_tensor_changes_the_fingerprint(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint("qwen2", sharded=True)
    model_dir = shutil.copytree(source, tmp_path / "model")
    file = model_dir / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, metadata={"format": "pt"})
    assert fingerprint(model_dir) == fingerprint(source)
    name = sorted(tensors)[-1]
    save_file(tensors | {name: tensors[name] * 1.5}, file, metadata={"format": "pt"})
    assert fingerprint(model_dir) != fingerprint(source)


def test_a_weight_file_cut_short_has_no_fingerprint(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model_dir = shutil.copytree(make_checkpoint("llama"), tmp_path / "model")
    file = model_dir / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*short"):
            fingerprint(model_dir)


# ------------------------------------------------------------------------------------------- the cache


def test_digests_are_plain_sha256(files: list[Path], cache: DigestCache) -> None:
    expected = tuple(hashlib.sha256(file.read_bytes()).digest() for file in files)
    assert cache.digests(files) == (expected, 9_000_000)


def test_a_file_is_read_once(files: list[Path], cache: DigestCache, folder: Path) -> None:
    before = num_read()
    first = cache.digests(files)
    assert num_read() - before > 9_000_000
    before = num_read()
    again = DigestCache(folder, SystemClock()).digests(files)
    assert num_read() - before < 100_000
    assert again == (first.digests, 0)


def test_without_a_folder_nothing_is_remembered(files: list[Path]) -> None:
    cache = DigestCache(None, SystemClock(), settled_s=0.0)
    assert cache.digests(files) == cache.digests(files)


@pytest.mark.parametrize("change", ["longer", "in place", "in place, old time", "replaced, old time"])
def test_a_changed_file_is_read_again(files: list[Path], cache: DigestCache, change: str) -> None:
    file = files[0]
    first = cache.digests(files)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    if change == "longer":
        file.write_bytes(file.read_bytes() + b"x")
    elif change.startswith("in place"):
        with file.open("r+b") as stream:
            stream.write(b"x")
    else:
        other = file.with_suffix(".new")
        other.write_bytes(b"x" + file.read_bytes()[1:])
        other.replace(file)
    if change.endswith("old time"):
        os.utime(file, ns=times)
    second = cache.digests(files)
    assert second.digests[0] == hashlib.sha256(file.read_bytes()).digest() != first.digests[0]
    assert second.digests[1:] == first.digests[1:]
    assert second.num_read_bytes == file.stat().st_size


def test_a_file_that_has_just_been_written_is_not_remembered(files: list[Path], folder: Path) -> None:
    """Its times have the resolution of the kernel's tick: a second change in it would not be seen."""
    cache = DigestCache(folder, SystemClock(), settled_s=3600.0)
    assert cache.digests(files).num_read_bytes == cache.digests(files).num_read_bytes == 9_000_000


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "not json", "of another file", "unreadable"])
def test_a_damaged_entry_is_ignored(files: list[Path], cache: DigestCache, folder: Path, damage: str) -> None:
    first = cache.digests(files[:2])
    entry, other = sorted(folder.glob("*.json"))
    text = entry.read_text()
    if damage == "unreadable":
        entry.unlink()
        entry.mkdir()
    else:
        digest_at = text.index('"sha256": "') + len('"sha256": "')
        damaged = {
            "empty": "",
            "cut": text[: len(text) // 2],
            "flipped": text[:digest_at] + ("0" if text[digest_at] != "0" else "1") + text[digest_at + 1 :],
            "not json": "digest\n",
            "of another file": other.read_text(),
        }
        entry.write_text(damaged[damage])
    again = cache.digests(files[:2])
    assert again == (first.digests, 3_000_000)


_HASH = """
import sys
from pathlib import Path
from kvtransfer.common.clock import SystemClock
from workers.model.fingerprint import DigestCache
cache = DigestCache(Path(sys.argv[1]), SystemClock(), settled_s=0.0)
sys.stdin.readline()
print(cache.digests([Path(name) for name in sys.argv[2:]]).num_read_bytes)
"""


def test_processes_of_a_node_read_each_file_once(files: list[Path], folder: Path) -> None:
    command = [sys.executable, "-c", _HASH, str(folder), *map(str, files)]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    read = [int(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert sum(read) == 9_000_000


def test_threads_that_begin_together_share_the_files(files: list[Path], folder: Path) -> None:
    """The replicas of one process, as tests have them."""
    barrier = threading.Barrier(4)

    def rank(_: int) -> fingerprint_module.Digests:
        barrier.wait()
        return DigestCache(folder, SystemClock(), settled_s=0.0).digests(files)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(rank, range(4)))
    assert len({each.digests for each in found}) == 1
    assert sum(each.num_read_bytes for each in found) == 9_000_000


def test_a_lock_that_is_never_given_back_does_not_stop_anybody(
    files: list[Path], cache: DigestCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint_module, "_PATIENCE_S", 0.05)
    cache.digests(files)
    locks = [os.open(path, os.O_RDWR) for path in folder.glob("*.lock")]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    files[0].write_bytes(b"changed")
    assert cache.digests(files).num_read_bytes == len(b"changed")
    for lock in locks:
        os.close(lock)


def test_the_hubs_cache_knows_the_digest(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    source = make_checkpoint("llama", seed=3)
    weights = (source / "model.safetensors").read_bytes()
    hub = tmp_path / "models--org--name"
    snapshot = hub / "snapshots/0123456789abcdef"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    sha256, small = hashlib.sha256(weights).hexdigest(), "f" * 40
    (hub / "blobs" / sha256).write_bytes(weights)
    (hub / "blobs" / small).write_bytes((source / "config.json").read_bytes())
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{sha256}")
    (snapshot / "config.json").symlink_to(f"../../blobs/{small}")
    cache = DigestCache(None, SystemClock())
    assert cache.digests([snapshot / "model.safetensors"]) == ((bytes.fromhex(sha256),), 0)
    assert model_fingerprint(snapshot, cache) == fingerprint(source)
    assert hub_digest(snapshot / "config.json") is None


def test_a_link_that_is_not_the_hubs_is_read(files: list[Path], tmp_path: Path) -> None:
    named = tmp_path / "blobs" / ("0" * 64)
    named.parent.mkdir()
    files[0].rename(named)
    files[0].symlink_to(named)
    assert hub_digest(files[0]) is None, "there are no snapshots beside the blobs"
    assert DigestCache(None, SystemClock()).digests(files[:1]).num_read_bytes == 3_000_000


def test_a_folder_of_somebody_elses_is_not_used(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_to_all = tmp_path / f"tandem-digests-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with caplog.at_level(logging.WARNING, "tandem.rank"):
        cache = DigestCache.of_node(SystemClock())
    assert "is not a folder that only this user can write to" in caplog.text
    assert cache.digests(files).num_read_bytes == 9_000_000
    assert not list(open_to_all.iterdir())
    open_to_all.chmod(0o700)
    DigestCache.of_node(SystemClock()).digests(files)
    assert list(open_to_all.glob("*.lock"))


# -------------------------------------------------------------------------------------- beside loading


def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(make_checkpoint("llama"), tmp_path / "model")
    file = model_dir / "model.safetensors"
    with FingerprintTask(model_dir, SystemClock()) as task:
        other = shutil.copy(file, tmp_path / "other")
        os.replace(other, file)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was loaded"):
            task.result()


def test_hashing_ends_when_it_is_stopped(files: list[Path], cache: DigestCache) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WorkerError, match="hashing the weights was stopped"):
        cache.digests(files, stop)


def test_a_model_that_cannot_be_loaded_leaves_no_thread(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    model_dir = shutil.copytree(make_checkpoint("llama"), tmp_path / "model")
    weights = load_file(model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model_dir / "model.safetensors")
    compute = ON_CPU._replace(num_threads=torch.get_num_threads())
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        ModelRunner(CheckpointFolder(model_dir), compute, RankCapacity(16, 256), SystemClock())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fingerprint")]
