"""Conversations replayed through each policy on nodes with small caches, without an engine."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import ReplicaLoad, RouteRequest
from router.service import RouterService

BLOCK_TOKENS = 16
NUM_NODES = 4
NODE_BLOCKS = 200
TOK_S = 2000.0


class Outcome(NamedTuple):
    hit_rate: float
    mean_wait_s: float
    imbalance: float


class Node:
    """A prefill replica: an LRU of blocks and a queue served at `TOK_S`."""

    def __init__(self, replica_id: str) -> None:
        self.identity = ReplicaIdentity(replica_id, 1)
        self.free_at_s = 0.0
        self.num_computed_tokens = 0
        self.sequence = 0
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def load(self, now: float) -> ReplicaLoad:
        backlog = int(max(0.0, self.free_at_s - now) * TOK_S)
        return ReplicaLoad(self.identity, now, 0, 0, 0, backlog, 1000, 1000, TOK_S, 0.02, 10 * TOK_S)

    def serve(self, keys: tuple[bytes, ...], now: float) -> tuple[int, KvEvents]:
        """Number of leading blocks that were cached, and the change of the cache."""
        num_cached = next((index for index, key in enumerate(keys) if key not in self.blocks), len(keys))
        num_tokens = max(1, (len(keys) - num_cached) * BLOCK_TOKENS)
        self.num_computed_tokens += num_tokens
        self.free_at_s = max(now, self.free_at_s) + num_tokens / TOK_S
        stored = tuple(key for key in keys if key not in self.blocks)
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        removed = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - NODE_BLOCKS)]
        self.sequence += 1
        changes = (BlocksStored(b"", stored),), (BlocksRemoved(tuple(removed)),)
        return num_cached, KvEvents(self.identity, self.sequence, *changes)


def busy_decode_load(now: float) -> ReplicaLoad:
    """So many streams that no prompt is worth prefilling there."""
    return ReplicaLoad(ReplicaIdentity("d", 1), now, 10**6, 0, 0, 0, 10**6, 10**6, TOK_S, 0.02, 10 * TOK_S)


def conversations() -> list[tuple[bytes, ...]]:
    """400 requests of 40 conversations that share a system prompt of 4 blocks and grow by 3 blocks a turn;
    conversations come in an order that repeats no pattern of the number of nodes."""
    requests = []
    turns = [0] * 40
    for number in range(400):
        who = number * 17 % 40 if number % 3 else number * 7 % 11
        turns[who] += 1
        own = tuple(b"c%d:%d" % (who, index) for index in range(min(3 * turns[who], 40)))
        requests.append((*(b"system:%d" % index for index in range(4)), *own))
    return requests


def replay(policy: str, gap_s: float = 0.03) -> Outcome:
    clock = ManualClock()
    config = RouterConfig.model_validate({"policy": policy, "skip_prefill_tokens": 0})
    router = RouterService(config, BLOCK_TOKENS, clock, seed=1)
    nodes = {f"n{index}": Node(f"n{index}") for index in range(NUM_NODES)}
    for node in nodes.values():
        router.add_replica(node.identity, "prefill")
        router.tree.apply_snapshot(KvSnapshot(node.identity, 0, ()))
    router.add_replica(ReplicaIdentity("d", 1), "decode")
    num_hits = num_blocks = 0
    wait_s = 0.0
    for number, keys in enumerate(conversations()):
        for node in nodes.values():
            router.loads.on_load(node.load(clock.now()))
        router.loads.on_load(busy_decode_load(clock.now()))
        request = RouteRequest(str(number), RequestFacts("t"), keys, len(keys) * BLOCK_TOKENS + 1, 1)
        node = nodes[router.route(request).prefill]
        num_cached, events = node.serve(keys, clock.now())
        assert router.tree.apply_events(events)
        wait_s += node.free_at_s - clock.now()
        num_hits, num_blocks = num_hits + num_cached, num_blocks + len(keys)
        router.on_finished(str(number))
        clock.advance(gap_s)
    router.check()
    work = [node.num_computed_tokens for node in nodes.values()]
    return Outcome(num_hits / num_blocks, wait_s / 400, max(work) * NUM_NODES / sum(work))


@pytest.mark.parametrize("other", ["round_robin", "random", "least_loaded"])
def test_cost_has_more_hits_and_less_waiting(other: str) -> None:
    cost, plain = replay("cost"), replay(other)
    assert cost.hit_rate > plain.hit_rate + 0.1
    assert cost.mean_wait_s < plain.mean_wait_s


def test_cost_stays_balanced_when_the_nodes_are_nearly_full() -> None:
    calm, full = replay("cost"), replay("cost", gap_s=0.01)
    assert full.imbalance < 1.2
    assert full.imbalance < calm.imbalance, "affinity yields to balance as queues grow"


def test_longest_prefix_alone_is_a_trap() -> None:
    """All conversations share the system prompt, so all follow the first one."""
    assert replay("longest_prefix").imbalance > 3.0
