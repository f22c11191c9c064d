"""Options of the commands that call a gateway, stated once: its address, and who calls.

    @gateway_options
    def status(as_json: AsJson = False, *, to: AdminOptions) -> None: ...

is a command with `--admin-address`, `--api-key-file` and so on, whose values come to it in `to`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.api.channel import ClientCredentials
from cluster.errors import ConfigError
from kvtransfer.common.os_errors import os_reason

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
Address = Annotated[
    str, typer.Option(envvar="TANDEM_ADDRESS", help="The gateway, host:port; tls://host:port with TLS.")
]
AdminAddress = Annotated[
    str,
    typer.Option(
        envvar="TANDEM_ADMIN_ADDRESS",
        help="The gateway's port for operators, host:port; tls://host:port with TLS.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CallerOptions:
    """Who calls."""

    api_key: ApiKey = ""
    api_key_file: ApiKeyFile = None
    client_certificate: ClientCertificate = None

    def credentials(self) -> ClientCredentials:
        """Return the credentials; `ConfigError` where a file cannot be read. The file with the key is read
        again for each call, so that a key may rotate while a command runs."""
        certificate, key_file = self.client_certificate, self.api_key_file
        pem = None if certificate is None else _read(certificate, "--client-certificate")
        if pem is not None and (b"PRIVATE KEY" not in pem or b"-----BEGIN CERTIFICATE" not in pem):
            raise ConfigError(
                f"--client-certificate: {certificate} must hold the certificate chain and its private key, "
                "as PEM"
            )
        if self.api_key or key_file is None:
            return ClientCredentials(bearer=self.api_key.strip(), certificate=pem, private_key=pem)
        read_key_file(key_file)
        return ClientCredentials(bearer=lambda: read_key_file(key_file), certificate=pem, private_key=pem)


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(CallerOptions):
    """Who sends requests, and where to."""

    address: Address = "127.0.0.1:8780"


@dataclass(frozen=True, kw_only=True)
class AdminOptions(CallerOptions):
    """Who reads or changes the cluster, and where."""

    admin_address: AdminAddress = "127.0.0.1:8782"


def gateway_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options in the fields of its one parameter that is a `CallerOptions`."""
    return spliced_options(command, CallerOptions)


def spliced_options(command: Callable[..., None], kind: type) -> Callable[..., None]:
    """Give a command the options in the fields of its one parameter that is of this dataclass, or of one
    derived from it."""
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters.values()
    (taker,) = (it for it in parameters if inspect.isclass(it.annotation) and issubclass(it.annotation, kind))
    shared = inspect.signature(taker.annotation, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        values = {name: given.pop(name) for name in shared}
        command(**given, **{taker.name: taker.annotation(**values)})

    own = [it for it in parameters if it.name != taker.name]
    called.__signature__ = signature.replace(parameters=[*own, *shared.values()])  # type: ignore[attr-defined]
    return called


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
        raise ConfigError(f"{option}: {os_reason(error)}") from error
