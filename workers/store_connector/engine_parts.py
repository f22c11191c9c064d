"""The parts of an engine core that the store connector works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workers.interfaces import EngineControl, RankChannel
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepRates


class EngineParts(NamedTuple):
    """The blocks that are stored and loaded, the scheduler whose sequences wait for them, the ranks that copy
    them, the measured rates of steps, the engine core itself, which plans and fails, the blocks of each group
    of layers with a window, and of each with states, which come after those."""

    pool: BlockPool
    scheduler: Scheduler
    ranks: RankChannel
    rates: StepRates
    control: EngineControl
    windows: Sequence[GroupPool] = ()
    states: Sequence[GroupPool] = ()
