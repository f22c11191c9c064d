"""A running cluster as its gateways tell of it: twice, some seconds apart, so that what grows now is seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.api.client import Client
from cluster.config import ClusterConfig
from cluster.errors import CallError
from cluster.proto import tandem_pb2 as pb
from cluster.scaling.config import ScalingConfig
from kvtransfer.common.clock import Clock
from kvtransfer.config import TransferConfig

_ANSWER_S = 5.0
_TLS = "tls://"


class GatewayReply(NamedTuple):
    """What one gateway said; `status` None: nothing, see `error`. `skew_s` is its clock's lead over ours,
    give or take half of `round_trip_s`."""

    address: str
    status: pb.StatusResponse | None
    error: str = ""
    skew_s: float = 0.0
    round_trip_s: float = 0.0


class Expected(NamedTuple):
    """What the configuration asks for, or its defaults where no file is given."""

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
    """`before` is the same as `status`, earlier; `stores` and `stores_before` likewise."""

    status: pb.StatusResponse
    before: pb.StatusResponse
    stores: Sequence[pb.StoreNodeStat]
    stores_before: Sequence[pb.StoreNodeStat]
    gateways: Sequence[GatewayReply]
    expected: Expected
    # Of this command.
    version: str = ""
    paths: Sequence[pb.ReplicaPaths] = ()

    def growth(self, count: Callable[[pb.Load], int]) -> dict[str, int]:
        """By replica: how much a counter grew between the two looks; a replica that is new has none."""
        earlier = {(item.replica_id, item.epoch): count(item.load) for item in self.before.replicas}
        return {
            item.replica_id: count(item.load) - earlier[item.replica_id, item.epoch]
            for item in self.status.replicas
            if (item.replica_id, item.epoch) in earlier
        }

    def tiers(self) -> Iterator[tuple[str, pb.StoreTier, pb.StoreTier]]:
        """Host, each tier of its store, and the same tier before."""
        earlier = {
            (node.member.node_id, node.member.epoch, tier.tier): tier
            for node in self.stores_before
            for tier in node.tiers
        }
        for node in self.stores:
            for tier in node.tiers:
                before = earlier.get((node.member.node_id, node.member.epoch, tier.tier), tier)
                yield node.member.host, tier, before

    def of_role(self, *roles: str) -> list[pb.Replica]:
        return [item for item in self.status.replicas if item.role in roles and item.state == "ready"]


async def look(
    address: str,
    interval_s: float,
    expected: Expected,
    version: str,
    clock: Clock,
) -> Live:
    """Ask the gateway at `address`, wait, ask it again, and once the others it names. `CallError` when it
    does not answer."""
    async with Client(address, clock) as client:
        before, stores_before = await _ask(client)
        await clock.sleep(interval_s)
        status, stores = await _ask(client)
        paths = await client.paths()
    scheme = _TLS if address.startswith(_TLS) else ""
    others = [f"{scheme}{item.address}" for item in status.gateways]
    replies = await asyncio.gather(*(_reply(each, clock) for each in others or [address]))
    return Live(status, before, stores, stores_before, replies, expected, version, paths)


async def _ask(client: Client) -> tuple[pb.StatusResponse, list[pb.StoreNodeStat]]:
    status = await client.status()
    return status, list((await client.store_stat()).nodes) if status.stores else []


async def _reply(address: str, clock: Clock) -> GatewayReply:
    try:
        async with Client(address, clock) as client, asyncio.timeout(_ANSWER_S):
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
