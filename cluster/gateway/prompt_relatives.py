"""Find the earlier prompt with which a prompt has the longest beginning in common, and where the two part.

Keeps hashes and lengths only. Sans-I/O, bounded, not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from cluster.metrics.ended_request import NO_RELATIVE, Relative
from cluster.text.preprocess import PreparedRequest

# The blocks of all prompts that are remembered, and those of one that are looked at.
MAX_BLOCKS = 1 << 16
MAX_PROMPT_BLOCKS = 1 << 11


@dataclass(slots=True, eq=False)
class _Prompt:
    """A remembered prompt. `hashes` are those of the keys of its full blocks."""

    request_id: str
    tenant: str
    num_tokens: int
    hashes: tuple[int, ...]


class PromptRelatives:
    """The latest prompts of a gateway, as many as have `max_blocks` together (None: `MAX_BLOCKS`).

    A key names all of the prompt up to its end, so the remembered keys have with each key all before it, and
    the last one that a prompt shares is found by bisection. Each block leads to the latest prompt with it.
    """

    def __init__(self, block_tokens: int, max_blocks: int | None = None) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = MAX_BLOCKS if max_blocks is None else max_blocks
        self._prompts: deque[_Prompt] = deque()
        self._hash_to_prompt: dict[int, _Prompt] = {}
        self._num_blocks = 0

    def meet(self, prepared: PreparedRequest, request_id: str) -> Relative:
        """Return the nearest relative of a prompt, and remember the prompt. A private one, and one without a
        full block, have none and are not remembered."""
        hashes = tuple(map(hash, prepared.block_keys[:MAX_PROMPT_BLOCKS]))
        if prepared.facts.is_private or not hashes:
            return NO_RELATIVE
        num_shared = bisect_left(hashes, True, key=lambda each: each not in self._hash_to_prompt)
        relative = NO_RELATIVE
        if num_shared:
            found = self._hash_to_prompt[hashes[num_shared - 1]]
            relative = Relative(
                found.request_id, found.tenant, found.num_tokens, num_shared * self._block_tokens
            )
        self._remember(_Prompt(request_id, prepared.facts.tenant, prepared.num_prompt_tokens, hashes))
        return relative

    def _remember(self, prompt: _Prompt) -> None:
        self._prompts.append(prompt)
        self._hash_to_prompt.update(dict.fromkeys(prompt.hashes, prompt))
        self._num_blocks += len(prompt.hashes)
        while self._num_blocks > self._max_blocks:
            oldest = self._prompts.popleft()
            self._num_blocks -= len(oldest.hashes)
            for each in oldest.hashes:
                if self._hash_to_prompt[each] is oldest:
                    del self._hash_to_prompt[each]
