"""Gateways ask each other, so that any of them answers for all: where a request went, which requests there
are, and what happened second by second.

    console, Explain, ListRequests --> Fleet --> this gateway's RequestManager and GatewayCounters
                                         |
                                         +--query, answer (frames)--> the Fleet of every other gateway

Every gateway listens on a port of its own for this (`GatewayRecord.fleet`), for connections that prove the
cluster secret. A gateway that does not answer within `ANSWER_S` is named, and the others' answers are used.

The file is over 600 lines because every question stands next to its answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from msgspec import structs

from cluster.admission.quotas import QuotaUse, merged_uses
from cluster.admission.shared_quotas import SharedQuotas
from cluster.errors import StartError, UnknownRequestError
from cluster.gateway.placement_exchange import FollowPlacements, PlacementExchange
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_manager import RequestManager
from cluster.gateway.resumed_calls import OtherGateways, ResumeClaim
from cluster.identity.ended_sessions import EndedSession
from cluster.identity.resume_tokens import gateway_tag, is_drawn_by
from cluster.identity.sessions import Sessions
from cluster.metrics.admission_stats import AdmissionStats
from cluster.metrics.curves import RING_S, Curves, Second, SecondCounts, Window, curves_of, merged, window_of
from cluster.metrics.ended_request import RequestInfo
from cluster.roster.messages import GatewayRecord
from kvtransfer.codec import Codec, Message, Part
from kvtransfer.common.clock import Clock
from kvtransfer.common.health import CoolDown
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import TransferError, UnknownMessageError, WireError, shown
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import FrameStream, frame_stream, open_tcp
from kvtransfer.rpc.trust import Trust

FLEET_PROTOCOL = 2
# How long a gateway may take to answer.
ANSWER_S = 2.0
# The number of running requests, and of ended ones, in one answer.
MAX_LISTED = 1000
# No query is longer: ids and tenants are bounded.
MAX_QUERY_BYTES = 4096
MAX_ANSWER_BYTES = 16 << 20
# The pause before a gateway that did not answer is queried again, except where a request went.
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 8.0
# The time between two messages about the end of a session to gateways that were not reached, or not known.
_REPEAT_S = 4.0
_BACKLOG = 128
_STOP_S = 0.5
_MAX_REASON_CHARS = 300

_log = logging.getLogger(__name__)


class FleetHello(Message, frozen=True):
    """First frame of a connection: whom it means to reach, since a port may have passed to somebody else."""

    protocol: int
    gateway_id: str


class ExplainQuery(Message, frozen=True):
    """Queries the known facts of a request; `tenant` None: of any tenant."""

    request_id: str
    tenant: str | None


class ListQuery(Message, frozen=True):
    """Queries this many running requests, and as many that ended; `tenant` None: of all tenants."""

    limit: int
    tenant: str | None


class StatsQuery(Message, frozen=True):
    """Asks for totals, and for the seconds from this one of the asked gateway's clock on."""

    since: int


class FleetRefusal(Message, frozen=True):
    """Ends a connection: its hello or its query cannot be answered."""

    reason: str


class ExplainAnswer(Message, frozen=True):
    """The known facts of the request; None: nothing. `now` is the sender's clock, whose times these are."""

    now: float
    found: RequestInfo | None


class ListedRequest(Part, frozen=True):
    """A request in a list, the fields as in `RequestInfo`."""

    request_id: str
    tenant: str
    state: str
    reason: str
    started_at: float
    first_token_at: float
    ended_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_attempts: int
    # The replica of the last attempt; `prefill` is "" where the decode replica prefills by itself.
    prefill: str
    decode: str


class ListAnswer(Message, frozen=True):
    """The latest requests; `now` as in `ExplainAnswer`."""

    now: float
    requests: tuple[ListedRequest, ...]


class SessionEnded(Message, frozen=True):
    """Tells that a session of the console was ended by its user; see `EndedSession`."""

    session_id: bytes
    ends_at: float
    key_id: str = ""
    began_at: float = 0.0


class ResumeJudged(Message, frozen=True):
    """Answers a `ResumeClaim`; `now` as in `ExplainAnswer`."""

    now: float
    is_free: bool


