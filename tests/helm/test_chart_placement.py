"""The rendered groups have resources for the rendered application: read by the product's own configuration
and by Ray's own autoscaler, which know nothing of the chart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_harness import EXAMPLES, Object, merged, objects, pods, ray_service, serve_config, with_value
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve.schema import ServeDeploySchema

from cluster.cli.main import _ENVIRONMENT
from cluster.config import ClusterConfig, GatewayConfig
from cluster.scaling.resource_demand import ReplicaDemand, shortages
from cluster.scaling.serve_client import MARK_DEPLOYMENT as GATEWAY_DEPLOYMENT
from cluster.scaling.serve_client import declared_counts
from cluster.serve.capacity import demands, gateway_bundle
from cluster.serve.entrypoint import declared_config, with_declared_counts

SHAPES: dict[str, Object] = {
    "defaults": {},
    **EXAMPLES,
    "stages apart": {
        "pools": {
            "decode": {"config": {"role": "decode", "replicas": 2, "tp": 2, "pp": 4}, "stagesPerPod": 2}
        }
    },
    "three in a pod": {"pools": {"decode": {"config": {"replicas": 7, "tp": 2}, "replicasPerPod": 3}}},
    "host and device": {
        "poolDefaults": {"config": {"dtype": "bf16"}},
        "pools": {"decode": {"config": {"pp": 2, "devices": ["cuda", "cpu"], "cpus_per_rank": 2.5}}},
    },
    "shared GPUs": {"poolDefaults": {"config": {"gpus_per_rank": 0.5, "tp": 2}}},
    "an odd name": {"pools": {"long-context": {"config": {"role": "both"}}}},
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The cluster secret and the URL of the index, as they are mounted."""
    secret, url = tmp_path / "secret", tmp_path / "url"
    secret.write_text("s" * 48 + "\n")
    url.write_text("redis://:password@redis:6379/0\n")
    return secret, url


def application(service: Object, files: tuple[Path, Path]) -> tuple[ClusterConfig, int]:
    """The configuration as Serve would build it, and how many gateways there are."""
    (app,) = ServeDeploySchema.model_validate(serve_config(service)).applications
    assert app.import_path == "cluster.serve.entrypoint:build"
    assert app.external_scaler_enabled
    args = app.args | {"secret_file": str(files[0]), "redis_url_file": str(files[1])}
    config = with_declared_counts(declared_config(args), app.model_dump(exclude_unset=True))
    assert app.name == config.app
    (gateways,) = app.deployments
    assert gateways.name == GATEWAY_DEPLOYMENT
    assert declared_counts(gateways.user_config).keys() == {pool.name for pool in config.pools}
    return config, int(gateways.num_replicas)


def node_types(service: Object) -> dict[str, Any]:
    """What Ray makes of the groups: resources, and how many there may be."""
    cluster = {"metadata": {"name": "c", "namespace": "n"}, "spec": service["spec"]["rayClusterConfig"]}
    found: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    return found


