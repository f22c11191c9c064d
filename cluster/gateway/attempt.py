"""The attempts of one request (sans-I/O): where the next one may go, where the stream of the running one
decodes, and what they have brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from cluster.errors import (
    FieldViolation,
    GrammarError,
    InvalidRequestError,
    InvalidToolsError,
    RequestError,
)
from cluster.metrics.ended_request import SampleResult
from cluster.text.output_parsers.pieces import ToolCallDelta
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.sample_text import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.health import backoff_s
from kvtransfer.messages import ReplicaIdentity
from router.messages import RouteRequest
from workers.messages.link import (
    HandOverTarget,
    Move,
    PromptLogprobs,
    RequestFailed,
    SampleState,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import PackedLogprobs, TokenLogprob

# Retries: which replicas to avoid.

_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


def backoff(num_failures: int) -> float:
    """Return the seconds before the next attempt, after so many that failed."""
    return backoff_s(num_failures + 1, _BACKOFF_S, MAX_BACKOFF_S)


class RetryPolicy:
    """The replicas that the next attempts of a request avoid."""

    def __init__(self) -> None:
        self._excluded: set[str] = set()
        self._avoided: set[str] = set()
        self._cut_off: set[str] = set()
        self._forgiven: set[ReplicaIdentity] = set()
        self._num_no_routes = 0

    def exclude(self, replicas: Iterable[ReplicaIdentity]) -> None:
        """Exclude replicas that failed, until no other is left."""
        self._excluded.update(replica.replica_id for replica in replicas)

    def avoid(self, replica_id: str) -> None:
        """Exclude a replica that had no capacity from the next attempt only."""
        self._avoided.add(replica_id)

    def cut_off(self, replica_id: str) -> None:
        """Record that a prefill replica has no path to a decode replica; without another decode replica, that
        one continues alone."""
        self._cut_off.add(replica_id)

    def forgive(self, replica: ReplicaIdentity) -> bool:
        """Return whether an attempt that ended because this replica leaves does not count: the first one."""
        is_first = replica not in self._forgiven
        self._forgiven.add(replica)
        return is_first

    def routed(self) -> None:
        """Begin a new attempt."""
        self._avoided.clear()
        self._num_no_routes = 0

    def relent(self) -> float:
        """Allow all replicas, because no place is left, but for the one side of a broken path instead of the
        other. Returns the seconds to wait before."""
        had_exclusions = bool(self._excluded or self._avoided)
        self._excluded.clear()
        self._avoided.clear()
        self._excluded, self._cut_off = self._cut_off, self._excluded
        pause_s = 0.0 if had_exclusions and self._num_no_routes == 0 else backoff(self._num_no_routes)
        self._num_no_routes += 1
        return pause_s

    def excluded(self) -> tuple[str, ...]:
        """Return the ids of the replicas that the next attempt must avoid."""
        return tuple(sorted(self._excluded | self._avoided))


def refusal_of(failure: RequestFailed, prepared: PreparedRequest) -> RequestError | None:
    """Return the error of a request that no replica can serve; None: another one may."""
    if failure.code == "invalid":
        return InvalidRequestError(FieldViolation("prompt", failure.reason))
    if failure.code == "grammar":
        return (InvalidToolsError if prepared.is_grammar_of_tools else GrammarError)(failure.reason)
    return None


# ----------------------------------------------------------------------------------------------
# Migration: the stream of one attempt moves away from a decode replica that leaves.

# Before the next target is asked for, after a migration that failed.
RETRY_PAUSE_S = 0.5
# Before a target is asked for again, after there was none.
NO_TARGET_PAUSE_S = 1.0
# How long the source of a migration may take to report its outcome after the target was lost.
OVERDUE_S = 5.0


class StreamMigration:
    """Where the stream of an attempt decodes, and its migrations, one after another::

        decodes --begin--> target --switch--> decodes there; the former replica may still owe tokens
           ^                  |
           +------- fail -----+    (the target is left out next time)

    `RequestState` reports what happens. A method that returns True asks for a new target: the caller must
    schedule one. `note(now, name, detail)` adds to the timeline.
    """

    def __init__(self, request_id: str, note: Callable[[float, str, str], None]) -> None:
        self._request_id = request_id
        self._note = note
        self._leaving: set[ReplicaIdentity] = set()
        self.decode: ReplicaIdentity | None = None
        self.reset(None, 0, can_move=False)

    def reset(self, decode: ReplicaIdentity | None, number: int, *, can_move: bool) -> None:
        """Begin an attempt, whose submission has this number."""
        self.decode = decode
        self.target: ReplicaIdentity | None = None
        # Why the target is gone. Whether it has the stream is for the source to report.
        self.target_lost = ""
        self._target_lost_at = 0.0
        self.num_moves = 0
        # The prompt is computed and handed over.
        self.is_decoding = False
        self._number = number
        self._can_move = can_move
        self._is_seeking = False
        self._had_no_target = False
        self._refused: set[str] = set()
        self._owed: dict[ReplicaIdentity, int] = {}

    # --------------------------------------------------------------------------------------- queries

    @property
    def has_to_move(self) -> bool:
        """Whether the stream decodes on a replica that it must leave, and has no target yet."""
        return self.is_decoding and self._can_move and self.target is None and self.is_leaving(self.decode)

    def is_leaving(self, replica: ReplicaIdentity | None) -> bool:
        """Whether streams must leave this replica."""
        return replica in self._leaving

    def is_former(self, replica: ReplicaIdentity) -> bool:
        """Whether the stream has moved away from this replica."""
        return replica in self._owed

    def owes(self, replica: ReplicaIdentity, num_tokens: int) -> bool:
        """Whether a replica that had the stream has yet to send tokens beyond the first `num_tokens`."""
        return num_tokens < self._owed.get(replica, 0)

    # ---------------------------------------------------------------------------------------- events

    def stay(self, replica: ReplicaIdentity, may_stay: bool) -> bool:
        """Record whether streams may stay on this replica."""
        if may_stay:
            self._leaving.discard(replica)
        else:
            self._leaving.add(replica)
        return self.seek()

    def decodes(self) -> bool:
        """Record that the stream decodes where it was routed to."""
        self.is_decoding = True
        return self.seek()

    def seek(self) -> bool:
        """Return whether a target must be scheduled; False while one is sought already."""
        if not self.has_to_move or self._is_seeking:
            return False
        self._is_seeking = True
        return True

    def excluded(self) -> tuple[str, ...]:
        """Ids of replicas that cannot be the target that is asked for now."""
        self._is_seeking = False
        assert self.decode is not None
        return tuple(sorted({self.decode.replica_id, *self._refused}))

    def no_target(self, now: float) -> bool:
        """Record that there is no target, so that all replicas may be tried again later."""
        if not self._had_no_target:
            self._note(now, "nowhere to move", "no other decode replica takes it")
        self._had_no_target = True
        self._refused.clear()
        return self.seek()

    def begin(self, target: HandOverTarget, now: float) -> tuple[ReplicaIdentity, Move]:
        """Begin to move to `target`; returns the source and the order for it."""
        assert self.decode is not None
        self.target, self.target_lost = target.identity, ""
        self._note(now, "moving", f"{self.decode.replica_id} -> {target.identity.replica_id}")
        return self.decode, Move(self._request_id, self._number, target)

    def lose_target(self, reason: str, now: float) -> None:
        """Record that the connection to the target has ended."""
        self.target_lost, self._target_lost_at = reason, now

    def is_overdue(self, now: float) -> bool:
        """Whether the source has not reported in time what became of a migration to a lost target."""
        is_lost = self.target is not None and bool(self.target_lost)
        return is_lost and now >= self._target_lost_at + OVERDUE_S

    def fail(self, reason: str, now: float) -> bool:
        """Record that the stream stays where it was."""
        assert self.target is not None
        self._note(now, "not moved", f"{self.target.replica_id}: {reason}")
        self._refused.add(self.target.replica_id)
        self.target, self.target_lost = None, ""
        return self.seek()

    def switch(self, first_index: int, now: float) -> bool:
        """Record that the target decodes from this output index on; the source still owes what is before."""
        assert self.decode is not None
        assert self.target is not None
        self._note(now, "moved", f"{self.decode.replica_id} -> {self.target.replica_id}")
        self._owed.pop(self.target, None)
        self._owed[self.decode] = first_index
        self.decode, self.target = self.target, None
        self._refused.clear()
        self.num_moves += 1
        return self.seek()


# ----------------------------------------------------------------------------------------------
# Samples: the output they have, and what is left to route and to submit.


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New tokens and text of one sample, for the client."""

    sample: int
    first_index: int
    tokens: bytes
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: str
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    # The stop string or stop token that ended the sample; None: neither.
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsDelta:
    """Log-probabilities of the prompt's tokens [first_index, first_index + n), for the client. They come in
    order, from index 1 to the prompt's end, before any token of output."""

    first_index: int
    logprobs: PackedLogprobs


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """The embedding of the prompt, for the client: float32 [hidden_size], not normalized. It is all the
    output of a request with `pooling`."""

    vector: bytes


