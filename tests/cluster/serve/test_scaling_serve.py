"""Pools scaled under load in the running service, through Ray Serve's own endpoint: nobody is cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from cluster_operator import Operator, Steady, Stream, pool_of, ready
from patience import SETTLE_S
from serving import RunningCluster, environment, free_port, tandem, write_long_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
# At the 25 ms or more that a token takes here, that is over ten minutes: the stream ends with the test.
NUM_LONG_TOKENS = 24_000
_DEPLOY = """
import logging, sys
import ray
from ray import serve
from cluster.serve.app import build_application
from cluster.serve.deployed import recall
ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
known = recall("tandem")
raw = known.config.model_dump(mode="json")
for pool in raw["pools"]:
    pool["health_check_period_s"] = 1.5
config = type(known.config).model_validate(raw)
application = build_application(config, known.cpus, life=known.life)
target = serve.RunTarget(application, name="tandem", route_prefix=None, external_scaler_enabled=True)
serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("scaling")
    model_dir = write_long_llama(folder / "model", 512)
    engine = "engine: {block_tokens: 16, kv_tokens: 32768}"
    common = f"dtype: fp32, cpus_per_rank: 0.1, drain_s: 20, {engine}"
    file = folder / "cluster.yaml"
    file.write_text(
        f"model: {model_dir}\n"
        "pools:\n"
        f"  - {{name: prefill, role: prefill, {common}}}\n"
        f"  - {{name: decode, role: decode, {common}}}\n"
        "scaling: {interval_s: 0.5}\n"
        "debug: {allow_pins: true}\n"
    )
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    yield running
    assert running.stop() == 0


@pytest.fixture
def operator(cluster: RunningCluster) -> Operator:
    return Operator(cluster)


