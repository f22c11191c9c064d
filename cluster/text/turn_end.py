"""The token by which a model ends its turn in a chat: what its template writes behind an answer.

Most checkpoints name this token among their end tokens. Where one does not, an answer would go on, as if the
model were to write the user's next turn too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cluster.text.bounded_process import BoundsBrokenError
from cluster.text.chat_template import Chat, ChatRenderer, ChatTurn, Rendered

_QUESTION, _ANSWER = "probe question", "probe answer"
_MAX_CHARS = 1 << 18


class TurnEnd:
    """Finds the token out by letting the template render a chat, when that is first needed."""

    def __init__(
        self, renderer: ChatRenderer, token_to_id: Mapping[str, int], answer_ends: Sequence[str] = ()
    ) -> None:
        """`token_to_id` has the tokens that may end a turn by their texts. Where the notation of answers has
        `answer_ends`, these count, and not what the template writes: it may be a mark within answers."""
        self._renderer = renderer
        self._token_to_id = token_to_id
        self._turn = asyncio.Lock()
        self._found: tuple[int, ...] | None = None
        if answer_ends:
            self._found = tuple(token_to_id[it] for it in answer_ends if it in token_to_id)

    async def token_ids(self, wall_s: float) -> tuple[int, ...]:
        """Return the token, if there is one, or those of the notation; `wall_s` is the time that a template
        has for a date."""
        if self._found is not None:
            return self._found
        async with self._turn:
            if self._found is None:
                try:
                    self._found = await self._probed(wall_s)
                except BoundsBrokenError:  # another time the host may be less busy
                    return ()
        return self._found

    async def _probed(self, wall_s: float) -> tuple[int, ...]:
        turns = (("user", _QUESTION), ("assistant", _ANSWER), ("user", _QUESTION))
        chat = Chat(tuple(ChatTurn(role, text) for role, text in turns), add_generation_prompt=False)
        result = await self._renderer.try_render(chat, wall_s=wall_s, max_chars=_MAX_CHARS)
        if not isinstance(result, Rendered):
            return ()
        return token_behind(result.text, _ANSWER, self._token_to_id)


def token_behind(text: str, said: str, token_to_id: Mapping[str, int]) -> tuple[int, ...]:
    """Return the token that follows what was said in a text, apart from spaces, if one does: the longest."""
    behind = text.partition(said)[2].lstrip()
    found = max((token for token in token_to_id if behind.startswith(token)), key=len, default="")
    return (token_to_id[found],) if found else ()
