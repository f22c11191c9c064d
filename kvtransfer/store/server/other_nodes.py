"""What a node uses of the others: where they have records, and the records themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtransfer.common.moving_average import RateMeter
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.index.holder_reader import Holder
from kvtransfer.store.messages.admin_requests import IndexStat, TierStat
from kvtransfer.store.messages.records import RecordId, RecordInfo, Tier
from kvtransfer.store.remote.owner_link import Wanted


class HolderIndex(Protocol):
    """Where records are: `kvtransfer.store.index.index.Index`, or that of a simulation."""

    def announce(self, info: RecordInfo, tier: Tier | None) -> None:
        """Tell where this node has the record now; None: nowhere."""

    async def find(self, space: bytes, chain: bytes, keys: Sequence[bytes]) -> list[tuple[Holder, ...]]:
        """Return the holders of each block on other nodes, in order of the keys, within a budget."""

    def stat(self) -> IndexStat:
        """Return the statistics of this index so far."""

    async def close(self) -> None:
        """Tell the others that this node has nothing any more."""


class RecordExchange(Protocol):
    """Records of other nodes: `kvtransfer.store.remote.exchange.Exchange`, or that of a simulation."""

    rate: RateMeter

    async def fetch(
        self, holder: ReplicaIdentity, address: str, wanted: Sequence[Wanted]
    ) -> dict[RecordId, int]:
        """Fetch these records into their slots. Return those that arrived, with their checksum; the slots of
        the others are reported as free."""

    def is_cooling(self, holder: ReplicaIdentity) -> bool:
        """Whether `fetch` would not contact that owner now, because it failed a short while ago."""

    def stat(self) -> TierStat:
        """Return statistics of the records that other nodes sent."""

    async def close(self) -> None:
        """End the exchange."""
