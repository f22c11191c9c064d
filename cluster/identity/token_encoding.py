"""The text form of tokens that gateways issue."""

from __future__ import annotations

import base64
import binascii


def encode_token(data: bytes) -> str:
    """Return the text of a token."""
    return base64.urlsafe_b64encode(data).decode()


def decode_token(text: str) -> bytes:
    """Return the bytes of a token; b"" for a text that is none."""
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
