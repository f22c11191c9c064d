"""Gateways query each other, so that any of them answers for all: where a request went, which requests there
are or were, and what happened second by second.

    console, Explain, ListRequests --> Fleet --> FleetAnswers: this gateway's RequestManager and counters
                                         |
                                         +--PeerQueries--frames--> the GatewayPort of every other gateway

Every gateway listens on a port of its own for this (`GatewayRecord.fleet`), for connections that prove the
cluster secret. A gateway that does not answer within `ANSWER_S` is named, and the others' answers are used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from msgspec import structs

from cluster.admission.quotas import QuotaUse, merged_uses
from cluster.errors import UnknownRequestError
from cluster.gateway.fleet.fleet_answers import MAX_LISTED, FleetAnswers
from cluster.gateway.fleet.gateway_port import GatewayPort
from cluster.gateway.fleet.messages import (
    Answer,
    ExplainAnswer,
    ExplainQuery,
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
)
from cluster.gateway.fleet.peer_gateway import PeerGateways
from cluster.gateway.fleet.peer_queries import PeerQueries
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_recording import RecordedRequest
from cluster.gateway.resumed_calls import OtherGateways, ResumeClaim
from cluster.identity.ended_sessions import EndedSession
from cluster.identity.request_ids import is_drawn_by
from cluster.identity.resume_tokens import gateway_tag
from cluster.metrics.curves import Curves, Second, Window, curves_of, merged, window_of
from cluster.metrics.ended_request import RequestInfo
from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.rpc.trust import Trust

# The time between two messages about the end of a session to gateways that were not reached, or not known.
_REPEAT_S = 4.0

A = TypeVar("A", ExplainAnswer, ListAnswer, StatsAnswer, ResumeJudged, Noted, RecordingAnswer)


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


class GatewayRecording(NamedTuple):
    """A part of the requests that a gateway has recorded, by the clock of the gateway that asked."""

    gateway_id: str
    requests: tuple[RecordedRequest, ...]
    # Of the gateway's last part: the time since which it has all requests. None: more parts follow.
    complete_since: float | None
    # Why the gateway gave no more; "": it gave all.
    problem: str = ""


class Fleet:
    """This gateway among the others. `start` listens, `stop` ends all connections."""

    def __init__(
        self,
        gateway_id: str,
        answers: FleetAnswers,
        connections: ReplicaConnections,
        port: GatewayPort,
        trust: Trust,
        clock: Clock,
    ) -> None:
        self._gateway_id = gateway_id
        self._answers = answers
        self._connections = connections
        self._port = port
        self._clock = clock
        self._peers = PeerGateways(
            gateway_id, trust, lambda peer: PeerQueries(peer, clock), lambda queries: queries.close()
        )
        self._repeats = SupervisedTasks()

    async def start(self, host: str, port: int = 0) -> int:
        """Listen as `GatewayPort.start` does, and return the port."""
        return await self._port.start(host, port)

    async def stop(self) -> None:
        """Answer and query nobody any more."""
        self._peers.update(())
        await self._repeats.close()
        await self._port.stop()

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

    async def recording(self, last_s: float) -> AsyncIterator[GatewayRecording]:
        """Yield the recorded requests of all gateways that arrived in the last `last_s`, one gateway after
        the other, in pages."""
        since = self._clock.now() - last_s
        for name in (self._gateway_id, *self._known_peers()):
            number: int | None = 0
            while number is not None:
                query = RecordingQuery(max(0.0, self._clock.now() - since), number)
                given, missing = await self._ask({name: query}, RecordingAnswer, is_patient=True)
                if missing:
                    yield GatewayRecording(name, (), None, missing[name])
                    break
                (answer, offset_s), number = given[name], given[name].answer.next_number
                if not answer.is_on:
                    yield GatewayRecording(name, (), None, "records nothing: its recording.max_mb is 0")
                    break
                requests = tuple(
                    structs.replace(it, arrived_at=it.arrived_at + offset_s) for it in answer.requests
                )
                complete_since = answer.complete_since + offset_s if number is None else None
                yield GatewayRecording(name, requests, complete_since)

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
        peers = dict(self._peers.by_id)  # some may leave during the call

        async def ask(name: str, query: Query) -> None:
            if name == self._gateway_id:
                answer: Answer | str = self._answers.answer(query)
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

    def _known_peers(self) -> dict[str, PeerQueries]:
        """Return the other gateways of the roster, by id."""
        self._peers.update(self._connections.gateways)
        return dict(self._peers.by_id)


class _Timed(NamedTuple, Generic[A]):
    """An answer, and the offset that turns its times into those of the own clock."""

    answer: A
    offset_s: float


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