Output = OutputDelta | PromptLogprobsDelta | EmbeddingDelta


class PromptProgress:
    """How far the log-probabilities of a request's prompt have come, of all attempts together. A call that
    resumes with output has had them."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._num_tokens = prepared.num_prompt_tokens
        self._num_top = prepared.sampling.num_prompt_logprobs
        has_output = any(start.output or start.finish for start in prepared.samples)
        self._next_index = self._num_tokens if self._num_top is None or has_output else 1

    @property
    def is_whole(self) -> bool:
        """Whether none are missing."""
        return self._next_index >= self._num_tokens

    def is_readable(self, part: PromptLogprobs) -> bool:
        """Return whether a part can follow on what is here, or repeats some of it."""
        logprobs = part.logprobs
        return (
            logprobs.is_whole
            and logprobs.num_top == self._num_top
            and 1 <= part.first_index <= self._next_index
            and part.first_index + logprobs.num_tokens <= self._num_tokens
        )

    def take(self, part: PromptLogprobs) -> PromptLogprobsDelta | None:
        """Take a readable part, and return what of it is new."""
        first, num_tokens = self._next_index, part.logprobs.num_tokens
        num_known = first - part.first_index
        if num_known >= num_tokens:
            return None
        self._next_index = part.first_index + num_tokens
        return PromptLogprobsDelta(first, part.logprobs.part(num_known, num_tokens))


class SampleOutput:
    """One continuation of the prompt: its seed, its output, and deltas that arrived early."""

    def __init__(self, start: SampleStart, text: SampleText) -> None:
        self.index = start.index
        self.seed = start.seed
        self.tokens = bytearray(start.output)
        self.finish = start.finish
        self.held: dict[int, TokenDelta] = {}
        self.is_decoding = False
        # Ended by a stop string, which its replica does not know.
        self.was_cut = False
        # What the grammar allowed behind the last token; b"": not known.
        self.mask_digest = b""
        self._text = text
        self._num_tokens_before = self.num_tokens

    @property
    def num_tokens(self) -> int:
        """The number of output tokens so far."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def has_progressed(self) -> bool:
        """Whether this attempt has brought a token."""
        return self.num_tokens > self._num_tokens_before

    @property
    def result(self) -> SampleResult:
        """Return how the sample ended, or how far it has come."""
        return SampleResult(self.index, self.finish, self.num_tokens, self._text.num_reasoning_tokens)

    def begin_attempt(self) -> None:
        """Forget what belongs to the previous attempt only."""
        self.held.clear()
        self.is_decoding = False
        self._num_tokens_before = self.num_tokens

    def take(self, delta: TokenDelta) -> list[OutputDelta]:
        """Take a delta in any order, and return all output that is complete up to there."""
        if not self.held and delta.first_index == self.num_tokens and (delta.tokens or delta.finish):
            return [self._append(delta)]
        self._hold(delta)
        output = []
        while (ready := self._next_delta()) is not None:
            output.append(self._append(ready))
        return output

    def _hold(self, delta: TokenDelta) -> None:
        """Keep the delta until its turn; of two at the same index, keep the longer one."""
        known = self.held.get(delta.first_index)
        if known is None or (len(known.tokens), known.finish) < (len(delta.tokens), delta.finish):
            self.held[delta.first_index] = delta

    def _next_delta(self) -> TokenDelta | None:
        """Return what continues the output, cut to what is new; drop what is there already."""
        for first_index in sorted(self.held):
            if self.finish or first_index > self.num_tokens:
                return None
            delta = self.held.pop(first_index)
            num_known = self.num_tokens - first_index
            num_new = len(delta.tokens) // TOKEN_BYTES - num_known
            if num_new > 0 or (num_new == 0 and delta.finish):
                return TokenDelta(
                    request_id=delta.request_id,
                    attempt=delta.attempt,
                    sample=delta.sample,
                    first_index=self.num_tokens,
                    tokens=delta.tokens[num_known * TOKEN_BYTES :],
                    logprobs=delta.logprobs[num_known:],
                    finish=delta.finish,
                    mask_digest=delta.mask_digest,
                )
        return None

    def _append(self, delta: TokenDelta) -> OutputDelta:
        """Append the tokens up to a stop string."""
        step = self._text.push(delta.tokens, delta.finish)
        self.was_cut = bool(step.finish) and not delta.finish
        tokens = delta.tokens[: step.num_tokens * TOKEN_BYTES]
        self.tokens += tokens
        if tokens:
            self.mask_digest = delta.mask_digest
        self.finish = step.finish
        if self.finish:
            self.held.clear()
        return OutputDelta(
            sample=self.index,
            first_index=delta.first_index,
            tokens=tokens,
            text=step.text,
            logprobs=delta.logprobs[: step.num_tokens],
            finish=step.finish,
            reasoning=step.reasoning,
            tool_calls=step.tool_calls,
            matched_stop=step.matched_stop,
        )


