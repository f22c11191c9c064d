"""How a gateway reads what callers send: within their bounds, which one object holds for gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import grpc.aio

from cluster.admission.caller_limits import CallerLimits
from cluster.admission.read_budget import ReadBudget, ReadReservation
from cluster.api.message_fields import MAX_VALUES
from cluster.api.message_sizes import max_body_bytes, max_message_bytes
from cluster.config import ClusterConfig
from cluster.errors import DeadlineError, FieldViolation, InvalidRequestError
from cluster.identity.identity import Identity

# grpc.aio.ServicerContext, which has no types.
Context = Any


class CallReading:
    """The bounds of the calls that callers may have running and read at once at one gateway. `context_tokens`
    is the model's context."""

    def __init__(self, config: ClusterConfig, context_tokens: int) -> None:
        admission, gateway = config.admission, config.gateway
        most_calls = 2 * gateway.max_requests
        self.limits = CallerLimits(
            admission.max_caller_calls or most_calls, admission.max_caller_connections or most_calls
        )
        self.budget = ReadBudget(
            int(admission.max_reading_mb * 1e6), int(admission.max_caller_reading_mb * 1e6)
        )
        self.max_body_bytes = max_body_bytes(config, context_tokens)
        self.max_message_bytes = max_message_bytes(config, context_tokens)
        # Numbers in the lists of one message: token ids of prompts, or of the output of all samples.
        self.max_values = max(MAX_VALUES, context_tokens * (1 + gateway.max_samples))
        self._message_timeout_s = gateway.message_timeout_s

    @contextlib.contextmanager
    def call(self, identity: Identity, connection: Hashable = None) -> Iterator[ReadReservation]:
        """Count a call of this identity, and its connection, while the block runs; yield its part of the
        budget. Raise `OverloadedError` where the caller has too many."""
        party = identity.party
        with contextlib.ExitStack() as ends:
            ends.enter_context(self.limits.call(party))
            if connection is not None:
                self.limits.connect(party, connection)
                ends.callback(self.limits.disconnect, party, connection)
            yield ends.enter_context(self.budget.open(party))

    async def read_message(self, context: Context, reservation: ReadReservation) -> bytes:
        """Return the one message of a gRPC call, not yet parsed. Raise the `RequestError` that says why it is
        not read.

        gRPC does not tell the length of a message, and receives all of it once it is read; before, it
        receives no more than its window of flow control. So there must be room for the largest.
        """
        await reservation.take(self.max_message_bytes)
        try:
            async with asyncio.timeout(self._message_timeout_s):
                message = await context.read()
        except TimeoutError:
            raise DeadlineError(
                f"the message did not arrive within {self._message_timeout_s:g} s (gateway.message_timeout_s)"
            ) from None
        if message is grpc.aio.EOF:
            raise InvalidRequestError(FieldViolation("request", "is missing; send one message"))
        assert isinstance(message, bytes)
        reservation.shrink(len(message))
        return message
