"""The checks that a cluster passes before anything of it starts: those of `tandem doctor` whose error means
that it would not come up, or not stay up.

    tandem serve, tandem update --> preflight(context) --> findings; errors refuse, in the doctor's words

Nothing is started or measured: together they take about as long as reading the headers of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import LOOPBACK
from cluster.doctor import limits, model, network, storage
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import Finding, Severity

# Wherever the replicas run, their nodes have the model's folder at the same path.
_OF_THE_MODEL = model.CHECKS
# Checks of the host that runs the replicas.
_OF_THE_HOST: tuple[Check[CheckContext], ...] = tuple(
    check
    for check in (*network.CHECKS, *limits.CHECKS, *storage.CHECKS)
    if check.name
    in {"ports", "shared-memory", "memory", "kv-capacity", "device-memory", "nvme-room", "nvme-direct-io"}
)


def preflight(context: CheckContext) -> list[Finding]:
    """Return the errors. Where several hosts may run the replicas, nothing is said of this one: its memory
    and ports may not be theirs; `tandem doctor -f` looks at each."""
    return [finding for finding in _findings(context) if finding.severity is Severity.ERROR]


def _findings(context: CheckContext) -> Iterator[Finding]:
    for check in _OF_THE_MODEL:
        yield from check.findings(context)
    if context.ray_address == "local" or context.config.transfer.data_host in LOOPBACK:
        for check in _OF_THE_HOST:
            yield from check.findings(context)
