"""The records of this user's `tandem serve` that run on this host, by which other commands find the cluster
that they are pointed at. No process of another user is contacted: a record is a file of mode 0600 in the
private folder of its run, which is locked while that lives."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cluster.config import ClusterConfig
from cluster.errors import StartError
from cluster.serve.private_folder import PrivateFolder, living_folders
from kvtransfer.common.os_errors import os_reason

_NAME = "run.json"


class ServeRun(msgspec.Struct, frozen=True):
    """Represents one `tandem serve` that serves."""

    app: str
    process_id: int
    # Seconds since the epoch.
    started_at: float
    # The file of its configuration; "": it was described by options.
    file: str
    # host:port.
    gateways: tuple[str, ...]
    # Addresses for operators, host:port; tls://host:port where the gateways speak TLS.
    admins: tuple[str, ...]
    # The address of the Ray cluster, host:port.
    ray: str
    # URL; "": none.
    dashboard: str
    # The file of the Ray token; "": in the environment of `tandem serve`, or there is none.
    token_file: str

    @property
    def text(self) -> str:
        """The name by which people know the run."""
        at = datetime.datetime.fromtimestamp(self.started_at).strftime("%Y-%m-%d %H:%M:%S")
        gateways = ", ".join(self.gateways)
        return f"{self.app!r} at {gateways} (process {self.process_id}, since {at}, Ray {self.ray})"


def record(folder: PrivateFolder, run: ServeRun) -> None:
    """Write the record of a run that serves."""
    folder.write(_NAME, msgspec.json.encode(run).decode())


def living_runs() -> list[ServeRun]:
    """Return the runs of this user on this host that serve; `StartError` where that cannot be known."""
    try:
        folders = living_folders()
    except OSError as error:
        raise StartError(f"the runs of this user cannot be looked up: {os_reason(error)}") from error
    return [run for folder in folders if (run := _read(folder)) is not None]


def _read(folder: Path) -> ServeRun | None:
    try:
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=ServeRun)
    except (OSError, msgspec.MsgspecError):  # it starts, has just ended, or is of another version
        return None


def runs_of(config: ClusterConfig, file: Path | None, runs: Sequence[ServeRun]) -> list[ServeRun]:
    """Return the runs that a configuration may mean: those of its application; of several the ones at its
    port, and of these the ones that were started from its file."""
    found = [run for run in runs if run.app == config.app]
    port, path = config.gateway.port, str(file.resolve()) if file else ""
    narrower: list[Callable[[ServeRun], bool]] = [
        lambda run: bool(port) and any(address.endswith(f":{port}") for address in run.gateways),
        lambda run: run.file == path,
    ]
    for fits in narrower:
        found = [run for run in found if fits(run)] or found
    return found


def only_run(config: ClusterConfig, file: Path | None, runs: Sequence[ServeRun]) -> ServeRun | None:
    """Return the one run that the configuration means, None where there is none; `StartError` lists
    several."""
    found = runs_of(config, file, runs)
    if len(found) > 1:
        names = "; ".join(run.text for run in found)
        raise StartError(
            f"{len(found)} clusters of the application {config.app!r} run here: {names}: name one with "
            "--ray-address HOST:PORT"
        )
    return found[0] if found else None


def run_at(ray_address: str, runs: Sequence[ServeRun]) -> ServeRun | None:
    """Return a run in the Ray cluster at this address."""
    return next((run for run in runs if run.ray == ray_address), None)
