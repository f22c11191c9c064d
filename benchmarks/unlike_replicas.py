"""How well replicas of unlike speed share the load, in virtual time, as JSON lines.

Four replicas compute 40,000 tokens a second and four 8,000, one prompt of 2,048 tokens at a time. Requests
arrive at random (Poisson) at 30, 50 and 70 % of what they can do together. The real `RouterService` is beside
the shortest expected time: whoever would be done first, known exactly. Every figure is the mean over the
seeds of the mean time from arrival to first token.

    python -m benchmarks.unlike_replicas [--requests 20000] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Literal

from benchmarks.virtual_replica import (
    NETWORK_S,
    REPORT_S,
    StepNews,
    VirtualReplica,
    VirtualRequest,
    serial_model,
)
from cluster.admission.flow import Flow
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.kv_events import KvSnapshot
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import QueueState, RouteRequest
from router.service import RouterService

SPEEDS_TOK_S = (40_000.0,) * 4 + (8_000.0,) * 4
PROMPT_TOKENS = 2048
BLOCK_TOKENS = 64
LOADS = (0.3, 0.5, 0.7)
Method = Literal["router", "shortest_expected_time"]


class World:
    """One gateway, the replicas, and what is on its way between them."""

    def __init__(self, method: Method, seed: int) -> None:
        self._method = method
        self._random = random.Random(seed)
        self._events = EventQueue()
        self._router = RouterService(RouterConfig(), BLOCK_TOKENS, self._events.clock, seed, salt="g0")
        self._replicas: dict[str, VirtualReplica] = {}
        self._ttfts_s: list[float] = []
        for index, tok_s in enumerate(SPEEDS_TOK_S):
            model = serial_model(tok_s, BLOCK_TOKENS)
            replica = VirtualReplica(f"r{index}", model, self._events, self._on_step, self._replicas)
            self._replicas[f"r{index}"] = replica
            self._router.add_replica(replica.identity, "both")
            self._router.tree.apply_snapshot(KvSnapshot(replica.identity, 0, ()))
            self._events.at(self._random.random() * REPORT_S, lambda it=replica: self._report(it))  # type: ignore[misc]

    def run(self, load: float, num_requests: int) -> float:
        """Return the mean time to the first token."""
        rate_s = load * sum(SPEEDS_TOK_S) / PROMPT_TOKENS
        num_arrived = 0

        def arrive() -> None:
            nonlocal num_arrived
            self._request(num_arrived)
            num_arrived += 1
            if num_arrived < num_requests:
                self._events.after(self._random.expovariate(rate_s), arrive)

        self._events.at(REPORT_S, arrive)
        while len(self._ttfts_s) < num_requests:
            self._events.step()
        return statistics.fmean(self._ttfts_s)

    def _request(self, number: int) -> None:
        now = self._events.clock.now()
        request = VirtualRequest(str(number), Flow("t", "standard"), PROMPT_TOKENS, 1, now)
        if self._method == "shortest_expected_time":
            min(self._replicas.values(), key=_expected_s).submit(request)
            return
        route_request = RouteRequest(request.request_id, RequestFacts("t"), (), PROMPT_TOKENS, 1)
        replica = self._replicas[self._router.route(route_request).compute_id]
        self._events.after(NETWORK_S, lambda: replica.submit(request))

    def _on_step(self, replica: VirtualReplica, state: QueueState, news: StepNews) -> None:
        (request,), ended_at = news.ended, self._events.clock.now()
        if self._method == "shortest_expected_time":
            self._ttfts_s.append(ended_at - request.arrived_at)
            return

        def heard() -> None:
            # The two ways over the network are the same for every choice, and left out.
            self._ttfts_s.append(ended_at - request.arrived_at - NETWORK_S)
            self._router.loads.on_queue(replica.identity, state, self._events.clock.now())
            self._router.on_prefilled(request.request_id)
            self._router.on_finished(request.request_id)

        self._events.after(NETWORK_S, heard)

    def _report(self, replica: VirtualReplica) -> None:
        self._router.loads.on_load(replica.load())
        self._events.after(REPORT_S, lambda: self._report(replica))


def _expected_s(replica: VirtualReplica) -> float:
    """Return when a prompt that is submitted now would be computed."""
    return (replica.queue_state().num_backlog_tokens + PROMPT_TOKENS) * replica.model.token_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    for load in LOADS:
        mean_s = {
            method: statistics.fmean(
                World(method, seed).run(load, arguments.requests) for seed in range(arguments.seeds)
            )
            for method in ("shortest_expected_time", "router")
        }
        line = {
            "what": "unlike_replicas",
            "load": load,
            **{f"{method}_ms": round(1e3 * value, 1) for method, value in mean_s.items()},
            "ratio": round(mean_s["router"] / mean_s["shortest_expected_time"], 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
