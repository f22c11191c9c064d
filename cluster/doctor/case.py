"""What a check before start is given, and what makes a function a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from cluster.config import ClusterConfig
from cluster.doctor.findings import Finding, Verdict
from cluster.doctor.machine import Machine
from cluster.doctor.needs import Needs
from kvtransfer.clock import Clock

C = TypeVar("C")


@dataclass(frozen=True)
class Case:
    """This machine, and what is to run on it."""

    machine: Machine
    config: ClusterConfig
    needs: Needs | None
    """None: the model folder cannot be read."""
    environment: Mapping[str, str]
    clock: Clock
    ray_address: str = "auto"
    is_running: bool = False
    """The cluster of this configuration runs already: its ports and its memory are taken by itself."""


class Check(NamedTuple, Generic[C]):
    """`look` says nothing where the question does not arise."""

    name: str
    group: str
    question: str
    """For the documentation: what is looked at."""
    look: Callable[[C], Iterable[Verdict]]

    def findings(self, case: C) -> list[Finding]:
        return [Finding(self.name, self.group, verdict) for verdict in self.look(case)]
