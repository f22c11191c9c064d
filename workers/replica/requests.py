"""The requests of one replica: from a gateway's Link into the scheduler, and their news back.

Called by the engine core. A request is here from its `Submission` (or the hand-over that it joined with) until its
last sample ends, it fails, it is cancelled, or it has been handed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender, RequestKey
from workers.errors import CapacityError, QueueFullError
from workers.messages import (
    HandOver,
    HandOverReport,
    IsolationReport,
    PrefillReport,
    RequestFailed,
    Submission,
    TokenDelta,
)
from workers.replica.gateway_links import GatewayKey, Gateways
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import PromptDone, StepOutcome

_REFUSED_RETRY_S = 1.0

_log = logging.getLogger("tandem.engine_core")


@dataclass(slots=True)
class _Request:
    gateway: GatewayKey
    samples: set[int]
    outbound: bool


class Requests:
    """See the module's text. `wake` asks the engine core to plan again."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        scheduler: Scheduler,
        gateways: Gateways,
        outbound: KvSender,
        inbound: KvReceiver,
        clock: Clock,
        vocab_size: int,
        wake: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._gateways = gateways
        self._outbound = outbound
        self._inbound = inbound
        self._clock = clock
        self._vocab_size = vocab_size
        self._wake = wake
        self._requests: dict[RequestKey, _Request] = {}
        # The last submission, from when it begins to change anything here.
        self._queueing: RequestKey | None = None
        # Why new work is refused; "" while it is taken.
        self.refusal = ""
        # Why it is handed back, to be done elsewhere.
        self._leaving = ""

    def __len__(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------------------ from the gateways

    def submit(self, gateway: GatewayKey, submission: Submission) -> None:
        """Queue the request, or tell its gateway why not."""
        if submission.decode is not None and submission.decode.identity == self._identity:
            submission = replace(submission, decode=None)  # no hand-over to itself
        self._queueing = None
        failure = self._refuse(submission)
        if failure is not None:
            self._gateways.post(gateway, failure)
            self._wake()
            return
        key = self._queueing = submission.request_id, submission.attempt
        self._scheduler.submit(submission, self._clock.now())
        samples = {sample.index for sample in submission.samples}
        self._requests[key] = _Request(gateway, samples, outbound=submission.decode is not None)
        if submission.decode is not None:
            self._outbound.accept(submission, gateway)
        self._wake()

    def blame(self, gateway: GatewayKey, submission: Submission, error: BaseException) -> bool:
        """Tell the gateway that `submit` has failed by an error of ours. Whether that is all: it was only
        looked at, and nothing here has changed."""
        key = submission.request_id, submission.attempt
        _log.error("request %s cannot be taken", key[0], exc_info=error, extra={"request_id": key[0]})
        self._requests.pop(key, None)
        reason = f"the request could not be taken: {error!r}"
        self._gateways.post(gateway, RequestFailed(*key, "internal", reason, suspect=True))
        self._wake()
        return self._queueing is None

    def cancel(self, key: RequestKey) -> None:
        """Stop the request wherever it is and free everything of it."""
        self._inbound.cancel(key)
        if self._requests.pop(key, None) is not None:
            self._scheduler.cancel(*key)
            self._outbound.cancel(key, "cancelled")
        self._wake()

    def cancel_all_of(self, gateway: GatewayKey) -> None:
        """A gateway is gone for good."""
        for key in [key for key, request in self._requests.items() if request.gateway == gateway]:
            self.cancel(key)

    # --------------------------------------------------------------------------------- from the engine

    def settle(self, outcome: StepOutcome) -> None:
        """Pass the news of a step on: to the hand-overs, and to the gateways."""
        for prompt in outcome.prompts:
            self._outbound.prompt_done(prompt)
        for chunk in outcome.chunks:
            self._outbound.chunk_done(chunk)
        for prompt in outcome.prompts:
            self._report_prefill(prompt)
        for delta in outcome.tokens:
            self._post_delta(delta)
        for chunk in outcome.migrating:
            self._outbound.moving.progress(chunk)
        for prompt in outcome.prompts:
            if prompt.all_finished:
                self._outbound.finished_here((prompt.request_id, prompt.attempt))
        for failure in outcome.failures:
            self.dropped(failure)

    def dropped(self, failure: RequestFailed) -> None:
        """The scheduler gave a request up (its deadline, or no room)."""
        self._outbound.cancel((failure.request_id, failure.attempt), failure.reason)
        self.failed(failure)

    # ------------------------------------------------------------------------------ from the hand-overs

    def failed(self, failure: RequestFailed) -> None:
        """The attempt is over: tell its gateway."""
        request = self._requests.pop((failure.request_id, failure.attempt), None)
        if request is not None:
            self._gateways.post(request.gateway, failure)
            self._wake()

    def ended(self, key: RequestKey) -> None:
        """The request continues elsewhere, or ended with its first token."""
        self._requests.pop(key, None)
        self._wake()

    def joined(self, hand_over: HandOver, report: HandOverReport, ended: list[TokenDelta]) -> None:
        """A handed-over request runs here now; `ended` are samples that are complete already."""
        submission = hand_over.submission
        gateway = hand_over.gateway_id, hand_over.gateway_epoch
        samples = {sample.index for sample in submission.samples}
        self._requests[submission.request_id, submission.attempt] = _Request(gateway, samples, outbound=False)
        self._gateways.post(gateway, report)
        for delta in ended:
            self._post_delta(delta)
        self._wake()

    def leave(self, reason: str) -> None:
        """Take nothing new, and hand back of what nothing is computed."""
        self._leaving = reason
        for key in self._scheduler.migration.waiting():
            self._hand_back(key)

    def hand_back_all(self) -> None:
        """After `leave`: what is left goes on elsewhere, with the output that it has."""
        for key in list(self._requests):
            self._inbound.cancel(key)
            self._hand_back(key)

    def isolated(self, report: IsolationReport) -> None:
        """A suspect begins to run alone, or is cleared."""
        request = self._requests.get((report.request_id, report.attempt))
        if request is not None:
            self._gateways.post(request.gateway, report)

    def fail_all(self, reason: str, suspects: Collection[RequestKey]) -> None:
        """Everything here must go on elsewhere; `suspects` may be why."""
        for key, request in self._requests.items():
            failure = RequestFailed(*key, "internal", reason, suspect=key in suspects)
            self._gateways.post(request.gateway, failure)
        self._requests.clear()

    # ---------------------------------------------------------------------------------------- private

    def _hand_back(self, key: RequestKey) -> None:
        self._scheduler.cancel(*key)
        self._outbound.cancel(key, self._leaving)
        self.failed(RequestFailed(*key, "leaving", self._leaving))

    def _refuse(self, submission: Submission) -> RequestFailed | None:
        """Why the request is not taken, if so. Changes nothing."""
        key = submission.request_id, submission.attempt
        if self.refusal:
            return RequestFailed(*key, "refused", self.refusal, _REFUSED_RETRY_S)
        if self._leaving:
            return RequestFailed(*key, "leaving", self._leaving)
        for field, tokens in _token_fields(submission):
            if len(tokens) % TOKEN_BYTES:
                return RequestFailed(*key, "invalid", f"{field}: {len(tokens)} bytes are no token ids")
            if max(memoryview(tokens).cast("I"), default=0) >= self._vocab_size:
                return RequestFailed(*key, "invalid", f"{field}: a token id is not below {self._vocab_size}")
        if key in self._requests:
            return RequestFailed(*key, "invalid", "attempt: this attempt of the request is here already")
        try:
            self._scheduler.check_capacity(submission)
        except CapacityError as error:
            return RequestFailed(*key, "invalid", str(error))
        except QueueFullError as error:
            return RequestFailed(*key, "refused", str(error), _REFUSED_RETRY_S)
        return None

    def _report_prefill(self, prompt: PromptDone) -> None:
        key = prompt.request_id, prompt.attempt
        request = self._requests.get(key)
        if request is not None:
            num_prompt_tokens = len(prompt.submission.prompt) // TOKEN_BYTES
            trace = self._outbound.trace(key)
            self._gateways.post(
                request.gateway,
                PrefillReport(
                    *key,
                    num_prompt_tokens,
                    prompt.num_cached_tokens,
                    prompt.times,
                    trace,
                    prompt.num_loaded_tokens,
                ),
            )

    def _post_delta(self, delta: TokenDelta) -> None:
        key = delta.request_id, delta.attempt
        request = self._requests.get(key)
        if request is None:
            return
        self._gateways.post(request.gateway, delta)
        if delta.finish:
            request.samples.discard(delta.sample)
            if not request.samples and not request.outbound:
                del self._requests[key]
                self._outbound.cancel(key, "it ended before it moved")


def _token_fields(submission: Submission) -> Iterator[tuple[str, bytes]]:
    yield "prompt", submission.prompt
    for sample in submission.samples:
        yield f"samples[{sample.index}].output", sample.output
