"""How well replicas of unlike speed share the load, in virtual time, as JSON lines.

Four replicas compute 40,000 tokens a second and four 8,000, one prompt of 2,048 tokens at a time. Requests
arrive at random (Poisson) at 30, 50 and 70 % of what they can do together. The real `RouterService` is beside
the shortest expected time: whoever would be done first, known exactly. Every figure is the mean over the
seeds of the mean time from arrival to first token.

    python -m benchmarks.unlike_replicas [--requests 20000] [--seeds 5]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Callable
from typing import Literal

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import KvSnapshot, ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import QueueState, ReplicaLoad, RouteRequest
from router.service import RouterService

SPEEDS_TOK_S = (40_000.0,) * 4 + (8_000.0,) * 4
PROMPT_TOKENS = 2048
REPORT_S = 0.2
NETWORK_S = 0.001
LOADS = (0.3, 0.5, 0.7)
Method = Literal["router", "shortest_expected_time"]


class Replica:
    """A replica without an engine: a queue at a constant rate."""

    def __init__(self, index: int, tok_s: float) -> None:
        self.identity = ReplicaIdentity(f"r{index}", 1)
        self.tok_s = tok_s
        self.free_at_s = 0.0
        self.ends_s: list[float] = []

    def backlog_tokens(self, now: float) -> int:
        while self.ends_s and self.ends_s[0] <= now:
            self.ends_s.pop(0)
        return int(max(0.0, self.free_at_s - now) * self.tok_s)

    def load(self, now: float) -> ReplicaLoad:
        backlog_tokens = self.backlog_tokens(now)
        return ReplicaLoad(
            identity=self.identity,
            received_at=now,
            num_running=0,
            num_waiting=len(self.ends_s),
            num_landings=0,
            num_backlog_tokens=backlog_tokens,
            num_free_blocks=1_000_000,
            num_total_blocks=1_000_000,
            prefill_tok_s=self.tok_s,
            decode_step_s=0.03,
            transfer_tok_s=200_000.0,
        )

    def queue_state(self, now: float) -> QueueState:
        backlog_tokens = self.backlog_tokens(now)
        return QueueState(0, len(self.ends_s), 0, backlog_tokens, 1_000_000)

    def serve(self, now: float) -> float:
        """Queue a prompt; returns when its first token comes."""
        self.free_at_s = max(self.free_at_s, now) + PROMPT_TOKENS / self.tok_s
        self.ends_s.append(self.free_at_s)
        return self.free_at_s


class World:
    """One gateway, the replicas, and what is on its way between them."""

    def __init__(self, method: Method, seed: int) -> None:
        self._method = method
        self._random = random.Random(seed)
        self._clock = ManualClock()
        self._router = RouterService(RouterConfig(), 64, self._clock, seed, salt="g0")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._replicas = {f"r{index}": Replica(index, tok_s) for index, tok_s in enumerate(SPEEDS_TOK_S)}
        self._ttfts_s: list[float] = []
        for replica in self._replicas.values():
            self._router.add_replica(replica.identity, "both")
            self._router.tree.apply_snapshot(KvSnapshot(replica.identity, 0, ()))
            self._at(self._random.random() * REPORT_S, lambda it=replica: self._report(it))  # type: ignore[misc]

    def run(self, load: float, num_requests: int) -> float:
        """Return the mean time to the first token."""
        rate_s = load * sum(SPEEDS_TOK_S) / PROMPT_TOKENS
        num_arrived = 0

        def arrive() -> None:
            nonlocal num_arrived
            self._request(num_arrived)
            num_arrived += 1
            if num_arrived < num_requests:
                self._at(self._clock.now() + self._random.expovariate(rate_s), arrive)

        self._at(REPORT_S, arrive)
        while len(self._ttfts_s) < num_requests:
            time_s, _, call = heapq.heappop(self._due)
            self._clock.advance(max(0.0, time_s - self._clock.now()))
            call()
        return statistics.fmean(self._ttfts_s)

    def _at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), call))

    def _request(self, number: int) -> None:
        request_id, arrived_at = str(number), self._clock.now()
        if self._method == "shortest_expected_time":
            replica = min(
                self._replicas.values(),
                key=lambda it: max(it.free_at_s, arrived_at) + PROMPT_TOKENS / it.tok_s,
            )
            self._ttfts_s.append(replica.serve(arrived_at) - arrived_at)
            return
        decision = self._router.route(RouteRequest(request_id, RequestFacts("t"), (), PROMPT_TOKENS, 1))
        replica = self._replicas[decision.compute_id]

        def submitted() -> None:
            self._at(replica.serve(self._clock.now()), lambda: ended(self._clock.now()))

        def ended(now: float) -> None:
            state = replica.queue_state(now)
            self._at(now + NETWORK_S, lambda: heard(state))

        def heard(state: QueueState) -> None:
            # The two ways over the network are the same for every choice, and left out.
            self._ttfts_s.append(self._clock.now() - arrived_at - 2 * NETWORK_S)
            self._router.loads.on_queue(replica.identity, state, self._clock.now())
            self._router.on_prefilled(request_id)
            self._router.on_finished(request_id)

        self._at(arrived_at + NETWORK_S, submitted)

    def _report(self, replica: Replica) -> None:
        self._router.loads.on_load(replica.load(self._clock.now()))
        self._at(self._clock.now() + REPORT_S, lambda: self._report(replica))


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
