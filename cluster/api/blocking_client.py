"""`cluster.api.client` and `cluster.api.admin_client` for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials, GatewayCaller, closed_error
from cluster.api.client import Client, Completion, Event
from cluster.api.generate_options import GenerateOptions, Prompt, Turn
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import Clock

T = TypeVar("T")
C = TypeVar("C", bound=GatewayCaller)
# The time that calls may take to end when their client is closed: that takes a few milliseconds.
_END_S = 5.0


class BlockingCaller(Generic[C]):
    """Runs a client in an event loop in a thread of its own. `with` closes it.

    Any thread may call it. Closing it ends the calls of other threads with a `CallError` of CANCELLED.
    """

    def __init__(self, client: C) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._is_closed = False
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="tandem-client", daemon=True)
        self._thread.start()
        self._loop, self._closing = started.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and connections, and the thread. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._closing.set)
            self._is_closed = True
        self._thread.join()

    def _run(self, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        """Run the loop until `close`; the runner then cancels every task that is left and waits for it.

        gRPC takes in what ends in any loop of the process: in the midst of the calls of another one, it would
        fail at a call whose own loop is closed. So each call ends before the loop does.
        """

        async def serve() -> None:
            closing = asyncio.Event()
            started.set_result((asyncio.get_running_loop(), closing))
            await closing.wait()
            await self._client.close()
            if ending := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(ending, timeout=_END_S)

        with asyncio.Runner() as runner:
            runner.run(serve())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with (
            self._lock
        ):  # what is scheduled before `close` is cancelled by it, and nothing is scheduled later
            if self._is_closed:
                work.close()
                raise closed_error()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise closed_error() from None
        finally:
            future.cancel()  # when Ctrl-C ended the wait; otherwise it is done


class BlockingClient(BlockingCaller[Client]):
    """`Client` for code without an event loop."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        clock: Clock | None = None,
        *,
        credentials: ClientCredentials | None = None,
    ) -> None:
        super().__init__(Client(addresses, clock, credentials=credentials))

    def generate(
        self,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        *,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Generator[Event, None, None]:
        """As `Client.generate`; leaving or closing the iteration cancels the request."""
        events = _Events(self._client.generate(prompt, options, timeout_s=timeout_s, resume=resume).events())
        try:
            while (event := self._wait(events.next_or_none())) is not None:
                yield event
        finally:
            if not self._is_closed:  # else the request was cancelled with all others
                self._wait(events.close())

    def complete(
        self,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        *,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Completion:
        return self._wait(self._client.complete(prompt, options, timeout_s=timeout_s, resume=resume))

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> list[list[float]]:
        return self._wait(
            self._client.embed(inputs, normalize=normalize, dimensions=dimensions, timeout_s=timeout_s)
        )

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> list[pb.ContinuationScore]:
        return self._wait(self._client.score(prompt, continuations, timeout_s=timeout_s))

    def tokenize(self, prompt: str | Sequence[Turn]) -> list[int]:
        return self._wait(self._client.tokenize(prompt))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._wait(self._client.detokenize(token_ids))

    def models(self) -> list[pb.Model]:
        return self._wait(self._client.models())

    def explain(self, request_id: str) -> pb.ExplainResponse:
        return self._wait(self._client.explain(request_id))

    def requests(self, limit: int | None = None) -> list[pb.RequestSummary]:
        return self._wait(self._client.requests(limit))


class BlockingAdminClient(BlockingCaller[AdminClient]):
    """`AdminClient` for code without an event loop."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        clock: Clock | None = None,
        *,
        credentials: ClientCredentials | None = None,
    ) -> None:
        super().__init__(AdminClient(addresses, clock, credentials=credentials))

    def status(self) -> admin_pb.StatusResponse:
        return self._wait(self._client.status())

    def paths(self, replica_ids: Sequence[str] = ()) -> list[admin_pb.ReplicaPaths]:
        """Return the measured paths from these replicas, by default from all."""
        return self._wait(self._client.paths(replica_ids))

    def explain(self, request_id: str, tenant: str | None = None) -> pb.ExplainResponse:
        return self._wait(self._client.explain(request_id, tenant))

    def requests(self, limit: int | None = None) -> pb.ListRequestsResponse:
        return self._wait(self._client.requests(limit))

    def scale(self, replicas: Mapping[str, int], *, dry_run: bool = False) -> admin_pb.ScaleResponse:
        return self._wait(self._client.scale(replicas, dry_run=dry_run))

    def release(self, pools: Sequence[str]) -> None:
        return self._wait(self._client.release(pools))

    def store_stat(self) -> admin_pb.StoreStatResponse:
        return self._wait(self._client.store_stat())

    def store_list(self, request: admin_pb.StoreListRequest) -> admin_pb.StoreListResponse:
        return self._wait(self._client.store_list(request))

    def store_verify(
        self, request: admin_pb.StoreVerifyRequest, timeout_s: float | None = None
    ) -> admin_pb.StoreVerifyResponse:
        return self._wait(self._client.store_verify(request, timeout_s))

    def store_purge(
        self, request: admin_pb.StorePurgeRequest, timeout_s: float | None = None
    ) -> admin_pb.StorePurgeResponse:
        return self._wait(self._client.store_purge(request, timeout_s))

    def traffic(self, weights: Mapping[str, float]) -> dict[str, float]:
        return self._wait(self._client.traffic(weights))


class _Events:
    """The events of one request, as the thread of the loop waits for them.

    Ctrl-C ends the wait of the calling thread at any point, also before it knows what it waits for: such a
    wait goes on here until it is cancelled, and may still be on its way out of the generator.
    """

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[Any]] = set()

    async def next_or_none(self) -> Event | None:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            async with self._turn:
                return await anext(self._events, None)
        finally:
            self._waiting.discard(task)

    async def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        async with self._turn:
            await self._events.aclose()
