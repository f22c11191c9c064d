"""Order counts, show what changes, and wait until it has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence

from rich.console import Console

from cluster.cli.progress_report import progress_line, stages
from cluster.cli.scale_plan import plan_json, plan_scale, plan_view
from cluster.cli.scale_target import ScaleTarget
from cluster.cli.terminal import err
from cluster.errors import (
    CallError,
    DashboardError,
    ScaleTimeoutError,
)
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import Clock

_POLL_S = 0.5


class ScaleWork:
    """Carries out one call of the command."""

    def __init__(self, target: ScaleTarget, console: Console, clock: Clock, *, as_json: bool) -> None:
        self._target = target
        self._console = console
        self._clock = clock
        self._as_json = as_json

    async def scale(
        self, counts: Mapping[str, int], released: Sequence[str], *, dry_run: bool, wait_s: float | None
    ) -> None:
        status = await self._target.status()
        reply = await self._target.scale(counts, dry_run=dry_run) if counts else admin_pb.ScaleResponse()
        if released and not dry_run:
            await self._target.release(released)
        plan = plan_scale(reply, status, released)
        if not self._as_json:
            self._console.print(plan_view(plan))
        if not dry_run and wait_s is not None and counts:
            await self._wait(counts, wait_s)
        if self._as_json:
            print(json.dumps({"dry_run": dry_run, **plan_json(plan)}))
        elif dry_run:
            self._console.print("nothing was changed: a dry run")

    async def _wait(self, counts: Mapping[str, int], wait_s: float) -> None:
        """Return when Serve runs as many, and no replica starts or stops."""
        deadline = self._clock.now() + wait_s
        running = {pool: {"RUNNING": num} if num else {} for pool, num in counts.items()}
        with stages(err, "waiting") as report:
            while True:
                # The dashboard, or this gateway, may move or restart meanwhile.
                with contextlib.suppress(DashboardError, CallError):
                    reply = await self._target.scale({}, dry_run=True)
                    pools = {seen.name: seen for seen in reply.pools if seen.name in counts}
                    ready = {pool: (seen.num_running, counts[pool]) for pool, seen in pools.items()}
                    report(progress_line("waiting", ready))
                    if all(dict(seen.states) == running[pool] for pool, seen in pools.items()):
                        return
                    if overruled := [pool for pool, seen in pools.items() if seen.before != counts[pool]]:
                        raise ScaleTimeoutError(f"somebody ordered another count of {overruled[0]} meanwhile")
                if self._clock.now() >= deadline:
                    raise ScaleTimeoutError(
                        f"not reached within {wait_s:g} s; Serve continues (`tandem status` shows how far)"
                    )
                await self._clock.sleep(_POLL_S)
