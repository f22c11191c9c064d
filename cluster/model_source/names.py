"""What `model` may name beside a folder: a repository of the hub, one GGUF file of it, or a URL.

org/name    org/name@revision    org/name:file.gguf    org/name@revision:file.gguf
s3://bucket/folder    gs://bucket/folder    https://host/folder    https://host/file.gguf
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cluster.errors import ConfigError

SCHEMES = ("s3", "gs", "https", "http")
GGUF = ".gguf"
_REPOSITORY = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[^\s:@]+))?"
    r"(?::(?P<file>[^\s:]+\.gguf))?"
)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<rest>[^#]*)(?:#(?P<version>[0-9a-f]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<num_parts>\d{5})\.gguf")
# More than any model is split into: as many names are made.
_MAX_PARTS = 1000


class HubName(NamedTuple):
    """Represents a repository of the hub at one of its revisions, or one GGUF file there (`file`)."""

    repository: str
    # Branch, tag or commit; "": the main branch.
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}{f':{self.file}' if self.file else ''}"

    @property
    def is_pinned(self) -> bool:
        """Whether the name means the same files forever."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def served_name(self) -> str:
        """The name by which clients ask for the model, where none is configured."""
        return Path(self.file).stem if self.file else self.repository.partition("/")[2]


class ModelUrl(NamedTuple):
    """Represents a folder, or a GGUF file, behind a URL. `version` names what was found there; "": whatever
    is there now."""

    url: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.url}#{self.version}" if self.version else self.url

    @property
    def is_pinned(self) -> bool:
        """Whether a process that finds this version in its cache needs to ask nobody."""
        return bool(self.version)

    @property
    def file(self) -> str:
        """The name of the GGUF file; "": the URL is that of a folder."""
        return self.last if self.last.endswith(GGUF) else ""

    @property
    def last(self) -> str:
        """The last part of the path."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def served_name(self) -> str:
        """The name by which clients ask for the model, where none is configured."""
        return self.last.removesuffix(GGUF)


ModelName: TypeAlias = HubName | ModelUrl


def model_name(model: str, folder: Path = Path()) -> ModelName | None:
    """Return what the text names, None for a path: one that exists in the folder, or that cannot be a name.

    `ConfigError` for a URL that nothing can be fetched from.
    """
    if (url := _URL.fullmatch(model)) is not None:
        return _model_url(url)
    found = _REPOSITORY.fullmatch(model)
    if found is None or (folder / model).exists():
        return None
    file = found["file"] or ""
    if ".." in Path(file).parts or file.startswith("/"):
        raise ConfigError(f"model: {model} names a file outside of the repository; name one that it lists")
    return HubName(found["repository"], found["revision"] or "", file)


def located_model(model: str, folder: Path) -> str:
    """Return a name as it is, and a path so that it is relative to the folder no more."""
    return str(folder / model) if model_name(model, folder) is None else model


def gguf_parts(file: str) -> list[str]:
    """Return the GGUF file, with its siblings where it is one of the parts of a split model."""
    split = _SPLIT.fullmatch(file)
    if split is None:
        return [file]
    num_parts = min(int(split["num_parts"]), _MAX_PARTS)
    return [f"{split['stem']}-{part:05d}-of-{split['num_parts']}{GGUF}" for part in range(1, num_parts + 1)]


def _model_url(url: re.Match[str]) -> ModelUrl:
    if url["scheme"] not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"model: {url['scheme']}:// is not supported; use one of {schemes}")
    if "?" in url["rest"] or "@" in url["rest"] or not url["rest"].strip("/"):
        raise ConfigError(
            f"model: a {url['scheme']}:// URL names host or bucket and path alone: leave user, password and "
            "query out (the configuration is shown), and give credentials as the driver's environment wants"
        )
    return ModelUrl(f"{url['scheme']}://{url['rest']}".rstrip("/"), url["version"] or "")
