"""The asyncio client under its old import path, kept until API v1; new code imports from `cluster`."""

from cluster.api.client import (
    Client,
    Collector,
    Completion,
    Event,
    GenerateOptions,
    GenerateStream,
    Prompt,
    Turn,
)

__all__ = [
    "Client",
    "Collector",
    "Completion",
    "Event",
    "GenerateOptions",
    "GenerateStream",
    "Prompt",
    "Turn",
]
