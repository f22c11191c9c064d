"""The ends of a chat's messages in the tokens of a prompt: where the chat template writes the special tokens
with which messages end.

Models with recurrent states keep snapshots there, because prompts that share messages part at such ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from cluster.text.bounded_process import BoundsBrokenError
from cluster.text.chat_template import Chat, ChatRenderer, ChatTurn, Rendered
from cluster.text.turn_end import token_behind
from workers.messages.link import MAX_MESSAGE_ENDS

_SYSTEM = ("system", "probe system")
_DIALOGUE = (("user", "probe question"), ("assistant", "probe answer"), ("user", "probe again"))
_MAX_CHARS = 1 << 18


class MessageEnds:
    """Finds the ends of messages. Which tokens end them is tried out by rendering a chat, once, when this is
    first needed."""

    def __init__(self, renderer: ChatRenderer, token_to_id: Mapping[str, int]) -> None:
        """`token_to_id` has the special tokens that may end a message, by their texts."""
        self._renderer = renderer
        self._token_to_id = token_to_id
        self._turn = asyncio.Lock()
        self._end_ids: tuple[int, ...] | None = None

    async def positions(self, prompt: bytes, wall_s: float) -> tuple[int, ...]:
        """Return how many tokens of a prompt (uint32, little-endian) are before the end of each message,
        ascending. Of more than `MAX_MESSAGE_ENDS` these are the first, since most prompts have the system's
        message and the tools in common, and the last. `wall_s` is the time that a template has for a date."""
        end_ids = await self._known_ends(wall_s)
        if not end_ids:
            return ()
        is_end = np.isin(np.frombuffer(prompt, dtype="<u4"), end_ids)
        # Of tokens that follow one another, the first ends the message.
        is_end[1:] &= ~is_end[:-1]
        found: list[int] = np.flatnonzero(is_end).tolist()
        found = [position for position in found if position > 0]
        if len(found) > MAX_MESSAGE_ENDS:
            found = [found[0], *found[1 - MAX_MESSAGE_ENDS :]]
        return tuple(found)

    async def _known_ends(self, wall_s: float) -> tuple[int, ...]:
        async with self._turn:
            if self._end_ids is None:
                try:
                    self._end_ids = await self._probed(wall_s)
                except BoundsBrokenError:  # another time the host may be less busy
                    return ()
        return self._end_ids

    async def _probed(self, wall_s: float) -> tuple[int, ...]:
        """Return the tokens behind messages of a chat, without a system's message where the template refuses
        that."""
        for turns in ((_SYSTEM, *_DIALOGUE), _DIALOGUE):
            chat = Chat(tuple(ChatTurn(role, text) for role, text in turns))
            result = await self._renderer.try_render(chat, wall_s=wall_s, max_chars=_MAX_CHARS)
            if isinstance(result, Rendered):
                ends = [token_behind(result.text, text, self._token_to_id) for _, text in turns]
                return tuple(sorted({token for end in ends for token in end}))
        return ()
