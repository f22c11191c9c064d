"""Failures of replicas that a simulation is told to have."""

from __future__ import annotations

import re
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.simulation.simulated_cluster import SimulatedCluster

_FORM = re.compile(r"(?P<name>[a-z]+[0-9]*)@(?P<at>[0-9.]+)(\+(?P<for>[0-9.]+))?")


class PlannedFailure(NamedTuple):
    """A replica dies at a time, and another one of its id starts after `for_s`; inf: never."""

    replica_id: str
    at_s: float
    for_s: float


def parse_failures(text: str) -> list[PlannedFailure]:
    """Parse `r0003@120+60,r0004@200`: replica, second, and after how many seconds it is back. Raises
    `ConfigError`."""
    failures = []
    for entry in filter(None, text.split(",")):
        found = _FORM.fullmatch(entry.strip())
        if found is None:
            raise ConfigError(
                f"--failures {entry}: expected REPLICA@SECOND or REPLICA@SECOND+SECONDS, as r0003@120+60"
            )
        for_s = float(found["for"]) if found["for"] else float("inf")
        failures.append(PlannedFailure(found["name"], float(found["at"]), for_s))
    return failures


def schedule_failures(cluster: SimulatedCluster, failures: list[PlannedFailure]) -> None:
    """Let the failures happen, counted from now. Raises `ConfigError` where a replica is not known."""
    names = {replica.identity.replica_id: replica for replica in cluster.replicas}
    for failure in failures:
        if failure.replica_id not in names:
            known = f"{min(names)} to {max(names)}"
            raise ConfigError(f"--failures: there is no replica {failure.replica_id}; there are {known}")
        replica, events = names[failure.replica_id], cluster.events
        role, engine = replica.role, replica.engine

        def end(name: str = failure.replica_id) -> None:
            if cluster.find(name) is not None:
                cluster.end_replica(name, "it failed, as the simulation was told")

        def begin(name: str = failure.replica_id, role: str = role, engine=engine) -> None:  # type: ignore[no-untyped-def]
            if cluster.find(name) is None:
                cluster.add_replica(name, role, engine)

        events.after(failure.at_s, end)
        if failure.for_s != float("inf"):
            events.after(failure.at_s + failure.for_s, begin)
