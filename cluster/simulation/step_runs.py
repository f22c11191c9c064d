"""Runs of steps of a simulated replica: many steps that only decode are done at once, at the moments at which
gateways hear of them or anything else looks.

    begin ---- step ---- step ---- step ---- step ---- step ---- step ---- step
                                    |                   |                   |
                        a block is filled: KV events   a load is due       the report after it is a single one
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.simulation.gateway_end import GatewayEnd
from cluster.simulation.simulated_ranks import SimulatedRanks
from kvtransfer.common.clock import Clock
from workers.disagg.request_table import RequestTable
from workers.replica.engine_decisions import STALL_REPORT_S
from workers.replica.gateway_links import GatewayLinks
from workers.replica.step_loop import StepLoop
from workers.scheduler.decode_run import MOST_STEPS, DecodeRun

# A run of fewer steps costs more than the steps.
_LEAST_STEPS = 2


class _StepRun(NamedTuple):
    """Steps that are passed over, at most so many; when each and those after them are done, when the first of
    them began, and the token that each sequence samples in every one."""

    num_steps: int
    times: list[float]
    began_at: float
    tokens: list[bytes]


class StepRuns:
    """The run of one replica, if there is one, and the parts of the replica that it moves on."""

    def __init__(
        self,
        decodes: DecodeRun,
        ranks: SimulatedRanks,
        steps: StepLoop,
        gateways: GatewayLinks,
        ends: Sequence[GatewayEnd],
        table: RequestTable,
        clock: Clock,
    ) -> None:
        """`ends` are those of all links to gateways."""
        self._decodes = decodes
        self._ranks = ranks
        self._steps = steps
        self._gateways = gateways
        self._ends = ends
        self._table = table
        self._clock = clock
        self._run: _StepRun | None = None
        # When the replica was looked after since the latest step that is done.
        self._looks: list[float] = []
        # The step of the run that is reported at its time; none: the report after the run is.
        self._noted = 0

    @property
    def is_on(self) -> bool:
        """Whether steps are passed over."""
        return self._run is not None

    @property
    def is_intact(self) -> bool:
        """Whether there is a run that nothing has ended, and which has steps left."""
        run, decodes = self._run, self._decodes
        return run is not None and decodes.num_done < run.num_steps and decodes.is_intact

    def begin(self, may_begin: Callable[[], bool]) -> None:
        """Begin a run, if the next steps can be passed over, and it `may_begin`."""
        decodes = self._decodes
        num_steps = decodes.begin(self._steps.depth)
        if num_steps < _LEAST_STEPS or not may_begin():
            return
        times = self._ranks.run_of_steps(num_steps, len(decodes.sequences), decodes.num_context_tokens)
        if times[-1] - times[-2] >= STALL_REPORT_S:
            return  # each of them is reported as a stall
        tokens = [self._ranks.token_of(sequence.slot) for sequence in decodes.sequences]
        self._run = _StepRun(num_steps, times, self._ranks.began_at, tokens)

    def wait(self) -> None:
        """Wait for the next step of which gateways hear, as blocks change or a load is due, or for the report
        after the run."""
        run = self._run
        assert run is not None
        due = bisect_left(run.times, self._gateways.next_load_at) + 1
        block_step = self._decodes.next_block_step
        noted = due if block_step is None else min(due, block_step)
        if noted > run.num_steps:
            # After a run as long as any, the next one begins.
            noted = MOST_STEPS if run.num_steps == MOST_STEPS else 0
        self._noted = noted
        self._ranks.report_first_at(run.times[noted - 1 if noted else run.num_steps])

    def passes_look(self) -> bool:
        """Return whether a turn at this moment would change nothing, and send nothing: only steps are under
        way, and no load is due. Otherwise do the steps of the run that are over by now."""
        now = self._clock.now()
        if self._run is None or now >= self._gateways.next_load_at:
            self.advance()
            return False
        self._looks.append(now)
        return True

    def passes_over(self) -> bool:
        """Do the steps that are over by now. Return whether the one that is reported now was among them, and
        else end the run."""
        if self._run is None or not self._noted:
            self.end()
            return False
        self.advance(self._noted)
        if self._decodes.num_done == self._run.num_steps:
            self.end()
        return True

    def advance(self, until: int = MOST_STEPS) -> None:
        """Do the steps of the run that are over by now, those after `until` left out. What they have sampled
        is sent by `end`."""
        run, before = self._run, self._decodes.num_done
        if run is None:
            return
        num_done = bisect_right(run.times, self._clock.now(), before, max(before, min(until, run.num_steps)))
        if num_done == before:
            self._pass_looks()
            return
        self._decodes.advance(num_done, run.tokens)
        times = run.times[before:num_done]
        begins = [run.times[before - 1] if before else run.began_at, *times]
        step_s = [end - begin for begin, end in zip(begins, times, strict=False)]
        self._steps.pass_over(step_s, len(run.tokens), times[-1])
        if self._looks:
            times = sorted([*times, *self._looks])  # of one time the step is first
            self._looks.clear()
        self._gateways.passed(times)

    def _pass_looks(self) -> None:
        if self._looks:
            self._gateways.passed(self._looks)
            self._looks.clear()

    def end(self) -> None:
        """Do the steps of the run that are over by now, send their tokens, and let single steps follow."""
        self.advance()
        run, self._run = self._run, None
        if run is None:
            return
        decodes, num_done = self._decodes, self._decodes.num_done
        if not num_done:
            self._ranks.report_first_at(run.times[0])
            return
        self._ranks.skip(num_done, run.times, [sequence.slot for sequence in decodes.sequences])
        self._steps.skip(num_done)
        deltas = decodes.end(run.tokens)
        for end in self._ends:
            end.pass_over(run.times[:num_done], deltas)
        for delta in deltas:
            self._table.post_delta(delta)
