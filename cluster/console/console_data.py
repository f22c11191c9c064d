"""The console's data as JSON: of the cluster, and of all its gateways; and the gateway's own metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from cluster.api.json_text import as_dict, status_json
from cluster.api.replies import Fresh
from cluster.api.store_admin import STAT_S
from cluster.config import ClusterConfig
from cluster.console.console_services import ConsoleServices
from cluster.errors import DashboardAwayError, FieldViolation, InvalidRequestError
from cluster.gateway.fleet.messages import ListedRequest
from cluster.metrics.curves import CURVE_S
from cluster.metrics.exporters import GatewayMetrics
from cluster.metrics.scraped_registry import ScrapedRegistry
from cluster.metrics.trends import LONG, Trends
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import Clock

# Requests of each kind, running and ended, in one answer.
MAX_REQUESTS = 100
_STATUS_AGE_S = 0.5
_STORES_AGE_S = 2.0
_PATHS_AGE_S = 5.0
_METRICS_AGE_S = 1.0
MIN_TREND_S = 60
# Paths in one answer: a longer table would not be read.
MAX_PATHS = 10_000

# The fields of `GatewayTotals` that the page shows.
_TOTALS = ("num_running", "num_finished", "num_failed", "num_cancelled")

# Sets and counts everything that the gateway exports.


class ConsoleApi:
    """Answers the polls of any number of pages: what is costly is made a few times a second, once for all."""

    def __init__(
        self,
        gateway_id: str,
        config: ClusterConfig,
        services: ConsoleServices,
        trends: Trends,
        clock: Clock,
    ) -> None:
        self._gateway_id = gateway_id
        self._config = config
        self._services = services
        self._trends = trends
        self._clock = clock
        # The JSON of `tandem status --json`, without the paths.
        self.status = Fresh(self._make_status, _STATUS_AGE_S, clock)
        # JSON with the paths of as many replicas as fit into `MAX_PATHS`, and the number of the others.
        self.paths = Fresh(self._make_paths, _PATHS_AGE_S, clock)
        self._store_stat: Fresh[admin_pb.StoreStatResponse] = Fresh(
            lambda: services.stores.stat(STAT_S), _STORES_AGE_S, clock
        )

        self._scraped = ScrapedRegistry(app=config.app, gateway=gateway_id, model=config.model_name)
        self._exporter = GatewayMetrics(self._scraped, config.transfer.min_gb_s, config.costs)
        # The gateway's metrics in Prometheus' text format.
        self.metrics = Fresh(self._make_metrics, _METRICS_AGE_S, clock)

    async def about(self) -> dict[str, Any]:
        """Return the facts that do not change while the gateway runs, and the dashboard's address."""
        scaling = self._config.scaling
        return {
            "gateway_id": self._gateway_id,
            "app": self._config.app,
            "autoscale": scaling.autoscale,
            "ttft_slo_s": scaling.ttft_slo_s,
            "itl_slo_s": scaling.itl_slo_s,
            "auth": self._config.auth.mode,
            "gpus_per_rank": {pool.name: pool.num_gpus_per_rank for pool in self._config.pools},
            "dashboard": await self._dashboard_url(),
        }

    async def requests(self) -> dict[str, Any]:
        """Return the running and recent requests of all gateways, the latest first."""
        found = await self._services.fleet.latest(MAX_REQUESTS, None)
        now = self._clock.now()
        requests = [_request(gateway_id, request, now) for gateway_id, request in found.requests]
        return {"requests": requests, "missing": found.missing}

    async def explain(self, request_id: str, tenant: str | None) -> dict[str, Any]:
        """Return the output of `tandem explain --json`; `UnknownRequestError` for an unknown request."""
        return as_dict(await self._services.status.explain(request_id, tenant))

    async def curves(self) -> dict[str, Any]:
        """Return TTFT and ITL at all gateways together, second by second, the sums of the last minute, and
        the totals of each gateway. A point is [Unix time, p50, p90, p99], in seconds."""
        stats = await self._services.status.stats.get()
        return {
            "at": self._clock.wall(),
            "span_s": CURVE_S,
            "ttft": stats.curves.ttft,
            "itl": stats.curves.itl,
            "minute": msgspec.structs.asdict(stats.minute),
            "totals": {
                name: {total: getattr(totals, total) for total in _TOTALS}
                for name, totals in stats.totals.items()
            },
            "missing": stats.missing,
        }

    async def trends(self, span_s: int) -> dict[str, Any]:
        """Return the points of the last `span_s` seconds, oldest first, with the fields of `TrendPoint`."""
        if not MIN_TREND_S <= span_s <= LONG.span_s:
            problem = f"must be from {MIN_TREND_S} to {LONG.span_s}, not {span_s}"
            raise InvalidRequestError(FieldViolation("span_s", problem))
        at = self._clock.wall()
        series, points = self._trends.since(at - span_s, span_s)
        return {
            "at": at,
            "span_s": span_s,
            "period_s": series.period_s,
            "points": [point._asdict() for point in points],
        }

    async def _dashboard_url(self) -> str:
        if self._services.operations is None:
            return ""
        try:
            return await self._services.operations.dashboard_url()
        except DashboardAwayError:
            return ""

    async def _make_status(self) -> str:
        reply = await self._services.status.status()
        nodes = (await self._store_stat.get()).nodes if reply.stores else []
        # A thread is used because with many replicas this would delay the tokens of this event loop.
        return await asyncio.to_thread(lambda: json.dumps(status_json(reply, nodes)))

    async def _make_metrics(self) -> bytes:
        self._scraped.clear()
        await self._services.export(self._exporter)
        return self._scraped.text()

    async def _make_paths(self) -> str:
        shown: list[admin_pb.ReplicaPaths] = []
        num_paths = num_left_out = 0
        async for replica in self._services.status.paths(()):
            if num_paths + len(replica.paths) > MAX_PATHS:
                num_left_out += 1
                continue
            shown.append(replica)
            num_paths += len(replica.paths)
        return await asyncio.to_thread(
            lambda: json.dumps({"replicas": [as_dict(it) for it in shown], "num_left_out": num_left_out})
        )


def _request(gateway_id: str, request: ListedRequest, now: float) -> dict[str, Any]:
    """Return the fields of a request. Times are milliseconds, null while not known; `age_s` counts from the
    request's arrival."""
    return {
        "request_id": request.request_id,
        "gateway_id": gateway_id,
        "state": request.state,
        "reason": request.reason,
        "tenant": request.tenant,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
        "age_s": now - request.started_at,
        "ttft_ms": _span_ms(request.started_at, request.first_token_at),
        "e2e_ms": _span_ms(request.started_at, request.ended_at),
        "attempts": request.num_attempts,
        "prefill": request.prefill,
        "decode": request.decode,
    }


def _span_ms(start: float, end: float) -> float | None:
    return 1e3 * (end - start) if end else None
