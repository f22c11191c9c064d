"""Checks and their results: what was seen, why it matters, what to do; and what a check is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials
from cluster.config import ClusterConfig
from cluster.errors import CallError
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.scaling.config import ScalingConfig
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import ClusterNeed
from kvtransfer.common.clock import Clock
from kvtransfer.config import TransferConfig

Figure = int | float | str | bool
Figures = dict[str, Figure]


class Severity(StrEnum):
    """Rates a result. `NOTE`: good to know; `WARNING`: works, but slower or less safely; `ERROR`: does not
    work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Represents one result: `seen` has the numbers in words, `figures` for programs, with units in the
    names."""

    severity: Severity
    seen: str
    why: str = ""
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """Represents a result with the name and the group of its check."""

    check: str
    group: str
    result: CheckResult

    @property
    def severity(self) -> Severity:
        return self.result.severity


def ok(seen: str, /, **figures: Figure) -> CheckResult:
    """Return the result of something that works."""
    return CheckResult(Severity.OK, seen, figures=figures)


def note(seen: str, why: str = "", remedy: str = "", /, **figures: Figure) -> CheckResult:
    """Return a result that is good to know."""
    return CheckResult(Severity.NOTE, seen, why, remedy, figures)


def warning(seen: str, why: str, remedy: str, /, **figures: Figure) -> CheckResult:
    """Return the result of something that works, but slower or less safely."""
    return CheckResult(Severity.WARNING, seen, why, remedy, figures)


def error(seen: str, why: str, remedy: str, /, **figures: Figure) -> CheckResult:
    """Return the result of something that does not work."""
    return CheckResult(Severity.ERROR, seen, why, remedy, figures)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort the findings, the worst first; equal ones keep their order."""
    return sorted(findings, key=lambda finding: -finding.severity.rank)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 when something does not work, else 0."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return a JSON object with stable keys: `ok`, `counts` by severity, and `findings`, worst first, each
    with `check`, `group`, `severity`, `seen`, `why`, `remedy` and `figures`."""
    ordered = worst_first(findings)
    counts = {str(severity): 0 for severity in Severity}
    for finding in ordered:
        counts[finding.severity] += 1
    listed = [{"check": item.check, "group": item.group, **asdict(item.result)} for item in ordered]
    return {"ok": not exit_status(ordered), "counts": counts, "findings": listed}


# ----------------------------------------------------------------------------------------------
# What a check of this machine is given, and what makes a function a check.

C = TypeVar("C")


@dataclass(frozen=True)
class CheckContext:
    """Represents this machine, and the configuration that is to run on it."""

    machine: Machine
    config: ClusterConfig
    # None: the model folder cannot be read.
    needs: ClusterNeed | None
    environment: Mapping[str, str]
    clock: Clock
    # local, auto or host:port.
    ray_address: str = "local"
    # The cluster of this configuration runs already, and takes its ports and its memory.
    is_running: bool = False


class Check(NamedTuple, Generic[C]):
    """Represents one check; `look` yields nothing where the question does not arise."""

    name: str
    group: str
    # The subject of the check, for the documentation.
    question: str
    look: Callable[[C], Iterable[CheckResult]]

    def findings(self, context: C) -> list[Finding]:
        return [Finding(self.name, self.group, result) for result in self.look(context)]


# ----------------------------------------------------------------------------------------------
# A running cluster as its gateways report it: twice, some seconds apart, to see which counters grow.

_ANSWER_S = 5.0
_TLS = "tls://"


class GatewayReply(NamedTuple):
    """Represents the answer of one gateway; `status` None: none, see `error`. `skew_s` is its clock's lead
    over ours, give or take half of `round_trip_s`."""

    address: str
    status: admin_pb.StatusResponse | None
    error: str = ""
    skew_s: float = 0.0
    round_trip_s: float = 0.0


class Expected(NamedTuple):
    """Represents the targets of the configuration, or its defaults where no file is given."""

    ttft_slo_s: float
    itl_slo_s: float
    min_gb_s: float
    growth_reserve: float

    @staticmethod
    def of(config: ClusterConfig | None) -> Expected:
        scaling = config.scaling if config else ScalingConfig()
        transfer = config.transfer if config else TransferConfig()
        return Expected(scaling.ttft_slo_s, scaling.itl_slo_s, transfer.min_gb_s, transfer.growth_reserve)


@dataclass(frozen=True)
class Live:
    """Represents a running cluster: `before` is an earlier `status`, as `stores_before` are of `stores`."""

    status: admin_pb.StatusResponse
    before: admin_pb.StatusResponse
    stores: Sequence[admin_pb.StoreNodeStat]
    stores_before: Sequence[admin_pb.StoreNodeStat]
    gateways: Sequence[GatewayReply]
    expected: Expected
    # The version of this command.
    version: str = ""
    paths: Sequence[admin_pb.ReplicaPaths] = ()

    def growth(self, count: Callable[[admin_pb.Load], int]) -> dict[str, int]:
        """Return by replica how much a counter grew between the two looks, where it did; new replicas are
        left out."""
        earlier = {(item.replica_id, item.epoch): count(item.load) for item in self.before.replicas}
        grown = {
            item.replica_id: count(item.load) - earlier.get((item.replica_id, item.epoch), count(item.load))
            for item in self.status.replicas
        }
        return {name: growth for name, growth in grown.items() if growth}

    def tiers(self) -> Iterator[tuple[str, admin_pb.StoreTier, admin_pb.StoreTier]]:
        """Yield host, each tier of its store, and the same tier before."""
        earlier = {
            (node.member.node_id, node.member.epoch, tier.tier): tier
            for node in self.stores_before
            for tier in node.tiers
        }
        for node in self.stores:
            for tier in node.tiers:
                before = earlier.get((node.member.node_id, node.member.epoch, tier.tier), tier)
                yield node.member.host, tier, before

    def of_role(self, *roles: str) -> list[admin_pb.Replica]:
        wanted = {value_of(admin_pb.ReplicaRole, role) for role in roles}
        return [
            item
            for item in self.status.replicas
            if item.role in wanted and item.state == admin_pb.REPLICA_STATE_READY
        ]


async def look(
    address: str,
    interval_s: float,
    expected: Expected,
    version: str,
    clock: Clock,
    who: ClientCredentials | None = None,
) -> Live:
    """Query the gateway at `address`, its port for operators, twice, `interval_s` apart, and once the others
    that it names, as `who`. `CallError` when it does not answer."""
    async with AdminClient(address, clock, credentials=who) as client:
        before, stores_before = await _ask(client)
        await clock.sleep(interval_s)
        status, stores = await _ask(client)
        paths = await client.paths()
    scheme = _TLS if address.startswith(_TLS) else ""
    others = [f"{scheme}{item.admin}" for item in status.gateways if item.admin]
    replies = await asyncio.gather(*(_reply(each, clock, who) for each in others or [address]))
    return Live(status, before, stores, stores_before, replies, expected, version, paths)


async def _ask(client: AdminClient) -> tuple[admin_pb.StatusResponse, list[admin_pb.StoreNodeStat]]:
    status = await client.status()
    return status, list((await client.store_stat()).nodes) if status.stores else []


async def _reply(address: str, clock: Clock, who: ClientCredentials | None) -> GatewayReply:
    try:
        async with AdminClient(address, clock, credentials=who) as client, asyncio.timeout(_ANSWER_S):
            await client.status()  # opens the connection, which is not to be measured
            asked_at, wall = clock.now(), clock.wall()
            status = await client.status()
            round_trip_s = clock.now() - asked_at
    except CallError as problem:
        return GatewayReply(address, None, str(problem))
    except TimeoutError:
        return GatewayReply(address, None, f"no answer within {_ANSWER_S:g} s")
    skew_s = status.wall_time_s - (wall + round_trip_s / 2) if status.wall_time_s else 0.0
    return GatewayReply(address, status, "", skew_s, round_trip_s)
