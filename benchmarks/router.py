"""Speed and quality of the router, as JSON lines.

Speed: processor time of a decision with 64 replicas and prompts of 2k and 8k tokens, without any store, and
with stores that hold what the devices lack, the shallower half in DRAM and the rest on NVMe; as one gateway
of several decides, with the loads as they were and after all replicas have reported; and what it takes to
find what a request would wait where others wait. Quality, with
`--trace FILE` (in Mooncake's format): every policy on 16 simulated replicas (`cluster.simulation`), each with
3,000 blocks, which compute prompts at a constant rate. The gateway knows the loads of all replicas exactly
whenever requests come; `tandem simulate --policy all` compares the policies with the reports that replicas
send.

    python -m benchmarks.router [--trace FILE] [--policies tandem,round_robin]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.replica_queue import ReplicaQueues
from cluster.bench.simulated_trace import FileTrace
from cluster.gateway.reported_load import routed_queue
from cluster.simulation.simulated_call import SimulatedRequest
from cluster.simulation.simulated_cluster import ClusterShape, SimulatedCluster
from cluster.simulation.simulated_load import prefill_token_s, trace_sessions
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import StepModel
from kvtransfer.blocks.keys import TOKEN_BYTES, extend_keys
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.kv_events import BlocksStored, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import PolicyName, RouterConfig
from router.messages import QueueState, ReplicaLoad, RouteRequest
from router.native import load_kernel
from router.radix import PrefixTree
from router.service import RouterService

BLOCK_TOKENS = 64
NUM_REPLICAS = 64
# The replicas of the trace, and the use of all of them together, if nothing were cached: it sets their rate.
NUM_NODES = 16
NODE_BLOCKS = 3000
UTILISATION = 0.75


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def load_of(replica_id: str, now: float, backlog_tokens: int = 0, num_running: int = 0) -> ReplicaLoad:
    return ReplicaLoad(
        identity=ReplicaIdentity(replica_id, 1),
        received_at=now,
        num_running=num_running,
        num_waiting=0,
        num_landings=0,
        num_backlog_tokens=backlog_tokens,
        num_free_blocks=1_000_000,
        num_total_blocks=1_000_000,
        prefill_tok_s=10_000.0,
        decode_step_s=0.03,
        transfer_tok_s=200_000.0,
    )


# ------------------------------------------------------------------------------------------------ speed


def quantiles_us(
    call: Callable[[], object], num_calls: int, before: Callable[[], object] = tuple
) -> tuple[float, float]:
    """Return the median and 99th percentile of the processor time of one call; `before` does not count."""
    times = []
    for _ in range(num_calls):
        before()
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    times.sort()
    return times[num_calls // 2] * 1e6, times[num_calls * 99 // 100] * 1e6


def measure_speed(num_tokens: int, with_store: bool, num_calls: int = 2000) -> Iterator[dict[str, object]]:
    """Time a match, the least that a compressed tree needs, and a whole decision; every depth is
    different."""
    clock = SystemClock()
    num_blocks = num_tokens // BLOCK_TOKENS
    keys = tuple(key_of(number) for number in range(num_blocks))
    service = RouterService(RouterConfig(), BLOCK_TOKENS, clock, 0, salt="gateway")
    service.set_shared(True)
    tree = PrefixTree(clock, 5.0, load_kernel())
    for index in range(NUM_REPLICAS):
        identity = ReplicaIdentity(f"r{index:02}", 1)
        others = tuple(key_of((index + 1) << 64 | number) for number in range(4000))
        held = num_blocks * index // NUM_REPLICAS
        chains = [BlocksStored(b"", keys[:held]), BlocksStored(b"", others)]
        if with_store:
            middle = (held + num_blocks) // 2
            chains.append(BlocksStored(b"", keys[held:middle], "dram"))
            chains.append(BlocksStored(b"", keys[middle:], "nvme"))
        service.add_replica(identity, "prefill" if index < NUM_REPLICAS // 2 else "decode")
        service.loads.on_load(load_of(identity.replica_id, clock.now(), index % 7 * 100, index % 5))
        tree.add_replica(identity)
        for target in (service.tree.apply_snapshot, tree.apply_snapshot):
            target(KvSnapshot(identity, 1, tuple(chains)))
    copy = tuple(bytes(bytearray(key)) for key in keys)
    tokens = bytes(TOKEN_BYTES * num_tokens)

    def decide() -> None:
        service.route(RouteRequest("q", RequestFacts("t"), copy, num_tokens, 100))
        service.on_finished("q")

    def report() -> None:
        for index in range(NUM_REPLICAS):
            queue = QueueState(index % 5, 0, 0, index % 7 * 100, 1_000_000)
            service.loads.on_queue(ReplicaIdentity(f"r{index:02}", 1), queue, clock.now())

    measures: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "match": (lambda: tree.match(copy), tuple),
        "compare_as_one_run": (lambda: copy == keys, tuple),
        "decision": (decide, tuple),
        "decision_after_reports": (decide, report),
        "reports": (report, tuple),
        # Beside it: the keys of the prompt's blocks, which are there before.
        "block_keys": (lambda: extend_keys(bytes(16), tokens, BLOCK_TOKENS), tuple),
    }
    for name, (call, before) in measures.items():
        median_us, p99_us = quantiles_us(call, num_calls, before)
        yield {
            "what": name,
            "prompt_tokens": num_tokens,
            "blocks": num_blocks,
            "replicas": NUM_REPLICAS,
            "with_store": with_store,
            "p50_us": round(median_us, 1),
            "p99_us": round(p99_us, 1),
            "per_s": round(1e6 / median_us),
        }


def measure_waits(num_tenants: int, num_calls: int = 500) -> dict[str, object]:
    """Time the addition of an overloaded gateway to a decision: the wait of a request for each replica that
    computes prompts, at each of which requests of this many tenants wait already."""
    clock = ManualClock()
    service = RouterService(RouterConfig(), BLOCK_TOKENS, clock, 0)
    queues = ReplicaQueues(service)
    for index in range(NUM_REPLICAS // 2):
        identity = ReplicaIdentity(f"r{index:02}", 1)
        service.add_replica(identity, "prefill")
        service.loads.on_load(load_of(identity.replica_id, clock.now(), 10_000))
        queue = queues[identity.replica_id]
        for number in range(3 * num_tenants):
            flow = Flow(f"t{number % num_tenants}", "standard")
            waiting = QueuedRequest(
                str(number), flow, clock.now(), cost_s=0.1 + number % 7 / 10, due_at=1e9, num_tokens=100
            )
            queue.put(waiting, 1.0 + number % 3, clock.now())
        queue.blocked(clock.now(), (identity.replica_id,))
    turns = itertools.cycle(Flow(f"t{number}", "standard") for number in range(num_tenants))

    def ask() -> None:
        clock.advance(0.001)
        queues.waits(next(turns), 1.0, clock.now(), None)

    median_us, p99_us = quantiles_us(ask, num_calls)
    return {
        "what": "waits",
        "replicas": NUM_REPLICAS // 2,
        "tenants": num_tenants,
        "p50_us": round(median_us, 1),
        "p99_us": round(p99_us, 1),
    }


# ---------------------------------------------------------------------------------------------- quality


def replay(policy: PolicyName, trace: FileTrace) -> dict[str, object]:
    """Replay all prompts through one policy."""
    steps = StepModel(0.008, 1e-5, 4e-8, prefill_token_s(trace, NUM_NODES, UTILISATION))
    engine = SimulatedEngine(steps, NODE_BLOCKS, trace.block_tokens)
    router = RouterConfig(policy=policy)
    shape = ClusterShape([("both", engine)] * NUM_NODES, router=router, holds_back=False)
    cluster = SimulatedCluster(shape, 1)
    events, (gateway,) = cluster.events, cluster.gateways
    events.run(1.0)  # the gateway knows all replicas then
    began_at, known_at = events.clock.now(), 0.0
    for session in trace_sessions(trace):
        at_s = began_at + session.at_s
        if at_s > known_at:
            # Requests of one moment are placed by the gateway's own account of those before.
            events.run(at_s)
            known_at = at_s
            for replica in cluster.replicas:
                replica.catch_up()
                gateway.router.loads.on_queue(replica.identity, routed_queue(replica.reports.queue()), at_s)
        (turn,) = session.turns
        cluster.arrive(SimulatedRequest(turn.new().astype("<u4").tobytes(), 1))
    while cluster.num_running:
        events.step()
    events.run(events.clock.now() + 1.0)
    cluster.check()
    ttfts_s = sorted(record.ttft_s for record in cluster.records)
    stats = [replica.steps.stats for replica in cluster.replicas]
    work = [it.num_queried_tokens - sum(it.num_hit_tokens.values()) for it in stats]
    num_tokens = sum(record.num_prompt for record in cluster.records)
    return {
        "what": "replay",
        "policy": policy,
        "requests": len(ttfts_s),
        "hit_rate": round(sum(record.num_cached for record in cluster.records) / num_tokens, 4),
        "mean_ttft_s": round(sum(ttfts_s) / len(ttfts_s), 3),
        "p99_ttft_s": round(ttfts_s[len(ttfts_s) * 99 // 100], 2),
        "imbalance": round(max(work) * len(work) / sum(work), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, help="of the trace; all by default")
    parser.add_argument("--policies", default=",".join(get_args(PolicyName)))
    arguments = parser.parse_args()
    for num_tokens in (2048, 8192):
        for with_store in (False, True):
            for line in measure_speed(num_tokens, with_store):
                print(json.dumps(line), flush=True)
    for num_tenants in (1, 4, 16):
        print(json.dumps(measure_waits(num_tenants)), flush=True)
    if arguments.trace is not None:
        trace = FileTrace(arguments.trace, arguments.requests, 1.0)
        # Nothing of a request is in a cycle, and looking for cycles among all blocks takes long.
        gc.disable()
        for name in get_args(PolicyName):
            if name in arguments.policies.split(","):
                print(json.dumps(replay(name, trace)), flush=True)


if __name__ == "__main__":
    main()
