"""The requests of a recorded trace, as simulations read them: lengths, times, and blocks by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvtransfer.request_facts import ServiceClass


class TracedRequest(NamedTuple):
    """A request: seconds from the beginning, tokens, and the numbers of the blocks of its prompt, the last of
    which may be a partial one."""

    at_s: float
    num_input: int
    num_output: int
    ids: Sequence[int]
    tenant: str = "tenant"
    service_class: ServiceClass = "standard"


class TraceRequests(Protocol):
    """A trace that can be read again and again."""

    @property
    def block_tokens(self) -> int:
        """The tokens of a block."""

    def __iter__(self) -> Iterator[TracedRequest]: ...
