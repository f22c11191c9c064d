"""Files with what must not stand in a configuration: mounted from a vault, or from a Kubernetes Secret."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import ConfigError

MIN_SECRET_BYTES = 16


def read_cluster_secret(path: Path) -> bytes:
    """What connections prove to each other, without the white space around it; `ConfigError` when the file
    cannot be read or holds too little."""
    secret = _read(path, "secret_file")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"secret_file: needs at least {MIN_SECRET_BYTES} bytes, has {len(secret)}")
    return secret


def read_redis_url(path: Path) -> str:
    """The URL with user and password; `ConfigError` when the file cannot be read, or is empty or binary."""
    try:
        url = _read(path, "redis_url_file").decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"redis_url_file: {path} holds no text") from error
    if not url:
        raise ConfigError(f"redis_url_file: {path} is empty; it should hold a URL such as redis://host:6379")
    return url


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{field}: {error}") from error
