"""What can go wrong when KV moves.

TransferError
├── WireError            a frame that is not one of ours: close the connection
│   └── UnknownMessageError  a message that another version has added: skip it, or refuse it
├── ProofError           the other side does not know the cluster secret: refuse it
├── TrustError           a file of this side's own secret or certificate cannot be used
├── IncompatibleError    the other side's model, dtype or layout differs: do not pair
├── PathError            a path could not be opened or fell below its floor: use another, or refuse
├── PeerGoneError        the other side closed or died: fail over
├── PushStoppedError     the push was stopped by an abort: nothing more is written
└── StoreError           a record or a tier of the store cannot be used: what it held is a miss
    ├── StoreIoError     reading or writing NVMe failed
    └── OtherVersionError  a record of another format version: ignored, its space is used again
"""

from __future__ import annotations


class TransferError(Exception):
    """Base of all errors of kvtransfer."""


class WireError(TransferError):
    """A frame could not be read as one of the connection's messages."""


class UnknownMessageError(WireError):
    """A frame is a message of a name that this version does not have on such a connection."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a message {name!r} is not known here: it is of another version, or of another use")
        self.name = name


class ProofError(TransferError):
    """The mutual proof of the cluster secret failed."""


class TrustError(TransferError):
    """The secret or the certificates of this process cannot be read; the text names the setting."""


class IncompatibleError(TransferError):
    """Two replicas cannot exchange KV; the text names each differing field."""


class PathError(TransferError):
    """No transport connects the two ranks, or the measured rate is below the floor."""


class PeerGoneError(TransferError):
    """The connection ended while it was needed."""


class PushStoppedError(TransferError):
    """The push was stopped on request before it completed."""


class StoreError(TransferError):
    """The store cannot provide what was requested, or one of its records is damaged."""


class StoreIoError(StoreError):
    """The file of a record could not be read or written, or holds something else."""


class OtherVersionError(StoreError):
    """The record is whole, but of another version of the format."""


# How text of another process appears in logs and in errors: on one line, without control characters, and
# no longer than is useful.
MAX_NAME_CHARS = 100
MAX_REASON_CHARS = 300


def shown(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return the text with escapes for unprintable characters, line breaks and marks of direction included,
    cut to `max_chars` with "..." as its end."""
    kept = text[: max_chars + 1]
    escaped = "".join(it if it.isprintable() else it.encode("unicode_escape").decode() for it in kept)
    return escaped if len(escaped) <= max_chars else escaped[: max(max_chars - 3, 0)] + "..."
