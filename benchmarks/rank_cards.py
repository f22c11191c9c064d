"""The cards of ranks that are processes of one machine: taken in turn."""

from __future__ import annotations

import os

import torch


def card_of(rank: int) -> torch.device:
    """Return a rank's card among those that this process sees."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def own_card(rank: int) -> dict[str, str]:
    """Return what to add to the environment of a rank's process so that it sees its card alone, as "cuda:0":
    that is how Ray starts ranks. Without cards it is nothing."""
    num_cards = torch.cuda.device_count()
    if not num_cards:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(num_cards)]
    return {"CUDA_VISIBLE_DEVICES": names[rank % num_cards]}
