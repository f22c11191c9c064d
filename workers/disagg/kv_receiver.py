"""Receives KV from other replicas: sequences that were computed there up to now and that continue here.

Joins the sans-I/O `kvtransfer.protocol.receiver.LandingTable` to the scheduler, the Peer links and the ranks.
Nothing here blocks; everything runs on the engine core's loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import LandingAbort, LandingProgress, LandingRequest, Manifest, WriterStopped
from kvtransfer.protocol.actions import Landed, LandingAction, Lost, LostCause, ToRank, ToRanks, ToWriter
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.transfer_reports import LandingClosed, Verified, WriterGone
from workers.disagg.request_table import RequestTable
from workers.disagg.submission_check import find_problem
from workers.errors import QueueFullError
from workers.interfaces import BlockSharing, PeerLinks, RankChannel
from workers.messages.link import HandOverReport, RequestKey, StageTimes, Submission
from workers.messages.peer_link import HandOver, PeerLinkMessage
from workers.scheduler.scheduler import Scheduler

_log = logging.getLogger("tandem.handover")


class KvReceiver:
    """The landings of one replica; see the module's text."""

    def __init__(
        self,
        *,
        landings: LandingTable,
        block_tokens: int,
        vocab_size: int,
        scheduler: Scheduler,
        requests: RequestTable,
        peers: PeerLinks,
        ranks: RankChannel,
        clock: Clock,
        faults: Faults,
        sharing: BlockSharing | None = None,
    ) -> None:
        """`sharing` gives on what landed, where ranks receive parts of what all hold."""
        self._sharing = sharing
        # Sequences that landed and whose blocks are given on, with their sharing groups; and which of them
        # were cancelled meanwhile.
        self._given: dict[RequestKey, str] = {}
        self._unwanted: set[RequestKey] = set()
        self._num_given_references = 0
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._scheduler = scheduler
        self._requests = requests
        self._peers = peers
        self._ranks = ranks
        self._clock = clock
        self._faults = faults
        self._hand_overs: dict[bytes, HandOver] = {}
        self.landings = landings
        self.num_checksum_failures = 0
        self.num_lost: Counter[LostCause] = Counter()

    def writer_joined(self, writer: ReplicaIdentity, pieces: Sequence[Sequence[tuple[int, Shard]]]) -> None:
        """Register a writer whose Peer link opened; of every block of each group of layers it will write
        these (rank of ours, piece)."""
        self._do(self.landings.writer_joined(writer, pieces))

    def message(self, writer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Take a message from a prefill replica."""
        now = self._clock.now()
        match message:
            case LandingRequest():
                self._do(self.landings.request(writer, message, now, idle=self._idle()))
            case Manifest():
                self._do(self.landings.manifest(writer, message, now))
            case LandingProgress():
                self.landings.progress(writer, message, now)
            case LandingAbort():
                self._do(self.landings.aborted_by_writer(writer, message))
            case WriterStopped():
                self.landings.writer_stopped(writer, message)
            case HandOver():
                self._take_over(writer, message, now)
            case _:
                _log.warning("%s sent %s to its reader", writer.replica_id, type(message).__name__)

    def report(self, rank: int, report: Verified | LandingClosed | WriterGone) -> None:
        """Take a report of a rank."""
        match report:
            case Verified():
                self._do(self.landings.verified(rank, report))
            case LandingClosed():
                self.landings.closed(rank, report)
            case WriterGone():
                self.landings.writer_gone(rank, report)

    def writer_lost(self, writer: ReplicaIdentity) -> None:
        """Abort the landings of a writer whose Peer link ended."""
        self._do(self.landings.writer_lost(writer))

    @property
    def num_references(self) -> int:
        """Block references of landings, and of blocks that are given on."""
        return self.landings.num_references + self._num_given_references

    @property
    def num_unfinished(self) -> int:
        """The landings that are open, and those whose blocks are given on."""
        return self.landings.num_open + len(self._given)

    def num_of(self, group: str | None) -> int:
        """Return the number of landings of this sharing group (None: all) that wait, are open or are given
        on."""
        return self.landings.num_of(group) + sum(group in (None, it) for it in self._given.values())

    def cancel(self, key: RequestKey) -> None:
        """Abort the landing of this attempt."""
        if key in self._given:
            self._unwanted.add(key)
        self._do(self.landings.cancel(*key))

    def leave(self, reason: str) -> None:
        """Take nothing new; landings under way may still join."""
        self._do(self.landings.refuse_all(reason))

    def grant(self) -> None:
        """Open waiting landings, for which blocks may have become free."""
        if self.landings.num_waiting or self.landings.has_claims:
            self._do(self.landings.grant(self._clock.now(), idle=self._idle()))

    def tick(self) -> None:
        """Look after leases and deadlines."""
        self._do(self.landings.expire(self._clock.now()))
        self.grant()

    def _idle(self) -> bool:
        return self._scheduler.counts.num_running == 0

    def _do(self, actions: list[LandingAction]) -> None:
        for action in actions:
            match action:
                case ToWriter(writer, message):
                    self._peers.send_to_writer(writer, message)
                case ToRanks(order):
                    self._ranks.send(order)
                case ToRank(rank, order):
                    self._ranks.send_to(rank, order)
                case Landed():
                    self._landed(action)
                case Lost(landing_id, request_id, attempt, reason, cause):
                    self.num_lost[cause] += 1
                    self._hand_overs.pop(landing_id, None)
                    about = {"request_id": request_id}
                    _log.info("landing of %s attempt %d ended: %s", request_id, attempt, reason, extra=about)

    def _take_over(self, writer: ReplicaIdentity, hand_over: HandOver, now: float) -> None:
        submission, landing_id = hand_over.submission, hand_over.landing_id
        name = submission.request_id, submission.attempt
        if self.landings.is_open(writer, landing_id):
            if self._scheduler.is_here(*name):
                self._do(self.landings.abort(landing_id, f"{name} runs here already", "message"))
                return
            if problem := self._find_problem(submission):
                self._do(self.landings.abort(landing_id, problem, "message"))
                return
            self._hand_overs[landing_id] = hand_over
        self._do(self.landings.hand_over(writer, landing_id, name, _num_landed_tokens(submission), now))

    def _find_problem(self, submission: Submission) -> str:
        """Return what is wrong with a submission that is handed over; "" where nothing is."""
        samples, num_prompt_tokens = submission.samples, len(submission.prompt) // TOKEN_BYTES
        if num_prompt_tokens == 0 or submission.sampling.max_tokens < 1:
            return f"{num_prompt_tokens} tokens of prompt, max_tokens {submission.sampling.max_tokens}"
        if len(samples) > self._scheduler.config.max_sequences:
            return f"{len(samples)} samples, {self._scheduler.config.max_sequences} fit this replica"
        if len(samples) > 1 and any(len(sample.output) != TOKEN_BYTES for sample in samples):
            return "samples: several have more than their first token"
        if len(submission.block_keys) > num_prompt_tokens // self._block_tokens:
            return f"{len(submission.block_keys)} block keys for {num_prompt_tokens} tokens"
        try:
            self._scheduler.life.grammars.check_limit(submission)
        except QueueFullError as error:
            return str(error)
        return find_problem(submission, self._vocab_size)

    def _landed(self, landed: Landed) -> None:
        """Join a sequence, once all ranks have what landed. Until then nobody finds its blocks."""
        self._faults.at("engine_core.join")
        hand_over = self._hand_overs.pop(landed.landing_id)
        self.num_checksum_failures += landed.num_bad_pieces
        num_held = landed.num_held_tokens // self._block_tokens
        num_valid = -(-landed.num_valid_tokens // self._block_tokens)
        if self._sharing is None or num_valid <= num_held:
            self._join(landed, hand_over)
            return
        key = hand_over.submission.request_id, hand_over.submission.attempt
        self._given[key] = hand_over.submission.facts.sharing_group
        self._num_given_references += len(landed.block_ids)

        def join() -> None:
            self._num_given_references -= len(landed.block_ids)
            del self._given[key]
            self._join(landed, hand_over, is_wanted=key not in self._unwanted)
            self._unwanted.discard(key)

        self._sharing.give(landed.block_ids[num_held:num_valid], join)

    def _join(self, landed: Landed, hand_over: HandOver, *, is_wanted: bool = True) -> None:
        """Let a sequence run here; one that is not wanted any more only frees its blocks."""
        now = self._clock.now()
        seconds = hand_over.transfer_seconds
        submission = hand_over.submission
        report = HandOverReport(
            request_id=submission.request_id,
            attempt=submission.attempt,
            num_held_tokens=landed.num_held_tokens,
            num_moved_bytes=hand_over.num_moved_bytes,
            num_bad_pieces=landed.num_bad_pieces,
            transport=hand_over.transport,
            transfer_gb_s=hand_over.num_moved_bytes / seconds / 1e9 if seconds > 0 else 0.0,
            times=StageTimes(transfer_start=hand_over.transfer_start, transfer_end=now, joined=now),
            first_index=min(len(sample.output) for sample in submission.samples) // TOKEN_BYTES,
        )
        num_valid_tokens, windows = landed.num_valid_tokens, landed.windows
        ended = self._scheduler.adopt(submission, landed.block_ids, num_valid_tokens, now, windows)
        if not is_wanted:
            self._scheduler.cancel(submission.request_id, submission.attempt)
            return
        gateway = hand_over.gateway_id, hand_over.gateway_epoch
        record = self._requests.add(replace(submission, decode=None), gateway)
        self._requests.post(record.key, report)
        for delta in ended:
            self._requests.post_delta(delta)


def _num_landed_tokens(submission: Submission) -> int:
    """Return the number of tokens whose KV was handed over: all but each sample's last one. -1 where that is
    not one number."""
    lengths = {len(sample.output) for sample in submission.samples}
    if len(lengths) != 1 or 0 in lengths:
        return -1
    return (len(submission.prompt) + lengths.pop()) // TOKEN_BYTES - 1