class Noted(Message, frozen=True):
    """Answers a message that queries nothing; `now` as in `ExplainAnswer`."""

    now: float


class GatewayTotals(Part, frozen=True):
    """Requests of one gateway: those that run, and those that ended since its start; and whom it does not
    hear."""

    num_running: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    # Why it does not count the placements of another gateway, by the id of each.
    unheard: dict[str, str]
    # Why only a part of the tenants' limits applies there; "": all of them apply.
    quota_note: str = ""
    admission: AdmissionStats = AdmissionStats()


class StatsAnswer(Message, frozen=True):
    """Totals, and the counts second by second. `now` is the sender's clock, `wall` the same as unix time."""

    now: float
    wall: float
    totals: GatewayTotals
    seconds: tuple[SecondCounts, ...]
    # The use of tenants with limits.
    quotas: tuple[QuotaUse, ...] = ()


Query = ExplainQuery | ListQuery | StatsQuery | SessionEnded | ResumeClaim
Answer = ExplainAnswer | ListAnswer | StatsAnswer | ResumeJudged | Noted
QUERY_CODEC: Codec[FleetHello | FollowPlacements | Query] = Codec(FleetHello | FollowPlacements | Query)
ANSWER_CODEC: Codec[Answer | FleetRefusal] = Codec(Answer | FleetRefusal)

A = TypeVar("A", ExplainAnswer, ListAnswer, StatsAnswer, ResumeJudged, Noted)


class FoundRequest(NamedTuple):
    """A request, its times by the clock of the gateway that asked, and the gateway that had it."""

    gateway_id: str
    info: RequestInfo


class FleetRequests(NamedTuple):
    """Requests of all gateways with the ids of their gateways, the latest arrivals first; times are by the
    clock of the gateway that asked."""

    requests: list[tuple[str, ListedRequest]]
    # The reasons, by the id of each gateway that did not answer.
    missing: dict[str, str]


class FleetStats(NamedTuple):
    """The statistics of all gateways together."""

    # Seconds by this gateway's clock as unix time, oldest first.
    seconds: list[Second]
    curves: Curves
    minute: Window
    # Totals by gateway id.
    totals: dict[str, GatewayTotals]
    # As in `FleetRequests`.
    missing: dict[str, str]
    # The tenants' use of their limits, those that were refused most first.
    quotas: tuple[QuotaUse, ...] = ()


