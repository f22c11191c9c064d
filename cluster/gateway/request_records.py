"""The requests of one gateway that run, and the latest that ended, for explanations and lists."""

from __future__ import annotations

from itertools import islice

from cluster.errors import UnknownRequestError
from cluster.gateway.request_task import RequestTask
from cluster.gateway.resumed_calls import RequestKey
from cluster.metrics.ended_request import EndedRequest, RequestInfo, request_info
from kvtransfer.common.recent_map import RecentMap

# Ended requests that are remembered.
NUM_RECORDS = 1024


class RequestRecords:
    """Finds running requests, and remembers those that ended."""

    def __init__(self, running: dict[RequestKey, RequestTask]) -> None:
        self._running = running
        self._ended: RecentMap[RequestKey, RequestInfo] = RecentMap(NUM_RECORDS)

    def ended(self, key: RequestKey, request: EndedRequest) -> None:
        """Remember how an accepted request has ended, without its prompt."""
        self._ended.put(key, request.info())

    def find(self, request_id: str, tenant: str | None) -> RequestInfo:
        """Return the known facts of a running or recent request of the tenant, or raise
        `UnknownRequestError`. `tenant` None: the latest of any tenant."""
        keys = [(tenant, request_id)] if tenant is not None else self._keys_of(request_id)
        found = [
            _running(key, task) if (task := self._running.get(key)) else self._ended[key]
            for key in keys
            if key in self._running or key in self._ended
        ]
        if not found:
            what = f"request {request_id[:128]!r} is neither running at this gateway nor"
            raise UnknownRequestError(f"{what} one of the last {NUM_RECORDS} that ended here")
        return max(found, key=lambda it: it.started_at)

    def latest(self, limit: int, tenant: str | None) -> list[RequestInfo]:
        """Return at most `limit` running requests of the tenant and as many that ended, the latest arrivals
        first. `tenant` None: of all tenants."""

        def is_asked(key: RequestKey) -> bool:
            return tenant is None or key[0] == tenant

        latest = ((key, task) for key, task in reversed(self._running.items()) if is_asked(key))
        running = [_running(key, task) for key, task in islice(latest, limit)]
        ended = (
            record
            for key, record in reversed(self._ended.items())
            if is_asked(key) and key not in self._running
        )
        return sorted([*running, *islice(ended, limit)], key=lambda it: it.started_at, reverse=True)

    def _keys_of(self, request_id: str) -> list[RequestKey]:
        """Return the keys of all tenants' requests with this id."""
        return [key for key in {*self._running, *self._ended} if key[1] == request_id]


def _running(key: RequestKey, task: RequestTask) -> RequestInfo:
    tenant, request_id = key
    state = task.state
    return request_info(
        request_id,
        tenant,
        "running",
        "",
        task.summary(),
        state.decisions,
        state.timeline,
        task.relative,
    )
