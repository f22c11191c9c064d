"""The rendered application of the CPU example, deployed through Serve's own endpoint on Ray nodes that are
started as KubeRay would start the rendered groups."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from authority import Authority
from chart_harness import (
    EXAMPLES,
    Object,
    RayGroups,
    merged,
    objects,
    places_of,
    ray_service,
    serve_config,
    with_value,
)
from chart_policies import Policies
from chart_schema import values
from optional_programs import uses_redis_or_valkey
from serving import TINY, free_port

from cluster.api.blocking_client import BlockingAdminClient, BlockingClient
from cluster.api.channel import ClientCredentials
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.index_server import IndexServer
from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.trust import Trust

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600), uses_redis_or_valkey]
SECRET = b"0123456789abcdef0123456789abcdef"
START_S = 240.0
# Too long to skip the prefill pool.
PROMPT = "".join(f"def function_{number}(x):\n    return x + {number}\n" for number in range(12))
SCALE = "/api/v1/applications/tandem/deployments/Pool-decode/scale"


@pytest.fixture(scope="module")
def chosen() -> Object:
    """The chart's values."""
    ports = {name: free_port() for name in ("port", "httpPort", "consolePort", "adminPort")}
    settings: Object = {"model": {"path": str(TINY)}, "gateway": ports, "innerTls": {"enabled": True}}
    return merged(EXAMPLES["cpu"], settings)


@pytest.fixture(scope="module")
def service(chosen: Object) -> Object:
    return ray_service(chosen)


