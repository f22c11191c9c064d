"""Consistent hashing with bounded loads: equal sessions and prompts go to equal replicas."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from router.policies.plain_policy import Side
from router.policies.replica_cost import ReplicaCost, RouteQuery
from router.policies.simple_ranks import num_requests

# The most requests of a replica, over the mean of all (Mirrokni, Thorup and Zadimoghaddam, 2016; the default
# of KubeAI's prefix hash).
LOAD_FACTOR = 1.25
# Of a request without a session, this much of the beginning of the prompt is hashed.
HASHED_TOKENS = 256


class ConsistentHash:
    """Orders the replicas by the hash of each with the request's key (rendezvous hashing: where a replica
    comes or goes, only its own keys move), and skips those that have more than their share of requests.

    All gateways agree on the order, whatever their salt: the key is the session, or the beginning of the
    prompt, or, for a prompt of less than a block, the request.
    """

    def rank(self, query: RouteQuery, replicas: Sequence[ReplicaCost], side: Side) -> list[float]:
        """Return the hashes, from 0 to 1; those of replicas over their share are greater by 1."""
        loads = num_requests(replicas)
        most = math.ceil(LOAD_FACTOR * (sum(loads) + 1) / len(replicas))
        return [
            _hash(query.affinity_key, replica.state.report.identity.replica_id)
            + (1.0 if load >= most else 0.0)
            for replica, load in zip(replicas, loads, strict=True)
        ]


def affinity_key(session: str, block_keys: Sequence[bytes], block_tokens: int, request_id: str) -> bytes:
    """Return by what a request is hashed. A block's key names all of the prompt up to the block's end."""
    if session or not block_keys:
        return (session or request_id).encode()
    num_blocks = min(len(block_keys), math.ceil(HASHED_TOKENS / block_tokens))
    return block_keys[num_blocks - 1]


def _hash(key: bytes, replica_id: str) -> float:
    digest = hashlib.blake2b(replica_id.encode() + b"\0" + key, digest_size=7).digest()
    return int.from_bytes(digest) / (1 << 8 * len(digest))
