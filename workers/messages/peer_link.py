"""The Peer link, between two engine cores: the KV messages of `kvtransfer.peer_messages`, and `HandOver`."""

from __future__ import annotations

from kvtransfer.codec import Codec, Message
from kvtransfer.peer_messages import PeerMessage
from workers.messages.link import Submission


class HandOver(Message, frozen=True):
    """Prefill to decode, after the last manifest: the sequence state. `submission.samples[i].output` holds
    the first token of sample i; `gateway_id` and `gateway_epoch` say on which Link its tokens go.
    `transfer_seconds` is the time spent writing, `transfer_start` when it began (the writer's clock)."""

    landing_id: bytes
    submission: Submission
    gateway_id: str
    gateway_epoch: int
    num_moved_bytes: int
    transport: str
    transfer_start: float
    transfer_seconds: float


PeerLinkMessage = PeerMessage | HandOver

PEER_CODEC: Codec[PeerLinkMessage] = Codec(PeerLinkMessage)
