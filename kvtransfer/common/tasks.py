"""How the rooms of an owner start tasks: by whoever watches over their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

# (work, name) -> the task; an error in it ends the store.
Spawn = Callable[[Coroutine[None, None, None], str], "asyncio.Task[None]"]
