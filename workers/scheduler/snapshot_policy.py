"""Which borders between blocks get a snapshot of a sequence's recurrent state.

A prompt that shares a prefix with an earlier one can only start behind a border whose state exists, and a
state exists where a chunk ended. So chunks end at the borders that others will start behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from kvtransfer.common.recent_map import RecentMap
from workers.config import EngineConfig
from workers.messages.link import MAX_MESSAGE_ENDS
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.sequence import Sequence

# Snapshots at the ends of messages are at least so far apart: one that is nearer to another saves less than
# it costs.
_LEAST_APART_TOKENS = 64
# The states of a running sequence, with those on their way (`StateCapacity`), in blocks.
_BLOCKS_OF_SEQUENCE = 3
# The snapshots beside it that allow a prompt to leave one more at an end of its messages. With fewer, those
# that are used less displace others (`benchmarks/snapshots.py`).
_BLOCKS_OF_END = 8
# The divergences of latest prompts that are remembered.
_MOST_DIVERGENCES = 4096


class SnapshotPolicy:
    """Wants a snapshot at the last border of each prompt, behind which the next turn of a chat starts, or the
    same prompt again; where the prompt left the way of earlier ones, since others may leave it there too; at
    `most_message_ends` ends of the prompt's messages; and after every `every_tokens` tokens (0: nowhere
    else).

    Borders are counts of whole blocks. Those that are passed by chance, as every border is while a sequence
    decodes, have a snapshot until its block is needed, and are the first to go. So are those at which one
    prompt alone has left the way of others: in a chat that happens with every turn, and never there again.
    """

    def __init__(self, block_tokens: int, every_tokens: int = 0, most_message_ends: int = 0) -> None:
        self._block_tokens = block_tokens
        self._every_blocks = -(-every_tokens // block_tokens)
        self._most_message_ends = most_message_ends
        self._least_apart = -(-_LEAST_APART_TOKENS // block_tokens)
        # The keys of the borders at which prompts have left the way of earlier ones.
        self._divergence_keys: RecentMap[bytes, None] = RecentMap(_MOST_DIVERGENCES)

    @classmethod
    def of_replica(cls, block_tokens: int, config: EngineConfig, pools: Seq[GroupPool]) -> SnapshotPolicy:
        """Return the policy by a replica's settings. A prompt leaves one snapshot at an end of its messages,
        and more where there are many blocks for each of `max_sequences` sequences."""
        num_blocks = min((pool.num_total for pool in pools if pool.has_states), default=0)
        share = num_blocks // config.max_sequences - _BLOCKS_OF_SEQUENCE
        most = max(1, min(share // _BLOCKS_OF_END, MAX_MESSAGE_ENDS))
        return cls(block_tokens, config.snapshot_every_tokens, most)

    def note_divergence(self, sequence: Sequence) -> None:
        """Note the border at which a prompt, which is admitted, leaves the way of earlier ones."""
        for border in self._divergences(sequence):
            if border > 0:
                key = sequence.block_keys(border, self._block_tokens)[-1]
                sequence.is_divergence_shared = key in self._divergence_keys
                self._divergence_keys.put(key, None)

    def keeps(self, sequence: Sequence, border: int) -> bool:
        """Whether the snapshot at this border of the sequence stays when others are evicted, since others
        will start behind it."""
        ends = self._ends_of_prompt(sequence)
        if border in ends or border in self._ends_of_messages(sequence, ends):
            return True
        if sequence.is_divergence_shared and border in self._divergences(sequence):
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

    def _own_borders(self, sequence: Sequence) -> set[int]:
        """Return the borders of this sequence at which there is to be a state."""
        prompt = self._ends_of_prompt(sequence)
        return {*self._divergences(sequence), *prompt, *self._ends_of_messages(sequence, prompt)}

    def _divergences(self, sequence: Sequence) -> Iterable[int]:
        """Return the border at which the prompt left the way of earlier ones."""
        return (sequence.known_border,)

    def _ends_of_prompt(self, sequence: Sequence) -> Iterable[int]:
        """Return the last border of the prompt, which is before its last token where the same prompt may come
        again. The end of the last message goes before it if it is as near as a block: what follows is the
        beginning of the answer, which a template may write in another way when the answer is there."""
        request = sequence.request
        whole, before_last = (
            count // self._block_tokens
            for count in (request.num_prompt_tokens, request.num_prompt_tokens - 1)
        )
        ends = request.submission.message_ends
        last_message = ends[-1] // self._block_tokens if ends else 0
        is_near = last_message > 0 and before_last - last_message == 1
        return (last_message,) if is_near else (before_last, whole)

    def _ends_of_messages(self, sequence: Sequence, others: Iterable[int]) -> Iterable[int]:
        """Return the borders at or before ends of messages: the first end before all, since most prompts have
        the system's message and the tools in common, then the last ones, at a distance to `others`."""
        first, *rest = sequence.request.submission.message_ends or (0,)
        found = [first // self._block_tokens] if self._most_message_ends else []
        for end in reversed(rest):
            border = end // self._block_tokens
            is_apart = all(abs(border - it) >= self._least_apart for it in (*others, *found))
            if len(found) < self._most_message_ends and is_apart:
                found.append(border)
        return found
