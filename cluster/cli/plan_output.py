"""What `tandem plan` prints: a line a figure, the plans beside, and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from cluster.cli.terminal import made_table, out
from cluster.planning.plan import Plan, PlannedPool
from cluster.planning.plan_lines import plan_lines
from cluster.planning.recommended_config import chart_values, cluster_file
from cluster.simulation.plan_check import PlanCheck


class PlanOutput:
    """Shows plans, the best first, each with what a simulation saw of it (None: it was not simulated), for a
    rate (None: what the best one holds), beside an API's price."""

    def __init__(
        self,
        checked: Sequence[tuple[Plan, PlanCheck | None]],
        rate: float | None,
        api_price: float | None,
        utilization: float,
    ) -> None:
        self._plans, self._rate = [plan for plan, _ in checked], rate
        self._checks = [check for _, check in checked]
        self._api_price, self._utilization = api_price, utilization

    def record(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "plans": [
                self._record_of(plan) | {"simulated": None if check is None else check._asdict()}
                for plan, check in zip(self._plans, self._checks, strict=True)
            ]
        }

    def show(self, *, explain: bool) -> None:
        """Print the best plan line by line, and the others beside it."""
        best = self._plans[0]
        columns = ["", "", "", *(["how"] if explain else [])]
        table = made_table(f"plan for {escape(best.model.source)}", *columns)
        group = ""
        for line in self._lines(best):
            shown = "" if line["group"] == group else line["group"]
            group = line["group"]
            cells = [shown, line["name"], line["value"], *([line["formula"]] if explain else [])]
            table.add_row(*map(escape, cells))
        out.print(table)
        if len(self._plans) > 1:
            self._show_others()
        if any(check is not None for check in self._checks):
            self._show_checks()

    def _show_others(self) -> None:
        others = made_table("beside others", "devices", "pools", numbers=["requests/s", "an hour"])
        for plan in self._plans:
            price = "-" if plan.price_per_hour is None else f"{plan.price_per_hour:.2f}"
            others.add_row(plan.devices, _pools_of(plan), f"{plan.rate:.2f}", price)
        out.print(others)

    def _show_checks(self) -> None:
        numbers = ["TTFT, ms", "TPOT, ms", "good"]
        table = made_table("simulated: times of nine of ten requests", "pools", "", numbers=numbers)
        for plan, check in zip(self._plans, self._checks, strict=True):
            if check is None:
                continue
            verdict = "keeps the objectives" if check.is_kept else "misses them"
            times = (f"{1e3 * each:.1f}" for each in (check.ttft_s, check.tpot_s))
            table.add_row(_pools_of(plan), verdict, *times, f"{check.kept:.0%}")
        out.print(table)

    def _lines(self, plan: Plan) -> list[dict[str, str]]:
        rate = self._rate or plan.rate
        lines = plan_lines(plan, rate, self._api_price, utilization=self._utilization, others=self._plans)
        return [line._asdict() for line in lines]

    def _record_of(self, plan: Plan) -> dict[str, Any]:
        return {
            "device": plan.profile.name,
            "devices": plan.devices,
            "num_devices": plan.num_devices,
            "disaggregated": plan.is_disaggregated,
            "refusal": plan.refusal,
            "rate": round(plan.rate, 4),
            "hit_rate": round(plan.load.hit_rate, 4),
            "price_per_hour": plan.price_per_hour,
            "cost_per_million_tokens": plan.cost_per_million(self._utilization * (self._rate or plan.rate)),
            "pools": [_record_of_pool(pool) for pool in plan.pools],
            "tiers": [it._asdict() for it in plan.tiers.tiers] if plan.tiers is not None else [],
            "lines": self._lines(plan),
            "cluster_yaml": "" if plan.refusal else cluster_file(plan),
            "values_yaml": "" if plan.refusal else chart_values(plan),
        }


def _pools_of(plan: Plan) -> str:
    return ", ".join(f"{it.num_replicas} {it.capacity.role} ({it.capacity.split.name})" for it in plan.pools)


def _record_of_pool(pool: PlannedPool) -> dict[str, Any]:
    capacity, served = pool.capacity, pool.served or pool.capacity
    memory = capacity.memory
    return {
        "role": capacity.role,
        "device": pool.profile.name,
        "replicas": pool.num_replicas,
        **capacity.split._asdict(),
        "rate_of_replica": round(capacity.rate, 4),
        "bound": capacity.bound,
        "kv_tokens": memory.kv_tokens,
        "weight_bytes": memory.weights,
        "activation_bytes": memory.activations,
        "staging_bytes": memory.staging,
        "host_bytes": memory.host_bytes,
        "batch": round(capacity.batch, 1),
        "ttft_ms": round(1e3 * served.ttft_s, 2),
        "tpot_ms": round(1e3 * served.tpot_s, 2),
    }
