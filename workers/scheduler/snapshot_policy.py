"""Which borders between blocks get a snapshot of a sequence's recurrent state.

A prompt that shares a prefix with an earlier one can only start behind a border whose state exists, and a
state exists where a chunk ended. So chunks end at the borders that others will start behind.
"""

from __future__ import annotations

from workers.scheduler.sequence import Sequence


class SnapshotPolicy:
    """Wants a snapshot at the last border of each prompt, behind which the next turn of a chat starts, or the
    same prompt again; where the prompt left the way of earlier ones, since others may leave it there too; and
    after every `every_tokens` tokens (0: nowhere else).

    Borders are counts of whole blocks. Those that are passed by chance, as every border is while a sequence
    decodes, have a snapshot until its block is needed, and are the first to go.
    """

    def __init__(self, block_tokens: int, every_tokens: int = 0) -> None:
        self._block_tokens = block_tokens
        self._every_blocks = -(-every_tokens // block_tokens)

    def wants(self, sequence: Sequence, border: int) -> bool:
        """Whether others will start behind this border of the sequence."""
        if border in self._own_borders(sequence):
            return True
        return self._every_blocks > 0 and border % self._every_blocks == 0

    def end_of_chunk(self, sequence: Sequence, end: int) -> int:
        """Return where a chunk of the sequence that may reach `end` ends: at the first border that is wanted,
        or else at the last border that it reaches, unless it ends the sequence's known tokens.

        A chunk that begins and ends at borders reads its state from one block and leaves it in another one,
        so it can be computed again if the step fails."""
        start, block_tokens = sequence.num_scheduled, self._block_tokens
        if end - start < 2:
            return end
        first, last = start // block_tokens + 1, end // block_tokens
        wanted = [border for border in self._own_borders(sequence) if first <= border <= last]
        if self._every_blocks:
            regular = -(-first // self._every_blocks) * self._every_blocks
            wanted += [regular] if regular <= last else []
        if wanted:
            return min(wanted) * block_tokens
        return end if end == sequence.target or last < first else last * block_tokens

    def _own_borders(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the borders that are wanted of this sequence. The ends of a chat's messages would be among
        them, but a submission does not say where they are."""
        num_prompt_tokens = sequence.request.num_prompt_tokens
        whole, before_last = (
            count // self._block_tokens for count in (num_prompt_tokens, num_prompt_tokens - 1)
        )
        return sequence.known_border, before_last, whole