@pytest.fixture(scope="module")
def mounted(chosen: Object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each Secret of the release, with its keys."""
    folder = tmp_path_factory.mktemp("mounted")
    for item in objects(chosen):
        if item["kind"] == "Secret":
            place = folder / item["metadata"]["name"].removeprefix("tandem-")
            place.mkdir()
            for name, value in item["data"].items():
                (place / name).write_bytes(base64.b64decode(value))
    (inner := folder / "inner-tls").mkdir()
    authority = Authority("inner")
    authority.issue(inner, "tandem-inner")
    authority.write(inner)
    return folder


@pytest.fixture(scope="module")
def config(service: Object, mounted: Path) -> Iterator[Object]:
    """What KubeRay would send, with this machine's places in the place of the pods'."""
    index = IndexServer("127.0.0.1", Trust.of(SECRET), SystemClock())
    (mounted / "url").write_text(index.url)
    rendered = serve_config(service)
    (application,) = rendered["applications"]
    secret_file = mounted / "cluster" / "cluster-secret"
    application["args"] |= {"secret_file": str(secret_file), "redis_url_file": str(mounted / "url")}
    application["args"]["config"]["auth"] |= {
        "keys_file": str(mounted / "api-keys" / "keys.yaml"),
        "key_root_file": str(mounted / "key-root" / "key-root"),
    }
    inner = application["args"]["config"]["inner_tls"]
    inner |= {name: str(mounted / "inner-tls" / Path(path).name) for name, path in inner.items()}
    application["args"]["config"]["gateway"]["host"] = "127.0.0.1"
    application["args"]["config"]["transfer"]["data_host"] = "127.0.0.1"
    # All nodes are on this host, which can have one proxy.
    rendered |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": free_port()}}
    yield rendered
    index.close()


@pytest.fixture(scope="module")
def user(mounted: Path) -> ClientCredentials:
    """Whoever has the first user's key."""
    return ClientCredentials(bearer=(mounted / "first-keys" / "user").read_text())


@pytest.fixture(scope="module")
def operator(mounted: Path) -> ClientCredentials:
    """Whoever has the first operator's key."""
    return ClientCredentials(bearer=(mounted / "first-keys" / "operator").read_text())


@pytest.fixture(scope="module")
def nodes(service: Object) -> Iterator[RayGroups]:
    started = RayGroups(service)
    try:
        started.start("headgroup")
        started.wait_for_dashboard(START_S)
        for group in ("gateway", "pool-prefill", "pool-decode"):
            started.start(group)
        yield started
    finally:
        started.close()


def test_a_wrong_field_is_reported_where_kuberay_looks(nodes: RayGroups, config: Object) -> None:
    wrong = with_value(config, "applications", [with_value(config["applications"][0], "name", "wrong")])
    wrong["applications"][0]["args"]["config"]["router"]["polcy"] = "cost"
    nodes.deploy(wrong)
    failed = nodes.application("wrong", "DEPLOY_FAILED", START_S)
    assert "args.config: router.polcy: unknown key; did you mean policy?" in failed["message"]


def test_the_rendered_application_serves_who_has_a_key(
    nodes: RayGroups, config: Object, user: ClientCredentials
) -> None:
    nodes.deploy(config)
    running = nodes.application("tandem", "RUNNING", START_S)
    places = {name: places_of(deployment) for name, deployment in running["deployments"].items()}
    (head,) = nodes.ask("/api/serve/applications/")["proxies"]
    assert all(len(place) == 1 for place in places.values()), places
    assert len({head, *(place[0] for place in places.values())}) == 4, "each group has its own"
    gateway = config["applications"][0]["args"]["config"]["gateway"]
    with BlockingClient(f"127.0.0.1:{gateway['port']}", credentials=user) as client:
        done = client.complete(PROMPT, GenerateOptions(max_tokens=24, ignore_eos=True, seed=3), timeout_s=60)
        assert len(done.token_ids[0]) == 24
        assert done.finished.prefill_replica.startswith("prefill-")
        assert done.finished.decode_replica.startswith("decode-")
    with BlockingClient(f"127.0.0.1:{gateway['port']}") as stranger, pytest.raises(CallError) as refused:
        stranger.complete(PROMPT, timeout_s=60)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
    url = f"http://127.0.0.1:{config['http_options']['port']}/-/healthz"
    nodes.until(
        lambda: "success" in text_of(url), 60, lambda: f"KubeRay finds the head ready: {text_of(url)}"
    )


def test_the_policies_allow_every_connection_of_the_running_cluster(
    nodes: RayGroups, config: Object, chosen: Object, user: ClientCredentials
) -> None:
    """Those between groups, while a stream runs."""
    policies = Policies(objects(chosen))
    gateway = config["applications"][0]["args"]["config"]["gateway"]
    found: set[tuple[str, str, int]] = set()
    with BlockingClient(f"127.0.0.1:{gateway['port']}", credentials=user) as client:
        for _ in client.generate(PROMPT, GenerateOptions(max_tokens=256, ignore_eos=True)):
            found |= nodes.connections()
    refused = {connection for connection in found if not policies.may(*connection)}
    assert refused == set()
    free = values()["networkPolicy"]["freePorts"]
    first, last = free["first"], free["last"]
    links = {(source, target) for source, target, port in found if first <= port <= last}
    assert {("gateway", "pool-prefill"), ("gateway", "pool-decode"), ("pool-prefill", "pool-decode")} <= links


def test_operators_scale_a_pool_into_a_new_pod(nodes: RayGroups, config: Object) -> None:
    assert nodes.ask(SCALE, {"target_num_replicas": 2}, "POST") is not None
    nodes.start("pool-decode")
    places = nodes.replicas("tandem", "Pool-decode", lambda places: len(places) == 2, START_S)
    assert len(set(places)) == 2


def test_a_pod_drains_before_it_ends(nodes: RayGroups, config: Object, user: ClientCredentials) -> None:
    """What the `preStop` hook asks for: the replica is started elsewhere, and no stream is cut."""
    assert nodes.ask(SCALE, {"target_num_replicas": 1}, "POST") is not None
    before = nodes.replicas("tandem", "Pool-decode", lambda places: len(places) == 1, START_S)
    gateway = config["applications"][0]["args"]["config"]["gateway"]
    stop = threading.Event()

    def stream() -> list[int]:
        lengths = []
        with BlockingClient(f"127.0.0.1:{gateway['port']}", credentials=user) as client:
            while not stop.is_set():
                options = GenerateOptions(max_tokens=256, ignore_eos=True)
                done = client.complete(PROMPT, options, timeout_s=120)
                lengths.append(len(done.token_ids[0]))
        return lengths

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream) for _ in range(2)]
        try:
            nodes.drain(before[0], 120)
            nodes.replicas(
                "tandem", "Pool-decode", lambda places: len(places) == 1 and places != before, START_S
            )
        finally:
            stop.set()
        for each in streams:
            assert set(each.result()) == {256}


def test_another_count_is_deployed_without_a_restart(
    nodes: RayGroups, config: Object, operator: ClientCredentials
) -> None:
    """Last: an order of the count in the build, right after a deploy, is taken for a reset by the deploy."""
    before = replica_ids(nodes)
    other = json.loads(json.dumps(config))
    for deployment in other["applications"][0]["deployments"]:
        if deployment["name"] == "Gateway":
            deployment["user_config"]["replicas"]["decode"] = 2
    nodes.deploy(other)
    gateway = config["applications"][0]["args"]["config"]["gateway"]
    address = f"127.0.0.1:{gateway['admin_port']}"
    with BlockingAdminClient(address, credentials=operator) as client:
        nodes.until(
            lambda: (
                {pool.name: pool.configured for pool in client.status().pools} == {"prefill": 1, "decode": 2}
            ),
            START_S,
            lambda: "the gateway knows the count",
        )
    assert replica_ids(nodes) == before


def text_of(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return str(reply.read().decode())
    except OSError as error:
        return str(error)


def replica_ids(nodes: RayGroups) -> set[str]:
    deployments = nodes.ask("/api/serve/applications/")["applications"]["tandem"]["deployments"]
    return {replica["replica_id"] for each in deployments.values() for replica in each["replicas"]}
