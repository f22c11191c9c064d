"""The gateway's end of the link of a simulated replica."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from cluster.simulation.simulated_peers import NETWORK_S
from cluster.simulation.virtual_time import EventQueue
from workers.messages.link import LinkUp, RequestKey, StepFrame, TokenDelta

_NOTHING = StepFrame()


class GatewayEnd:
    """What is sent arrives after the time of the network.

    Tokens between the first and the last of an attempt change nothing at a gateway where nothing waits. They
    are kept, and go with the next token that does; a frame that has nothing else is not sent.
    """

    def __init__(
        self, events: EventQueue, arrive: Callable[[LinkUp], None], is_quiet: Callable[[], bool]
    ) -> None:
        """`arrive` takes a message at the gateway, at which nothing waits while it `is_quiet`."""
        self._events = events
        self._arrive = arrive
        self._is_quiet = is_quiet
        self._kept: dict[tuple[RequestKey, int], TokenDelta] = {}

    def send(self, frame: LinkUp) -> None:
        """Send a message, or keep what of it can wait."""
        if isinstance(frame, StepFrame):
            self._send_step(frame)
        else:
            self._post(frame)

    def send_kept(self) -> None:
        """Send all tokens that are kept: what follows may depend on them."""
        if self._kept:
            self._post(StepFrame(deltas=tuple(self._kept.values())))
            self._kept.clear()

    def close(self) -> None:
        """The gateway hears of a replica's end from the cluster."""

    def _send_step(self, frame: StepFrame) -> None:
        if not self._is_quiet() or frame.failures or frame.moves:
            self.send_kept()
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
