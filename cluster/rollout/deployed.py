"""What an application was deployed with, kept in Ray's GCS as long as it runs, for whoever updates it.

Ray Serve keeps the same in the same place for restarting replicas; it has no way to ask for it.
"""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.ray_private import delete_value, read_value, write_value
from kvtransfer.wire import Codec, Part

_NAMESPACE = b"tandem"


class Deployed(Part, frozen=True):
    """The configuration that an application follows, and what must stay the same when that changes."""

    config_json: str
    """With all that was settled at its start, such as the address of the store's index."""
    cpus: dict[str, float]
    """Per rank, by pool."""
    secret: bytes
    life: str

    @property
    def config(self) -> ClusterConfig:
        return ClusterConfig.model_validate_json(self.config_json)


_CODEC: Codec[Deployed] = Codec(Deployed)


def remember(app: str, deployed: Deployed) -> None:
    """Replaces what was there."""
    write_value(_key(app), _CODEC.encode(deployed), _NAMESPACE)


def recall(app: str) -> Deployed | None:
    """None where no `tandem serve` has deployed such an application to this Ray cluster."""
    frame = read_value(_key(app), _NAMESPACE)
    return None if frame is None else _CODEC.decode(frame)


def forget(app: str) -> None:
    """The application is gone."""
    delete_value(_key(app), _NAMESPACE)


def _key(app: str) -> bytes:
    return f"deployed/{app}".encode()
