"""The queries of this gateway to another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cluster.gateway.fleet.messages import (
    ANSWER_CODEC,
    MAX_ANSWER_BYTES,
    MAX_REASON_CHARS,
    QUERY_CODEC,
    Answer,
    FleetRefusal,
    Query,
    checked_size,
)
from cluster.gateway.fleet.peer_gateway import PeerGateway
from cluster.metrics.curves import RING_S, SecondCounts
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import CoolDown
from kvtransfer.errors import TransferError, shown
from kvtransfer.rpc.stream import FrameStream

# How long a gateway may take to answer.
ANSWER_S = 2.0
# The pause before a gateway that did not answer is queried again, except where a request went.
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 8.0

_log = logging.getLogger(__name__)


class PeerQueries:
    """The queries to another gateway: one at a time, on a stream that the first one opens."""

    def __init__(self, peer: PeerGateway, clock: Clock) -> None:
        self.peer = peer
        self._clock = clock
        self._stream: FrameStream | None = None
        self._turn = asyncio.Lock()
        self._pause = CoolDown(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        # Seconds by their numbers: all that the gateway has sent and that are not too old.
        self._seconds: dict[int, SecondCounts] = {}

    @property
    def newest_second(self) -> int:
        """The last second that the gateway sent, of which more may be counted since."""
        return max(self._seconds, default=0)

    def keep(self, seconds: Sequence[SecondCounts]) -> tuple[SecondCounts, ...]:
        """Take the latest seconds; returns all that are not too old."""
        self._seconds |= {each.at: each for each in seconds}
        oldest = self.newest_second - RING_S
        self._seconds = {at: each for at, each in self._seconds.items() if at >= oldest}
        return tuple(self._seconds.values())

    async def ask(self, query: Query, *, is_patient: bool) -> Answer | str:
        """Return the answer, or why there is none. After a failure there is a pause, in which only patient
        callers try."""
        if not is_patient and self._pause.remaining_s(self._clock.now()):
            return self._pause.reason
        try:
            async with asyncio.timeout(ANSWER_S), self._turn:
                answer = await self._exchange(query)
        except TimeoutError:
            problem = f"did not answer within {ANSWER_S:g} s"
        except TransferError as error:
            problem = f"could not be asked: {error}"
        else:
            if not isinstance(answer, FleetRefusal):
                self._pause.succeeded(self._clock.now())
                return answer
            problem = f"refused to answer: {shown(answer.reason, MAX_REASON_CHARS)}"
        if not self._pause.reason:
            _log.warning("%s %s", self.peer.gateway_id, problem)
        self._pause.failed(problem[:MAX_REASON_CHARS], self._clock.now())
        return self._pause.reason

    async def _exchange(self, query: Query) -> Answer | FleetRefusal:
        """Send the query, and return the answer. Without an answer, for whatever reason, the stream ends: a
        late answer would be taken for that of the next query."""
        stream, self._stream = self._stream, None
        try:
            if stream is None or stream.closed:
                stream = await self.peer.open_queries()
            stream.send(QUERY_CODEC.encode(query))
            answer = ANSWER_CODEC.decode(checked_size(await stream.next_frame(), MAX_ANSWER_BYTES))
            if not isinstance(answer, FleetRefusal):
                self._stream = stream
            return answer
        finally:
            if stream is not None and self._stream is not stream:
                stream.abort()

    def close(self) -> None:
        """End the stream; the gateway has left."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
