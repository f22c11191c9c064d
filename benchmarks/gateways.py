"""How well several gateways share the replicas, in virtual time, as JSON lines.

Every gateway is a real `RouterService` with the real feed and frames of placements. 16 replicas of role
"both" compute one prompt of 2,048 tokens at a time at 10,000 tokens a second, and report to all gateways
every 0.2 s, and what waits whenever that changes. Requests come at random (Poisson) at 70 % of what the
replicas can do, each to a gateway drawn at random. A submission, a first token, and a frame of placements
take 1 ms. With `cut`, no frame arrives in the middle fifth of the run; with `none`, never. With
`--admission` what no replica can take waits in its gateway, as in a cluster; without, all is sent at once.
Every figure is the median over the seeds.

    python -m benchmarks.gateways [--requests 50000] [--seeds 5] [--gateways 1,4,8] [--admission]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from typing import NamedTuple

from benchmarks.virtual_replica import (
    NETWORK_S,
    REPORT_S,
    StepNews,
    VirtualReplica,
    VirtualRequest,
    serial_model,
)
from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest, Released
from cluster.gateway.fleet.peer_placements import PeerPlacements
from cluster.gateway.fleet.placement_exchange import BATCH_S
from cluster.gateway.fleet.placement_feed import PlacementFeed
from cluster.gateway.request_state import MOST_RETURNS
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.kv_events import KvEvents, KvSnapshot
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import Decision, QueueState, RouteRequest
from router.service import RouterService

NUM_REPLICAS = 16
UTILISATION = 0.7
BLOCK_TOKENS = 64
PROMPT_TOKENS = 2048
TOK_S = 10_000.0
# With shared prefixes: how many there are, how many blocks each has, and how many blocks a replica keeps.
NUM_PREFIXES = 64
PREFIX_BLOCKS = 16
KEPT_BLOCKS = 1024
# The time after its end in which the cut exchange may still disturb requests.
RECOVERY_S = 5.0


class Outcome(NamedTuple):
    """The outcome of one run: seconds from arrival to first token, of all requests, and of those after the
    cut's end."""

    mean_s: float
    p99_s: float
    mean_after_s: float
    hit_rate: float


