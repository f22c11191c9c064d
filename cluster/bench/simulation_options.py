"""The options of `tandem simulate` for the load and for the replicas, and what they describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from cluster.bench.conversations import read_conversations
from cluster.bench.live_engines import LiveCluster
from cluster.bench.simulated_trace import FileTrace, RecordedRequests
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile, device_profile, read_profile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import planned_model
from cluster.simulation.batch_gate import Batching
from cluster.simulation.planned_engine import planned_engine
from cluster.simulation.simulated_cluster import ClusterShape
from cluster.simulation.simulated_load import (
    DrawnLengths,
    SimulatedSession,
    conversation_sessions,
    drawn_sessions,
    prefill_token_s,
    trace_sessions,
)
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel
from cluster.simulation.store_shape import parse_store
from cluster.simulation.trace_requests import TraceRequests
from router.config import RouterConfig

FORMATS = ("mooncake", "sharegpt", "synthetic")
BATCHING: tuple[str, ...] = get_args(Batching)
# Of drawn requests and of conversations, where no number is given.
_DEFAULT_REQUESTS = 1000
_MAX_SEQUENCES = 256
# The longest mean that is drawn: lengths are up to ten times as long.
_MOST_TOKENS = 1_000_000
# Without a model: what a decode step takes, on a device of no kind, and the blocks of its KV.
_STEP_S, _SEQUENCE_S, _CONTEXT_S = 0.008, 1e-5, 4e-8
_DEFAULT_BLOCKS = 6000
_DEFAULT_UTILIZATION = 0.75


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `BadParameter` for a value that is not known."""
    if value not in known:
        raise typer.BadParameter(f"{value} is none of {', '.join(known)}", param_hint=name)


def check_absent(option_to_given: Mapping[str, bool]) -> None:
    """Raise `BadParameter` for the first option that is given although no pool is scaled."""
    for option, is_given in option_to_given.items():
        if is_given:
            raise typer.BadParameter("is for --autoscale; name the pools there", param_hint=option)


@dataclass(frozen=True, kw_only=True)
class SimulatedLoadOptions:
    """The requests of a simulation."""

    trace: Annotated[
        Path | None, typer.Option(help="Requests: a trace, or conversations; none for synthetic ones.")
    ] = None
    format: Annotated[str, typer.Option(help=f"Of --trace: {', '.join(FORMATS)}.")] = "mooncake"
    requests: Annotated[int | None, typer.Option(min=1, help="The most requests or conversations.")] = None
    rate: Annotated[
        float, typer.Option(min=1e-6, max=1e6, help="Arrivals a second; a trace has its own times.")
    ] = 1.0
    time_scale: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Stretches the times of a trace.")] = (
        1.0
    )
    input: Annotated[int, typer.Option(min=1, max=_MOST_TOKENS, help="Mean tokens of synthetic prompts.")] = (
        1024
    )
    output: Annotated[
        int, typer.Option(min=1, max=_MOST_TOKENS, help="Mean tokens of synthetic answers.")
    ] = 256
    most_output: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of an answer; 1: prompts alone.")
    ] = None
    shared_prefix: Annotated[
        int, typer.Option(min=0, max=_MOST_TOKENS, help="Tokens with which all synthetic prompts begin.")
    ] = 0
    think_s: Annotated[float, typer.Option(min=0, max=1e6, help="Mean pause between turns.")] = 0.0
    source: Annotated[
        str,
        typer.Option("--from", help="Admin address of a running cluster whose latest requests come again."),
    ] = ""
    last: Annotated[str, typer.Option(help="With --from: that arrived in this time.")] = "10m"
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0

    def check(self) -> None:
        """Raise `BadParameter` where the sources of requests do not go together."""
        check_choice("--format", self.format, FORMATS)
        if self.source and self.trace is not None:
            raise typer.BadParameter(
                "has its requests from a cluster: leave out --trace", param_hint="--from"
            )
        if not self.source and (self.trace is None) != (self.format == "synthetic"):
            raise typer.BadParameter("give a file, --from, or --format synthetic", param_hint="--trace")

    def of(self, live: LiveCluster) -> LiveLoadOptions:
        """Return the load of a running cluster's requests."""
        return LiveLoadOptions(live=live, **{it.name: getattr(self, it.name) for it in fields(self)})

    @cached_property
    def recorded(self) -> TraceRequests | None:
        """The trace, where the load is one. Raises `BenchError` for a file that is none."""
        if self.trace is None or self.format != "mooncake":
            return None
        return FileTrace(self.trace, self.requests, self.time_scale)

    @property
    def span_s(self) -> float:
        """About how long requests arrive."""
        if self.recorded is not None:
            return max(1.0, *(request.at_s for request in self.recorded))
        return (self.requests or _DEFAULT_REQUESTS) / self.rate

    def sessions(self) -> Iterator[SimulatedSession]:
        """Yield the sessions, the same each time."""
        for session in self._sessions():
            yield session if self.most_output is None else session.cut(self.most_output)

    def _sessions(self) -> Iterator[SimulatedSession]:
        if self.recorded is not None:
            return trace_sessions(self.recorded)
        num_requests = self.requests or _DEFAULT_REQUESTS
        if self.trace is not None:
            told = (
                [("\n".join(turn.content for turn in it.asked), it.answer) for it in conversation]
                for conversation in islice(read_conversations(self.trace), num_requests)
            )
            return conversation_sessions(told, self.rate, self.seed, self.think_s)
        lengths = DrawnLengths(self.input, self.output)
        return drawn_sessions(lengths, self.rate, num_requests, self.seed, shared_tokens=self.shared_prefix)