class Fleet:
    """This gateway among the others. `start` listens, `stop` ends all connections."""

    def __init__(
        self,
        gateway_id: str,
        requests: RequestManager,
        connections: ReplicaConnections,
        sessions: Sessions,
        exchange: PlacementExchange,
        quotas: SharedQuotas,
        trust: Trust,
        clock: Clock,
    ) -> None:
        self._gateway_id = gateway_id
        self._sessions = sessions
        self._exchange = exchange
        self._quotas = quotas
        self._requests = requests
        self._connections = connections
        self._trust = trust
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._listener: ProvenListener | None = None
        self._streams: set[FrameStream] = set()
        self._tasks = SupervisedTasks()
        self._repeats = SupervisedTasks()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen, and return the port (a free one when `port` is 0); `StartError` when it is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise StartError(
                f"gateway.fleet_port: the gateway cannot listen on {host}:{port} for the others: "
                f"{error.strerror or error}; choose another port, or 0 for a free one"
            ) from error
        port = int(sock.getsockname()[1])
        self._listener = ProvenListener(
            sock, self._trust, self._serve, self._tasks.spawn, self._clock, "fleet"
        )
        return port

    async def stop(self) -> None:
        """Answer and ask nobody any more."""
        if self._listener is not None:
            self._listener.close()
        for peer in self._peers.values():
            peer.close()
        for stream in self._streams:
            stream.abort()
        await self._repeats.close()
        await self._tasks.wait(_STOP_S)
        await self._tasks.close()

    async def explain(self, request_id: str, tenant: str | None) -> FoundRequest:
        """Return the known facts of a running or recent request of the tenant (None: of any) at any gateway;
        `UnknownRequestError` when there are none.

        The gateway that drew the id is queried before the others. These are queried where it does not know
        the request or where the request failed there, since clients resume requests at any gateway, and for
        ids that clients chose.
        """
        peers = self._known_peers()
        drawn_by = next((it for it in (self._gateway_id, *peers) if is_drawn_by(it, request_id)), None)
        settled = ("running",) if drawn_by is None else ("running", "finished")
        rest = [name for name in peers if name != drawn_by]
        found: list[FoundRequest] = []
        missing: dict[str, str] = {}
        for names in ([self._gateway_id], [drawn_by] if drawn_by in peers else [], rest):
            queries = {name: ExplainQuery(request_id, tenant) for name in names if name is not None}
            given, silent = await self._ask(queries, ExplainAnswer, is_patient=True)
            missing |= silent
            found += [
                FoundRequest(name, _info_shifted(it.answer.found, it.offset_s))
                for name, it in given.items()
                if it.answer.found is not None
            ]
            best = max(found, key=lambda it: (it.info.state == "running", it.info.started_at), default=None)
            if best is not None and (best.info.state in settled or names is rest):
                return best
        reasons = "".join(f"; {name} {reason}" for name, reason in sorted(missing.items()))
        what = f"request {request_id[:128]!r} is neither running nor among the latest that ended"
        raise UnknownRequestError(f"{what}, at any gateway{reasons}")

    async def latest(self, limit: int, tenant: str | None) -> FleetRequests:
        """Return at most `limit` running requests of the tenant (None: of all) and as many that ended."""
        query = ListQuery(min(limit, MAX_LISTED), tenant)
        names = (self._gateway_id, *self._known_peers())
        given, missing = await self._ask(dict.fromkeys(names, query), ListAnswer)
        listed = [
            (name, _shifted(request, it.offset_s))
            for name, it in given.items()
            for request in it.answer.requests
        ]
        listed.sort(key=_arrival, reverse=True)
        running = [item for item in listed if item[1].state == "running"][: query.limit]
        ended = [item for item in listed if item[1].state != "running"][: query.limit]
        return FleetRequests(sorted([*running, *ended], key=_arrival, reverse=True), missing)

    async def stats(self) -> FleetStats:
        """Return the curves and totals of all gateways. Each sends the seconds since those that it sent
        last."""
        peers = self._known_peers()
        queries = {name: StatsQuery(peer.newest_second) for name, peer in peers.items()}
        given, missing = await self._ask({self._gateway_id: StatsQuery(0), **queries}, StatsAnswer)
        wall = self._clock.wall()
        parts = []
        for name, (answer, _) in given.items():
            seconds = peers[name].keep(answer.seconds) if name in peers else answer.seconds
            parts.append((answer.wall - answer.now, seconds))
        both = merged(parts)
        return FleetStats(
            seconds=both,
            curves=curves_of(both, wall, wall),
            minute=window_of(both, wall),
            totals={name: it.answer.totals for name, it in given.items()},
            missing=missing,
            quotas=merged_uses(use for it in given.values() for use in it.answer.quotas),
        )

    async def end_session(self, ended: EndedSession) -> dict[str, str]:
        """Make every gateway refuse the session. Return, by the id of each gateway that does not answer, why
        it may still accept the session; those gateways are told again until they answer."""
        message = SessionEnded(*ended)
        reached, missing = await self._ask(
            dict.fromkeys(self._known_peers(), message), Noted, is_patient=True
        )
        self._repeats.spawn(self._end_everywhere(message, set(reached)), "end of a session")
        return missing

    async def _end_everywhere(self, message: SessionEnded, reached: set[str]) -> None:
        """Repeat the message until it has reached all gateways, those included of which this one learns only
        now."""
        missing: Mapping[str, str] = {"": ""}
        while missing and self._clock.wall() < message.ends_at:
            await self._clock.sleep(_REPEAT_S)
            peers = [name for name in self._known_peers() if name not in reached]
            given, missing = await self._ask(dict.fromkeys(peers, message), Noted)
            reached |= given.keys()

    async def judge_resume(self, claim: ResumeClaim) -> OtherGateways:
        """Return the other gateways' answers about a call that resumes a request."""
        given, _ = await self._ask(dict.fromkeys(self._known_peers(), claim), ResumeJudged)
        return OtherGateways(
            is_free=all(it.answer.is_free for it in given.values()),
            is_issuer_there=any(gateway_tag(name) == claim.issuer for name in given),
        )

    async def _ask(
        self, queries: Mapping[str, Query], expected: type[A], *, is_patient: bool = False
    ) -> tuple[dict[str, _Timed[A]], dict[str, str]]:
        """Return the answers by gateway id, and why there is none, by the id of each gateway that gave
        none."""
        given: dict[str, _Timed[A]] = {}
        missing: dict[str, str] = {}
        peers = dict(self._peers)  # some may leave during the call

        async def ask(name: str, query: Query) -> None:
            if name == self._gateway_id:
                answer: Answer | str = self._answer(query)
            elif name in peers:
                answer = await peers[name].ask(query, is_patient=is_patient)
            else:
                answer = "has left"
            if isinstance(answer, expected):
                given[name] = _Timed(answer, self._clock.now() - answer.now)
            else:
                missing[name] = answer if isinstance(answer, str) else "answered something else"

        await asyncio.gather(*(ask(name, query) for name, query in queries.items()))
        return given, missing

    def _known_peers(self) -> dict[str, _Peer]:
        """Return the other gateways of the roster, by id."""
        records = {
            it.gateway_id: it for it in self._connections.gateways if it.gateway_id != self._gateway_id
        }
        for name, peer in list(self._peers.items()):
            if name not in records or not peer.is_at(records[name]):
                peer.close()
                del self._peers[name]
        for name, record in records.items():
            if name not in self._peers:
                self._peers[name] = _Peer(record, self._trust, self._gateway_id, self._clock)
        return dict(self._peers)

    # --------------------------------------------------------------------------- what others ask this one

    async def _serve(self, sock: socket.socket, name: str) -> None:
        stream = await frame_stream(
            sock, name, self._trust.server_tls(sock), has_heartbeat=True, max_bytes=MAX_QUERY_BYTES
        )
        self._streams.add(stream)
        try:
            hello = _query(await stream.next_frame())
            if isinstance(hello, FleetHello):
                await self._answer_all(hello, stream)
            elif isinstance(hello, FollowPlacements):
                await self._exchange.serve(hello, stream)
            stream.close()
            await stream.wait_closed()
        finally:
            stream.abort()
            self._streams.discard(stream)

    async def _answer_all(self, hello: FleetHello, stream: FrameStream) -> None:
        if (hello.protocol, hello.gateway_id) != (FLEET_PROTOCOL, self._gateway_id):
            reason = f"this is gateway {self._gateway_id} with fleet protocol {FLEET_PROTOCOL}"
            stream.send(ANSWER_CODEC.encode(FleetRefusal(reason)))
            return
        while (frame := await stream.receive()) is not None:
            stream.send(self._answer_frame(frame))

    def _answer_frame(self, frame: bytes) -> bytes:
        """Return the answer to a query, or a refusal of a query by a gateway of another version."""
        try:
            query = _query(frame)
        except UnknownMessageError as error:
            return ANSWER_CODEC.encode(FleetRefusal(str(error)))
        if isinstance(query, FleetHello | FollowPlacements):
            raise WireError("a second hello")
        answer = ANSWER_CODEC.encode(self._answer(query))
        if len(answer) > MAX_ANSWER_BYTES:
            answer = ANSWER_CODEC.encode(FleetRefusal(f"the answer has {len(answer)} bytes"))
        return answer

    def _answer(self, query: Query) -> Answer:
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


