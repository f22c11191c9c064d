"""What the tests of scaling are made of: histories for the policy, a reconciler between
Serve and the roster as plain values, and Ray Serve's scale API without Ray: its states and refusals, over
real HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from cluster.metrics.demand import Demand
from cluster.roster.desired_state import DesiredState
from cluster.roster.messages import RosterView, ScalingChange
from cluster.scaling.config import PoolLimits, ScalingConfig
from cluster.scaling.forecast import Moments
from cluster.scaling.measured_rates import MeasuredRates, RequestSizes, StepCost
from cluster.scaling.policy import ScalingPlan, decide, history_span_s
from cluster.scaling.reconciler import Action, Reconciler, RestoreRoles, SetTarget
from cluster.scaling.samples import History, PoolView, ReplicaSample, ScalingSample
from cluster.scaling.serve_client import AppTargets, PoolTarget

PREFILL_TOK_S = 8000.0
# What replicas were measured to do, and requests of one size.
RATES = MeasuredRates(
    prefill_tok_s=PREFILL_TOK_S,
    step=StepCost(0.012, 0.0004),
    batch=64,
    kv_blocks=1000.0,
    blocks_per_sequence=10.0,
)
SIZES = RequestSizes(Moments(2000.0, 0.0), Moments(200.0, 0.0), 1.0)
STEP_S = 0.02
TOTAL_BLOCKS = 1000


def config(most: int = 16, **settings: Any) -> ScalingConfig:
    """Return a configuration with both pools from 1 to `most`, looked at every 2 s."""
    limits = {"min": 1, "max": most}
    defaults: dict[str, Any] = {
        "autoscale": True,
        "pools": {"prefill": limits, "decode": limits, "both": limits},
        "ttft_slo_s": 2.0,
        "itl_slo_s": 0.05,
        "down_cool_down_s": 120.0,
        "target_load": 0.75,
    }
    return ScalingConfig.model_validate(defaults | settings)


def pool(role: str, desired: int = 1, **fields: Any) -> PoolView:
    """Return a pool named like its role, with limits 1 to 16."""
    view = PoolView(role, role, desired, max_sequences=64, block_tokens=64, limits=PoolLimits(min=1, max=16))
    return view._replace(**fields)


def prefilling(number: int = 0, **load: Any) -> ReplicaSample:
    """Return a prefill replica at rest, whose rate is known."""
    replica = ReplicaSample(
        replica_id=f"prefill-{number}",
        pool="prefill",
        role="prefill",
        num_free_blocks=TOTAL_BLOCKS,
        num_total_blocks=TOTAL_BLOCKS,
        prefill_tok_s=PREFILL_TOK_S,
    )
    return msgspec.structs.replace(replica, **load)


def decoding(number: int = 0, **load: Any) -> ReplicaSample:
    """Return a decode replica at rest, whose step time is known."""
    replica = ReplicaSample(
        replica_id=f"decode-{number}",
        pool="decode",
        role="decode",
        num_free_blocks=TOTAL_BLOCKS,
        num_total_blocks=TOTAL_BLOCKS,
        decode_step_s=STEP_S,
    )
    return msgspec.structs.replace(replica, **load)


def demand(arrived: int, prompt_tokens: int = 2000, output_tokens: int = 200) -> Demand:
    """Return a demand in which `arrived` requests of one size came, and as many ended, all in time."""
    return Demand(
        num_arrived=arrived,
        num_sequences=arrived,
        num_prompts=arrived,
        num_computed_tokens=arrived * prompt_tokens,
        computed_tokens_squared=float(arrived * prompt_tokens**2),
        num_ended=arrived,
        num_output_tokens=arrived * output_tokens,
        output_tokens_squared=float(arrived * output_tokens**2),
        num_first_tokens=arrived,
        num_gaps=arrived * (output_tokens - 1),
    )


def history_of(
    settings: ScalingConfig,
    sample_of: Callable[[float], tuple[Sequence[ReplicaSample], Demand]],
    seconds: float = 400.0,
    desired: dict[str, int] | None = None,
) -> History:
    """Return a sample every `interval_s` from time 0 to `seconds`; `desired` is what was asked for all the
    time."""
    history = History(history_span_s(settings))
    for index in range(int(seconds / settings.interval_s) + 1):
        at = index * settings.interval_s
        replicas, asked = sample_of(at)
        counts: dict[str, int] = desired or {}
        if desired is None:
            for replica in replicas:
                counts[replica.pool] = counts.get(replica.pool, 0) + 1
        history.add(ScalingSample(at, counts, tuple(replicas), asked))
    return history


# ------------------------------------------------------------------------------------ single decisions

NOW = 400.0
NOTHING = Demand()
# 20 requests/s of 2000 tokens, with one token of output: nothing to decode.
PROMPTS = demand(40, output_tokens=1)
BUSY = {"num_running": 40, "num_free_blocks": 600}


def decided(
    replicas: Sequence[ReplicaSample] | Callable[[float], Sequence[ReplicaSample]],
    pools: Sequence[PoolView],
    asked: Demand = NOTHING,
    settings: ScalingConfig | None = None,
    now: float = NOW,
) -> ScalingPlan:
    """Return the plan after 400 s in which the replicas looked like this and `asked` came every 2 s."""
    settings = settings or config()
    desired = {view.name: view.desired for view in pools}
    history = history_of(
        settings, lambda at: (replicas(at) if callable(replicas) else replicas, asked), desired=desired
    )
    plan = decide(history, settings, pools, now)
    assert decide(history, settings, pools, now) == plan  # the same again: it keeps nothing
    return plan


def counts(plan: ScalingPlan) -> dict[str, tuple[int, int]]:
    return {move.pool: (move.before, move.after) for move in plan.moves}


PAIR = (pool("prefill"), pool("decode"))
RESTING = (prefilling(), decoding(num_running=1))


def queueing(backlog: int, **load: Any) -> ReplicaSample:
    return prefilling(num_running=1, num_waiting=8, num_backlog_tokens=backlog, **load)


NOBODY: frozenset[str] = frozenset()


class ReconcilerHarness:
    """Serve, the roster and a reconciler, as plain values: `look` carries out the actions."""

    def __init__(self, counts: dict[str, int], autoscaled: frozenset[str] = NOBODY) -> None:
        self.configured = dict(counts)
        self.targets = dict(counts)
        self.declared: dict[str, int] = {}
        self.mark = "m0"
        self.status = "RUNNING"
        self.autoscaled = autoscaled
        self.version = 0
        self.state = DesiredState(0)
        self.reconciler = Reconciler()
        self.now = 100.0
        self.serve_works = True
        self.is_there = True
        self.recorded: list[tuple[str, int, int, str]] = []
        self.orders: list[tuple[str, int]] = []
        self.num_restored = 0

    def view(self) -> RosterView:
        self.version += 1
        return self.state.fill(RosterView(version=self.version))

    def seen(self) -> AppTargets | None:
        if not self.is_there:
            return None
        pools = {
            pool: PoolTarget(target, self.configured[pool], declared=self.declared.get(pool))
            for pool, target in self.targets.items()
        }
        return AppTargets(self.status, self.mark, True, pools)

    def look(self, after_s: float = 2.0) -> None:
        self.now += after_s
        self.carry_out(self.reconciler.look(self.seen(), self.view(), self.autoscaled, self.now, self.now))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RestoreRoles():
                    self.num_restored += 1
                case SetTarget(pool, count):
                    self.pull(action, pool, count)
                case _:
                    self.state.change(action)
                    if isinstance(action, ScalingChange):
                        self.recorded.append((action.pool, action.before, action.after, action.by))

    def pull(self, action: SetTarget, pool: str, count: int) -> None:
        self.orders.append((pool, count))
        if not self.serve_works:
            self.reconciler.failed(action, self.now)
            return
        self.targets[pool] = count
        self.state.change(self.reconciler.pulled(action))

    def autoscale(self, pool: str, count: int) -> None:
        """As the scaler does: only after a look that found nothing to do."""
        before = self.state.fill(RosterView(version=0)).desired.get(pool, self.targets[pool])
        move = ScalingChange(self.now, pool, before, count, "autoscaler", "more load")
        self.carry_out(self.reconciler.order(move))

    def deploy(self, mark: str, counts: dict[str, int]) -> None:
        self.mark, self.configured, self.targets = mark, dict(counts), dict(counts)

    @property
    def desired(self) -> dict[str, int]:
        return self.state.fill(RosterView(version=0)).desired

    @property
    def pinned(self) -> tuple[str, ...]:
        return self.state.fill(RosterView(version=0)).pinned


TOKEN = "the-token"


@dataclass
class FakePool:
    """One deployment: its target, and what the last deploy set it to."""

    target: int
    configured: int
    states: list[str] = field(default_factory=list)


@dataclass
class FakeApp:
    """One application, as `serve.run` makes it with `external_scaler_enabled`."""

    pools: dict[str, FakePool]
    mark: str = "m1"
    status: str = "RUNNING"
    source: str = "imperative"
    deployed_at: float = 1.5
    is_scalable: bool = True

    def deploy(self, mark: str, counts: dict[str, int]) -> None:
        """Serve sets every target to the configured count."""
        self.mark = mark
        self.pools = {pool: FakePool(count, count) for pool, count in counts.items()}


class FakeDashboard:
    """Listens on a free loopback port while entered; `url` is its address."""

    def __init__(self, app: FakeApp | None, name: str = "tandem") -> None:
        self.app = app
        self.name = name
        # The number of the next requests that are answered with 503.
        self.failing = 0
        # The status and text of every answer to an order, in place of obedience.
        self.refusal: tuple[int, str] | None = None
        # Orders for this pool are answered with 503.
        self.refused_pool = ""
        self.orders: list[tuple[str, int]] = []
        # Other paths that it answers.
        self.bodies: dict[str, bytes] = {}
        self.url = ""
        self._server = web.Application(middlewares=[self._guard])
        self._server.add_routes(
            [
                web.get("/api/serve/applications/", self._applications),
                web.post("/api/v1/applications/{app}/deployments/{deployment}/scale", self._scale),
                web.get("/{tail:.*}", self._other),
            ]
        )
        self._runner = web.AppRunner(self._server, access_log=None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if not given:
            return web.Response(status=401, text="Unauthorized: Missing authentication token")
        if given != f"Bearer {TOKEN}":
            return web.Response(status=403, text="Forbidden: Invalid authentication token")
        if self.failing:
            self.failing -= 1
            return web.json_response({"error": "Serve controller is not available"}, status=503)
        response: web.StreamResponse = await handler(request)
        return response

    async def _applications(self, request: web.Request) -> web.Response:
        shown = {} if self.app is None else {self.name: _shown(self.app)}
        return web.json_response({"applications": shown, "proxies": {}, "target_capacity": None})

    async def _scale(self, request: web.Request) -> web.Response:
        if self.refusal is not None:
            return web.json_response({"error": self.refusal[1]}, status=self.refusal[0])
        count = (await request.json())["target_num_replicas"]
        pool = request.match_info["deployment"].removeprefix("Pool-")
        if pool == self.refused_pool:
            return web.json_response({"error": "Serve controller is not available"}, status=503)
        if self.app is None or request.match_info["app"] != self.name or pool not in self.app.pools:
            return web.json_response({"error": "Application or Deployment not found"}, status=404)
        if not self.app.is_scalable:
            return web.json_response({"error": "external_scaler_enabled=false"}, status=412)
        self.app.pools[pool].target = count
        self.orders.append((pool, count))
        return web.json_response({"message": "Scaling request received."})

    async def _other(self, request: web.Request) -> web.Response:
        body = self.bodies.get(request.path)
        return web.Response(status=200 if body else 404, body=body or b"", content_type="application/json")


def _shown(app: FakeApp) -> dict[str, Any]:
    gateway = _deployment(1, 1, ["RUNNING"], {"deploy_mark": app.mark} if app.mark else None)
    pools = {
        f"Pool-{name}": _deployment(pool.target, pool.configured, pool.states, None)
        for name, pool in app.pools.items()
    }
    return {
        "name": "tandem",
        "status": app.status,
        "last_deployed_time_s": app.deployed_at,
        "source": app.source,
        "external_scaler_enabled": app.is_scalable,
        "deployments": {"Gateway": gateway, **pools},
    }


def _deployment(target: int, configured: int, states: list[str], user_config: Any) -> dict[str, Any]:
    return {
        "status": "HEALTHY",
        "target_num_replicas": target,
        "deployment_config": {"num_replicas": configured, "user_config": user_config, "name": "x"},
        "replicas": [{"state": state, "replica_id": str(number)} for number, state in enumerate(states)],
    }
