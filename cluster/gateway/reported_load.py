"""What the router takes from the reports of a replica."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec.structs import asdict

from router.messages import QueueState, ReplicaLoad
from workers.messages.link import LoadReport, QueueReport, ReplicaHello, StepFrame
from workers.stats_record import ReplicaStats

# The statistics that the router reads.
_ROUTED = tuple(
    name
    for name in ReplicaLoad.__struct_fields__
    if name in ReplicaStats.__struct_fields__ and name != "num_running"
)
_routed_values = attrgetter(*_ROUTED)


def routed_load(load: LoadReport, hello: ReplicaHello | None, now: float) -> ReplicaLoad:
    """Return a report as the router takes it; `hello` is the replica's greeting, if there was one."""
    num_running = load.num_running - load.num_paused  # as in `QueueReport`: these make way for others
    return ReplicaLoad(
        identity=load.identity,
        received_at=now,
        max_local_tokens=hello.max_context_tokens if hello else 0,
        **transfer_of(load, hello),
        num_running=num_running,
        **dict(zip(_ROUTED, _routed_values(load), strict=True)),
    )


def may_free_capacity(frame: StepFrame) -> bool:
    """Return whether a replica may take more after this news than before. Tokens alone change nothing of
    that: the end of a request runs the admission's pump by itself, and what it leaves free at the replica
    comes with a report of the queue."""
    return (
        frame.queue is not None
        or frame.load is not None
        or bool(frame.prefills or frame.hand_overs or frame.failures or frame.moves)
    )


def routed_queue(queue: QueueReport) -> QueueState:
    """Return the state of a queue as the router takes it."""
    return QueueState(**asdict(queue))


def transfer_of(load: LoadReport, hello: ReplicaHello | None) -> dict[str, Any]:
    """Return the fields that say what a hand-over takes from there."""
    if hello is None or not (moved := hello.compatibility.moved_bytes).token_bytes:
        return {"transfer_tok_s": 0.0}
    return {
        "transfer_tok_s": load.transfer_gb_s * 1e9 / moved.token_bytes,
        "window_tokens": moved.window,
        "window_token_ratio": moved.window_token_bytes / moved.token_bytes,
        "state_tokens": moved.state_bytes / moved.token_bytes,
    }
