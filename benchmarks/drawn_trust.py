"""Clusters of their own: files of a drawn secret, which are removed when this process ends."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from kvtransfer.rpc.trust import TrustFiles, draw_files

_FOLDER = TemporaryDirectory(prefix="tandem-secrets-")


def draw_trust() -> TrustFiles:
    """Write a fresh secret."""
    return draw_files(Path(mkdtemp(dir=_FOLDER.name)))
