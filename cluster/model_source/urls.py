"""Fetching from object stores and web servers, through fsspec and its drivers, into the same cache.

URL -> which of the files are there, with sizes and tags -> version -> whole in the cache? -> lock -> files

There are no checksums that all of these servers give: sizes are compared, and the headers of safetensors. The
version is a digest of names, sizes and tags, so a changed folder is another version beside the earlier one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cluster.errors import ConfigError, StartError
from cluster.model_source.cache import hub_cache, locked, url_folder
from cluster.model_source.config import DownloadConfig
from cluster.model_source.fetch_context import ByteCount, FetchContext, FetchProgress
from cluster.model_source.names import ModelUrl, gguf_parts
from cluster.model_source.partial_file import CutTransferError, PartialFile
from cluster.model_source.selection import INDEX, SINGLE, SMALL_FILES, cut_short, is_whole, weights_of
from kvtransfer.common.os_errors import os_reason

_CHUNK_BYTES = 8 << 20
_VERSION_CHARS = 16
_MAX_INDEX_BYTES = 64 << 20
_NOT_FOUND = 404
# By scheme, what brings fsspec's driver.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "https": "aiohttp", "http": "aiohttp"}
# What drivers raise beside `OSError`: looked up where the module is loaded, since most are not installed.
_DRIVER_ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
# What tells two versions of a file apart, by the names that drivers give it.
_TAGS = ("ETag", "etag", "md5Hash", "LastModified", "updated", "mtime")


class _Offered(NamedTuple):
    """Represents a file that the server has."""

    name: str
    size: int
    tag: str


def fetch_from_url(
    name: ModelUrl, settings: DownloadConfig, context: FetchContext, *, prefer_cached: bool
) -> ModelUrl:
    """Return the URL with its version when all of its files are in the cache. With `prefer_cached`, or
    offline, what was fetched last counts, if that is whole."""
    fetch = _UrlFetch(name, settings, context)
    try:
        return fetch.fetch(prefer_cached=prefer_cached)
    except OSError as error:
        raise ConfigError(
            f"download.cache_folder: {os_reason(error)}; name a folder that this user may write"
        ) from error


class _NoDigest:
    """Implements `Digest` where there is no checksum to compare with."""

    def update(self, data: bytes, /) -> None:
        pass


class _ServerError(Exception):
    """The server, or fsspec's driver for it, did not do what was asked: the text says why."""


class _Server:
    """Represents what is behind a URL: the files of a folder, or those beside a GGUF file."""

    def __init__(self, name: ModelUrl) -> None:
        scheme = name.url.partition("://")[0]
        folder = name.url.rpartition("/")[0] if name.file else name.url
        try:
            from fsspec.core import url_to_fs  # here: only such URLs need it

            with _as_server_error():
                self._files, self._folder = url_to_fs(folder, **_options(scheme))
        except ImportError as error:
            raise ConfigError(
                f"model: {scheme}:// URLs need fsspec and {_PACKAGES[scheme]}: pip install fsspec "
                f"{_PACKAGES[scheme]}, on every node"
            ) from error

    def look(self, name: str) -> _Offered:
        """Return what the server says of the file."""
        found = self.look_for(name)
        if found is None:
            raise _ServerError(f"there is no {name}")
        return found

    def look_for(self, name: str) -> _Offered | None:
        """Return what the server says of the file; None where it has none of this name."""
        try:
            with _as_server_error():
                about = self._files.info(self._path(name))
        except FileNotFoundError as error:
            # The driver for web servers says the same of a server that it cannot reach, or that refuses.
            cause = error.__cause__
            is_refused = isinstance(cause, _driver_errors()) and not isinstance(cause, FileNotFoundError)
            if is_refused and getattr(cause, "status", 0) != _NOT_FOUND:
                raise _ServerError(str(cause) or type(cause).__name__) from error
            return None
        size = about.get("size")
        if size is None:
            raise _ServerError(f"its server does not say how long {name} is")
        return _Offered(name, int(size), next((str(about[tag]) for tag in _TAGS if about.get(tag)), ""))

    def names(self) -> list[str]:
        """Return the names of all files there; none where the server does not list them."""
        with contextlib.suppress(_ServerError, FileNotFoundError, NotImplementedError), _as_server_error():
            return [str(path).rpartition("/")[2] for path in self._files.ls(self._folder, detail=False)]
        return []

    def read(self, name: str) -> bytes:
        """Return a small file."""
        with _as_server_error():
            data: bytes = self._files.cat_file(self._path(name), start=0, end=_MAX_INDEX_BYTES)
        return data

    def chunks(self, file: _Offered, start: int) -> Iterator[bytes]:
        """Yield the file from `start` on, piece by piece, so that none is long to repeat."""
        while start < file.size:
            end = min(start + _CHUNK_BYTES, file.size)
            try:
                with _as_server_error():
                    data: bytes = self._files.cat_file(self._path(file.name), start=start, end=end)
            except (_ServerError, FileNotFoundError) as error:
                raise CutTransferError(str(error)) from error
            if len(data) == file.size > end - start:  # the server sends all of it, whatever is asked
                data = data[start:]
            if not data:
                return
            yield data
            start += len(data)

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"


