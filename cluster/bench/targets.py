"""Where `tandem bench serve` sends its requests: a gateway over gRPC, or any server that speaks OpenAI's API
over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from cluster.bench.serving_load import AnswerEnd, BenchPrompt

# Token ids that every vocabulary has, where a server does not say how many there are.
UNKNOWN_VOCABULARY = 1000


class TargetModel(NamedTuple):
    """The model that is measured. 0: not known."""

    name: str
    vocab_size: int
    context_tokens: int


class Target(Protocol):
    """A server that requests are sent to."""

    model: TargetModel

    def send(
        self, prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        """Send a request, and yield 0 when it was accepted, the number of tokens of each part of its answer,
        and in the end what else is known. `CallError` where it fails."""
