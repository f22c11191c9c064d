"""Ranks that form their groups when one of them is gone."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # the type stubs leave it out

from workers.engine.groups import RankGroups
from workers.errors import RankDiedError


def test_a_rank_that_died_before_its_links_were_made_is_an_error_of_that_kind() -> None:
    """It has told where it listens, and does not listen any more."""
    store = HashStore()
    store.set("device 0", "cpu")
    store.set("local 0", f"here {secrets.token_hex(16)}")
    with pytest.raises(RankDiedError, match="forming the replica's groups"):
        RankGroups(store, tp=2, pp=1, rank=1, device=torch.device("cpu"), host="127.0.0.1", host_id="here")
