"""Block keys: chained names of blocks, equal exactly where the KV bytes are interchangeable.

    root     = H(len-prefixed "tandem-key-1", model fingerprint, tenant)
    key of a = H(parent's key, the block's token ids as uint32 little-endian)

H is SHA-256 cut to 128 bits: a fast hash could be forged to read another tenant's cache.
"""

from __future__ import annotations

import hashlib
import struct

KEY_BYTES = 16
TOKEN_BYTES = 4

_DOMAIN = b"tandem-key-1"
_LENGTH = struct.Struct("<I")


def block_keys(prompt: bytes, block_tokens: int, fingerprint: bytes, tenant: str) -> tuple[bytes, ...]:
    """Compute the keys of the prompt's full blocks; a last partial block has none.

    `prompt` holds token ids as uint32 little-endian. Raises `ValueError` if it is not whole tokens.
    """
    return extend_keys(root_key(fingerprint, tenant), prompt, block_tokens)


def extend_keys(parent: bytes, tokens: bytes, block_tokens: int) -> tuple[bytes, ...]:
    """Compute the keys of the full blocks of `tokens` that follow the block `parent` (or a root)."""
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are not whole uint32 token ids")
    stride = block_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    key = parent
    for start in range(0, len(tokens) - stride + 1, stride):
        key = hashlib.sha256(key + tokens[start : start + stride]).digest()[:KEY_BYTES]
        keys.append(key)
    return tuple(keys)


def root_key(fingerprint: bytes, tenant: str) -> bytes:
    """Compute the parent of every first block of one tenant under one model."""
    digest = hashlib.sha256()
    for field in (_DOMAIN, fingerprint, tenant.encode()):
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()[:KEY_BYTES]
