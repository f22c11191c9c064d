"""Records which product files are entered, and reads the lists of them in `docs/architecture.md`."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent.parent
_PRODUCT = tuple(f"{ROOT / name}/" for name in ("cluster", "workers", "router", "kvtransfer"))


class EnteredFiles:
    """Product files whose functions were called while recording, also in threads begun while watching."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._is_recording = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this, threads that begin report their calls too."""
        threading.setprofile(self._on_event)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within this, calls count."""
        self._is_recording = True
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._is_recording = False

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and self._is_recording and path.startswith(_PRODUCT) and "_pb2" not in path:
            self.paths.add(path.removeprefix(f"{ROOT}/"))


def documented_files(heading: str) -> set[str]:
    """The paths listed under this heading of `docs/architecture.md`, one at the beginning of each item."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/architecture.md has no section {heading!r}"
    return set(re.findall(r"^- `([\w/]+\.py)`", section.group(1), re.MULTILINE))
