"""What `tandem serve` and `tandem update` refuse before anything starts, in the words of `tandem doctor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cluster.cli.doctor import findings_view, machine_context
from cluster.cli.serve_options import ServeOptions, in_options
from cluster.cli.terminal import die, err
from cluster.config import ClusterConfig
from cluster.doctor.checks import Finding
from cluster.doctor.preflight import preflight


def refuse_what_cannot_run(
    config: ClusterConfig,
    given: ServeOptions,
    environment: Mapping[str, str],
    *,
    ray_address: str,
    is_running: bool = False,
) -> None:
    """End this command where the checks of this machine find errors, with each error and its remedy."""
    context = machine_context(config, environment, ray_address, is_running=is_running)
    errors = [_in_options(finding, given) for finding in preflight(context)]
    if errors:
        err.print(findings_view(errors))
        die("this cannot run here; nothing was started")


def _in_options(finding: Finding, given: ServeOptions) -> Finding:
    result = finding.result
    return dataclasses.replace(
        finding,
        result=dataclasses.replace(
            result,
            seen=in_options(result.seen, given),
            why=in_options(result.why, given),
            remedy=in_options(result.remedy, given),
        ),
    )
