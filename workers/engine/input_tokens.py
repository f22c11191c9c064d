"""What a rank of the first stage embeds: tokens that plans name, and those that were just sampled."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from workers.engine.groups import RankGroups
from workers.messages import BatchEntry, SampledToken, StepPlan


class InputTokens:
    """On a rank of the first stage: the token with which each slot continues.

    Where the sampler is another rank, its messages come in the order of the plans that sample, and are waited
    for when a slot's token is wanted. `_unread` are the slots of those that have not been looked at;
    `_slot_to_message` counts messages: the one with the slot's newest token.
    """

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._slot_to_token: dict[int, int] = {}
        self._slot_to_message: dict[int, int] = {}
        self._unread: deque[list[int]] = deque()
        self._num_read = 0
        # Of more plans than can be in flight the sampler has reported the oldest, so it has sent its tokens.
        self._most_unread = groups.pp + 1

    def change(self, plan: StepPlan) -> None:
        """Forget the slots that are freed, then begin those that start."""
        for slot in plan.free_slots:
            assert slot in self._slot_to_token, f"slot {slot} is freed but was never started"
            del self._slot_to_token[slot]
            self._slot_to_message.pop(slot, None)
        for sample in (sample for start in plan.starts for sample in start.samples):
            assert sample.slot not in self._slot_to_token, f"slot {sample.slot} is already in use"
            self._slot_to_token[sample.slot] = sample.last_token

    def tokens(self, entries: tuple[BatchEntry, ...]) -> NDArray[np.int64]:
        """[T]: the input tokens; an entry without any continues with its slot's last token."""
        parts = []
        for entry in entries:
            parts.append(entry.tokens or self._last(entry.slot).to_bytes(4, "little"))
            assert len(parts[-1]) == 4 * entry.num_tokens, f"slot {entry.slot}: {len(entry.tokens)} bytes"
        return np.frombuffer(b"".join(parts), dtype="<u4").astype(np.int64)

    def expect(self, plan: StepPlan) -> None:
        """Before the plan is computed: another rank will sample for it."""
        slots = sampling_slots(plan)
        if self._groups.is_sampler or not slots:
            return
        self._groups.expect_tokens(plan.step, len(slots))
        self._unread.append(slots)
        for slot in slots:
            assert slot in self._slot_to_token, f"slot {slot} samples but was never started"
            self._slot_to_message[slot] = self._num_read + len(self._unread)
        if len(self._unread) > self._most_unread:
            self._read()

    def sampled(self, tokens: list[SampledToken]) -> None:
        """This rank itself is the sampler."""
        for token in tokens:
            self._slot_to_token[token.slot] = token.token

    def _last(self, slot: int) -> int:
        assert slot in self._slot_to_token, f"slot {slot} continues but was never started"
        while self._slot_to_message.get(slot, 0) > self._num_read:
            self._read()
        return self._slot_to_token[slot]

    def _read(self) -> None:
        _, tokens = self._groups.receive_tokens()
        self._num_read += 1
        for slot, token in zip(self._unread.popleft(), tokens, strict=True):
            if self._slot_to_message.get(slot) == self._num_read:  # else it was freed, or sampled again
                self._slot_to_token[slot] = int(token)


def sampling_slots(plan: StepPlan) -> list[int]:
    """The slots that sample, in the order in which the tokens are reported."""
    return [slot for entry in plan.entries for slot in entry.sample_slots]
