"""Fetching from the Hugging Face hub, or a mirror of it, into the cache that its own library uses.

    revision -> commit -> whole in the cache? -> lock -> list -> small files -> weights -> headers checked

The hub's library finds, authorizes and lists. The bytes are fetched here: the library starts a file anew when
its process has ended within it, and compares no checksums.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from cluster.errors import ConfigError, StartError
from cluster.model_source.cache import hub_cache, hub_folder, locked
from cluster.model_source.config import DownloadConfig
from cluster.model_source.fetch_context import ByteCount, FetchContext, FetchProgress
from cluster.model_source.names import HubName
from cluster.model_source.partial_file import CutTransferError, PartialFile, RestartTransferError
from cluster.model_source.selection import INDEX, cut_short, gguf_files, is_whole, small_files, weights_of
from kvtransfer.common.os_errors import os_reason

# Else the library sends with each request what is installed here, and asks huggingface.co, whatever the
# endpoint, what may be named there.
constants.HF_HUB_DISABLE_TELEMETRY = True
_LIBRARY = "tandem-serve"
_MAIN = "main"
_NUM_CONNECTIONS = 4
_CHUNK_BYTES = 1 << 20
# A file that arrives with a wrong checksum is fetched so often in all.
_MAX_ARRIVALS = 2
_BLOB_KEY = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRY_AGAIN = (408, 429)
_RANGE_REFUSED = 416


def fetch_from_hub(
    name: HubName, settings: DownloadConfig, context: FetchContext, *, prefer_cached: bool
) -> HubName:
    """Return the name with its commit when all of its files are in the cache. With `prefer_cached` a branch
    is what it was when it was last fetched here, if that is whole."""
    return _HubFetch(name, settings, context).fetch(prefer_cached=prefer_cached)


class _HubFetch:
    def __init__(self, name: HubName, settings: DownloadConfig, context: FetchContext) -> None:
        self._name = name
        self._repository = name.repository
        self._settings = settings
        self._context = context
        self._cache = hub_cache(settings)
        self._storage = hub_folder(self._cache, name.repository)
        self._endpoint = (settings.endpoint or constants.ENDPOINT).rstrip("/")
        self._token = _read_token(settings)
        self._api = HfApi(endpoint=self._endpoint, token=self._token, library_name=_LIBRARY)
        self._is_offline = settings.offline or constants.is_offline_mode()
        # Set when one file has failed: the others end too.
        self._failed = threading.Event()

    def fetch(self, *, prefer_cached: bool) -> HubName:
        with self._in_words():
            if prefer_cached and (known := self._cached_name()) is not None:
                return known
            pinned = self._name._replace(revision=self._commit())
            folder = self._storage / "snapshots" / pinned.revision
            if is_whole(folder, pinned.file):
                return pinned
            if self._is_offline:
                raise self._not_cached()
            lock = self._cache / ".locks" / self._storage.name / f"{_LIBRARY}.lock"
            with locked(lock, f"waiting for the process that downloads {self._name}", self._context):
                if not is_whole(folder, pinned.file):
                    self._download(pinned, folder)
            return pinned

    def _cached_name(self) -> HubName | None:
        with contextlib.suppress(RevisionResolutionError):
            found = self._name._replace(revision=self._commit(from_cache=True))
            if is_whole(self._storage / "snapshots" / found.revision, found.file):
                return found
        return None

    def _commit(self, *, from_cache: bool = False) -> str:
        resolved = self._api.resolve_revision(
            self._repository,
            revision=self._name.revision or None,
            cache_dir=self._cache,
            local_files_only=from_cache or self._is_offline,
        ).resolved
        if _COMMIT.fullmatch(resolved) is None:
            raise ConfigError(f"model: {self._endpoint} gave no commit for {self._name}; is it a hub's URL?")
        return resolved

    def _download(self, pinned: HubName, folder: Path) -> None:
        self._context.report(FetchProgress(f"listing {self._name}"))
        entries = self._api.list_repo_tree(self._repository, recursive=True, revision=pinned.revision)
        listed = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
        (self._storage / "blobs").mkdir(parents=True, exist_ok=True)
        if pinned.file:
            weights = gguf_files(self._repository, pinned.file, listed)
        else:
            small = [listed[file] for file in small_files(listed)]
            self._fetch_all(small, pinned, folder)
            weights = weights_of(self._repository, listed, (folder / INDEX).read_bytes)
            self._refuse_missing(weights, listed)
        self._fetch_all([listed[file] for file in weights], pinned, folder)
        if not pinned.file and (problem := cut_short(folder, weights)):
            raise ConfigError(f"model: {problem}, as it is in {pinned}; name another revision")

    def _refuse_missing(self, weights: Sequence[str], listed: Collection[str]) -> None:
        if missing := [file for file in weights if file not in listed]:
            raise ConfigError(
                f"model: {self._name} lacks {missing[0]}, which its {INDEX} names; name another revision"
            )

    def _fetch_all(self, files: Sequence[RepoFile], pinned: HubName, folder: Path) -> None:
        missing = list({_key(file): file for file in files if not self._has(file)}.values())
        total_bytes = sum(file.size for file in missing)
        self._check_free_bytes(total_bytes - sum(_size(self._part(file)) for file in missing))
        count = ByteCount(self._context, f"downloading {self._name}", total_bytes)
        context = FetchContext(self._context.report, self._context.interrupted, self._failed)
        executor = ThreadPoolExecutor(_NUM_CONNECTIONS, "model download")
        try:
            fetching = [executor.submit(self._fetch_file, file, pinned, context, count) for file in missing]
            for ended in wait(fetching, return_when=FIRST_EXCEPTION).done:
                ended.result()
        finally:
            self._failed.set()
            executor.shutdown(cancel_futures=True)
            self._failed.clear()
        for file in files:
            _link(folder / file.path, self._storage / "blobs" / _key(file))

    def _fetch_file(self, file: RepoFile, pinned: HubName, context: FetchContext, count: ByteCount) -> None:
        if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # such files come through the library alone
            self._api.hf_hub_download(
                self._repository, file.path, revision=pinned.revision, cache_dir=self._cache
            )
            return
        part = PartialFile(self._part(file), file.size, context, count)
        for _ in range(_MAX_ARRIVALS):
            digest = _digest(file)
            try:
                arrived = part.fill(lambda start: self._chunks(file, pinned, start), digest)
            except CutTransferError as cut:
                raise StartError(
                    f"model: {file.path} of {self._name} does not arrive ({cut}): try again, and what has "
                    "arrived is kept; or name a mirror by download.endpoint"
                ) from cut
            if arrived and digest.hexdigest() == _key(file):
                os.replace(self._part(file), self._storage / "blobs" / _key(file))
                return
            part.discard()
        raise StartError(
            f"model: {file.path} of {self._name} has arrived {_MAX_ARRIVALS} times with another size or "
            f"checksum than {self._endpoint} lists: a proxy or mirror on the way damages it; name another by "
            "download.endpoint"
        )

    def _chunks(self, file: RepoFile, pinned: HubName, start: int) -> Iterator[bytes]:
        """Yield the file from `start` on. Where the server sends all of it, what is there is left out."""
        url = f"{self._endpoint}/{self._repository}/resolve/{pinned.revision}/{_quoted(file.path)}"
        headers = build_hf_headers(token=self._token, library_name=_LIBRARY)
        headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                if response.status_code == _RANGE_REFUSED:
                    raise RestartTransferError
                hf_raise_for_status(response)
                num_known = start if response.status_code == 200 else 0
                for chunk in response.iter_bytes(_CHUNK_BYTES):
                    yield chunk[num_known:]
                    num_known = max(num_known - len(chunk), 0)
        except httpx2.TransportError as error:
            raise CutTransferError(str(error) or type(error).__name__) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status < 500 and status not in _TRY_AGAIN:
                raise
            raise CutTransferError(f"status {status}") from error

    def _has(self, file: RepoFile) -> bool:
        blob = self._storage / "blobs" / _key(file)
        return blob.is_file() and blob.stat().st_size == file.size

    def _part(self, file: RepoFile) -> Path:
        return self._storage / "blobs" / f"{_key(file)}.{_LIBRARY}.incomplete"

    def _check_free_bytes(self, num_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._storage).free
        if num_bytes > free_bytes:
            raise ConfigError(
                f"download.cache_folder: {self._name} needs {num_bytes / 1e9:.1f} GB more in {self._cache}, "
                f"which has {free_bytes / 1e9:.1f} free; name a folder on a larger disk"
            )

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn what the hub and its library answer into one sentence with the remedy."""
        name, at = self._repository, self._endpoint
        try:
            yield
        except GatedRepoError as error:
            raise ConfigError(
                f"model: {name} is gated: accept its terms at {at}/{name}, and name a file with the token of "
                "an account that has, by download.token_file"
            ) from error
        except RevisionNotFoundError as error:
            raise ConfigError(
                f"model: {name} has no revision {self._name.revision or _MAIN}: name a branch, a tag or a "
                f"commit of it, as {name}@REVISION"
            ) from error
        except RepositoryNotFoundError as error:
            raise ConfigError(
                f"model: {name} is no folder here, and no repository of {at} that this host may see: correct "
                "the name, or, if it is private, name a file with a token by download.token_file"
            ) from error
        except HfHubHTTPError as error:
            raise self._refused(error.response.status_code) from error
        except HFValidationError as error:
            raise ConfigError(f"model: {error}") from error
        except (RevisionResolutionError, OfflineModeIsEnabled, httpx2.TransportError) as error:
            if self._is_offline:
                raise self._not_cached() from error
            raise StartError(
                f"model: {at} cannot be reached, and {self._name} is not in the cache {self._cache}: check "
                "the network, or name a mirror by download.endpoint"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"download.cache_folder: {os_reason(error)}; name a folder that this user may write"
            ) from error

    def _refused(self, status: int) -> ConfigError | StartError:
        if status in (401, 403):
            return ConfigError(
                f"model: {self._endpoint} refuses {self._repository} to this token (status {status}): name a "
                "file with a valid one that may read it, by download.token_file"
            )
        return StartError(
            f"model: {self._endpoint} answered {status} for {self._repository}: try again later, or name "
            "a mirror by download.endpoint"
        )

    def _not_cached(self) -> ConfigError:
        why = "download.offline" if self._settings.offline else "HF_HUB_OFFLINE"
        return ConfigError(
            f"model: {self._name} is not in the cache {self._cache}, or not all of it, and {why} lets "
            "nothing be fetched: start it once without, or name another download.cache_folder"
        )


