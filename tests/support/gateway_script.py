"""How a scripted replica of the gateway's tests misbehaves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from workers.messages import RequestFailed


@dataclass
class Script:
    """How a replica misbehaves. Counts are of what is still to come."""

    num_refusals: int = 0
    # Sent once in place of an answer; its ids are filled in.
    failure: RequestFailed | None = None
    # Send no token beyond this output index until `resume` is set.
    stop_after: int | None = None
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    token_s: float = 0.0
    # Why a stream cannot move away.
    moves_fail: str = ""
    # In place of the truth.
    tokens: list[int] | None = None
    # End with the end token at this output index.
    eos_at: int | None = None
    # As a prefill replica: hand over before the first token is sent.
    hand_over_first: bool = False
    # Of the prompt's cached tokens: those that the store's tiers gave.
    loaded: dict[str, int] = field(default_factory=dict)
