"""The token of a Ray cluster: anyone who has it runs code on every node. The environment, of this process and
of all that it starts, names the place where Ray finds it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.serve.private_folder import PrivateFolder
from cluster.serve.ray_private import forget_token

_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_PATH = "RAY_AUTH_TOKEN_PATH"
_FILE = "ray-token"
_NUM_BYTES = 32


def names_token(environment: Mapping[str, str]) -> bool:
    """Whether the environment names the token to use, or sets that there is none."""
    return bool(environment.get(_TOKEN) or environment.get(_PATH)) or is_disabled(environment)


def is_disabled(environment: Mapping[str, str]) -> bool:
    """Whether the environment makes Ray use no token."""
    return environment.get(_MODE, "").lower() == "disabled"


def named_token_file(environment: Mapping[str, str]) -> str:
    """Return the path of the file from which Ray reads its token; "" where it reads none."""
    if environment.get(_TOKEN) or is_disabled(environment):
        return ""
    return environment.get(_PATH) or str(Path.home() / ".ray" / "auth_token")


def token_place(environment: Mapping[str, str]) -> str:
    """Return in words where Ray finds its token."""
    if is_disabled(environment):
        return f"none: {_MODE} is disabled"
    if environment.get(_TOKEN):
        return f"in the environment variable {_TOKEN}"
    return f"in {named_token_file(environment)}"


def draw_token(folder: PrivateFolder) -> Path:
    """Write a new token that only this user can read, and return its file."""
    return folder.write(_FILE, secrets.token_hex(_NUM_BYTES))


@contextlib.contextmanager
def using_token_file(path: Path | str) -> Iterator[None]:
    """Make Ray read its token from this file, in this process and in those that it starts."""
    before = os.environ.get(_PATH)
    os.environ[_PATH] = str(path)
    forget_token()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PATH]
        else:
            os.environ[_PATH] = before
        forget_token()
