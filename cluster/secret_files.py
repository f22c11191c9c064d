"""Secrets, which are read from files of their own: mounted from a vault, or from a Kubernetes Secret. Each
process reads them itself; only their paths are in a configuration, which passes through Ray."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from kvtransfer.common.os_errors import os_reason
from kvtransfer.config import StoreConfig
from kvtransfer.errors import TrustError
from kvtransfer.rpc.trust import Trust, TrustFiles


def trust_files(config: ClusterConfig) -> TrustFiles:
    """Return the paths of the files by which processes prove themselves to each other. `tandem serve` has
    named a `secret_file` where the configuration names none."""
    assert config.secret_file is not None, "decided before the application is deployed"
    tls = None if config.inner_tls is None else config.inner_tls.files
    return TrustFiles(str(config.secret_file), tls)


def read_trust(config: ClusterConfig, *, certificates: bool = True) -> Trust:
    """Read these files, or the secret alone, for a process that opens no connection; `ConfigError` names the
    setting whose file cannot be used."""
    files = trust_files(config)
    try:
        return Trust.read(files if certificates else TrustFiles(files.secret_file))
    except TrustError as error:
        raise ConfigError(str(error)) from error


def read_redis_url(store: StoreConfig) -> str:
    """Return the URL of the index as it is configured, with user and password: not for logs; "" where none
    is. `ConfigError` when its file cannot be read, or is empty or binary."""
    path = store.redis_url_file
    if path is None:
        return store.redis_url
    try:
        url = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"store.redis_url_file: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"store.redis_url_file: {path} holds no text") from error
    if not url:
        raise ConfigError(
            f"store.redis_url_file: {path} is empty; it should hold a URL such as redis://host:6379"
        )
    return url
