"""The requests that run at one gateway, found by their id on the wire or by the client's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cluster.admission.end_rate import EndRate
from cluster.admission.flow import Flow
from cluster.admission.overload_refusals import OverloadRefusals
from cluster.gateway.request_task import RequestTask
from cluster.gateway.resumed_calls import RequestKey
from cluster.identity.request_ids import draw_request_id


class RunningRequests:
    """The running requests, at most `max_requests`, with those that are about to begin."""

    def __init__(self, gateway_id: str, max_requests: int, now: float) -> None:
        self.max_requests = max_requests
        self._gateway_id = gateway_id
        # Tasks by the id on the wire, which is new for every call, and by the tenant and the client's own id.
        self.tasks: dict[str, RequestTask] = {}
        self.latest: dict[RequestKey, RequestTask] = {}
        self._num_arriving = 0
        self._ends = EndRate(now)

    def __len__(self) -> int:
        return len(self.tasks)

    def draw_id(self) -> str:
        """Return the id of a request whose client has named none."""
        return draw_request_id(self._gateway_id)

    def find(self, key: RequestKey) -> RequestTask | None:
        """Return the running request of a tenant that has this id."""
        return self.latest.get(key)

    def add(self, key: RequestKey, task: RequestTask) -> None:
        """Let a request begin."""
        self.tasks[task.state.prepared.request_id] = self.latest[key] = task

    def remove(self, key: RequestKey, task: RequestTask, now: float) -> None:
        """Forget a request that ended, which makes a place for another."""
        del self.tasks[task.state.prepared.request_id]
        if self.latest.get(key) is task:
            del self.latest[key]
        self._ends.add(now)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a request that is being prepared."""
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    def check_number(self, flow: Flow, refusals: OverloadRefusals, now: float, *, factor: int = 1) -> None:
        """Raise `OverloadedError` where there are `factor` times as many requests as may run."""
        most = factor * self.max_requests
        if len(self.tasks) + self._num_arriving >= most:
            because = f"this gateway has {most} requests, the most it takes (gateway.max_requests)"
            raise refusals.overloaded("requests", flow, because, self._ends.next_s(now))
