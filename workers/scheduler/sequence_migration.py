"""Stop sequences that migrate to another replica, and continue those that stay.

Part of the scheduler: `workers.disagg.migration` calls it, so that nothing outside touches a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from kvtransfer.messages import BlockSpan
from workers.messages.link import RequestKey, Submission
from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.sequence import Phase, Sequence


class Position(NamedTuple):
    """The progress of a sequence. Counts are tokens from the prompt's first one."""

    # Tokens that are known, or sampled by plans that are out.
    num_tokens: int
    # Tokens whose KV is in the pool, in `block_ids`.
    num_settled: int
    # The number of tokens with which it ends at the latest.
    most_tokens: int
    block_ids: tuple[int, ...]
    # The blocks of each group of layers behind the first.
    windows: tuple[BlockSpan, ...] = ()


class SequenceMigration:
    """Holds and resumes sequences. One can move when it is the only one of its request, computes one token
    after another, and lies on the device as a whole. One that has blocks in host memory must wait until they
    have come back.

        RUNNING --hold_at(n)--> no plan beyond n tokens --settled--> HELD --finish_outbound--> gone
                                        |                             |
                                        +-- preempted, moved out -----+-- resume --> RUNNING
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def position(self, key: RequestKey) -> Position | None:
        """Return the position of a sequence that can move now; None for any other."""
        sequence = self._movable(key)
        if sequence is None:
            return None
        request, num_settled = sequence.request, sequence.num_settled
        return Position(
            num_tokens=sequence.target,
            num_settled=num_settled,
            most_tokens=request.num_prompt_tokens + request.output_limit,
            block_ids=self._life.tables.covering(sequence, num_settled),
            windows=self._life.tables.groups.blocks(sequence),
        )

    def block_keys(self, key: RequestKey) -> tuple[bytes, ...]:
        """Return the keys of the full blocks of its tokens, generated ones included; it can move."""
        sequence = self._movable(key)
        assert sequence is not None
        block_tokens = self._life.tables.pool.block_tokens
        num_blocks = sequence.num_tokens // block_tokens
        return tuple(sequence.block_keys(num_blocks, block_tokens))

    def submission(self, key: RequestKey) -> Submission:
        """Return the submission as it came, of a request that is here."""
        return self._life.requests[key].submission

    def hold_at(self, key: RequestKey, num_tokens: int) -> bool:
        """Stop the sequence with KV of exactly `num_tokens` tokens; return False when it is further, or
        cannot move any more."""
        sequence = self._movable(key)
        if sequence is None or num_tokens < sequence.target:
            return False
        sequence.hold_at = num_tokens
        return True

    def is_on_its_way(self, key: RequestKey) -> bool:
        """Whether `hold_at` still holds: it has been neither preempted nor moved out nor ended since."""
        sequence = self._only(key)
        return sequence is not None and sequence.hold_at > 0

    def resume(self, key: RequestKey) -> None:
        """Continue the sequence here, if it is still here: the migration has ended."""
        sequence = self._only(key)
        if sequence is None:
            return
        sequence.hold_at = 0
        if sequence.phase is Phase.HELD:
            self._life.resume(sequence)

    def waiting(self) -> list[RequestKey]:
        """Return the requests of which nothing is computed here: new ones, and those that were preempted."""
        return [
            key
            for key, request in self._life.requests.items()
            if all(sequence.phase is Phase.WAITING for sequence in request.sequences)
        ]

    def _only(self, key: RequestKey) -> Sequence | None:
        request = self._life.requests.get(key)
        if request is None or len(request.sequences) != 1:
            return None
        return request.sequences[0]

    def _movable(self, key: RequestKey) -> Sequence | None:
        sequence = self._only(key)
        if sequence is None or sequence.phase is not Phase.RUNNING or sequence.num_offloaded:
            return None
        request = sequence.request
        return (
            sequence if request.prompt_done and not request.decodes_remotely and not sequence.finish else None
        )
