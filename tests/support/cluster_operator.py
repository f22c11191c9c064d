"""An operator of a running cluster, with the Ray token, curl and `tandem status`, and load on that
cluster without any help of the client, so that a request that breaks is seen."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import RunningCluster

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb


class Operator:
    """Orders and looks through the dashboard of a running cluster."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.dashboard = cluster.addresses["dashboard"]
        self.token_file = cluster.addresses["Ray token"].removeprefix("in ")
        self.token = Path(self.token_file).read_text().strip()

    def ask(self, path: str, body: dict[str, int] | None = None) -> Any:
        request = urllib.request.Request(
            self.dashboard + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            error.close()
            raise

    def scale(self, pool: str, num_replicas: int) -> None:
        path = f"/api/v1/applications/tandem/deployments/Pool-{pool}/scale"
        self.ask(path, {"target_num_replicas": num_replicas})

    def target(self, pool: str) -> int:
        instance = self.ask("/api/serve/applications/")
        found: int = instance["applications"]["tandem"]["deployments"][f"Pool-{pool}"]["target_num_replicas"]
        return found

    def process_ids(self, class_name: str) -> list[int]:
        rows = self.ask("/api/v0/actors?detail=1&limit=1000")["data"]["result"]["result"]
        return [
            row["pid"] for row in rows if row["state"] == "ALIVE" and row["class_name"].startswith(class_name)
        ]


def ready(pool: str, num_replicas: int) -> Callable[[admin_pb.StatusResponse], bool]:
    """Return a test whether the pool has `num_replicas` replicas, all ready, and none on its way out."""

    def holds(status: admin_pb.StatusResponse) -> bool:
        states = [replica.state for replica in status.replicas if replica.pool == pool]
        return states == [admin_pb.REPLICA_STATE_READY] * num_replicas

    return holds


def pool_of(status: admin_pb.StatusResponse, name: str) -> admin_pb.Pool:
    return next(pool for pool in status.pools if pool.name == name)


class Stream:
    """One long request in a thread. It begins at the replica `decode`, if that is named."""

    def __init__(self, address: str, max_tokens: int, number: int = 0, decode: str = "") -> None:
        self.options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True, seed=3, pinned_decode=decode)
        self.prompt = list(range(5 + 7 * number, 305 + 7 * number))
        self.tokens: list[int] = []
        self.request_id = ""
        self.failure: Exception | None = None
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with BlockingClient(self._address) as client:
                stream = client.generate(self.prompt, self.options, timeout_s=900.0, resume=False)
                for event in stream:
                    if isinstance(event, pb.Accepted):
                        self.request_id = event.request_id
                    if isinstance(event, pb.Delta):
                        assert event.first_index == len(self.tokens)
                        self.tokens += event.token_ids
                    if self._stop.is_set():
                        break
                stream.close()
        except (CallError, AssertionError) as error:
            self.failure = error

    def has_grown(self, num_tokens: int) -> None:
        """Wait until it has `num_tokens` more tokens."""
        wanted, pause = len(self.tokens) + num_tokens, threading.Event()
        for _ in range(1200):
            assert self.failure is None
            assert self._thread.is_alive()
            if len(self.tokens) >= wanted:
                return
            pause.wait(0.1)
        raise AssertionError(f"{len(self.tokens)} tokens, {wanted} were expected")

    def end(self) -> None:
        """Break off, if it has not ended yet."""
        self._stop.set()
        self.has_ended()

    def has_ended(self) -> None:
        """Wait for its end, which nothing has caused but itself."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.failure is None

    def was_never_cut_off(self) -> list[str]:
        """Return the timeline of its one attempt, by name."""
        with BlockingClient(self._address) as client:
            explained = client.explain(self.request_id)
        names = [event.name for event in explained.timeline]
        assert len(explained.decisions) == 1, names
        return names

    def has_the_same_tokens(self) -> None:
        """Check at several places that the stream goes on as one does that begins there."""
        options = GenerateOptions(max_tokens=8, ignore_eos=True, seed=3)
        with BlockingClient(self._address) as client:
            for share in (0.1, 0.5, 0.95):
                start = int(share * (len(self.tokens) - 8))
                done = client.complete(self.prompt + self.tokens[:start], options, timeout_s=120)
                assert list(done.token_ids[0]) == self.tokens[start : start + 8]


class Steady:
    """Requests in `num_threads` threads, one after the other in each, all of different prompts."""

    def __init__(
        self, address: str, num_threads: int = 1, prompt_tokens: int = 96, max_tokens: int = 12
    ) -> None:
        self.num_done = 0
        self.wrong: list[str] = []
        self._address = address
        self._prompt_tokens = prompt_tokens
        self._options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True, seed=1)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, thread: int) -> None:
        start = 1000 * thread
        with BlockingClient(self._address) as client:
            while not self._stop.is_set():
                start += 7
                prompt = [4 + (start + place * place) % 4000 for place in range(self._prompt_tokens)]
                problem = self._problem(client, prompt)
                with self._lock:
                    self.num_done += 1
                    self.wrong += [problem] if problem else []
                self._stop.wait(0.05)

    def _problem(self, client: BlockingClient, prompt: list[int]) -> str:
        num_tokens = 0
        try:
            for event in client.generate(prompt, self._options, timeout_s=120.0, resume=False):
                if isinstance(event, pb.Delta):
                    num_tokens += len(event.token_ids)
        except CallError as error:
            return str(error)
        return "" if num_tokens == self._options.max_tokens else f"{num_tokens} tokens"

    def end(self) -> None:
        """Let the running requests finish; none may have failed or been cut."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()
        assert self.wrong == []
