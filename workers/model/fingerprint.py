"""The identity of a checkpoint: every byte of its weights, and the configuration that KV depends on.

Computed by ranks, beside loading. No torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from kvtransfer.clock import Clock
from workers.errors import CheckpointError
from workers.model.config import file_problem, read_model_config, weight_files
from workers.model.file_digests import DigestCache, read_state

FINGERPRINT_BYTES = 16

_log = logging.getLogger("tandem.rank")

_REPORT_S = 1.0
"""How often whoever waits for a fingerprint reports how far it has come."""
_FORMAT = "tandem-model-2"
_NOT_OF_KV = ("max_context_tokens", "checkpoint_dtype", "eos_token_ids")


def model_fingerprint(model_dir: Path, cache: DigestCache, stop: threading.Event | None = None) -> bytes:
    """16 bytes that differ wherever two checkpoints would compute different KV.

    SHA-256 over the configuration's fields and the SHA-256 of every weight file, in name order; cut to 128
    bits. The same tensors in other files have another fingerprint. The dtypes of weights and KV are not in
    it: the `CompatibilityRecord` has them beside it. Raises `CheckpointError`, and
    `WorkerError` soon after `stop` is set.
    """
    config = dataclasses.asdict(read_model_config(model_dir))
    fields = {name: value for name, value in config.items() if name not in _NOT_OF_KV}
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


class FingerprintTask:
    """Computes a fingerprint on a thread of its own while the weights are loaded. A context manager: when
    loading fails, so that nobody asks for the result, the thread ends soon."""

    def __init__(self, model_dir: Path, clock: Clock) -> None:
        """Raises `CheckpointError` where weight files are missing."""
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
        """Wait for the fingerprint; called when all weights are loaded. `progress` is called with how far it
        has come.

        Raises what `model_fingerprint` does, and `CheckpointError` for a file that changed since the start:
        what was loaded need not be what was hashed.
        """
        waiting_since = self._clock.now()
        while not wait((self._found,), timeout=_REPORT_S).done:
            progress(f"hashing weights, {self._cache.num_found} of {len(self._before)} files")
        fingerprint = self._found.result()
        for file, state in self._before.items():
            if not read_state(file).is_same_content(state):
                raise CheckpointError(f"{file}: changed while it was loaded; start again when it is complete")
        _log.info("waited %.2f s for the hash of the weights", self._clock.now() - waiting_since)
        return fingerprint
