"""The answers of this gateway to queries of the fleet, its own included."""

from __future__ import annotations

from cluster.admission.shared_quotas import SharedQuotas
from cluster.errors import UnknownRequestError
from cluster.gateway.fleet.messages import (
    ANSWER_CODEC,
    MAX_ANSWER_BYTES,
    MAX_REASON_CHARS,
    Answer,
    ExplainAnswer,
    ExplainQuery,
    FleetHello,
    FleetRefusal,
    FollowPlacements,
    GatewayTotals,
    ListAnswer,
    ListedRequest,
    ListQuery,
    Noted,
    Query,
    RecordingAnswer,
    RecordingQuery,
    ResumeJudged,
    SessionEnded,
    StatsAnswer,
    StatsQuery,
    decode_query,
)
from cluster.gateway.fleet.placement_exchange import PlacementExchange
from cluster.gateway.request_manager import RequestManager
from cluster.gateway.request_recording import RequestRecording
from cluster.gateway.resumed_calls import ResumeClaim
from cluster.identity.ended_sessions import EndedSession
from cluster.identity.sessions import Sessions
from cluster.metrics.curves import RING_S
from cluster.metrics.ended_request import RequestInfo
from kvtransfer.common.clock import Clock
from kvtransfer.errors import UnknownMessageError, WireError
from kvtransfer.rpc.stream import FrameStream

# The number of running requests, and of ended ones, in one answer.
MAX_LISTED = 1000


class FleetAnswers:
    """Answers queries about the requests, the recording, sessions, placements and quotas of this gateway."""

    def __init__(
        self,
        requests: RequestManager,
        sessions: Sessions,
        exchange: PlacementExchange,
        quotas: SharedQuotas,
        recording: RequestRecording,
        clock: Clock,
    ) -> None:
        self._requests = requests
        self._sessions = sessions
        self._exchange = exchange
        self._quotas = quotas
        self._recording = recording
        self._clock = clock

    async def serve(self, stream: FrameStream) -> None:
        """Answer the queries of another gateway until the stream ends."""
        while (frame := await stream.receive()) is not None:
            stream.send(self._answer_frame(frame))

    def answer(self, query: Query) -> Answer:
        """Return what this gateway knows."""
        now = self._clock.now()
        match query:
            case ExplainQuery(request_id, tenant):
                try:
                    return ExplainAnswer(now, self._requests.record(request_id, tenant))
                except UnknownRequestError:
                    return ExplainAnswer(now, None)
            case ListQuery(limit, tenant):
                latest = self._requests.latest(max(0, min(limit, MAX_LISTED)), tenant)
                return ListAnswer(now, tuple(_listed(it) for it in latest))
            case StatsQuery(since):
                counters = self._requests.counters
                totals = GatewayTotals(
                    num_running=self._requests.num_running,
                    num_finished=counters.num_ended("finished"),
                    num_failed=counters.num_ended("failed"),
                    num_cancelled=counters.num_ended("cancelled"),
                    unheard=self._exchange.missing(),
                    quota_note=self._quotas.note,
                    admission=self._requests.admission.stats(),
                    outcomes=counters.outcomes.stats(now),
                )
                seconds = counters.seconds.counts_since(max(since, int(now) - RING_S))
                return StatsAnswer(now, self._clock.wall(), totals, seconds, self._quotas.uses(now))
            case SessionEnded():
                self._sessions.forget(
                    EndedSession(query.session_id, query.ends_at, query.key_id, query.began_at)
                )
                return Noted(now)
            case ResumeClaim():
                return ResumeJudged(now, self._requests.resumed.judge(query))
            case RecordingQuery(last_s, first_number):
                page = self._recording.page(now - last_s, first_number)
                return RecordingAnswer(now, *page, is_on=self._recording.is_on)

    def _answer_frame(self, frame: bytes) -> bytes:
        """Return the answer to a query, or a refusal of a query by a gateway of another version."""
        try:
            query = decode_query(frame)
        except UnknownMessageError as error:
            return ANSWER_CODEC.encode(FleetRefusal(str(error)))
        if isinstance(query, FleetHello | FollowPlacements):
            raise WireError("a second hello")
        answer = ANSWER_CODEC.encode(self.answer(query))
        if len(answer) > MAX_ANSWER_BYTES:
            answer = ANSWER_CODEC.encode(FleetRefusal(f"the answer has {len(answer)} bytes"))
        return answer


def _listed(info: RequestInfo) -> ListedRequest:
    last = info.decisions[-1].decision if info.decisions else None
    return ListedRequest(
        request_id=info.request_id,
        tenant=info.tenant,
        state=info.state,
        reason=info.reason[:MAX_REASON_CHARS],
        started_at=info.started_at,
        first_token_at=info.first_token_at,
        ended_at=info.ended_at,
        num_prompt_tokens=info.num_prompt_tokens,
        num_output_tokens=info.num_output_tokens,
        num_cached_tokens=info.num_cached_tokens,
        num_attempts=len(info.decisions),
        prefill=last.prefill if last else "",
        decode=last.decode if last else "",
    )
