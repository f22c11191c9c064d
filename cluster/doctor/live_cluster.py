"""A running cluster as its gateways report it: twice, some seconds apart, to see which counters grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials
from cluster.config import ClusterConfig
from cluster.errors import CallError
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.scaling.config import ScalingConfig
from kvtransfer.common.clock import Clock
from kvtransfer.config import TransferConfig

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
