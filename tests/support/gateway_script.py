"""How a scripted replica of the gateway's tests misbehaves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from workers.messages import RequestFailed


@dataclass
class Script:
    """How a replica misbehaves. Counts are of what is still to come."""

    num_refusals: int = 0
    failure: RequestFailed | None = None
    """Sent once in place of an answer; its ids are filled in."""
    stop_after: int | None = None
    """Send no token beyond this output index until `resume` is set."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    token_s: float = 0.0
    moves_fail: str = ""
    """Why a stream cannot move away."""
    tokens: list[int] | None = None
    """In place of the truth."""
    eos_at: int | None = None
    """End with the end token at this output index."""
    hand_over_first: bool = False
    """As a prefill replica: hand over before the first token is sent."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Of the prompt's cached tokens: those that the store's tiers gave."""