def test_the_endpoint_wants_the_token(operator: Operator) -> None:
    path = "/api/v1/applications/tandem/deployments/Pool-decode/scale"
    for headers, code in (({}, 401), ({"Authorization": "Bearer another"}, 403)):
        request = urllib.request.Request(
            operator.dashboard + path, data=b'{"target_num_replicas": 2}', headers=headers
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == code
        refused.value.close()
    assert operator.target("decode") == 1


def test_pools_grow_and_shrink_under_load_and_serves_own_processes_die(
    cluster: RunningCluster, operator: Operator
) -> None:
    stream, steady = Stream(cluster.address, NUM_LONG_TOKENS), Steady(cluster.address)
    stream.has_grown(20)
    operator.scale("decode", 3)
    status = cluster.wait_for(ready("decode", 3), SETTLE_S)
    operator.scale("prefill", 2)
    cluster.wait_for(ready("prefill", 2), SETTLE_S)
    status = cluster.wait_for(lambda status: pool_of(status, "prefill").pinned)
    assert [(pool.desired, pool.configured, pool.pinned) for pool in status.pools] == [
        (2, 1, True),
        (3, 1, True),
    ]
    assert [(move.pool, move.before, move.after, move.by) for move in status.scaling_changes] == [
        ("decode", 1, 3, "operator"),
        ("prefill", 1, 2, "operator"),
    ]
    decodes = [replica.replica_id for replica in status.replicas if replica.pool == "decode"]
    streams = [
        Stream(cluster.address, NUM_LONG_TOKENS, number, decode) for number, decode in enumerate(decodes, 1)
    ]
    for each in (stream, *streams):
        each.has_grown(20)
    operator.scale("prefill", 1)
    operator.scale("decode", 1)
    status = cluster.wait_for(ready("decode", 1), SETTLE_S)
    cluster.wait_for(ready("prefill", 1), SETTLE_S)
    for each in (stream, *streams):
        each.has_grown(20)
    (stayed,) = [replica.replica_id for replica in status.replicas if replica.pool == "decode"]
    for each, decode in zip(streams, decodes, strict=True):
        assert ("moved" in each.was_never_cut_off()) == (decode != stayed)
        each.end()
        each.has_the_same_tokens()

    operator.scale("decode", 3)
    cluster.wait_for(ready("decode", 3), SETTLE_S)
    before = {replica.replica_id for replica in cluster.status().replicas}
    for class_name in ("ServeController", "ProxyActor"):
        for process_id in operator.process_ids(class_name):
            os.kill(process_id, signal.SIGKILL)
    stream.has_grown(40)
    pause = threading.Event()
    for _ in range(300):
        if operator.process_ids("ServeController"):
            break
        pause.wait(0.2)
    assert operator.target("decode") == 3
    stream.has_grown(40)
    status = cluster.wait_for(ready("decode", 3), SETTLE_S)
    assert {replica.replica_id for replica in status.replicas} == before
    assert operator.target("decode") == 3
    assert pool_of(status, "decode").desired == 3

    steady.end()
    assert steady.num_done > 20
    stream.end()
    stream.has_the_same_tokens()
    assert cluster.status().num_failed_requests == 0


def test_a_deploy_resets_the_count_and_it_is_restored(cluster: RunningCluster, operator: Operator) -> None:
    """Of somebody who knows nothing of the desired counts, and has changed what resets Serve's target. Those
    who keep the count have just died."""
    operator.scale("decode", 2)
    cluster.wait_for(lambda status: pool_of(status, "decode").desired == 2)
    actors = [*operator.process_ids("RayScaler"), *operator.process_ids("RayRosterActor")]
    assert len(actors) == 2
    for process_id in actors:
        os.kill(process_id, signal.SIGKILL)
    deployed = subprocess.run(
        [sys.executable, "-c", _DEPLOY, cluster.addresses["Ray"]],
        env={**environment(), **cluster.ray_variables},
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert deployed.returncode == 0, deployed.stderr
    status = cluster.wait_for(lambda status: status.scaling_changes[-1].by == "deploy")
    move = status.scaling_changes[-1]
    assert (move.pool, move.before, move.after) == ("decode", 1, 2)
    assert operator.target("decode") == 2
    status = cluster.wait_for(ready("decode", 2), SETTLE_S)
    assert pool_of(status, "decode").pinned
    assert status.scaling_changes[-1] == move


def test_the_command_says_what_changes_and_waits_until_it_has(
    cluster: RunningCluster, operator: Operator
) -> None:
    places = ["--admin-address", cluster.admin_address]
    operator.scale("decode", 2)
    dry = tandem("scale", "decode=1", "prefill=2", "--dry-run", "--json", *places)
    assert dry.returncode == 0, dry.stderr
    told = json.loads(dry.stdout)
    assert [(pool["name"], pool["before"], pool["after"]) for pool in told["pools"]] == [
        ("decode", 2, 1),
        ("prefill", 1, 2),
    ]
    assert told["pools"][1]["needed"] == {"CPU": pytest.approx(0.15)}
    assert 0 < told["free"]["CPU"] <= os.cpu_count()
    assert told["shortages"] == []
    huge = json.loads(tandem("scale", "prefill=999", "--dry-run", "--json", *places).stdout)
    assert "CPU: 149.7 wanted" in huge["shortages"][0]
    done = tandem("scale", "decode=1", *places)
    assert done.returncode == 0, done.stderr
    status = cluster.status()
    assert ready("decode", 1)(status)
    assert pool_of(status, "decode").desired == 1
    shown = tandem("status", "--admin-address", cluster.admin_address).stdout
    assert "operator (pinned)" in shown
    released = tandem("scale", "--release", "decode", *places)
    assert released.returncode == 0, released.stderr
    cluster.wait_for(lambda status: not pool_of(status, "decode").pinned)
    assert operator.target("decode") == 1
    wrong = tandem("scale", "decoder=2", *places)
    assert wrong.returncode == 1
    assert "there is no pool 'decoder', but decode, prefill" in " ".join(wrong.stderr.split())
