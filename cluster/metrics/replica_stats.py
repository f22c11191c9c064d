"""Converts the statistics of a replica to the public `tandem.v1.Load` and back, by the names of fields."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from workers.stats_record import ReplicaStats


class _Renamed(NamedTuple):
    """A field of `Load` that has another name and unit than its statistic."""

    stat: str
    scale: float


RENAMED = {"decode_step_ms": _Renamed("decode_step_s", 1e3)}
SHARED = tuple(
    field.name for field in admin_pb.Load.DESCRIPTOR.fields if field.name in ReplicaStats.__struct_fields__
)
_values_of = operator.attrgetter(*SHARED)
_MAPS = frozenset(name for name in SHARED if isinstance(getattr(ReplicaStats(), name), dict))


def load_of(stats: ReplicaStats) -> admin_pb.Load:
    """Return the message of these stats, without its age."""
    values: dict[str, Any] = dict(zip(SHARED, _values_of(stats), strict=True))
    for name, (stat, scale) in RENAMED.items():
        values[name] = getattr(stats, stat) * scale
    return admin_pb.Load(**values)


def stats_of(load: admin_pb.Load) -> dict[str, Any]:
    """Return the fields of `ReplicaStats` that the message has."""
    values = dict(zip(SHARED, _values_of(load), strict=True))
    for name in _MAPS:
        values[name] = dict(values[name])
    for name, (stat, scale) in RENAMED.items():
        values[stat] = getattr(load, name) / scale
    return values
