"""Config updates and a second version of the model, as an operator does them, while clients send requests."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from neighbor_version import Version, folder_for, processes_of, set_version
from patience import START_S
from serving import ROOT, TINY, RunningCluster, free_port, tandem
from wire_image import recorded_images

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Client, Collector, Completion
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.gateway.traffic_splitter import application_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PROMPTS = [f"def function_{number}(self, value):\n    return value + {number}\n" for number in range(5)]
LONG = GenerateOptions(max_tokens=1200, seed=7, ignore_eos=True)
SHORT = GenerateOptions(max_tokens=16, seed=3, ignore_eos=True)
UPDATE_S = 180.0
# fp32, in which a stream that goes on elsewhere continues with the same tokens, always.
FILE = """
app: {app}
model: {model}
pools:
  - {{name: prefill, role: prefill, dtype: fp32, engine: {{block_tokens: 16}}}}
  - {{name: decode, role: decode, replicas: {decode}, dtype: fp32, engine: {{block_tokens: 16{engine}}}}}
{rest}
"""


class Setup:
    """The running cluster, its file, and the commands that operators give it."""

    def __init__(self, folder: Path, rest: str = "", prefix: Sequence[str] = ()) -> None:
        """`rest` stands at the end of each file that is written; `prefix` as in `RunningCluster`."""
        self.file = folder / "cluster.yaml"
        self._rest = rest
        self.write()
        self.places = ("--port", str(free_port()), "--admin-port", str(free_port()))
        self.cluster = RunningCluster(
            "--file", str(self.file), *self.places, prefix=prefix, start_s=2 * START_S
        )

    def write(self, engine: str = "", rest: str = "") -> None:
        rest = f"gateway: {{max_connection_age_s: 2}}\n{self._rest}\n{rest}"
        text = FILE.format(app="tandem", model=TINY, decode=2, engine=engine, rest=rest)
        self.file.write_text(text)

    def update(self, *arguments: str) -> dict[str, Any]:
        """What `tandem update --json` says."""
        done = self.command("update", "-f", str(self.file), *self.places, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        reported: dict[str, Any] = json.loads(done.stdout)
        return reported

    def traffic(self, *weights: str) -> Any:
        return tandem("traffic", *weights, "--admin-address", self.cluster.admin_address)

    def command(self, *arguments: str) -> Any:
        return tandem(*arguments, "--ray-address", self.cluster.addresses["Ray"], timeout_s=UPDATE_S)


class Load:
    """Short requests one after the other, and beside them long streams, two at a time. No call is repeated
    or resumed: a client that knows nothing but gRPC would see whatever breaks one."""

    def __init__(self, address: str) -> None:
        self.answers: list[tuple[str, Completion]] = []
        self.errors: list[CallError] = []
        self.long: list[Completion] = []
        # Of long streams: whether they ended at another replica, or at a gateway that was leaving.
        self.disturbed: list[bool] = []
        self._address = address
        self._stop = threading.Event()
        # So many that some run at a replica whenever it leaves.
        works = (self._steadily, *[self._long_streams] * 4)
        self._threads = [threading.Thread(target=work) for work in works]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def check(self, reference: tuple[int, ...]) -> None:
        """Not one failed, was cut, or had other tokens than the same request at another time; some long
        streams did change their replica or gateway meanwhile."""
        assert self.errors == []
        assert len(self.answers) >= 10
        assert [done.token_ids[0] == reference for done in self.long] == [True] * len(self.long)
        assert any(self.disturbed)
        seen: dict[str, tuple[int, ...]] = {}
        for prompt, done in self.answers:
            assert (len(done.token_ids[0]), done.finish_reasons) == (SHORT.max_tokens, ("length",))
            assert seen.setdefault(prompt, done.token_ids[0]) == done.token_ids[0]

    def _steadily(self) -> None:
        with BlockingClient(self._address) as client:
            while not self._stop.is_set():
                prompt, collector = PROMPTS[len(self.answers) % len(PROMPTS)], Collector()
                try:
                    for event in client.generate(prompt, SHORT, timeout_s=60, resume=False):
                        collector.add(event)
                except CallError as error:
                    self.errors.append(error)
                else:
                    self.answers.append((prompt, collector.completion()))

    def _long_streams(self) -> None:
        asyncio.run(self._stream_long())

    async def _stream_long(self) -> None:
        async with Client(self._address) as client:
            while not self._stop.is_set():
                collector = Collector()
                try:
                    async for event in client.generate(PROMPTS[0], LONG, timeout_s=300, resume=False):
                        collector.add(event)
                except CallError as error:
                    self.errors.append(error)
                    continue
                done = collector.completion()
                self.long.append(done)
                try:
                    names = {event.name for event in (await client.explain(done.request_id)).timeline}
                except CallError:  # it ended at the gateway that leaves, and another one is asked
                    names = {"moved"}
                self.disturbed.append("moved" in names or done.finished.timing.attempts > 1)


class Watch:
    """How many replicas of a pool were ready, again and again."""

    def __init__(self, cluster: RunningCluster, pool: str) -> None:
        self.seen: list[frozenset[str]] = []
        self._cluster, self._pool = cluster, pool
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            self.seen.append(ready(self._cluster.status(), self._pool))


def ready(status: admin_pb.StatusResponse, pool: str) -> frozenset[str]:
    ready = admin_pb.REPLICA_STATE_READY
    return frozenset(it.replica_id for it in status.replicas if it.pool == pool and it.state == ready)


def lives(status: admin_pb.StatusResponse, pool: str) -> set[tuple[str, int, int]]:
    return {(it.replica_id, it.epoch, it.process_id) for it in status.replicas if it.pool == pool}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(tmp_path_factory.mktemp("upgrade"))
    yield made
    assert made.cluster.stop() == 0


@pytest.fixture(scope="module")
def reference(setup: Setup) -> tuple[int, ...]:
    """The tokens of the long stream when nothing happens."""
    with BlockingClient(setup.cluster.address) as client:
        return client.complete(PROMPTS[0], LONG, timeout_s=120).token_ids[0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("before", "after"), [("older", "newer"), ("newer", "older")])
def test_a_cluster_is_rolled_to_a_neighboring_version(
    tmp_path: Path, before: Version, after: Version
) -> None:
    """Gateways, replicas and store processes of both versions serve side by side meanwhile. It stands before
    the tests that share a cluster, which has not been started yet."""
    folder = folder_for(tmp_path, recorded_images()[-1])
    set_version(folder, before)
    prefix = ("env", f"PYTHONPATH={folder}:{ROOT}")
    setup = Setup(tmp_path, "store: {dram_gb: 0.25}", prefix)
    try:
        status = setup.cluster.status()
        assert members(status) <= processes_of(folder, before)
        with BlockingClient(setup.cluster.address) as client:
            reference = client.complete(PROMPTS[0], LONG, timeout_s=120).token_ids[0]
        set_version(folder, after)
        setup.write(engine=", max_sequences: 8", rest="logs: {format: json}")
        with Load(setup.cluster.address) as load:
            reported = setup.update()
        assert {it["action"] for it in reported["deployments"]} == {"roll"}
        load.check(reference)
        status = setup.cluster.status()
        assert members(status) <= processes_of(folder, after)
        assert [list(it.unheard) for it in status.gateways] == [[]]
    finally:
        assert setup.cluster.stop() == 0


def members(status: admin_pb.StatusResponse) -> set[int]:
    """The processes of the gateways and engine cores."""
    return {it.process_id for it in status.gateways} | {it.process_id for it in status.replicas}


def test_a_dry_run_says_what_would_happen_and_does_nothing(setup: Setup) -> None:
    before = setup.cluster.status()
    setup.write(engine=", max_sequences: 8")
    reported = setup.update("--dry-run")
    assert reported["applied"] is False
    assert reported["changes"] == [
        {"path": "pools.decode.engine.max_sequences", "before": "auto", "after": 8}
    ]
    assert {it["pool"]: it["action"] for it in reported["deployments"]} == {
        "prefill": "stay",
        "decode": "roll",
        "gateways": "stay",
    }
    assert lives(setup.cluster.status(), "decode") == lives(before, "decode")


def test_what_cannot_change_is_refused_and_nothing_is_done(setup: Setup) -> None:
    before = setup.cluster.status()
    setup.write(engine=", max_sequences: 8", rest="store: {dram_gb: 2}")
    done = setup.command("update", "-f", str(setup.file), *setup.places)
    assert done.returncode == 1
    assert "store.dram_gb: an update does not restart stores" in done.stderr
    setup.file.write_text(setup.file.read_text().replace("app: tandem", "app: unheard-of"))
    done = setup.command("update", "-f", str(setup.file), *setup.places)
    assert done.returncode == 1
    assert "no `tandem serve` has deployed the application 'unheard-of'" in done.stderr
    setup.write(engine="}, cpus_per_rank: 1000, resources: {")
    done = setup.command("update", "-f", str(setup.file), *setup.places)
    assert done.returncode == 1
    assert "lacks resources for the new replicas beside the old ones: CPU: 1000" in done.stderr
    assert lives(setup.cluster.status(), "decode") == lives(before, "decode")


def test_a_pool_is_rolled_one_by_one_and_nothing_else(setup: Setup, reference: tuple[int, ...]) -> None:
    before = setup.cluster.status()
    setup.write(engine=", max_sequences: 8")
    with Load(setup.cluster.address) as load, Watch(setup.cluster, "decode") as watch:
        assert setup.update()["applied"] is True
    load.check(reference)
    after = setup.cluster.status()
    old, new = ready(before, "decode"), ready(after, "decode")
    assert len(new) == 2
    assert not old & new
    assert all(2 <= len(ids) <= 3 for ids in watch.seen)
    assert any(len(ids & old) == 1 for ids in watch.seen), "one was there while the other was replaced"
    epochs = {it.epoch for it in before.replicas if it.pool == "decode"}
    assert min(it.epoch for it in after.replicas if it.pool == "decode") > max(epochs)
    assert lives(after, "prefill") == lives(before, "prefill")
    assert [it.gateway_id for it in after.gateways] == [it.gateway_id for it in before.gateways]
    assert setup.update() == {**setup.update("--dry-run"), "applied": False}


def test_gateways_are_rolled_and_no_client_notices(setup: Setup, reference: tuple[int, ...]) -> None:
    """One gateway with a fixed port: the next one listens there before it leaves."""
    before = setup.cluster.status()
    setup.write(engine=", max_sequences: 8", rest="logs: {format: json}")
    with Load(setup.cluster.address) as load:
        reported = setup.update()
    assert {it["action"] for it in reported["deployments"]} == {"roll"}
    load.check(reference)
    after = setup.cluster.status()
    assert {it.gateway_id for it in after.gateways}.isdisjoint({it.gateway_id for it in before.gateways})
    assert not lives(after, "prefill") & lives(before, "prefill")


def test_every_process_logs_json_and_each_request_has_its_line(setup: Setup) -> None:
    """After the update before this one."""
    with BlockingClient(setup.cluster.address) as client:
        client.complete(PROMPTS[1], GenerateOptions(request_id="logged", tenant="acme", max_tokens=4))
    lines = [json.loads(line) for line in setup.cluster.log().splitlines() if line.startswith('{"ts"')]
    processes = {line["process"] for line in lines}
    status = setup.cluster.status()
    assert {it.replica_id for it in status.replicas} <= processes
    assert {f"{it.replica_id}/0" for it in status.replicas} <= processes
    (access,) = (line for line in lines if line.get("request_id") == "logged")
    assert (access["logger"], access["state"], access["output_tokens"]) == ("tandem.access", "finished", 4)
    assert access["process"] == status.gateways[0].gateway_id
    assert (access["tenant"], access["decode_replica"] in ready(status, "decode")) == ("acme", True)


def test_a_configuration_that_does_not_work_leaves_the_old_replicas(setup: Setup) -> None:
    before = setup.cluster.status()
    text = setup.file.read_text()
    setup.file.write_text(f"{text}\ntransfer: {{data_host: 203.0.113.7}}\n")  # not an address of this host
    done = setup.command("update", "-f", str(setup.file), *setup.places)
    setup.file.write_text(text)
    assert done.returncode == 1
    assert re.search(r"Pool-(prefill|decode): .*203\.0\.113\.7", done.stderr)
    assert "Replicas that were not replaced keep running" in done.stderr
    assert lives(before, "decode") <= lives(setup.cluster.status(), "decode")
    assert setup.update()["applied"] is True
    assert lives(setup.cluster.status(), "decode") == lives(before, "decode")


def test_counts_change_without_any_restart(setup: Setup) -> None:
    before = setup.cluster.status()
    text = setup.file.read_text()
    setup.file.write_text(text.replace("replicas: 2", "replicas: 1"))
    reported = setup.update()
    assert {it["action"] for it in reported["deployments"]} == {"stay"}
    after = setup.cluster.wait_for(lambda status: status.pools[1].configured == 1)
    assert len(ready(after, "decode")) == 1
    assert lives(after, "decode") < lives(before, "decode")
    assert [it.gateway_id for it in after.gateways] == [it.gateway_id for it in before.gateways]


def test_a_second_version_gets_its_share_and_gives_it_back(setup: Setup, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "v2", "llama", seed=5, tokenizer_from=TINY)
    file = tmp_path / "v2.yaml"
    rest = "gateway: {port: 0, console_port: null}"
    file.write_text(FILE.format(app="tandem-v2", model="v2", decode=1, engine="", rest=rest))
    ids = [f"split-{number}" for number in range(24)]
    first = RunningCluster("--file", str(file), ray_address=setup.cluster.addresses["Ray"])
    try:
        with BlockingClient(setup.cluster.address) as client:
            own, other = ready(setup.cluster.status(), "decode"), ready(first.status(), "decode")
            assert answered_by(client, ids) <= own
            done = setup.traffic("tandem=50", "tandem-v2=50")
            assert "tandem 50 %, tandem-v2 50 %" in done.stdout, done.stderr
            setup.cluster.wait_for(lambda status: len(status.traffic) == 2)
            shares = {"tandem": 0.5, "tandem-v2": 0.5}
            for request_id in ids:
                is_there = application_of(shares, "tandem", "", request_id) == "tandem-v2"
                assert answered_by(client, [request_id]) <= (other if is_there else own), request_id
            assert answered_by(client, ids) & own
            assert answered_by(client, ids) & other
            assert (
                "tandem 50 %, tandem-v2 50 %"
                in tandem("status", "--admin-address", setup.cluster.admin_address).stdout
            )
            assert setup.traffic("tandem=100").returncode == 0
            setup.cluster.wait_for(lambda status: status.traffic["tandem"] == 1.0)
            assert answered_by(client, ids) <= own
    finally:
        assert first.stop() == 0
    done = setup.traffic("tandem=1", "tandem-v2=1")
    assert done.returncode == 1
    assert "no gateway of an application 'tandem-v2'" in done.stderr


def answered_by(client: BlockingClient, ids: list[str]) -> frozenset[str]:
    """The decode replicas that answered requests of these ids."""
    return frozenset(
        client.complete(
            PROMPTS[0], GenerateOptions(request_id=it, max_tokens=2), timeout_s=60
        ).finished.decode_replica
        for it in ids
    )