def groups(service: Object) -> dict[str, Object]:
    return {group["groupName"]: group for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_replica_has_a_place_in_its_own_group(shape: str, files: tuple[Path, Path]) -> None:
    service = ray_service(SHAPES[shape])
    config, num_gateways = application(service, files)
    types = node_types(service)
    cpus = {pool.name: pool.cpus_per_rank or math.nan for pool in config.pools}
    wanted = {f"pool-{pool.name}": demands([pool], cpus) for pool in config.pools}
    gateway = ReplicaDemand("gateway", (gateway_bundle(config.gateway),))
    wanted["gateway"] = [gateway] * num_gateways
    assert groups(service).keys() == wanted.keys()
    for name, group in groups(service).items():
        nodes = [types[name]["resources"]] * group["replicas"]
        assert shortages(wanted[name], nodes, nodes) == [], name
        other_place = [kind["resources"] for other, kind in types.items() if other != name] * 100
        for replica in wanted[name]:
            for bundle in replica.bundles:
                assert shortages([ReplicaDemand(name, (bundle,))], other_place, other_place), (
                    f"{name}: {bundle}"
                )


@pytest.mark.parametrize("shape", SHAPES)
def test_pods_have_the_gpus_that_ray_counts(shape: str) -> None:
    service = ray_service(SHAPES[shape])
    for name, group in groups(service).items():
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus = int(limits.get("nvidia.com/gpu", "0"))
        assert int(group["rayStartParams"]["num-gpus"]) == gpus
        assert node_types(service)[name]["resources"].get("GPU", 0) == gpus


def test_no_gpu_stays_idle() -> None:
    def gpus(pool: Object) -> list[int]:
        """Of each of the pool's pods at first."""
        group = groups(ray_service({"pools": {"decode": pool}}))["pool-decode"]
        return [int(group["rayStartParams"]["num-gpus"])] * group["replicas"]

    assert gpus({"config": {"replicas": 3, "tp": 4}}) == [4, 4, 4]
    assert gpus({"config": {"replicas": 3, "ep": 4}}) == [4, 4, 4]
    assert gpus({"config": {"replicas": 2, "tp": 2, "pp": 2}}) == [4, 4]
    assert gpus({"config": {"replicas": 2, "tp": 2, "pp": 2}, "stagesPerPod": 1}) == [2, 2, 2, 2]
    assert gpus({"config": {"replicas": 6, "tp": 1}, "replicasPerPod": 3}) == [3, 3]
    assert gpus({"config": {"replicas": 2, "gpus_per_rank": 0.5, "tp": 2}}) == [1, 1]
    assert gpus({"config": {"device": "cpu"}}) == [0]


def test_the_head_runs_nothing_of_the_service() -> None:
    resources = node_types(ray_service())["headgroup"]["resources"]
    assert resources["CPU"] == 0
    assert resources.get("GPU", 0) == 0
    assert not [name for name in resources if name.startswith("tandem")]


def test_another_count_is_no_other_configuration() -> None:
    def args(replicas: int) -> Object:
        changed = {"pools": {"decode": {"config": {"replicas": replicas}}}, "gateway": {"replicas": replicas}}
        (app,) = serve_config(ray_service(changed))["applications"]
        # Of the pools alone: a num_replicas of theirs would go before what was ordered since.
        reported = {"replicas": {"decode": replicas, "prefill": 1}}
        assert app["deployments"] == [{"name": "Gateway", "num_replicas": replicas, "user_config": reported}]
        found: Object = app["args"]
        return found

    assert args(1) == args(3)


def test_limits_of_the_autoscalers_are_limits_of_the_pods() -> None:
    def pods_of(pool: Object, scaling: Object | None = None) -> tuple[int, int, int]:
        values = {"pools": {"decode": pool}, "config": {"scaling": scaling or {}}}
        group = groups(ray_service(values))["pool-decode"]
        return group["minReplicas"], group["replicas"], group["maxReplicas"]

    assert pods_of({}) == (1, 1, 1)
    assert pods_of({"config": {"replicas": 4}}) == (4, 4, 4)
    assert pods_of({"config": {"replicas": 4}, "minPods": 0, "maxPods": 9}) == (0, 4, 9)
    assert pods_of({"config": {"replicas": 4}, "pods": 6}) == (6, 6, 6)
    assert pods_of({}, {"pools": {"decode": {"min": 1, "max": 5}}}) == (1, 1, 5)
    assert pods_of({"replicasPerPod": 2}, {"pools": {"decode": {"min": 1, "max": 5}}}) == (1, 1, 3)


@pytest.mark.parametrize("case", EXAMPLES)
def test_pods_stay_for_as_long_as_replicas_drain(case: str, files: tuple[Path, Path]) -> None:
    service = ray_service(EXAMPLES[case])
    config, _ = application(service, files)
    longest = max(pool.drain_s for pool in config.pools)
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > longest
    for pool in config.pools:
        spec = groups(service)[f"pool-{pool.name}"]["template"]["spec"]
        script = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        waits = int(script.partition("--deadline-remaining-seconds ")[2].split()[0])
        assert pool.drain_s + 10 < waits < spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("drain_s", "grace_s"), [(None, 160), (0, 60), (20, 60), (90.5, 131)])
