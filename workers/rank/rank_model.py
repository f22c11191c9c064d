"""A rank's part of the model, joined with the parts of the other ranks of its stage."""

from __future__ import annotations

from typing import NamedTuple

from workers.model.decoder import Decoder
from workers.model.parallel import Unfinished, parallelize
from workers.rank.collectives import RankGroups
from workers.rank.expert_copier import ExpertCopier


class RankModel(NamedTuple):
    """A loaded `decoder`, the collectives of its rank, those of a computation that are not done yet, and what
    moves copies of its experts."""

    decoder: Decoder
    groups: RankGroups
    unfinished: Unfinished
    copier: ExpertCopier

    @classmethod
    def join(cls, decoder: Decoder, groups: RankGroups) -> RankModel:
        """Join a decoder, in place, with those of the stage's other ranks. Raises `WorkerError` if they
        cannot have copies of experts as configured."""
        unfinished = Unfinished(groups, decoder)
        parallelize(decoder, unfinished)
        return cls(decoder, groups, unfinished, ExpertCopier(decoder, groups))