def by_submission(unfinished: Sequence[SampleOutput]) -> list[list[SampleOutput]]:
    """Group samples without any output together, each other one by itself."""
    fresh = [sample for sample in unfinished if not sample.tokens]
    groups = [[sample] for sample in unfinished if sample.tokens]
    return [fresh, *groups] if fresh else groups


def route_request(
    prepared: PreparedRequest,
    unfinished: Sequence[SampleOutput],
    excluded: tuple[str, ...],
    *,
    is_scored: bool = True,
) -> RouteRequest:
    """Build the router's request for what is left. A prompt that is not yet `is_scored`, though its
    log-probabilities are asked for, is computed whole wherever it is cached."""
    longest = max(sample.num_tokens for sample in unfinished)
    shortest = min(sample.num_tokens for sample in unfinished)
    return RouteRequest(
        request_id=prepared.request_id,
        tenant=prepared.tenant,
        block_keys=prepared.block_keys if is_scored else (),
        num_tokens=prepared.num_prompt_tokens + longest,
        max_new_tokens=max(1, prepared.sampling.max_tokens - shortest),
        num_samples=len(unfinished),
        excluded=excluded,
        pinned_prefill=prepared.pinned_prefill,
        pinned_decode=prepared.pinned_decode,
        kv_share=prepared.kv_share,
        decodes=prepared.pooling is None,
        session=prepared.session,
        is_private=prepared.is_private,
    )


