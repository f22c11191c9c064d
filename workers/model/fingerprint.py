"""The identity of a checkpoint: every byte of its weights, and the configuration that KV depends on. No
torch.

Ranks compute it while they load. The SHA-256 of each weight file is computed once per node and cached in a
private folder."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.common.host import private_folder
from kvtransfer.common.os_errors import os_reason
from workers.errors import CheckpointError, WorkerError
from workers.model.model_config import ModelConfig, file_problem, read_model_config, weight_files
from workers.model.rope_config import RopeConfig

FINGERPRINT_BYTES = 16

_log = logging.getLogger("tandem.rank")

# How often progress is reported while a rank waits for the fingerprint.
_REPORT_S = 1.0
_FORMAT = "tandem-model-2"
_NOT_OF_KV = ("max_context_tokens", "checkpoint_dtype", "eos_token_ids", "is_wrapped", "num_extra_layers")
# Fields that came later count only where they differ from their defaults: the fingerprints of the models that
# an older version serves stay as they are.
_FIRST_FIELDS = 19
_FIRST_ROPE_FIELDS = 6
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.02
_SETTLED_S = 2.0
# After this time, plus the time that the file takes at this rate, the process that holds its lock is given
# up.
_PATIENCE_S = 10.0
_SLOW_BYTE_S = 50e6
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


def model_fingerprint(model_dir: Path, cache: DigestCache, stop: threading.Event | None = None) -> bytes:
    """Compute 16 bytes that differ wherever two checkpoints would compute different KV.

    It is the SHA-256 over the configuration's fields and the SHA-256 of every weight file, in name order, cut
    to 128 bits. The same tensors in other files have another fingerprint. The dtypes of weights and KV are
    not part of it: the `CompatibilityRecord` has them as well. Raises `CheckpointError`, and `WorkerError`
    soon after `stop` is set."""
    fields = _fields_of_kv(read_model_config(model_dir))
    files = weight_files(model_dir)
    for problem in filter(None, map(file_problem, files)):
        raise CheckpointError(problem)
    weights = cache.digests(files, stop)
    _log.info("weights of %s: %.1f GB read to hash them", model_dir, weights.num_read_bytes / 1e9)
    identity = {
        "format": _FORMAT,
        "config": fields,
        "weights": [digest.hex() for digest in weights.digests],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()[:FINGERPRINT_BYTES]


def _fields_of_kv(config: ModelConfig) -> dict[str, Any]:
    fields = {name: value for name, value in _told(config, _FIRST_FIELDS).items() if name not in _NOT_OF_KV}
    if config.layer_ropes:
        fields["layer_ropes"] = [
            None if rope is None else _told(rope, _FIRST_ROPE_FIELDS) for rope in config.layer_ropes
        ]
    if config.state is not None:
        fields["state"] = [type(config.state).__name__, dataclasses.asdict(config.state)]
    if config.quantization is not None:
        fields["quantization"] = dataclasses.asdict(config.quantization, dict_factory=_declared)
    return fields | {"rope": _told(config.rope, _FIRST_ROPE_FIELDS)}


def _declared(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields without those that follow from others."""
    return {name: value for name, value in fields if not name.startswith("_")}


def _told(config: ModelConfig | RopeConfig, num_first: int) -> dict[str, Any]:
    """Return the first fields, and those of the others that are not at their defaults."""
    fields = dataclasses.fields(config)
    return {
        field.name: getattr(config, field.name)
        for number, field in enumerate(fields)
        if number < num_first or getattr(config, field.name) != field.default
    }


class FingerprintTask:
    """Computes a fingerprint on a thread while the weights are loaded. A context manager: if loading fails,
    the thread ends soon."""

    def __init__(self, model_dir: Path, clock: Clock) -> None:
        """Start the thread. Raises `CheckpointError` if weight files are missing."""
        self._clock = clock
        self._stop = threading.Event()
        self._before = {file: read_state(file) for file in weight_files(model_dir)}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fingerprint")
        self._cache = DigestCache.of_node(clock)
        self._found = self._threads.submit(model_fingerprint, model_dir, self._cache, self._stop)

    def __enter__(self) -> FingerprintTask:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._threads.shutdown()

    def result(self, progress: Callable[[str], None] = lambda phase: None) -> bytes:
        """Wait for the fingerprint, when all weights are loaded. `progress` is called with the number of
        files done.

        Raises the errors of `model_fingerprint`, and `CheckpointError` for a file that changed since the
        start: the loaded bytes may differ from those that were hashed."""
        waiting_since = self._clock.now()
        while not wait((self._found,), timeout=_REPORT_S).done:
            progress(f"hashing weights, {self._cache.num_found} of {len(self._before)} files")
        fingerprint = self._found.result()
        for file, state in self._before.items():
            if not read_state(file).is_same_content(state):
                raise CheckpointError(f"{file}: changed while it was loaded; start again when it is complete")
        _log.info("waited %.2f s for the hash of the weights", self._clock.now() - waiting_since)
        return fingerprint


