"""The ranks of a simulated replica: they report plans after the time that steps take, and carry out transfers
without bytes.

All ranks of a replica are one here, whose steps take as long as those of all of them together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from cluster.simulation.step_model import StepModel
from cluster.simulation.store_copies import StoreCopies
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.messages import Shard
from kvtransfer.peer_messages import PieceSum
from kvtransfer.store.messages.store_orders import AttachStore, StoreGet, StorePut
from kvtransfer.transfer_orders import CloseLanding, OpenLanding, PushOrder, StopPush, VerifyOrder
from kvtransfer.transfer_reports import LandingClosed, PushDone, PushStopped, Verified
from workers.messages.rank_channel import (
    CompileGrammar,
    GrammarCompiled,
    RankDown,
    RankUp,
    ReleaseGrammar,
    StepPlan,
    StepReport,
)


class _DueReport(NamedTuple):
    """The report of a plan, before it is made."""

    step: int
    tokens: bytes
    began_at: float
    finished_at: float


_TRANSPORT = "simulated"
_TOKEN_BYTES = 4


class SimulatedRanks:
    """The rank channel of one replica (`workers.interfaces.RankChannel`)."""

    def __init__(
        self,
        model: StepModel,
        events: EventQueue,
        report: Callable[[int, RankUp], None],
        passes_over: Callable[[], bool],
        block_bytes: int,
        shard: Shard,
        max_sequences: int,
        store: StoreCopies | None = None,
    ) -> None:
        """`report` is called with the rank and each of its reports, when it is made. `passes_over` is called
        before that of a step, and returns whether the step is one of a run: then it is not reported. A block
        has `block_bytes`, and is sent as one piece, the whole `shard`. `store` copies to and from the node's
        store, if there is one."""
        self._model = model
        self._events = events
        self._report = report
        self._passes_over = passes_over
        self._block_bytes = block_bytes
        self._shard = shard
        self._store = store
        self._is_dead = False
        # The time in which steps ran.
        self.busy_s = 0.0
        # Reports of plans that are computed, the oldest first, with what each took.
        self._due: deque[_DueReport] = deque()
        self._link_free_at = 0.0
        # When the next report is made; events for other times were made for runs of steps that were cut.
        self._alarm_at = math.inf
        # Of each slot: the position at which it continues, and the token that it samples each time.
        self._positions = [0] * max_sequences
        self._tokens = [b"\0" * _TOKEN_BYTES] * max_sequences
        # The lengths of the transfers that are over, for the time lines.
        self.num_moved_bytes = 0

    def kill(self) -> None:
        """End the ranks: nothing is reported any more."""
        self._is_dead = True

    def send_to(self, rank: int, message: RankDown) -> None:
        """Send a message to the one rank that there is."""
        self.send(message)

    def send(self, message: RankDown) -> None:
        """Carry out a plan or an order, and report it when it would be done."""
        match message:
            case StepPlan():
                self._run(message)
            case PushOrder():
                self._push(message)
            case VerifyOrder(landing_id):
                self._answer(Verified(landing_id, ()))
            case StopPush(landing_id):
                self._answer(PushStopped(landing_id))
            case CloseLanding(landing_id):
                self._answer(LandingClosed(landing_id, ()))
            case CompileGrammar(grammar):
                self._answer(GrammarCompiled(grammar.digest))
            case AttachStore() | StorePut() | StoreGet():
                assert self._store is not None
                at, report = self._store.carry_out(message, self._block_bytes)
                self._events.at(at, lambda: self._tell(report))
            case OpenLanding() | ReleaseGrammar():
                pass
            case _:
                raise AssertionError(f"a simulated rank was sent {type(message).__name__}")

    # ------------------------------------------------------------------------------------------ steps

    def _run(self, plan: StepPlan) -> None:
        """Run a plan behind those before it."""
        began_at = max(self._events.clock.now(), self._due[-1].finished_at if self._due else 0.0)
        took_s = self._step_s(plan)
        tokens = b"".join([self._tokens[slot] for slot in plan.sample_slots])
        self._due.append(_DueReport(plan.step, tokens, began_at, began_at + took_s))
        if len(self._due) == 1:
            self._arm()

    def _arm(self) -> None:
        """Report the oldest plan when it is done."""
        self.report_first_at(self._due[0].finished_at if self._due else math.inf)

    def _ring(self, at: float) -> None:
        if at != self._alarm_at or self._is_dead:
            return
        self._alarm_at = math.inf
        if self._passes_over():
            return
        self._alarm_at = math.inf
        due = self._due.popleft()
        assert due.finished_at == at, "a report is made when it is due"
        self.busy_s += due.finished_at - due.began_at
        self._arm()
        self._report(0, StepReport(due.step, due.tokens, due.began_at, due.finished_at))

    @property
    def began_at(self) -> float:
        """When the oldest plan that is out began."""
        return self._due[0].began_at

    def report_first_at(self, at: float) -> None:
        """Make the next report at that time, not before."""
        if at != self._alarm_at:
            self._alarm_at = at
            if at < math.inf:
                self._events.at(at, lambda: self._ring(at))

    def run_of_steps(self, num_steps: int, num_decodes: int, num_context_tokens: int) -> list[float]:
        """Return when each of so many steps would be done, and then those that the plans out at a time would
        be by then: all of them of `num_decodes` decodes, the first behind so many tokens."""
        times = [it.finished_at for it in self._due]
        first = num_context_tokens + len(times) * num_decodes
        last, decode_s = first + num_steps * num_decodes, self._model.decode_s
        step_s = [decode_s(num_decodes, num_tokens) for num_tokens in range(first, last, num_decodes)]
        return times[:-1] + list(accumulate(step_s, initial=times[-1]))

    def skip(self, num_steps: int, times: Sequence[float], slots: Sequence[int]) -> None:
        """Let the plans that are out be those of so many steps later; `times` are those of `run_of_steps`,
        and `slots` those that decode."""
        num_out, first = len(self._due), self._due[0]
        self.busy_s += times[num_steps - 1] - first.began_at
        for slot in slots:
            self._positions[slot] += num_steps
        tokens, step = first.tokens, first.step + num_steps
        self._due.clear()
        for index in range(num_out):
            began_at, finished_at = times[num_steps + index - 1], times[num_steps + index]
            self._due.append(_DueReport(step + index, tokens, began_at, finished_at))
        self._arm()

    def token_of(self, slot: int) -> bytes:
        """Return the token that the slot samples each time."""
        return self._tokens[slot]

    def _step_s(self, plan: StepPlan) -> float:
        """Return what the plan takes, and move its slots on."""
        positions, chunks = self._positions, []
        num_sequences = num_context_tokens = 0
        for start in plan.starts:
            for sample in start.samples:
                self._tokens[sample.slot] = (sample.seed & 0x7FFFFFFF).to_bytes(_TOKEN_BYTES, "little")
        for entry in plan.entries:
            if entry.num_tokens > 1:
                chunks.append((entry.start, entry.num_tokens))
            else:
                num_sequences += 1
                num_context_tokens += entry.start
            for slot in (entry.slot, *entry.sample_slots):
                positions[slot] = entry.start + entry.num_tokens
        for slot in memoryview(plan.decodes).cast("I"):
            num_sequences += 1
            num_context_tokens += positions[slot]
            positions[slot] += 1
        return self._model.step_s(num_sequences, num_context_tokens, chunks)

    # -------------------------------------------------------------------------------------- transfers

    def _push(self, order: PushOrder) -> None:
        """Send blocks over the link, behind those before them."""
        num_bytes = self._block_bytes * len(order.moves)
        now = self._events.clock.now()
        began_at = max(now, self._link_free_at)
        took_s = self._model.push_s + num_bytes / self._model.link_bytes_s
        self._link_free_at = began_at + took_s
        self.num_moved_bytes += num_bytes
        pieces = tuple([PieceSum(move.block_index, 0, self._shard, 0) for move in order.moves])
        done = PushDone(
            order.push_id, order.landing_id, pieces, num_bytes, took_s, began_at, _TRANSPORT, order.traffic
        )
        self._events.at(self._link_free_at, lambda: self._tell(done))

    def _answer(self, report: RankUp) -> None:
        self._events.after(0.0, lambda: self._tell(report))

    def _tell(self, report: RankUp) -> None:
        if not self._is_dead:
            self._report(0, report)
