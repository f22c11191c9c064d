"""Block keys against a plain SHA-256 chain."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.keys import KEY_BYTES, block_keys, extend_keys, root_key

FINGERPRINT = bytes(range(16))


def as_bytes(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def reference(tokens: list[int], block_tokens: int, tenant: str) -> list[bytes]:
    text = b""
    for field in (b"tandem-key-1", FINGERPRINT, tenant.encode()):
        text += struct.pack("<I", len(field)) + field
    keys = [hashlib.sha256(text).digest()[:16]]
    for number in range(len(tokens) // block_tokens):
        block = as_bytes(tokens[number * block_tokens : (number + 1) * block_tokens])
        keys.append(hashlib.sha256(keys[-1] + block).digest()[:16])
    return keys[1:]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=100), st.sampled_from([1, 2, 16, 64]), st.text(max_size=9)
)
def test_keys_equal_the_reference(tokens: list[int], block_tokens: int, tenant: str) -> None:
    keys = block_keys(as_bytes(tokens), block_tokens, FINGERPRINT, tenant)
    assert list(keys) == reference(tokens, block_tokens, tenant)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64), st.integers(0, 4))
def test_extending_a_prefix_gives_the_same_keys(tokens: list[int], num_first: int) -> None:
    keys = block_keys(as_bytes(tokens), 16, FINGERPRINT, "a")
    parent = keys[num_first - 1] if num_first else root_key(FINGERPRINT, "a")
    assert keys[:num_first] + extend_keys(parent, as_bytes(tokens[num_first * 16 :]), 16) == keys


def test_a_key_depends_on_everything_before_it() -> None:
    tokens = list(range(64))
    keys = block_keys(as_bytes(tokens), 16, FINGERPRINT, "a")
    assert {len(key) for key in keys} == {KEY_BYTES}
    other_tenant = block_keys(as_bytes(tokens), 16, FINGERPRINT, "b")
    other_model = block_keys(as_bytes(tokens), 16, bytes(16), "a")
    other_start = block_keys(as_bytes([99, *tokens[1:]]), 16, FINGERPRINT, "a")
    assert len({*keys, *other_tenant, *other_model, *other_start}) == 16


def test_fields_of_the_root_cannot_flow_into_each_other() -> None:
    assert root_key(b"ab", "c") != root_key(b"a", "bc")


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="not whole"):
        block_keys(b"abcde", 16, FINGERPRINT, "")
