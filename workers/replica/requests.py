"""The requests of one replica: from a gateway's Link into the scheduler, and the outcome of steps back.

The engine core calls this. `workers.disagg.request_table` keeps the record of each request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set

from msgspec.structs import replace

from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from workers.disagg.kv_hand_overs import KvHandOvers
from workers.disagg.request_table import RequestTable
from workers.disagg.submission_check import find_problem
from workers.errors import CapacityError, QueueFullError
from workers.messages.link import (
    GatewayKey,
    IsolationReport,
    PrefillReport,
    PromptLogprobs,
    RequestFailed,
    RequestKey,
    StallReport,
    Submission,
    TokenDelta,
)
from workers.replica.gateway_links import GatewayLinks
from workers.scheduler.expected_time import ExpectedTime
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import PromptDone, StepOutcome

_REFUSED_RETRY_S = 1.0
# The most bytes of the log-probabilities of a prompt that are sent to the gateway as one part.
LOGPROB_PART_BYTES = 64 << 10

_log = logging.getLogger("tandem.engine_core")


class Requests:
    """Admits, cancels and hands back requests, and passes on the outcomes of their steps."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        table: RequestTable,
        gateways: GatewayLinks,
        scheduler: Scheduler,
        hand_overs: KvHandOvers,
        work: ExpectedTime,
        clock: Clock,
        vocab_size: int,
    ) -> None:
        self._identity = identity
        self._table = table
        self._gateways = gateways
        self._scheduler = scheduler
        self._kv_sender, self._kv_receiver, self._migration = hand_overs
        self._work = work
        self._clock = clock
        self._vocab_size = vocab_size
        # The submission that `submit` handles, once it begins to change state here.
        self._queueing: RequestKey | None = None
        # The requests of a step without progress that were reported.
        self._stalled: Set[RequestKey] = frozenset()
        # The reason why new requests are refused; "": they are accepted.
        self.refusal = ""
        # The reason why requests go back to their gateways, to run at another replica; "": they stay.
        self._leaving = ""

    @property
    def takes_new(self) -> bool:
        """Whether new requests are accepted now."""
        return not (self.refusal or self._leaving)

    # ------------------------------------------------------------------------------ from the gateways

    def submit(self, gateway: GatewayKey, submission: Submission) -> None:
        """Queue the request, or report to its gateway why that is refused."""
        if submission.decode is not None and submission.decode.identity == self._identity:
            submission = replace(submission, decode=None)  # no hand-over to itself
        self._queueing = None
        failure = self._refuse(submission)
        if failure is not None:
            self._gateways.post(gateway, failure)
            return
        self._queueing = submission.request_id, submission.attempt
        now = self._clock.now()
        self._scheduler.submit(submission, now)
        record = self._table.add(submission, gateway)
        record.work_before_s = self._work.at(now)
        if submission.decode is not None:
            self._kv_sender.accept(record, submission.decode)

    def blame(self, gateway: GatewayKey, submission: Submission, error: BaseException) -> bool:
        """Report to the gateway that `submit` has raised this error. Return whether the replica may continue,
        which is so if `submit` had changed nothing yet."""
        key = submission.request_id, submission.attempt
        _log.error("request %s cannot be taken", key[0], exc_info=error, extra={"request_id": key[0]})
        self._table.remove(key)
        reason = f"the request could not be taken: {error!r}"
        self._gateways.post(gateway, RequestFailed(*key, "internal", reason, suspect=True))
        return self._queueing is None

    def cancel(self, key: RequestKey) -> None:
        """Stop the request in whatever phase it is, and free everything that it has."""
        self._kv_receiver.cancel(key)
        record = self._table.remove(key)
        if record is not None:
            self._scheduler.cancel(*key)
            self._kv_sender.cancel(record, "cancelled")

    def cancel_all_of(self, gateway: GatewayKey) -> None:
        """Cancel the requests of a gateway that is gone for good."""
        for record in self._table:
            if record.gateway == gateway:
                self.cancel(record.key)

    # --------------------------------------------------------------------------------- from the engine

    def settle(self, outcome: StepOutcome) -> None:
        """Pass the outcome of a step on to the gateways, and then to the hand-overs: readers do not wait
        until a push has begun."""
        for prompt in outcome.prompts:
            self._kv_sender.prompt_done(prompt)
        for chunk in outcome.chunks:
            self._kv_sender.note_chunk(chunk)
        for prompt in outcome.prompts:
            self._report_prefill(prompt)
        for read in outcome.prompt_logprobs:
            for part in parts_of(read):
                self._table.post((part.request_id, part.attempt), part)
        for delta in outcome.tokens:
            self._post_delta(delta)
        for embedding in outcome.embeddings:
            self._table.post_embedding(embedding)
        self._gateways.flush_news()
        for chunk in outcome.chunks:
            self._kv_sender.chunk_done(chunk)
        for chunk in outcome.migrating:
            self._migration.progress(chunk)
        for prompt in outcome.prompts:
            if prompt.decodes_remotely and prompt.all_finished:
                record = self._table.remove((prompt.request_id, prompt.attempt))
                if record is not None:
                    self._kv_sender.cancel(record, "finished at the prefill side")
        for failure in outcome.failures:
            self.dropped(failure)

    def dropped(self, failure: RequestFailed) -> None:
        """End an attempt that the scheduler has ended, since its deadline passed or it could not be
        computed."""
        record = self._table.get((failure.request_id, failure.attempt))
        if record is not None:
            self._kv_sender.cancel(record, failure.reason)
            self._table.fail(failure)

    def isolated(self, report: IsolationReport) -> None:
        """Report that a suspect begins to run alone, or is cleared."""
        self._table.post((report.request_id, report.attempt), report)

    def stalled(self, in_flight: Set[RequestKey]) -> None:
        """Report the requests of a step with which no rank progresses, once for each stall."""
        if in_flight or self._stalled:
            for key in in_flight - self._stalled:
                self._table.post(key, StallReport(*key))
            self._stalled = in_flight

    def leave(self, reason: str) -> None:
        """Accept no more requests, and hand back those of which nothing is computed yet."""
        self._leaving = reason
        for key in self._scheduler.migration.waiting():
            self._hand_back(key)

    def hand_back_all(self) -> None:
        """Hand back the remaining requests after `leave`: they resume at another replica with their
        output."""
        for record in self._table:
            self._kv_receiver.cancel(record.key)
            self._hand_back(record.key)

    # ---------------------------------------------------------------------------------------- private

    def _hand_back(self, key: RequestKey) -> None:
        self._scheduler.cancel(*key)
        self.dropped(RequestFailed(*key, "leaving", self._leaving))

    def _refuse(self, submission: Submission) -> RequestFailed | None:
        """Return the failure to report if the request is refused, else None. Changes nothing."""
        key = submission.request_id, submission.attempt
        if self.refusal:
            return RequestFailed(*key, "refused", self.refusal, _REFUSED_RETRY_S)
        if self._leaving:
            return RequestFailed(*key, "leaving", self._leaving)
        if problem := find_problem(submission, self._vocab_size):
            return RequestFailed(*key, "invalid", problem)
        if len(submission.samples) > 1 and any(sample.output for sample in submission.samples):
            return RequestFailed(*key, "invalid", "samples: only one may have output already")
        if key in self._table:
            return RequestFailed(*key, "invalid", "attempt: this attempt of the request is here already")
        try:
            self._scheduler.check_capacity(submission)
        except CapacityError as error:
            return RequestFailed(*key, "invalid", str(error))
        except QueueFullError as error:
            return RequestFailed(*key, "refused", str(error), _REFUSED_RETRY_S)
        most = submission.most_backlog_tokens
        if most is not None and (num_tokens := self._scheduler.counts.num_backlog_tokens) > most:
            return RequestFailed(*key, "crowded", f"{num_tokens} tokens wait here, and at most {most} may")
        return None

    def _report_prefill(self, prompt: PromptDone) -> None:
        key = prompt.request_id, prompt.attempt
        record = self._table.get(key)
        if record is not None:
            num_prompt_tokens = len(prompt.submission.prompt) // TOKEN_BYTES
            steps_s = self._work.at(prompt.times.prefilled) - record.work_before_s
            self._gateways.post(
                record.gateway,
                PrefillReport(
                    *key,
                    num_prompt_tokens,
                    prompt.num_cached_tokens,
                    prompt.times,
                    tuple(record.trace),
                    prompt.num_loaded_tokens,
                    max(0.0, round(steps_s, 6)),
                ),
            )

    def _post_delta(self, delta: TokenDelta) -> None:
        ended = self._table.post_delta(delta)
        if ended is not None:
            self._kv_sender.cancel(ended, "it ended before it migrated")


def parts_of(read: PromptLogprobs) -> Iterator[PromptLogprobs]:
    """Cut the log-probabilities that a step has read of a prompt into parts of at most
    `LOGPROB_PART_BYTES`."""
    logprobs = read.logprobs
    num_tokens = max(1, LOGPROB_PART_BYTES // (4 + 8 * logprobs.num_top))
    for first in range(0, logprobs.num_tokens, num_tokens):
        part = logprobs.part(first, first + num_tokens)
        yield PromptLogprobs(read.request_id, read.attempt, read.first_index + first, part)
