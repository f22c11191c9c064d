"""The health of an actor's background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


def check_tasks(tasks: Sequence[asyncio.Task[Any]], name: str, epoch: int) -> None:
    """Raise when a background task has ended: it failed, or a later registration took this one's place."""
    for task in tasks:
        if task.done():
            task.result()
            raise RuntimeError(f"{name}: this registration was superseded in the roster (epoch {epoch})")