@dataclass(frozen=True, kw_only=True)
class LiveLoadOptions(SimulatedLoadOptions):
    """The requests that a running cluster has recorded."""

    live: LiveCluster

    @cached_property
    def recorded(self) -> TraceRequests | None:
        return RecordedRequests(self.live.trace.requests[: self.requests])


@dataclass(frozen=True, kw_only=True)
class SimulatedReplicaOptions:
    """The engine of every replica. Without a model, prompts are computed at a constant rate."""

    prefill: Annotated[
        int | None,
        typer.Option(min=0, max=10_000, help="Replicas that compute prompts; default: 1, or as --from has."),
    ] = None
    decode: Annotated[
        int | None,
        typer.Option(min=0, max=10_000, help="Replicas that decode; default: 1, or as --from has."),
    ] = None
    colocated: Annotated[
        bool, typer.Option("--colocated", help="All replicas have both roles: prefill + decode of them.")
    ] = False
    model: Annotated[str, typer.Option(help="As of `tandem plan`; with --hardware.")] = ""
    hardware: Annotated[
        str, typer.Option(help="A device of `tandem plan --gpu`, or a JSON file that describes one.")
    ] = ""
    tp: Annotated[int, typer.Option(min=1, help="Devices of a replica that share each layer.")] = 1
    pp: Annotated[int, typer.Option(min=1, help="Stages of a replica.")] = 1
    kv_blocks: Annotated[int | None, typer.Option(min=2, max=100_000_000, help="KV blocks of a replica.")] = (
        None
    )
    block_tokens: Annotated[int | None, typer.Option(min=16, max=_MOST_TOKENS, help="Tokens of a block.")] = (
        None
    )
    store: Annotated[
        str, typer.Option(help="The store of each node, as dram=64,nvme=500: sizes in GB; rates in GB/s.")
    ] = ""
    replicas_per_node: Annotated[int, typer.Option(min=1, help="Replicas that share a store.")] = 8
    utilization: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=10, help="Without a model: how busy prompts without a cache keep the replicas."
        ),
    ] = None
    tpot_objective_ms: Annotated[
        float | None,
        typer.Option(
            min=1e-3, max=1e6, help="`engine.tpot_objective_s`: chunks of prompts leave sequences this time."
        ),
    ] = None
    batching: Annotated[
        str, typer.Option(help=f"{', '.join(BATCHING)}: the first two are baselines that exist only here.")
    ] = "continuous"
    price_per_hour: Annotated[float | None, typer.Option(min=1e-9, max=1e6, help="Of a device.")] = None

    @property
    def roles(self) -> list[str]:
        """The role of each replica. Raises `ConfigError` where none decodes."""
        num_prefill = 1 if self.prefill is None else self.prefill
        num_decode = 1 if self.decode is None else self.decode
        if self.colocated or not num_prefill:
            roles = ["both"] * (num_prefill + num_decode)
        else:
            roles = ["prefill"] * num_prefill + ["decode"] * num_decode
        if not roles or set(roles) == {"prefill"}:
            raise ConfigError("--decode: no replica decodes; give one, or --colocated")
        return roles

    def as_in(self, live: LiveCluster) -> SimulatedReplicaOptions:
        """Return the options with the counts of a running cluster where none are given."""
        num_both = len(live.replicas.get("both", ()))
        num_prefill, num_decode = (len(live.replicas.get(role, ())) for role in ("prefill", "decode"))
        is_colocated = self.colocated or (num_both > 0 and self.prefill is None)
        return replace(
            self,
            prefill=(0 if is_colocated else num_prefill) if self.prefill is None else self.prefill,
            decode=(num_both if is_colocated else num_decode) if self.decode is None else self.decode,
            colocated=is_colocated,
        )

    @property
    def price_per_s(self) -> float | None:
        """The price of all devices a second; None without the price of one."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * len(self.roles) * self.tp * self.pp / 3600

    def check(self) -> None:
        """Raise `BadParameter` for a batching that there is not."""
        check_choice("--batching", self.batching, BATCHING)

    def shape(self, load: SimulatedLoadOptions, *, policy: str, **others: Any) -> ClusterShape:
        """Return the cluster, whose replicas serve this load by this policy; `others` are of the shape."""
        router = RouterConfig.model_validate({"policy": policy})
        if isinstance(load, LiveLoadOptions) and not self.model:
            engines = {role: self._changed(load.live.engine(role)) for role in set(self.roles)}
        else:
            engine = self._changed(self._engine(load))
            engines = dict.fromkeys(self.roles, engine)
        return ClusterShape(
            [(role, engines[role]) for role in self.roles],
            router=router,
            store=parse_store(self.store, self.tp * self.pp, self.replicas_per_node),
            **others,
        )

    def _engine(self, load: SimulatedLoadOptions) -> SimulatedEngine:
        """Return the engine of every replica. Raises `ConfigError` where the options do not go together, or
        the model does not fit the device."""
        if self.model:
            if self.utilization is not None:
                raise ConfigError("--utilization: is for replicas without --model, whose speed it decides")
            model, split = planned_model(self.model, "auto", "auto"), DeviceSplit(self.tp, self.pp)
            engine = planned_engine(model, self._profile(), split, _MAX_SEQUENCES)
        elif self.hardware:
            raise ConfigError("--model: name the model that runs on --hardware")
        else:
            steps = StepModel(_STEP_S, _SEQUENCE_S, _CONTEXT_S, self._token_s(load))
            engine = SimulatedEngine(steps, _DEFAULT_BLOCKS)
        return engine

    def _changed(self, engine: SimulatedEngine) -> SimulatedEngine:
        """Return the engine with the sizes that are given."""
        if self.block_tokens is not None:
            num_blocks = max(2, engine.num_blocks * engine.block_tokens // self.block_tokens)
            engine = engine._replace(block_tokens=self.block_tokens, num_blocks=num_blocks)
        if self.kv_blocks is not None:
            engine = engine._replace(num_blocks=self.kv_blocks)
        if self.tpot_objective_ms is not None:
            engine = engine._replace(tpot_objective_s=self.tpot_objective_ms / 1e3)
        return engine._replace(batching=cast(Batching, self.batching))

    def _token_s(self, load: SimulatedLoadOptions) -> float:
        num_computing = sum(role != "decode" for role in self.roles)
        utilization = self.utilization or _DEFAULT_UTILIZATION
        if load.recorded is not None:
            return prefill_token_s(load.recorded, num_computing, utilization)
        return utilization * num_computing / (load.rate * load.input)

    def _profile(self) -> DeviceProfile:
        if not self.hardware:
            raise ConfigError("--hardware: name the device on which --model runs, as H100")
        if self.hardware.endswith(".json"):
            return read_profile(Path(self.hardware))
        return device_profile(self.hardware)
