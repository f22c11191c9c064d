"""Who calls, on the command line: options and variables of the environment that every call shares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.api.channel import ClientCredentials
from cluster.errors import ConfigError

# Hidden, because every process of the host may see the arguments of a command.
ApiKey = Annotated[str, typer.Option(envvar="TANDEM_API_KEY", hidden=True, show_envvar=False)]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(envvar="TANDEM_API_KEY_FILE", help="Holds the API key or JWT; TANDEM_API_KEY goes first."),
]
ClientCertificate = Annotated[
    Path | None,
    typer.Option(
        envvar="TANDEM_CLIENT_CERTIFICATE",
        help="PEM of the client's certificate chain and its key, for gateways that ask for one.",
    ),
]


def credentials(key: str, key_file: Path | None, certificate: Path | None) -> ClientCredentials:
    """Return the credentials of a command; `ConfigError` where a file cannot be read. The file with the key
    is read again for each call, so that a key may rotate while a command runs."""
    pem = None if certificate is None else _read(certificate, "--client-certificate")
    if pem is not None and (b"PRIVATE KEY" not in pem or b"-----BEGIN CERTIFICATE" not in pem):
        raise ConfigError(
            f"--client-certificate: {certificate} must hold the certificate chain and its private key, as PEM"
        )
    if key or key_file is None:
        return ClientCredentials(bearer=key.strip(), certificate=pem, private_key=pem)
    read_key_file(key_file)
    return ClientCredentials(bearer=lambda: read_key_file(key_file), certificate=pem, private_key=pem)


def read_key_file(path: Path) -> str:
    """Return the one line of the file; `ConfigError` where it has none."""
    try:
        text = _read(path, "--api-key-file").decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise ConfigError(f"--api-key-file: {path} must hold one line, the API key or JWT")
    return text


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: {error}") from error
