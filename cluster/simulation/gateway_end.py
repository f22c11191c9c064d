"""The gateway's end of the link of a simulated replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.virtual_time import EventQueue
from workers.messages.link import LinkUp, RequestKey, StepFrame, TokenDelta

_NOTHING = StepFrame()


class PassedSteps(NamedTuple):
    """Steps of a run, whose tokens are sent together: when those of each arrive, and the first index of what
    each request gets."""

    arrivals: list[float]
    first_indices: dict[str, int]

    def has(self, delta: TokenDelta) -> bool:
        """Whether these are tokens of the run."""
        return self.first_indices.get(delta.request_id) == delta.first_index


class TokenObserver(Protocol):
    """Hears of all tokens for a gateway at the times at which they arrive, also of those that are kept."""

    def streamed(self, delta: TokenDelta, at: float, passed: PassedSteps | None) -> None:
        """Take tokens that arrive then; those of steps that were passed over at the times of these."""


class GatewayEnd:
    """What is sent arrives after the time of the network.

    Tokens between the first and the last of an attempt let no waiting request go
    (`cluster.gateway.reported_load.may_free_capacity`). They are kept, and go with the next token that does
    more; a frame that has nothing else is not sent.
    """

    def __init__(
        self,
        events: EventQueue,
        arrive: Callable[[LinkUp], None],
        observer: TokenObserver,
    ) -> None:
        """`arrive` takes a message at the gateway."""
        self._observer = observer
        self._passed: tuple[float, PassedSteps] | None = None
        self._events = events
        self._arrive = arrive
        self._kept: dict[tuple[RequestKey, int], TokenDelta] = {}

    def send(self, frame: LinkUp) -> None:
        """Send a message, or keep what of it can wait."""
        if isinstance(frame, StepFrame):
            self._observe(frame)
            self._send_step(frame)
        else:
            self._post(frame)

    def pass_over(self, times: Sequence[float], deltas: Sequence[TokenDelta]) -> None:
        """Note the steps whose tokens are sent at this moment."""
        first_indices = {delta.request_id: delta.first_index for delta in deltas}
        passed = PassedSteps([at + NETWORK_S for at in times], first_indices)
        self._passed = self._events.clock.now(), passed

    def _observe(self, frame: StepFrame) -> None:
        if frame.deltas:
            now, passed = self._events.clock.now(), None
            if self._passed is not None and self._passed[0] == now:
                passed = self._passed[1]
            for delta in frame.deltas:
                self._observer.streamed(delta, now + NETWORK_S, passed)

    def send_kept(self) -> None:
        """Send all tokens that are kept: what follows may depend on them."""
        if self._kept:
            self._post(StepFrame(deltas=tuple(self._kept.values())))
            self._kept.clear()

    def close(self) -> None:
        """The gateway hears of a replica's end from the cluster."""

    def _send_step(self, frame: StepFrame) -> None:
        if frame.failures or frame.moves:
            self.send_kept()
            self._post(frame)
            return
        if not frame.deltas:
            self._post(frame)
            return
        # The first token of an attempt comes with the report of its prompt.
        first = {report.request_id for report in frame.prefills}
        deltas = []
        for delta in frame.deltas:
            key = (delta.request_id, delta.attempt), delta.sample
            kept = self._kept.pop(key, None)
            if kept is not None:
                delta = replace(delta, first_index=kept.first_index, tokens=kept.tokens + delta.tokens)
            if delta.finish or delta.request_id in first:
                deltas.append(delta)
            else:
                self._kept[key] = delta
        rest = replace(frame, deltas=tuple(deltas))
        if rest != _NOTHING:
            self._post(rest)

    def _post(self, message: LinkUp) -> None:
        self._events.after(NETWORK_S, lambda: self._arrive(message))
