"""What an owner takes from all of its clients, and what it answers."""

from __future__ import annotations

from typing import TypeVar

from kvtransfer.codec import Codec, Message
from kvtransfer.errors import MAX_REASON_CHARS, StoreError, WireError, shown
from kvtransfer.store.messages.admin_requests import AdminAnswer, AdminRequest
from kvtransfer.store.messages.arena_mapping import ArenaGrant, RankHello
from kvtransfer.store.messages.engine_session import (
    EngineRequest,
    FetchedBlocks,
    FindAnswer,
    PutGrant,
    StoreWelcome,
    TierEvents,
    TierPart,
)
from kvtransfer.store.messages.record_exchange import OwnerHello, RecordsSent, SendRecords, StopSending

STORE_PROTOCOL = 4
# The most bytes of a frame between an owner and an engine core, another owner or an administrator: blocks of
# a long prompt, or a listing. The messages of an owner to the engine cores of its node may be longer.
MAX_OWNER_BYTES = 16 << 20


class StoreRefusal(Message, frozen=True):
    """Owner to any client: the connection is refused and closes."""

    reason: str


ToOwner = EngineRequest | RankHello | AdminRequest | OwnerHello | SendRecords | StopSending
FromOwner = (
    StoreWelcome
    | StoreRefusal
    | PutGrant
    | FindAnswer
    | FetchedBlocks
    | TierEvents
    | TierPart
    | ArenaGrant
    | OwnerHello
    | RecordsSent
    | AdminAnswer
)

TO_OWNER_CODEC: Codec[ToOwner] = Codec(ToOwner)
FROM_OWNER_CODEC: Codec[FromOwner] = Codec(FromOwner)

M = TypeVar("M")


def expect(message: FromOwner, kind: type[M]) -> M:
    """Return an owner's message if it is of this kind; otherwise raise `StoreError` with the reason of a
    refusal, or `WireError`."""
    if isinstance(message, StoreRefusal):
        raise StoreError(f"refused by the owner: {shown(message.reason, MAX_REASON_CHARS)}")
    if not isinstance(message, kind):
        raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message