def first_route_request(prepared: PreparedRequest) -> RouteRequest:
    """Build the router's request for all of a request that begins."""
    return RouteRequest(
        request_id=prepared.request_id,
        tenant=prepared.tenant,
        block_keys=prepared.block_keys if PromptProgress(prepared).is_whole else (),
        num_tokens=prepared.num_prompt_tokens,
        max_new_tokens=max(1, prepared.sampling.max_tokens),
        num_samples=len(prepared.samples),
        pinned_prefill=prepared.pinned_prefill,
        pinned_decode=prepared.pinned_decode,
        kv_share=prepared.kv_share,
        decodes=prepared.pooling is None,
        session=prepared.session,
        is_private=prepared.is_private,
    )


def submission(
    prepared: PreparedRequest,
    group: Sequence[SampleOutput],
    number: int,
    target: HandOverTarget | None,
    now: float,
    *,
    suspect: bool = False,
    is_scored: bool = True,
    most_backlog_tokens: int | None = None,
    due_at: float | None = None,
) -> Submission:
    """Begin an attempt of the samples of `group`, as they are now. The log-probabilities of a prompt that
    `is_scored` are not asked for again. A replica with more than `most_backlog_tokens` sends it back. At
    `due_at` it has waited as long as its class may."""
    for sample in group:
        sample.begin_attempt()
    deadline_at, sampling = prepared.deadline_at, prepared.sampling
    if is_scored and sampling.num_prompt_logprobs is not None:
        sampling = replace(sampling, num_prompt_logprobs=None)
    return Submission(
        request_id=prepared.request_id,
        attempt=number,
        tenant=prepared.tenant,
        sharing_group=prepared.sharing_group,
        priority=prepared.priority,
        prompt=prepared.prompt,
        root_key=prepared.root_key,
        block_keys=prepared.block_keys,
        samples=tuple(
            SampleState(sample.index, sample.seed, bytes(sample.tokens), sample.mask_digest)
            for sample in group
        ),
        sampling=sampling,
        decode=target,
        deadline_s=None if deadline_at is None else max(0.0, deadline_at - now),
        due_s=None if due_at is None else due_at - now,
        suspect=suspect,
        service_class=prepared.service_class,
        grammar=prepared.grammar,
        is_private=prepared.is_private,
        pooling=prepared.pooling,
        most_backlog_tokens=most_backlog_tokens,
    )
