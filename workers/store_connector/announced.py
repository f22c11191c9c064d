"""Prompts of requests that wait in gateways and will probably come here: the blocks that the store has of
them are loaded early, as for requests that wait here.

    Announce --> pending --take--> asked --loaded--> on the device, as far as it came
                    |                |                  |
                    +----------------+------------------+--> forgotten: submitted, cancelled, 30 s are over,
                                                                 or its gateway's link has ended

Sans I/O: time is an argument. `workers.store_connector.connector` asks, `block_loader` loads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from workers.messages.link import GatewayKey

# After this time the request has gone elsewhere, or waits for so long that the loaded blocks may be evicted
# again.
ANNOUNCED_S = 30.0
# The most prompts, and bytes of their keys, that are kept. Prompts announced beyond are loaded when they
# come.
MAX_PROMPTS = 256
MAX_KEY_BYTES = 4 << 20
# At most one in this many blocks of the replica, or of a sharing group's share, holds data loaded for
# requests that have not come.
POOL_SHARE = 4


@dataclass(slots=True)
class AnnouncedPrompt:
    """The prompt of an announced request. `keys` are the keys of all its full blocks, the last token's
    excluded; `gateway` announced it last."""

    gateway: GatewayKey
    request_id: str
    sharing_group: str
    keys: tuple[bytes, ...]
    expires_at: float
    # The number of its blocks on the device when its load began.
    num_held: int = 0
    # The number of blocks behind these that are being loaded, or have come.
    num_blocks: int = 0
    # The tiers from which these blocks have come.
    tiers: Sequence[str] = ()

    @property
    def num_key_bytes(self) -> int:
        """The memory that its keys take."""
        return sum(map(len, self.keys))

    def num_loaded_blocks(self, num_matched: int) -> dict[str, int]:
        """Return, by tier, how many of the blocks that were loaded for it are among the first `num_matched`
        of its prompt."""
        return dict(Counter(self.tiers[: max(0, num_matched - self.num_held)]))


class AnnouncedPrompts:
    """The announced prompts, in the order of their latest announcements."""

    def __init__(self) -> None:
        # All prompts, and the prompts of which nothing was loaded yet.
        self._prompts: OrderedDict[str, AnnouncedPrompt] = OrderedDict()
        self._pending: OrderedDict[str, AnnouncedPrompt] = OrderedDict()
        self._num_key_bytes = 0
        # Totals: prompts, and blocks that were on the device before their request came.
        self.num_announced = 0
        self.num_loaded_blocks = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(
        self,
        gateway: GatewayKey,
        request_id: str,
        sharing_group: str,
        keys: tuple[bytes, ...],
        now: float,
    ) -> bool:
        """Note an announced prompt; False when it is known, and kept for longer, or there are too many."""
        if (known := self._prompts.get(request_id)) is not None:
            known.gateway, known.expires_at = gateway, now + ANNOUNCED_S
            self._prompts.move_to_end(request_id)
            return False
        prompt = AnnouncedPrompt(gateway, request_id, sharing_group, keys, now + ANNOUNCED_S)
        if len(self._prompts) >= MAX_PROMPTS:
            return False
        if self._num_key_bytes + prompt.num_key_bytes > MAX_KEY_BYTES:
            return False
        self._prompts[request_id] = self._pending[request_id] = prompt
        self._num_key_bytes += prompt.num_key_bytes
        self.num_announced += 1
        return True

    @property
    def next(self) -> AnnouncedPrompt | None:
        """The first prompt of which nothing was loaded yet."""
        return next(iter(self._pending.values()), None)

    def take(self) -> None:
        """Count the `next` prompt among the prompts that are looked after."""
        self._pending.popitem(last=False)

    def begin(self, request_id: str, num_held: int, num_blocks: int) -> None:
        """Note that `num_blocks` blocks are being loaded, behind those that are held."""
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.num_held, prompt.num_blocks = num_held, num_blocks

    def loaded(self, request_id: str, tiers: Sequence[str]) -> None:
        """Note the tiers from which blocks have come."""
        self.num_loaded_blocks += len(tiers)
        if (prompt := self._prompts.get(request_id)) is not None:
            prompt.num_blocks, prompt.tiers = len(tiers), tiers

    def num_blocks(self, group: str | None = None) -> int:
        """Return how many blocks were or are being loaded for prompts of this group (None: of all)."""
        return sum(it.num_blocks for it in self._prompts.values() if group in (None, it.sharing_group))

    def forget(self, request_id: str) -> AnnouncedPrompt | None:
        """Remove and return a prompt, if it is here."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._pending.pop(request_id, None)
            self._num_key_bytes -= prompt.num_key_bytes
        return prompt

    def drop(self, group: str | None) -> list[AnnouncedPrompt]:
        """Remove and return the prompts of this group (None: all)."""
        gone = [it for it in self._prompts.values() if group in (None, it.sharing_group)]
        for prompt in gone:
            self.forget(prompt.request_id)
        return gone

    def drop_gateway(self, gateway: GatewayKey) -> list[AnnouncedPrompt]:
        """Remove and return the prompts that this gateway has announced: nobody will say when they do not
        come."""
        gone = [it for it in self._prompts.values() if it.gateway == gateway]
        for prompt in gone:
            self.forget(prompt.request_id)
        return gone

    def expire(self, now: float) -> list[AnnouncedPrompt]:
        """Remove and return the prompts that were announced long ago."""
        gone: list[AnnouncedPrompt] = []
        while self._prompts and (first := next(iter(self._prompts.values()))).expires_at <= now:
            self.forget(first.request_id)
            gone.append(first)
        return gone

    def check(self) -> None:
        """Assert the bounds and that the counts are right."""
        assert self._pending.keys() <= self._prompts.keys()
        assert self._num_key_bytes == sum(it.num_key_bytes for it in self._prompts.values()) <= MAX_KEY_BYTES
        assert len(self._prompts) <= MAX_PROMPTS
