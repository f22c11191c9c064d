"""Block keys: chained names of blocks, equal exactly where the KV is interchangeable and may be shared.

    root     = HMAC(root secret, "tandem-root-1" | model fingerprint | sharing group), each with its length
    key of a = H(parent's key, the block's token ids as uint32 little-endian)

HMAC and H are SHA-256 cut to 128 bits. Gateways alone know the root secret. Without it nobody can compute the
keys of a prompt that is guessed, or find out from keys that two groups have sent the same prompt. Replicas
continue a chain from its root, which does not reveal the secret.

The state behind a block has a key of its own, derived from the block's, by which stores keep the two apart.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

KEY_BYTES = 16
TOKEN_BYTES = 4

# What `key_slices` hashes at a time, in about half a millisecond: keys, and tokens where blocks are large.
SLICE_KEYS = 512
SLICE_TOKENS = 1 << 15

_DOMAIN = b"tandem-root-1"
_STATE_DOMAIN = b"tandem-state-1"
_LENGTH = struct.Struct("<I")


def extend_keys(parent: bytes, tokens: bytes, block_tokens: int) -> tuple[bytes, ...]:
    """Compute the keys of the full blocks of `tokens` that follow the block `parent` (or a root); a last
    partial block has none.

    `tokens` are token ids as uint32 little-endian. Raises `ValueError` if they are not whole.
    """
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are not whole uint32 token ids")
    stride = block_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    key, sha256 = parent, hashlib.sha256
    for start in range(0, len(tokens) - stride + 1, stride):
        key = sha256(key + tokens[start : start + stride]).digest()[:KEY_BYTES]
        keys.append(key)
    return tuple(keys)


def key_slices(parent: bytes, tokens: bytes, block_tokens: int) -> Iterator[tuple[bytes, ...]]:
    """Compute the keys of `extend_keys` slice by slice, so that an event loop can do other work in between:
    the keys of a prompt of 100,000 tokens take milliseconds. Raises `ValueError` as `extend_keys` does."""
    stride = block_tokens * TOKEN_BYTES * max(1, min(SLICE_KEYS, SLICE_TOKENS // block_tokens))
    for start in range(0, len(tokens), stride):
        keys = extend_keys(parent, tokens[start : start + stride], block_tokens)
        parent = keys[-1] if keys else parent
        yield keys


def state_key(key: bytes) -> bytes:
    """Compute the key of the recurrent state behind the last token of the block of this key."""
    return hashlib.sha256(_STATE_DOMAIN + key).digest()[:KEY_BYTES]


def root_key(secret: bytes, fingerprint: bytes, sharing_group: str) -> bytes:
    """Compute the parent of every first block of one sharing group under one model."""
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for field in (_DOMAIN, fingerprint, sharing_group.encode()):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()[:KEY_BYTES]
