"""The configuration of `tandem serve`: a file, options, or both."""

from __future__ import annotations

from pathlib import Path

import typer

from cluster.config import ClusterConfig, default_config, load_config
from workers.model.config import read_model_config

HOST_HELP = 'Address for the gateway to listen on; "auto": all of this node\'s.'


def serve_config(
    file: Path | None,
    model: Path | None,
    prefill: int | None,
    decode: int | None,
    host: str | None,
    port: int | None,
    nvme: tuple[Path | None, float | None],
) -> ClusterConfig:
    """The file with what the options change, or without a file what they say. `ConfigError` or a usage error
    where they contradict each other. `model` must be given without a file."""
    folder, num_gb = nvme
    if (folder is None) != (num_gb is None):
        raise typer.BadParameter("go together", param_hint="--nvme, --nvme-gb")
    if file is not None:
        if folder is not None:
            raise typer.BadParameter("the file says it, under store:", param_hint="--nvme, --nvme-gb")
        if prefill is not None or decode is not None:
            raise typer.BadParameter(
                "the file says how many replicas there are", param_hint="--prefill, --decode"
            )
        config = load_config(file)
        if model is not None:
            config = config.model_copy(update={"model": model.resolve()})
        return listening_at(config, host, port)
    assert model is not None
    return default_config(
        model,
        prefill=1 if prefill is None else prefill,
        decode=1 if decode is None else decode,
        host=host,
        port=port,
        context_tokens=read_model_config(model).max_context_tokens,
        nvme=None if folder is None or num_gb is None else (folder, num_gb),
    )


def listening_at(config: ClusterConfig, host: str | None, port: int | None) -> ClusterConfig:
    """The same, with the gateway at this host and port; None: as it is."""
    if host is None and port is None:
        return config
    return config.model_copy(update={"gateway": config.gateway.at(host, port)})
