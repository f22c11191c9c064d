"""`tandem traffic`: which share of an application's requests each application of the Ray cluster answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated

import typer

from cluster.api.admin_client import AdminClient
from cluster.cli.gateway_options import AdminOptions, gateway_options
from cluster.cli.terminal import AsJson, out, run, traffic_line


@gateway_options
def traffic(
    weights: Annotated[
        list[str] | None, typer.Argument(metavar="[APP=WEIGHT]...", help="Such as tandem=90 tandem-v2=10.")
    ] = None,
    as_json: AsJson = False,
    *,
    to: AdminOptions,
) -> None:
    """Split the requests to an application, whose gateway is called, between it and others, such as another
    version of the model beside it.

    Without weights, show the shares that hold. `tandem traffic tandem=100` takes all back.
    """
    try:
        wanted = parse_weights(weights or ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="APP=WEIGHT") from error
    run(_traffic(wanted, to, as_json=as_json))


async def _traffic(weights: dict[str, float], to: AdminOptions, *, as_json: bool) -> None:
    async with AdminClient(to.admin_address, credentials=to.credentials()) as client:
        status = await client.status()
        shares = dict(status.traffic) or {status.app: 1.0}
        if weights:
            shares = await client.traffic(weights)
    if as_json:
        print(json.dumps({"app": status.app, "traffic": shares}))
    else:
        out.print(f"requests to {status.app}: {traffic_line(shares)}", highlight=False)


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Parse `["tandem=90", "tandem-v2=10"]`; `ValueError` for any other form. The gateway decides which
    weights make shares."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or name in weights or not 0 <= weight < math.inf:
            raise ValueError(f"expected APPLICATION=WEIGHT, each once, with a weight from 0; not {text!r}")
        weights[name] = weight
    return weights
