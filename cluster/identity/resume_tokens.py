"""Proofs that a caller may resume a request, which gateways of one cluster secret make for each other and for
themselves."""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from typing import NamedTuple

import msgspec

from cluster.errors import FieldViolation, ForbiddenError, InvalidRequestError
from cluster.identity.identity import Identity
from cluster.identity.token_encoding import decode_token, encode_token
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import Clock
from kvtransfer.rpc.trust import Trust

# Issuer, time and cap, each in 4 bytes.
_HEAD = struct.Struct(">III")
# Seconds since 1970 that a token can hold: until 2106.
_MAX_TIME = (1 << 32) - 1
# Bytes of a token's proof: enough to tell the token from all others.
_KEY_BYTES = 16
_FIELD = "resume_token"
_LENGTH_BYTES = 8
_PROMPTS = ("text", "token_ids", "chat")
# Fields of a request that decide none of its tokens, or stand in a resume token by themselves.
_NOT_DIGESTED = ("model", "request_id", "seed", "tenant", "priority", "resume", "resume_token", "pins")


class ResumeToken(NamedTuple):
    """The content of a token apart from its proof."""

    # A proof that tells the token from every other.
    key: bytes
    # `gateway_tag` of the gateway that ran the call; 0: it is of a version that did not name itself.
    issuer: int
    # Unix time.
    expires_at: int
    # The value to which `max_tokens` was cut; 0: it was not.
    capped_max_tokens: int


def gateway_tag(gateway_id: str) -> int:
    """Return the number by which resume tokens name a gateway; 0 stands for none."""
    return zlib.crc32(gateway_id.encode()) or int(bool(gateway_id))


class ResumeTokens:
    """Issues and checks the tokens that let a caller resume its own request, at any gateway.

    A token begins with the tag of its gateway and the time when it expires, 4 bytes each. Gateways of an
    earlier version read both as one time of 8 bytes, which has not come yet, and issue tokens whose tag is 0:
    each takes the tokens of the other while a cluster is rolled.
    """

    def __init__(self, trust: Trust, clock: Clock, lifetime_s: float, gateway_id: str = "") -> None:
        self._key = trust.key_for("tandem-resume-2")
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._issuer = gateway_tag(gateway_id)

    def issue(
        self,
        identity: Identity,
        tenant: str,
        request_id: str,
        seed: int,
        prompt: bytes,
        capped_max_tokens: int = 0,
    ) -> str:
        """Return a token for this request; `prompt` is the digest of all that decides its tokens. What
        `max_tokens` was cut to (0: it was not) holds wherever the request is resumed."""
        expires_at = min(int(self._clock.wall() + self._lifetime_s), _MAX_TIME)
        head = _HEAD.pack(self._issuer, expires_at, capped_max_tokens)
        return encode_token(head + self._mac(head, identity, tenant, request_id, seed, prompt))

    def check(
        self, token: str, identity: Identity, tenant: str, request_id: str, seed: int, prompt: bytes
    ) -> ResumeToken:
        """Return the content of the token; raise `InvalidRequestError` without a token, and `ForbiddenError`
        for one of another caller or request, or an expired one."""
        if not token:
            problem = "is missing; a resumed request needs the one that `accepted` gave"
            raise InvalidRequestError(FieldViolation(_FIELD, problem))
        data = decode_token(token)
        head, mac = data[: _HEAD.size], data[_HEAD.size :]
        if not hmac.compare_digest(mac, self._mac(head, identity, tenant, request_id, seed, prompt)):
            raise ForbiddenError(f"{_FIELD}: it is not the one of this caller, request id, seed and prompt")
        issuer, expires_at, cap = _HEAD.unpack(head)
        if expires_at <= self._clock.wall():
            raise ForbiddenError(f"{_FIELD}: it has expired; send the request as a new one")
        return ResumeToken(mac[:_KEY_BYTES], issuer, expires_at, cap)

    def _mac(
        self, head: bytes, identity: Identity, tenant: str, request_id: str, seed: int, prompt: bytes
    ) -> bytes:
        parts = (head, identity.owner, tenant, request_id, seed, prompt)
        return hmac.digest(self._key, msgspec.msgpack.encode(parts), "sha256")


def resume_digest(request: pb.GenerateRequest) -> bytes:
    """Return the SHA-256 of all that a call that resumes the request must repeat: the prompt, and the
    parameters that decide its tokens."""
    digest = hashlib.sha256()
    parameters = pb.GenerateRequest()
    for field, value in request.ListFields():
        if field.name in _PROMPTS:  # it may be long, and is not copied
            text = value.encode() if isinstance(value, str) else value.SerializeToString(deterministic=True)
            digest.update(field.number.to_bytes(_LENGTH_BYTES, "big"))
            digest.update(len(text).to_bytes(_LENGTH_BYTES, "big"))
            digest.update(text)
        elif field.name not in _NOT_DIGESTED:
            parameters.MergeFrom(pb.GenerateRequest(**{field.name: value}))
    digest.update(parameters.SerializeToString(deterministic=True))
    return digest.digest()
