"""The facts that a check of this machine reads, and the registration of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple

from cluster.config import ClusterConfig
from cluster.doctor.checks import C, CheckResult, Finding
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import ClusterNeed
from kvtransfer.common.clock import Clock


@dataclass(frozen=True)
class CheckContext:
    """Represents this machine, and the configuration that is to run on it."""

    machine: Machine
    config: ClusterConfig
    # None: the model folder cannot be read.
    needs: ClusterNeed | None
    environment: Mapping[str, str]
    clock: Clock
    # local, auto or host:port.
    ray_address: str = "local"
    # The cluster of this configuration runs already, and takes its ports and its memory.
    is_running: bool = False


class Check(NamedTuple, Generic[C]):
    """Represents one check; `look` yields nothing where the question does not arise."""

    name: str
    group: str
    # The subject of the check, for the documentation.
    question: str
    look: Callable[[C], Iterable[CheckResult]]

    def findings(self, context: C) -> list[Finding]:
        return [Finding(self.name, self.group, result) for result in self.look(context)]
