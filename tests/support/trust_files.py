"""The cluster secret of tests that need one only, and its file for processes that are started with paths."""

from __future__ import annotations

from benchmarks.drawn_trust import draw_trust
from kvtransfer.rpc.trust import Trust

FILES = draw_trust()
TRUST = Trust.read(FILES)