class World:
    """Gateways, replicas and what is on its way between them."""

    def __init__(
        self, num_gateways: int, seed: int, *, is_exchanging: bool, has_prefixes: bool, has_admission: bool
    ) -> None:
        self.random = random.Random(seed)
        self.events = EventQueue()
        self.clock = self.events.clock
        self.has_prefixes = has_prefixes
        model = serial_model(TOK_S, BLOCK_TOKENS, KEPT_BLOCKS if has_prefixes else 0)
        self.replicas: dict[str, VirtualReplica] = {}
        for name in (f"r{index:02}" for index in range(NUM_REPLICAS)):
            self.replicas[name] = VirtualReplica(name, model, self.events, self._on_step, self.replicas)
        self.feeds = [PlacementFeed(self.clock) for _ in range(num_gateways)]
        self.routers = [
            RouterService(RouterConfig(), BLOCK_TOKENS, self.clock, seed, salt=f"g{index}", observer=feed)
            for index, feed in enumerate(self.feeds)
        ]
        self.admissions = [
            RequestAdmission(
                AdmissionConfig(),
                router,
                self.clock,
                itertools.count().__next__,
                self.events.at,
            )
            for router in (self.routers if has_admission else [])
        ]
        self.peers = {
            (to, source): PeerPlacements(f"g{source}", self.routers[to], self.clock)
            for to in range(num_gateways)
            for source in range(num_gateways)
            if to != source and is_exchanging
        }
        self.is_cut = True
        self._send_at = [float("inf")] * num_gateways
        for router in self.routers:
            router.set_shared(num_gateways > 1)
        for replica in self.replicas.values():
            for router in self.routers:
                router.add_replica(replica.identity, "both")
                router.tree.apply_snapshot(KvSnapshot(replica.identity, 0, ()))
            self.events.at(self.random.random() * REPORT_S, lambda replica=replica: self._report(replica))  # type: ignore[misc]
        # The gateway of each request on its way.
        self.gateways: dict[str, int] = {}
        self.ttfts_s: list[tuple[float, float]] = []
        self.num_sent_back = 0
        self.connect()

    def run(self, num_requests: int) -> None:
        """Let `num_requests` requests arrive, and end when all have ended."""
        num_arrived = 0

        def arrive() -> None:
            nonlocal num_arrived
            self._request(num_arrived)
            num_arrived += 1
            if num_arrived < num_requests:
                self.events.after(self.random.expovariate(self.rate()), arrive)

        self.events.at(0.0, arrive)
        while len(self.ttfts_s) < num_requests:
            self.events.step()

    def settle(self) -> None:
        """Let the last frames arrive."""
        self.events.run(self.clock.now() + 1.0)

    def rate(self) -> float:
        return NUM_REPLICAS * UTILISATION * TOK_S / PROMPT_TOKENS

    def cut(self) -> None:
        """Let no frame of placements arrive."""
        self.is_cut = True
        for peer in self.peers.values():
            peer.close()
        for feed in self.feeds:
            feed.stop()

    def connect(self) -> None:
        """Send snapshots, and changes from then on."""
        self.is_cut = False
        for source, feed in enumerate(self.feeds):
            if any(pair[1] == source for pair in self.peers):
                for frame in feed.snapshot(self.routers[source].own_placements()):
                    self._send(source, frame)

    def _request(self, number: int) -> None:
        gateway, arrived_at = self.random.randrange(len(self.routers)), self.clock.now()
        keys = tuple(
            (number << 32 | index).to_bytes(16, "big") for index in range(PROMPT_TOKENS // BLOCK_TOKENS)
        )
        if self.has_prefixes:
            prefix = int(NUM_PREFIXES * self.random.random() ** 2)
            shared = tuple(
                (1 << 100 | prefix << 32 | index).to_bytes(16, "big") for index in range(PREFIX_BLOCKS)
            )
            keys = shared + keys[PREFIX_BLOCKS:]
        flow = Flow("t", "standard")
        virtual = VirtualRequest(str(number), flow, PROMPT_TOKENS, 1, arrived_at, keys)
        request = RouteRequest(
            virtual.request_id,
            RequestFacts(flow.tenant),
            keys if self.has_prefixes else (),
            PROMPT_TOKENS,
            1,
        )
        self.gateways[virtual.request_id] = gateway

        def release(decision: Decision) -> None:
            self._submit(virtual, request, decision)

        if not self.admissions:
            release(self.routers[gateway].route(request))
            return
        admission = self.admissions[gateway]

        def report(outcome: object) -> None:
            assert isinstance(outcome, Released), f"none should be refused at this load: {outcome}"
            release(outcome.decision)

        queued = QueuedRequest(virtual.request_id, flow, arrived_at, report=report)
        admission.place(queued, request)
        admission.wait(queued)
        self._flush(gateway)

    def _submit(
        self, virtual: VirtualRequest, request: RouteRequest, decision: Decision, num_returns: int = 0
    ) -> None:
        """Send a request, which a replica with more to do than the decision allows sends back, unless it was
        sent back too often."""
        gateway = self.gateways[virtual.request_id]
        router, compute = self.routers[gateway], self.replicas[decision.compute_id]
        self._flush(gateway)
        most = decision.most_backlog_tokens if num_returns < MOST_RETURNS else None

        state: QueueState

        def sent_back() -> None:
            router.loads.on_queue(compute.identity, state, self.clock.now())
            router.on_finished(request.request_id)
            self._submit(virtual, request, router.route(request), num_returns + 1)

        def submitted() -> None:
            nonlocal state
            state = compute.queue_state()
            if most is not None and state.num_backlog_tokens > most:
                self.num_sent_back += 1
                self.events.after(NETWORK_S, sent_back)
                return
            changes = compute.submit(virtual)
            if changes is not None:
                self.events.after(NETWORK_S, lambda: self._tell(changes))
            self._tell_queue(compute, compute.queue_state())

        self.events.after(NETWORK_S, submitted)

    def _on_step(self, replica: VirtualReplica, state: QueueState, news: StepNews) -> None:
        (virtual,) = news.ended

        def ended() -> None:
            gateway = self.gateways.pop(virtual.request_id)
            self.ttfts_s.append((virtual.arrived_at, self.clock.now() - virtual.arrived_at))
            self.routers[gateway].on_prefilled(virtual.request_id)
            self.routers[gateway].on_finished(virtual.request_id)
            self._flush(gateway)

        self.events.after(NETWORK_S, ended)
        self._tell_queue(replica, state)

    def _tell(self, events: KvEvents) -> None:
        for router in self.routers:
            router.tree.apply_events(events)

    def _tell_queue(self, replica: VirtualReplica, state: QueueState) -> None:
        def heard() -> None:
            for router in self.routers:
                router.loads.on_queue(replica.identity, state, self.clock.now())
            self._pump(replica)

        self.events.after(NETWORK_S, heard)

    def _pump(self, replica: VirtualReplica) -> None:
        """Let what waits for the replica go, where it may."""
        for gateway, admission in enumerate(self.admissions):
            admission.pump(replica.identity.replica_id)
            self._flush(gateway)

    def _report(self, replica: VirtualReplica) -> None:
        load = replica.load()
        for router in self.routers:
            router.loads.on_load(load)
        self._pump(replica)
        self.events.after(REPORT_S, lambda: self._report(replica))

    def _flush(self, gateway: int) -> None:
        """Send the changes when `PlacementExchange` would."""
        feed, now = self.feeds[gateway], self.clock.now()
        if feed.changed.is_set():
            delay_s = 0.0 if feed.urgent.is_set() else BATCH_S
            send_at = now + delay_s
            if send_at < self._send_at[gateway]:
                self._send_at[gateway] = send_at
                self.events.at(send_at, lambda: self._take(gateway, send_at))

    def _take(self, gateway: int, send_at: float) -> None:
        if self._send_at[gateway] == send_at:  # nothing more urgent has come since
            self._send_at[gateway] = float("inf")
            for frame in self.feeds[gateway].take():
                self._send(gateway, frame)

    def _send(self, source: int, frame: bytes) -> None:
        def arrive() -> None:
            for (_, sender), peer in self.peers.items():
                if sender == source and not self.is_cut:
                    peer.on_frame(frame)

        self.events.after(NETWORK_S, arrive)


def run(
    num_gateways: int,
    num_requests: int,
    seed: int,
    *,
    is_exchanging: bool,
    has_prefixes: bool,
    has_cut: bool,
    has_admission: bool = False,
) -> Outcome:
    """Run one world; nothing may be left in any router when all requests have ended."""
    world = World(
        num_gateways,
        seed,
        is_exchanging=is_exchanging,
        has_prefixes=has_prefixes,
        has_admission=has_admission,
    )
    span_s = num_requests / world.rate()
    if has_cut:
        world.events.at(0.4 * span_s, world.cut)
        world.events.at(0.6 * span_s, world.connect)
    world.run(num_requests)
    world.settle()
    for router in world.routers:
        router.check()
        assert router.num_placements == 0
    waits_s = sorted(ttft_s for _, ttft_s in world.ttfts_s)
    after_s = [ttft_s for arrived_at, ttft_s in world.ttfts_s if arrived_at > 0.6 * span_s + RECOVERY_S]
    return Outcome(
        statistics.fmean(waits_s),
        waits_s[len(waits_s) * 99 // 100],
        statistics.fmean(after_s),
        sum(it.num_cached_tokens for it in world.replicas.values()) / (num_requests * PROMPT_TOKENS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gateways", default="1,4,8")
    parser.add_argument("--kinds", default="exchange,none,cut")
    parser.add_argument("--admission", action="store_true")
    arguments = parser.parse_args()
    for has_prefixes in (False, True):
        base: tuple[float, ...] | None = None
        for num_gateways in map(int, arguments.gateways.split(",")):
            for kind in arguments.kinds.split(",") if num_gateways > 1 else ["exchange"]:
                outcomes = [
                    run(
                        num_gateways,
                        arguments.requests,
                        seed,
                        is_exchanging=kind != "none",
                        has_prefixes=has_prefixes,
                        has_cut=kind == "cut",
                        has_admission=arguments.admission,
                    )
                    for seed in range(arguments.seeds)
                ]
                median = Outcome(*(statistics.median(values) for values in zip(*outcomes, strict=True)))
                base = base or median
                line = {
                    "what": "gateways",
                    "gateways": num_gateways,
                    "exchange": kind,
                    "admission": arguments.admission,
                    "shared_prefixes": has_prefixes,
                    "requests": arguments.requests,
                    "mean_ms": round(1e3 * median.mean_s, 1),
                    "p99_ms": round(1e3 * median.p99_s, 1),
                    "mean_after_cut_ms": round(1e3 * median.mean_after_s, 1),
                    "token_hit_rate": round(median.hit_rate, 3),
                    "mean_ratio": round(median.mean_s / base[0], 3),
                    "p99_ratio": round(median.p99_s / base[1], 3),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
