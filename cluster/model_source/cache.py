"""Where fetched models lie on this host, and who may write there: one process a model at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.model_source.config import DownloadConfig
from cluster.model_source.fetch_context import FetchContext, FetchProgress
from cluster.model_source.names import HubName, ModelName, ModelUrl
from kvtransfer.common.file_lock import try_lock

_LOOK_S = 0.2
_DIGEST_CHARS = 16


def hub_cache(settings: DownloadConfig) -> Path:
    """Return the folder of all models."""
    if settings.cache_folder is not None:
        return settings.cache_folder
    from huggingface_hub import constants  # here: most processes serve a folder

    return Path(constants.HF_HUB_CACHE)


def hub_folder(cache: Path, repository: str) -> Path:
    """Return the folder of one repository, named as the hub's library names it."""
    return cache / f"models--{repository.replace('/', '--')}"


def url_folder(cache: Path, url: ModelUrl) -> Path:
    """Return the folder of what comes from one URL."""
    digest = hashlib.sha256(url.url.encode()).hexdigest()[:_DIGEST_CHARS]
    return cache / f"urls--{digest}--{url.last}"


def cached_path(name: ModelName, settings: DownloadConfig) -> Path:
    """Return where the model lies when it has been fetched: its folder, or its GGUF file. A branch is what it
    was when it was last fetched."""
    cache = hub_cache(settings)
    if isinstance(name, ModelUrl):
        return url_folder(cache, name) / "snapshots" / (name.version or "none") / name.file
    storage = hub_folder(cache, name.repository)
    commit = name.revision if name.is_pinned else _last_commit(storage, name)
    return storage / "snapshots" / commit / name.file


@contextlib.contextmanager
def locked(path: Path, stage: str, context: FetchContext) -> Iterator[None]:
    """Do the work in one process of the host at a time; the others show `stage` while they wait."""
    while (lock := try_lock(path)) is None:
        context.report(FetchProgress(stage))
        context.pause(_LOOK_S)
    try:
        yield
    finally:
        os.close(lock)


def _last_commit(storage: Path, name: HubName) -> str:
    try:
        return (storage / "refs" / (name.revision or "main")).read_text().strip()
    except OSError:
        return name.revision or "main"
