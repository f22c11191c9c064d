"""What waits in gateways, as the load that it will be for replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class QueuedLoad:
    """The load that waits in a gateway for one replica."""

    # Requests whose prompts it will compute, and the tokens of these that are not cached.
    num_prompts: int = 0
    num_tokens: int = 0
    # Sequences that it will decode.
    num_sequences: int = 0