class FileState(NamedTuple):
    """What the file system knows of a file's content. A program that rewrites a file can restore `mtime_ns`,
    but not `ctime_ns`. Links and permissions change `ctime_ns` as well, which costs one more reading."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    def is_same_content(self, other: FileState) -> bool:
        """Whether nothing was written between the two states, for a reader that holds the file open."""
        return self[:-1] == other[:-1]


class Digests(NamedTuple):
    """The SHA-256 of each file, and the number of bytes that this process read for them."""

    digests: tuple[bytes, ...]
    num_read_bytes: int


class DigestCache:
    """Caches digests by path and `FileState`. The processes of a node share it: the first that needs a file's
    digest reads the file, and the others read different files meanwhile, or wait."""

    def __init__(self, folder: Path | None, clock: Clock, settled_s: float = _SETTLED_S) -> None:
        """Without a folder nothing is cached. Neither is a file that changed less than `settled_s` before it
        was read: a second change in the same tick of the clock would be missed."""
        self._folder = folder
        self._clock = clock
        self._settled_s = settled_s
        # How many digests `digests` has found so far.
        self.num_found = 0

    @classmethod
    def of_node(cls, clock: Clock) -> DigestCache:
        """Open the cache of this user on this node."""
        try:
            return cls(private_folder("tandem-digests"), clock)
        except OSError as error:
            _log.warning("weights are read whole by every rank, because digests cannot be kept: %s", error)
            return cls(None, clock)

    def digests(self, files: Sequence[Path], stop: threading.Event | None = None) -> Digests:
        """Return the digest of each file, in order.

        Raises `CheckpointError` for a file that is unreadable or changes meanwhile, and `WorkerError` soon
        after `stop` is set.
        """
        stop = stop or threading.Event()
        found: dict[Path, bytes] = {}
        num_read_bytes = 0
        waiting_since = self._clock.now()
        while pending := [file for file in files if file not in found]:
            for file in pending:
                patience_s = _PATIENCE_S + read_state(file).num_bytes / _SLOW_BYTE_S
                is_overdue = self._clock.now() > waiting_since + patience_s
                with self._locked(file) as is_ours:
                    digest = hub_digest(file) or self._recall(file)
                    if digest is None and (is_ours or is_overdue):
                        digest, state = _read(file, stop)
                        num_read_bytes += state.num_bytes
                        self._remember(file, state, digest)
                if digest is not None:
                    found[file] = digest
                    self.num_found += 1
                    waiting_since = self._clock.now()
            if all(file in found for file in pending):
                break
            if not any(file in found for file in pending):
                stop.wait(_POLL_S)
            _check_stop(stop)
        return Digests(tuple(found[file] for file in files), num_read_bytes)

    def _recall(self, file: Path) -> bytes | None:
        """Return the cached digest of the file's present state, None if there is none or the entry is
        damaged."""
        if self._folder is None:
            return None
        try:
            text = self._entry(file).read_text(encoding="ascii")
            line, check = text.splitlines()
            entry = json.loads(line)
        except (OSError, ValueError):
            return None
        if check != _check(line) or not isinstance(entry, dict):
            return None
        if entry.get("path") != str(file.resolve()) or entry.get("state") != list(read_state(file)):
            return None
        return bytes.fromhex(entry["sha256"])

    def _remember(self, file: Path, state: FileState, digest: bytes) -> None:
        if self._folder is None or self._clock.wall() - state.ctime_ns * 1e-9 < self._settled_s:
            return
        line = json.dumps({"path": str(file.resolve()), "state": list(state), "sha256": digest.hex()})
        try:
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="ascii") as stream:
                stream.write(f"{line}\n{_check(line)}\n")
            os.replace(stream.name, self._entry(file))
        except OSError as error:
            _log.warning("the digest of %s cannot be kept: %s", file, error)

    @contextlib.contextmanager
    def _locked(self, file: Path) -> Iterator[bool]:
        """Yield whether this process may read the file: no other process does, or locks are not available."""
        lock = None
        if self._folder is not None:
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                lock = os.open(self._entry(file).with_suffix(".lock"), flags, 0o600)
        if lock is None:
            yield True
            return
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except BlockingIOError:
                is_ours = False
            yield is_ours
        finally:
            os.close(lock)

    def _entry(self, file: Path) -> Path:
        """Return the path's entry. There is one for each path, so that a changed file replaces its old
        entry."""
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]}.json"


def read_state(file: Path) -> FileState:
    """Read the state of the file that the path leads to. Raises `CheckpointError`."""
    try:
        return _state(file.stat())
    except OSError as error:
        raise CheckpointError(f"{file}: unreadable: {os_reason(error, has_path=True)}") from error


def hub_digest(file: Path) -> bytes | None:
    """Return the digest that the Hugging Face cache knows: there `snapshots/<revision>/<file>` is a link to
    `blobs/<sha256>` (small files have a shorter name, of another hash). None for any other file."""
    if not file.is_symlink():
        return None
    blob = file.parent / os.readlink(file)
    folder = blob.parent
    if folder.name != "blobs" or not _SHA256_NAME.fullmatch(blob.name):
        return None
    return bytes.fromhex(blob.name) if (folder.parent / "snapshots").is_dir() else None


def _read(file: Path, stop: threading.Event) -> tuple[bytes, FileState]:
    """Hash all bytes. Releases the GIL in every chunk."""
    try:
        with file.open("rb", buffering=0) as stream:
            before = _state(os.fstat(stream.fileno()))
            digest = _sum(stream, stop)
            after = _state(os.fstat(stream.fileno()))
    except OSError as error:
        raise CheckpointError(f"{file}: unreadable: {os_reason(error, has_path=True)}") from error
    if not before.is_same_content(after):
        raise CheckpointError(f"{file}: changed while it was read; start again when it is complete")
    return digest, before


def _sum(stream: FileIO, stop: threading.Event) -> bytes:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    while num_bytes := stream.readinto(buffer):
        digest.update(view[:num_bytes])
        _check_stop(stop)
    return digest.digest()


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise WorkerError("hashing the weights was stopped, because loading them failed")


def _state(found: os.stat_result) -> FileState:
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _check(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]
