"""`tandem traffic`: which share of an application's requests each application of the Ray cluster answers."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cluster.cli.display import stages, traffic_line
from cluster.cli.terminal import AsJson, JoinedRay, err, out


def traffic(
    shares: Annotated[
        list[str] | None, typer.Argument(metavar="[APP=WEIGHT]...", help="Such as tandem=90 tandem-v2=10.")
    ] = None,
    app: Annotated[str, typer.Option(help="The application whose gateways clients call.")] = "tandem",
    ray_address: JoinedRay = "auto",
    as_json: AsJson = False,
) -> None:
    """Split an application's requests between it and others, such as another version of the model beside it.

    Without shares, show those that hold. `tandem traffic tandem=100` takes all back.
    """
    from cluster.serve.traffic_shares import parse_shares, read_shares, set_shares  # here: they need Ray
    from cluster.serve.update import connect

    try:
        wanted = parse_shares(shares) if shares else {}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="APP=WEIGHT") from error
    with stages(err, "connecting to Ray"):
        connect(ray_address)
    holding = set_shares(app, wanted) if wanted else read_shares(app)
    if as_json:
        print(json.dumps({"app": app, "traffic": holding}))
    else:
        out.print(f"requests to {app}: {traffic_line(holding)}", highlight=False)
