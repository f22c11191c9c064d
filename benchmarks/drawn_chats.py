"""Drawn chats as a chat template renders them, turn by turn, with the places where their messages end.

As the templates of models that reason do, the prompt opens the reasoning of the answer, and the reasoning of
answers before the last question is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Special tokens: the end of a message, its beginning, and the marks of reasoning.
END, START, REASONING, REASONING_END = 1, 2, 3, 4
_SYSTEM, _USER, _ASSISTANT, _TOOL = 5, 6, 7, 8
_FIRST_CONTENT, _VOCABULARY = 16, 1 << 17

_NUM_SYSTEMS = 12
_MOST_TURNS = 8
# The part of questions that their user writes once more, in another way.
_EDITED = 0.15


class ChatTurn(NamedTuple):
    """One request of a chat: token ids of the prompt, how many of them are before the end of each message,
    the answer with its reasoning, and how long the user, or the tool, takes before."""

    prompt: np.ndarray
    message_ends: tuple[int, ...]
    answer: np.ndarray
    think_s: float


class DrawnChat(NamedTuple):
    """The requests of one chat, the first of which arrives at `begins_at`."""

    begins_at: float
    turns: list[ChatTurn]


class _Message(NamedTuple):
    role: int
    content: np.ndarray
    reasoning: np.ndarray | None = None


class ChatDrawer:
    """Draws chats that share the messages of a few systems. Those of agents have several calls of tools
    between two questions."""

    def __init__(self, seed: int, *, are_agents: bool) -> None:
        self._random = np.random.default_rng(seed)
        self._are_agents = are_agents
        lengths = self._random.integers(500, 4000, _NUM_SYSTEMS)
        self._systems = [self._text(int(length)) for length in lengths]
        weights = 1 / np.arange(1, _NUM_SYSTEMS + 1)
        self._weights = weights / weights.sum()

    def draw(self, num_chats: int, rate_per_s: float) -> list[DrawnChat]:
        """Return chats that begin by a Poisson process."""
        begins = np.cumsum(self._random.exponential(1 / rate_per_s, num_chats))
        return [DrawnChat(float(at), self._turns()) for at in begins]

    def _turns(self) -> list[ChatTurn]:
        system = self._systems[int(self._random.choice(_NUM_SYSTEMS, p=self._weights))]
        history = [_Message(_SYSTEM, system)]
        turns: list[ChatTurn] = []
        for number in range(int(self._random.integers(1, _MOST_TURNS + 1))):
            question = _Message(_USER, self._text(self._length(120)))
            if number and self._random.random() < _EDITED:
                last = max(at for at, message in enumerate(history) if message.role == _USER)
                history = history[:last]
            history.append(question)
            think_s = float(self._random.exponential(20.0)) if number else 0.0
            num_calls = int(self._random.integers(1, 6)) if self._are_agents else 0
            for call in range(num_calls + 1):
                answer = _Message(_ASSISTANT, self._text(self._length(80)), self._text(self._length(150)))
                turns.append(self._turn(history, answer, think_s if call == 0 else 1.0))
                history.append(answer)
                if call < num_calls:
                    history.append(_Message(_TOOL, self._text(self._length(400))))
        return turns

    def _turn(self, history: Sequence[_Message], answer: _Message, think_s: float) -> ChatTurn:
        last = max(at for at, message in enumerate(history) if message.role == _USER)
        parts = [_rendered(message, keeps_reasoning=at > last) for at, message in enumerate(history)]
        ends = [end - 1 for end in itertools.accumulate(map(len, parts))]
        opening = np.asarray([START, _ASSISTANT, REASONING])
        return ChatTurn(np.concatenate([*parts, opening]), tuple(ends), _spoken(answer), think_s)

    def _text(self, num_tokens: int) -> np.ndarray:
        return self._random.integers(_FIRST_CONTENT, _VOCABULARY, num_tokens)

    def _length(self, median: int) -> int:
        return int(np.clip(self._random.lognormal(np.log(median), 0.8), 4, 16 * median))


def _rendered(message: _Message, *, keeps_reasoning: bool) -> np.ndarray:
    head = [START, message.role]
    if message.reasoning is None or not keeps_reasoning:
        return np.concatenate([head, message.content, [END]])
    return np.concatenate([head, [REASONING], _spoken(message)])


def _spoken(message: _Message) -> np.ndarray:
    assert message.reasoning is not None
    return np.concatenate([message.reasoning, [REASONING_END], message.content, [END]])
