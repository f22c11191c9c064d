"""The block that an open landing has in a group of layers with a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.messages import BlockSpan
from kvtransfer.protocol.landing_part import LandingPart
from kvtransfer.protocol.verification import Verification


@dataclass(slots=True)
class StatePart(LandingPart):
    """The one block that takes the state behind the last token that is handed over. It is written last, when
    nothing changes it any more, and stands in the place of the landing's last block, with however many tokens
    the sequence ends. The state comes from the writer, also where the blocks before it were cached here."""

    def first_needed(self, num_tokens: int, block_tokens: int) -> int:
        return self.first

    def allows(self, end: int, num_tokens: int, group: int, pieces: Verification, block_tokens: int) -> bool:
        return end == num_tokens and pieces.is_good(group, self.first)

    def pass_on(self, num_valid_tokens: int, block_tokens: int) -> BlockSpan:
        if num_valid_tokens == 0:
            self.pool.release(self.written)
            return BlockSpan(0, ())
        return BlockSpan((num_valid_tokens - 1) // block_tokens, tuple(self.written))
