"""The placements of another gateway, in the router of this one.

A gateway that proves the secret may still be wrong: its frames, numbers and placements are bounded, and
replicas that are not known here are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cluster.gateway.fleet.messages import (
    MAX_COUNT,
    MAX_KEYS,
    MAX_PLACEMENT_FRAME_BYTES,
    MAX_PLACEMENTS,
    MAX_REASON_CHARS,
    PLACEMENT_CODEC,
    Change,
    Finished,
    Placed,
    PlacementSnapshot,
    PlacementsRefused,
    Prefilled,
    checked_size,
)
from kvtransfer.common.clock import Clock
from kvtransfer.errors import WireError, shown
from router.placements import Placement
from router.service import RouterService

_MAX_KEY_BYTES = 64
_MAX_ID_CHARS = 256
# The predictions of one gateway in a period of this many seconds.
_MAX_PREDICTED_KEYS = 1 << 20
_PREDICTED_PERIOD_S = 5.0


class PeerPlacements:
    """The placements of one other gateway, in the router of this one."""

    def __init__(self, gateway_id: str, router: RouterService, clock: Clock) -> None:
        assert gateway_id
        self._gateway_id = gateway_id
        self._router = router
        self._clock = clock
        self._request_ids: set[str] = set()
        # Whether the snapshot has come.
        self.is_current = False
        self._period_ends_at = 0.0
        self._num_predicted_keys = 0

    def on_frame(self, frame: bytes) -> None:
        """Apply a frame, or raise `WireError`, which ends the stream."""
        message = PLACEMENT_CODEC.decode_known(checked_size(frame, MAX_PLACEMENT_FRAME_BYTES))
        if message is None:
            return
        if isinstance(message, PlacementsRefused):
            raise WireError(f"it refuses: {shown(message.reason, MAX_REASON_CHARS)}")
        if isinstance(message, PlacementSnapshot) == self.is_current:
            raise WireError("a snapshot among changes" if self.is_current else "changes before the snapshot")
        changes: Sequence[Change] = (
            message.placed if isinstance(message, PlacementSnapshot) else message.changes
        )
        for change in changes:
            _check(change)
        now = self._clock.now()
        for change in changes:
            self._apply(change, now)
        if isinstance(message, PlacementSnapshot):
            self.is_current = message.is_last

    @property
    def num_placements(self) -> int:
        """Number of its requests that are counted here."""
        return len(self._request_ids)

    def close(self) -> None:
        """Forget the placements: they are not heard of any more."""
        self.is_current = False
        self._request_ids.clear()
        self._router.remove_gateway(self._gateway_id)

    def _apply(self, change: Change, now: float) -> None:
        request_id = change.request_id
        match change:
            case Placed():
                self._request_ids.add(request_id)
                if len(self._request_ids) > MAX_PLACEMENTS:
                    raise WireError(f"more than {MAX_PLACEMENTS} placements")
                placement = Placement(
                    request_id=request_id,
                    compute_id=change.compute_id,
                    decode_id=change.decode_id,
                    block_keys=change.block_keys,
                    num_prefill_tokens=change.num_prefill_tokens,
                    num_new_blocks=change.num_new_blocks,
                    num_sequences=change.num_sequences,
                    routed_at=now - change.age_s,
                    prefilled_at=None if change.prefilled_age_s is None else now - change.prefilled_age_s,
                    gateway_id=self._gateway_id,
                    is_queued=change.is_held,
                )
                may_predict = self._may_predict(len(change.block_keys), now)
                self._router.on_remote_routed(placement, is_predicted=may_predict)
            case Prefilled():
                may_predict = self._may_predict(0, now)
                self._router.on_remote_prefilled(
                    self._gateway_id, request_id, now - change.age_s, is_predicted=may_predict
                )
            case Finished():
                self._request_ids.discard(request_id)
                self._router.on_remote_finished(self._gateway_id, request_id)

    def _may_predict(self, num_keys: int, now: float) -> bool:
        """Count predicted keys, of which the tree takes a limited number in a period from one gateway."""
        if now >= self._period_ends_at:
            self._period_ends_at, self._num_predicted_keys = now + _PREDICTED_PERIOD_S, 0
        self._num_predicted_keys += num_keys
        return self._num_predicted_keys <= _MAX_PREDICTED_KEYS


def _check(change: Change) -> None:
    """Raise `WireError` for ids, counts and ages that no gateway sends."""
    ids = [change.request_id]
    ages: list[float] = []
    counts: list[int] = []
    if isinstance(change, Placed):
        ids += [change.compute_id, change.decode_id]
        counts = [change.num_prefill_tokens, change.num_new_blocks, change.num_sequences]
        ages = [change.age_s, change.prefilled_age_s or 0.0]
        if len(change.block_keys) > MAX_KEYS or any(len(key) > _MAX_KEY_BYTES for key in change.block_keys):
            raise WireError(f"more than {MAX_KEYS} block keys, or one of more than {_MAX_KEY_BYTES} bytes")
    elif isinstance(change, Prefilled):
        ages = [change.age_s]
    if any(len(each) > _MAX_ID_CHARS for each in ids):
        raise WireError(f"an id of more than {_MAX_ID_CHARS} characters")
    if not all(0 <= count <= MAX_COUNT for count in counts):
        raise WireError(f"counts {counts}, which must be from 0 to {MAX_COUNT}")
    if not all(0.0 <= age < math.inf for age in ages):
        raise WireError(f"ages {ages}, which must be finite and not negative")
