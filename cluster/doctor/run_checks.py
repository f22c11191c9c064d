"""The list of all checks, of a machine before start and of a running cluster, and running them."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.doctor import hardware, limits, members, model, network, redis, serving, storage, tiers, transfer
from cluster.doctor.checks import C, Check, CheckContext, Finding, Live, error

MACHINE_CHECKS: tuple[Check[CheckContext], ...] = (
    *model.CHECKS,
    *limits.CHECKS,
    *hardware.CHECKS,
    *storage.CHECKS,
    *network.CHECKS,
    *redis.CHECKS,
)
LIVE_CHECKS: tuple[Check[Live], ...] = (
    *serving.CHECKS,
    *transfer.CHECKS,
    *tiers.CHECKS,
    *members.CHECKS,
)
# Before all others: the file itself, one finding for each field that is wrong.
CONFIG_CHECK = "config"
# Before all others of a running cluster: that the gateway answers.
REACH_CHECK = "gateway"


def run_machine_checks(context: CheckContext) -> list[Finding]:
    """Run the checks of this machine."""

    return _run(MACHINE_CHECKS, context)


def run_cluster_checks(live: Live) -> list[Finding]:
    """Run the checks of a running cluster."""

    return _run(LIVE_CHECKS, live)


def config_findings(problem: str) -> list[Finding]:
    """Return what `load_config` refused, line by line."""
    why = "`tandem serve` refuses the file; nothing that depends on it was looked at"
    return [
        Finding(
            CONFIG_CHECK, "configuration", error(line, why, "correct that field; docs/operating.md has them")
        )
        for line in problem.splitlines()
    ]


def unreachable(address: str, problem: str) -> Finding:
    """Return the finding for a gateway that does not answer."""

    why = "nothing can be said of the cluster behind it"
    remedy = "does `tandem serve` run there? Is its port open from here? tls:// where it has a certificate"
    return Finding(REACH_CHECK, "members", error(f"no gateway answers at {address}: {problem}", why, remedy))


def _run(checks: Iterable[Check[C]], context: C) -> list[Finding]:
    return [finding for check in checks for finding in check.findings(context)]
