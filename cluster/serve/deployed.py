"""Keep the deployed configuration of an application in Ray's GCS, for later updates.

Ray Serve keeps the same in the same place for restarting replicas, but offers no way to read it.
"""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.serve.ray_private import delete_value, read_value, write_value
from cluster.stored_config import read_stored_config
from kvtransfer.codec import Codec, Part

_NAMESPACE = b"tandem"


class Deployed(Part, frozen=True):
    """Represents the configuration of an application, and the values that must stay the same when it
    changes."""

    # The configuration with all that was settled at its start, such as the address of the store's index.
    config_json: str
    # CPUs per rank, by pool.
    cpus: dict[str, float]
    life: str

    @property
    def config(self) -> ClusterConfig:
        return read_stored_config(self.config_json)


_CODEC: Codec[Deployed] = Codec(Deployed)


def remember(app: str, deployed: Deployed) -> None:
    """Record the deployed configuration of the application, in place of an earlier record."""
    write_value(_key(app), _CODEC.encode(deployed), _NAMESPACE)


def recall(app: str) -> Deployed | None:
    """Return the record; None where no `tandem serve` has deployed such an application to this Ray
    cluster."""
    frame = read_value(_key(app), _NAMESPACE)
    return None if frame is None else _CODEC.decode(frame)


def forget(app: str) -> None:
    """Remove the record of an application that was stopped."""
    delete_value(_key(app), _NAMESPACE)


def _key(app: str) -> bytes:
    return f"deployed/{app}".encode()