def test_gateways_stay_for_as_long_as_their_streams_drain(drain_s: float | None, grace_s: int) -> None:
    service = ray_service({} if drain_s is None else {"config": {"gateway": {"drain_s": drain_s}}})
    spec = groups(service)["gateway"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == grace_s
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= grace_s


def test_a_gateway_leaves_before_the_next_one_fills_its_pod(files: tuple[Path, Path]) -> None:
    def gateway(values: dict[str, Any]) -> GatewayConfig:
        return application(ray_service(values), files)[0].gateway

    usual = gateway({})
    assert not usual.surge
    assert usual.max_connection_age_s is not None
    assert usual.max_connection_age_s * 1.1 < usual.drain_s, "clients have moved when the drain ends"
    assert gateway({"gateway": {"maxConnectionAgeSeconds": None}}).max_connection_age_s is None
    assert gateway({"config": {"gateway": {"surge": True}}}).surge, "with a spare pod"


def test_pods_have_the_environment_that_tandem_serve_gives() -> None:
    # The token's mode is the operator's to set.
    wanted = {name: value for name, value in _ENVIRONMENT.items() if name != "RAY_AUTH_MODE"}
    for name, pod in pods([ray_service()]):
        given = {item["name"]: item["value"] for item in pod["spec"]["containers"][0]["env"]}
        assert given.items() >= wanted.items(), name
        assert "RAY_AUTH_MODE" not in given
    for _, pod in pods([ray_service({"rayAuth": {"mode": "disabled"}})]):
        assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in pod["spec"]["containers"][0]["env"]


def test_the_kubelet_asks_the_gateway_over_grpc_without_tls() -> None:
    def probe(tls: Object) -> tuple[Object, Object]:
        service = ray_service({"gateway": {"tls": tls}})
        container = groups(service)["gateway"]["template"]["spec"]["containers"][0]
        (app,) = serve_config(service)["applications"]
        return container["readinessProbe"]["grpc"], app["args"]["config"]["gateway"]

    asked, gateway = probe({})
    assert asked == {"port": gateway["port"], "service": "tandem.v1.Inference"}
    assert "health_port" not in gateway
    asked, gateway = probe({"enabled": True, "secretName": "s"})
    assert asked["port"] == gateway["health_port"] != gateway["port"]


def test_nvme_is_mounted_where_the_store_expects_it_and_found_again() -> None:
    on = {"config": {"store": {"nvme_gb": 10}}}
    host = {"poolDefaults": {"nvme": {"volume": {"hostPath": {"path": "/mnt/nvme"}}}}}
    for values, hostname in ((on, None), (merged(on, host), "tandem-decode")):
        service = ray_service(values)
        (app,) = serve_config(service)["applications"]
        spec = groups(service)["pool-decode"]["template"]["spec"]
        mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        (volume,) = [
            v for v in spec["volumes"] if v["name"] == mounts[app["args"]["config"]["store"]["nvme_path"]]
        ]
        assert set(volume) - {"name"} == {"hostPath" if hostname else "emptyDir"}
        assert spec.get("hostname") == hostname
    assert "nvme" not in yaml.safe_dump(ray_service())


def test_redis_of_ones_own_is_used_for_all() -> None:
    external = {"address": "rediss://cache:6380", "secretName": "cache", "usernameKey": "user"}
    items = objects({"redis": {"mode": "external", "external": external}})
    assert not [item for item in items if item["kind"] == "StatefulSet"]
    options = ray_service({"redis": {"mode": "external", "external": external}})["spec"]["rayClusterConfig"][
        "gcsFaultToleranceOptions"
    ]
    assert options["redisAddress"] == external["address"]
    keys = {name: options[name]["valueFrom"]["secretKeyRef"] for name in ("redisPassword", "redisUsername")}
    assert keys == {
        "redisPassword": {"name": "cache", "key": "password"},
        "redisUsername": {"name": "cache", "key": "user"},
    }
    # Two RayClusters live side by side during an upgrade: each has the namespace that KubeRay gives it.
    assert "externalStorageNamespace" not in options


def test_a_gateway_service_can_be_held_to_one_ray_cluster() -> None:
    values = with_value({}, "gateway.service.rayCluster", "tandem-x7k2p")
    for item in objects(values):
        if item["kind"] == "Service" and item["metadata"]["name"] == "tandem":
            assert item["spec"]["selector"]["ray.io/cluster"] == "tandem-x7k2p"


def test_only_pods_with_gpus_have_the_image_for_them() -> None:
    def images(values: Object) -> dict[str, str]:
        download = {"model": {"source": "download", "download": {"repo": "org/name"}}}
        found = {}
        for name, pod in pods(objects(merged(download, values))):
            each = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
            (found[name],) = {container["image"] for container in each}
        return {("job" if "-download-" in name else name): image for name, image in found.items()}

    cpu_pool = {"pools": {"prefill": {"config": {"device": "cpu"}}}}
    found = images(merged(cpu_pool, {"image": {"repository": "r"}}))
    (version,) = {found["gateway"].removeprefix("r:").removesuffix("-cpu")}
    assert found.pop("tandem-redis").startswith("docker.io/")
    assert found.pop("pool-decode") == f"r:{version}-cuda"
    assert found.keys() == {"headgroup", "gateway", "pool-prefill", "job"}
    assert set(found.values()) == {f"r:{version}-cpu"}
    assert images({"image": {"tag": "t"}})["gateway"] == images({"image": {"tag": "t"}})["pool-decode"]
    both = images(merged(cpu_pool, {"image": {"tag": "gpu", "cpuTag": "small"}}))
    assert [both[name].partition(":")[2] for name in ("headgroup", "pool-prefill", "pool-decode")] == [
        "small",
        "small",
        "gpu",
    ]


def test_an_image_by_digest_is_that_digest() -> None:
    """The tag stays for readers. One digest is that of all pods, unless those without GPUs have their own."""
    big, small, other = (f"sha256:{64 * digit}" for digit in "abc")

    def images(values: Object) -> dict[str, set[str]]:
        return {
            name: {container["image"] for container in pod["spec"]["containers"]}
            for name, pod in pods(objects(values))
        }

    found = images({"image": {"tag": "t", "digest": big}, "redis": {"bundled": {"image": {"digest": other}}}})
    assert found["gateway"] == found["pool-decode"] == {f"tandem:t@{big}"}
    assert found["tandem-redis"] == {f"docker.io/library/redis:7.4@{other}"}
    both = images({"image": {"tag": "t", "digest": big, "cpuDigest": small}})
    assert (both["gateway"], both["pool-decode"]) == ({f"tandem:t@{small}"}, {f"tandem:t@{big}"})


def test_each_node_fetches_a_named_model_into_its_own_cache(files: tuple[Path, Path]) -> None:
    commit, place = "0" * 40, {"path": "/var/lib/tandem"}
    download = {"repo": "org/name", "revision": commit, "endpoint": "https://hub.example"}
    model: Object = {"source": "nodes", "cache": {"volume": {"hostPath": place}}, "download": download}
    values: Object = {"model": {**model, "download": {**download, "tokenSecret": {"name": "hub"}}}}
    config, _ = application(ray_service(values), files)
    assert config.model_source.model == f"org/name@{commit}"
    assert (config.model_name, config.download.endpoint) == ("name", "https://hub.example")
    for name, pod in pods(objects(values)):
        if name == "tandem-redis":
            continue
        assert {"name": "model-cache", "hostPath": place} in pod["spec"]["volumes"], name
        assert "model" not in {volume["name"] for volume in pod["spec"]["volumes"]}
        assert "initContainers" not in pod["spec"]
        (mounts,) = (it["volumeMounts"] for it in pod["spec"]["containers"])
        places = {mount["name"]: Path(mount["mountPath"]) for mount in mounts if "mountPath" in mount}
        for path in (config.download.cache_folder, config.model_cache):
            assert path is not None
            assert path.is_relative_to(places["model-cache"])
        assert config.download.token_file == places["hub-token"] / "token"
    values = {"model": {**model, "download": {**download, "file": "m.Q8_0.gguf"}}}
    config, _ = application(ray_service(values), files)
    assert (config.model_source.model, config.model_name) == (f"org/name@{commit}:m.Q8_0.gguf", "m.Q8_0")
    assert config.download.token_file is None


def test_a_cache_keeps_what_is_made_of_a_claimed_model(files: tuple[Path, Path]) -> None:
    values: Object = {"model": {"source": "pvc", "pvc": {"claim": "models"}}}
    assert application(ray_service(values), files)[0].model_cache is None
    values = merged(values, {"model": {"cache": {"volume": {"emptyDir": {}}}}})
    config, _ = application(ray_service(values), files)
    assert (str(config.model), str(config.model_cache)) == ("/tandem/models/tiny", "/tandem/model-cache/made")