class _Timed(NamedTuple, Generic[A]):
    """An answer, and the offset that turns its times into those of the own clock."""

    answer: A
    offset_s: float


class _Peer:
    """Another gateway: the stream to it, opened when it is first asked, with one query at a time."""

    def __init__(self, record: GatewayRecord, trust: Trust, own_id: str, clock: Clock) -> None:
        self._record = record
        self._trust = trust
        self._own_id = own_id
        self._clock = clock
        self._stream: FrameStream | None = None
        self._turn = asyncio.Lock()
        self._pause = CoolDown(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        # Seconds by their numbers: all that the gateway has sent and that are not too old.
        self._seconds: dict[int, SecondCounts] = {}

    def is_at(self, record: GatewayRecord) -> bool:
        """Whether this is the same life of the gateway, at the same address."""
        return (record.epoch, record.fleet) == (self._record.epoch, self._record.fleet)

    @property
    def newest_second(self) -> int:
        """The last second that the gateway sent, of which more may be counted since."""
        return max(self._seconds, default=0)

    def keep(self, seconds: Sequence[SecondCounts]) -> tuple[SecondCounts, ...]:
        """Take the latest seconds; returns all that are not too old."""
        self._seconds |= {each.at: each for each in seconds}
        oldest = self.newest_second - RING_S
        self._seconds = {at: each for at, each in self._seconds.items() if at >= oldest}
        return tuple(self._seconds.values())

    async def ask(self, query: Query, *, is_patient: bool) -> Answer | str:
        """Return the answer, or why there is none. After a failure there is a pause, in which only patient
        callers try."""
        if not is_patient and self._pause.remaining_s(self._clock.now()):
            return self._pause.reason
        try:
            async with asyncio.timeout(ANSWER_S), self._turn:
                answer = await self._exchange(query)
        except TimeoutError:
            problem = f"did not answer within {ANSWER_S:g} s"
        except TransferError as error:
            problem = f"could not be asked: {error}"
        else:
            if not isinstance(answer, FleetRefusal):
                self._pause.succeeded(self._clock.now())
                return answer
            problem = f"refused to answer: {shown(answer.reason, _MAX_REASON_CHARS)}"
        if not self._pause.reason:
            _log.warning("%s %s", self._record.gateway_id, problem)
        self._pause.failed(problem[:_MAX_REASON_CHARS], self._clock.now())
        return self._pause.reason

    async def _exchange(self, query: Query) -> Answer | FleetRefusal:
        """Send the query, and return the answer. Without an answer, for whatever reason, the stream ends: a
        late answer would be taken for that of the next query."""
        stream, self._stream = self._stream, None
        try:
            if stream is None or stream.closed:
                hello = FleetHello(FLEET_PROTOCOL, self._record.gateway_id)
                stream = await open_tcp(
                    self._record.fleet,
                    self._trust,
                    self._own_id,
                    has_heartbeat=True,
                    max_bytes=MAX_ANSWER_BYTES,
                )
                stream.send(QUERY_CODEC.encode(hello))
            stream.send(QUERY_CODEC.encode(query))
            answer = _decoded(ANSWER_CODEC, await stream.next_frame(), MAX_ANSWER_BYTES)
            if not isinstance(answer, FleetRefusal):
                self._stream = stream
            return answer
        finally:
            if stream is not None and self._stream is not stream:
                stream.abort()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


M = TypeVar("M")


def _decoded(codec: Codec[M], frame: bytes, max_bytes: int) -> M:
    if len(frame) > max_bytes:
        raise WireError(f"a frame of {len(frame)} bytes, where {max_bytes} are the most")
    return codec.decode(frame)


def _query(frame: bytes) -> FleetHello | FollowPlacements | Query:
    return _decoded(QUERY_CODEC, frame, MAX_QUERY_BYTES)


def _listed(info: RequestInfo) -> ListedRequest:
    last = info.decisions[-1].decision if info.decisions else None
    return ListedRequest(
        request_id=info.request_id,
        tenant=info.tenant,
        state=info.state,
        reason=info.reason[:_MAX_REASON_CHARS],
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


def _arrival(item: tuple[str, ListedRequest]) -> float:
    return item[1].started_at


T = TypeVar("T", ListedRequest, RequestInfo)


def _shifted(request: T, offset_s: float) -> T:
    """Return the request with its times by another clock; 0 stays 0: that has not happened."""
    return structs.replace(
        request,
        started_at=request.started_at + offset_s,
        first_token_at=request.first_token_at + offset_s if request.first_token_at else 0.0,
        ended_at=request.ended_at + offset_s if request.ended_at else 0.0,
    )


def _info_shifted(info: RequestInfo, offset_s: float) -> RequestInfo:
    timeline = tuple(structs.replace(entry, at=entry.at + offset_s) for entry in info.timeline)
    return structs.replace(_shifted(info, offset_s), timeline=timeline)
