"""Block keys against a plain chain of SHA-256, from a root by HMAC."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.blocks.keys import KEY_BYTES, SLICE_KEYS, SLICE_TOKENS, extend_keys, key_slices, root_key

SECRET = bytes(range(32))
FINGERPRINT = bytes(range(16))
ROOT = root_key(SECRET, FINGERPRINT, "a")


def as_bytes(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def reference(tokens: list[int], block_tokens: int, group: str) -> list[bytes]:
    text = b""
    for field in (b"tandem-root-1", FINGERPRINT, group.encode()):
        text += struct.pack("<I", len(field)) + field
    keys = [hmac.digest(SECRET, text, "sha256")[:16]]
    for number in range(len(tokens) // block_tokens):
        block = as_bytes(tokens[number * block_tokens : (number + 1) * block_tokens])
        keys.append(hashlib.sha256(keys[-1] + block).digest()[:16])
    return keys[1:]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=100), st.sampled_from([1, 2, 16, 64]), st.text(max_size=9)
)
def test_keys_equal_the_reference(tokens: list[int], block_tokens: int, group: str) -> None:
    keys = extend_keys(root_key(SECRET, FINGERPRINT, group), as_bytes(tokens), block_tokens)
    assert list(keys) == reference(tokens, block_tokens, group)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64), st.integers(0, 4))
def test_extending_a_prefix_gives_the_same_keys(tokens: list[int], num_first: int) -> None:
    keys = extend_keys(ROOT, as_bytes(tokens), 16)
    parent = keys[num_first - 1] if num_first else ROOT
    assert keys[:num_first] + extend_keys(parent, as_bytes(tokens[num_first * 16 :]), 16) == keys


@pytest.mark.parametrize("block_tokens", [1, 16, 64, 1000, SLICE_TOKENS + 1])
def test_slices_of_a_long_prompt_are_the_keys_of_the_whole(block_tokens: int) -> None:
    tokens = as_bytes(list(range(70_000)))
    slices = list(key_slices(ROOT, tokens, block_tokens))
    assert tuple(key for each in slices for key in each) == extend_keys(ROOT, tokens, block_tokens)
    assert max(map(len, slices)) <= SLICE_KEYS
    assert max(map(len, slices)) * block_tokens <= max(SLICE_TOKENS, block_tokens)
    assert list(key_slices(ROOT, b"", block_tokens)) == []
    with pytest.raises(ValueError, match="not whole"):
        list(key_slices(ROOT, b"12345", block_tokens))


def test_a_key_depends_on_everything_before_it() -> None:
    tokens = as_bytes(list(range(64)))
    roots = [
        ROOT,
        root_key(SECRET, FINGERPRINT, "b"),
        root_key(SECRET, bytes(16), "a"),
        root_key(bytes(32), FINGERPRINT, "a"),
    ]
    keys = [key for root in roots for key in extend_keys(root, tokens, 16)]
    other_start = extend_keys(ROOT, as_bytes([99, *range(1, 64)]), 16)
    assert {len(key) for key in (*roots, *keys)} == {KEY_BYTES}
    assert len({*roots, *keys, *other_start}) == 4 + 16 + 4


def test_fields_of_the_root_cannot_flow_into_each_other() -> None:
    assert root_key(SECRET, b"ab", "c") != root_key(SECRET, b"a", "bc")


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="not whole"):
        extend_keys(ROOT, b"abcde", 16)