def _read_token(settings: DownloadConfig) -> str | None:
    """Return the token; None: what the hub's library finds itself."""
    path = settings.token_file
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"download.token_file: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"download.token_file: {path} holds no text") from error
    if not token or not token.isascii() or len(token.split()) != 1:
        raise ConfigError(f"download.token_file: {path} should hold one line, the hub's token")
    return token


def _key(file: RepoFile) -> str:
    """Return the name of the file's blob, which is its checksum."""
    key = file.blob_id if file.lfs is None else file.lfs.sha256
    if _BLOB_KEY.fullmatch(key) is None:
        raise StartError(f"model: the hub lists {file.path} without a checksum; name another mirror")
    return key


def _digest(file: RepoFile) -> Any:
    """Return what computes the checksum: SHA-256 of a large file, git's SHA-1 of a small one."""
    if file.lfs is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _link(link: Path, blob: Path) -> None:
    """Have the snapshot's file be the blob, as the hub's library does, whatever was there."""
    if link.is_symlink() and link.resolve() == blob.resolve():
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.unlink(missing_ok=True)
    made.symlink_to(os.path.relpath(blob, link.parent))
    os.replace(made, link)


def _size(path: Path) -> int:
    """Return how long the file is; 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def _quoted(path: str) -> str:
    return "/".join(httpx2.URL(path=f"/{part}").raw_path.decode()[1:] for part in path.split("/"))