class _UrlFetch:
    def __init__(self, name: ModelUrl, settings: DownloadConfig, context: FetchContext) -> None:
        self._name = name
        self._settings = settings
        self._context = context
        self._storage = url_folder(hub_cache(settings), name)
        self._last = self._storage / "last"

    def fetch(self, *, prefer_cached: bool) -> ModelUrl:
        version = self._name.version
        if not version and (prefer_cached or self._settings.offline):
            with contextlib.suppress(OSError):
                version = self._last.read_text().strip()
        if version and is_whole(self._folder(version), self._name.file):
            return self._name._replace(version=version)
        if self._settings.offline:
            raise ConfigError(
                f"model: {self._name} is not in the cache {self._storage.parent}, or not all of it, and "
                "download.offline lets nothing be fetched: start it once without, or name another "
                "download.cache_folder"
            )
        return self._fetch_now()

    def _fetch_now(self) -> ModelUrl:
        self._context.report(FetchProgress(f"looking at {self._name.url}"))
        with self._in_words():
            server = _Server(self._name)
            offered = self._offered(server)
            found = _version(offered)
            if self._name.version not in ("", found):
                raise ConfigError(
                    f"model: {self._name.url} has changed since the start (version {found} now, "
                    f"not {self._name.version}): put the earlier files back, or start the cluster anew"
                )
            folder = self._folder(found)
            stage = f"waiting for the process that downloads {self._name.url}"
            with locked(self._storage / "lock", stage, self._context):
                if not is_whole(folder, self._name.file):
                    self._download(server, offered, folder)
                self._last.write_text(found)
        return self._name._replace(version=found)

    def _offered(self, server: _Server) -> list[_Offered]:
        """Return the files of the model that are there."""
        if self._name.file:
            return [server.look(part) for part in gguf_parts(self._name.file)]
        names = (*SMALL_FILES, SINGLE, INDEX)
        found = {name: it for name in names if (it := server.look_for(name)) is not None}
        if "config.json" not in found:
            raise ConfigError(
                f"model: {self._name.url} has no config.json: name a folder in Hugging Face layout, or a "
                ".gguf file"
            )
        if SINGLE in found:
            found.pop(INDEX, None)
        listed = found if SINGLE in found or INDEX in found else server.names()
        weights = weights_of(self._name.url, listed, lambda: server.read(INDEX))
        return [*found.values(), *(server.look(it) for it in weights if it not in found)]

    def _download(self, server: _Server, offered: list[_Offered], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [it for it in offered if not _has(folder, it)]
        count = ByteCount(self._context, f"downloading {self._name.url}", sum(it.size for it in missing))
        for it in missing:
            path = folder / it.name
            path.parent.mkdir(exist_ok=True)
            part = PartialFile(path.with_name(f"{path.name}.incomplete"), it.size, self._context, count)
            try:
                is_right = part.fill(partial(server.chunks, it), _NoDigest())
            except CutTransferError as cut:
                raise StartError(
                    f"model: {it.name} of {self._name.url} does not arrive ({cut}): try again, and what has "
                    "arrived is kept"
                ) from cut
            if not is_right:
                part.discard()
                raise StartError(
                    f"model: {it.name} of {self._name.url} arrives with another size than the {it.size} "
                    "bytes that its server names: try again when nobody writes it"
                )
            os.replace(path.with_name(f"{path.name}.incomplete"), path)
        weights = [it.name for it in offered if it.name.endswith(".safetensors")]
        if problem := cut_short(folder, weights):
            raise ConfigError(f"model: {problem}, as it is at {self._name.url}; upload that file again")

    def _folder(self, version: str) -> Path:
        return self._storage / "snapshots" / version

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except _ServerError as error:
            raise StartError(
                f"model: {self._name.url} cannot be read ({error}): check the URL, the network, and the "
                "credentials in the environment of every node"
            ) from error


def _options(scheme: str) -> dict[str, object]:
    """Return the driver's options: nothing that it has seen earlier counts."""
    return {"use_listings_cache": False, "skip_instance_cache": True} | (
        {"client_kwargs": {"trust_env": True}} if scheme in ("http", "https") else {}
    )


@contextlib.contextmanager
def _as_server_error() -> Iterator[None]:
    """Raise what a driver raises as `_ServerError`, except that a file is missing."""
    try:
        yield
    except (FileNotFoundError, ImportError):
        raise
    except _driver_errors() as error:
        raise _ServerError(str(error) or type(error).__name__) from error


def _driver_errors() -> tuple[type[Exception], ...]:
    found = [getattr(sys.modules.get(module), name, None) for module, name in _DRIVER_ERRORS]
    return OSError, *(it for it in found if isinstance(it, type) and issubclass(it, Exception))


def _version(offered: list[_Offered]) -> str:
    return hashlib.sha256(repr(sorted(offered)).encode()).hexdigest()[:_VERSION_CHARS]


def _has(folder: Path, file: _Offered) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size
