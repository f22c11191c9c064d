"""What platform teams hook into the chart: registries, pull secrets, containers, environment, objects."""

from __future__ import annotations

from typing import Any

import pytest
from chart_harness import Object, check, objects, only, pods, ray_service, serve_config

REGISTRY = "registry.corp.example:5000"
CONTAINER: Object = {"name": "helper", "image": "helper:1", "command": ["true"]}
DOWNLOAD: Object = {"model": {"source": "download", "download": {"repo": "org/name"}}}


def containers(values: Object) -> dict[str, list[Object]]:
    """The containers of every pod of the chart, those that run first included."""
    return {
        name: [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        for name, pod in pods(objects(values))
    }


def pod_of(name: str, values: Object) -> Object:
    (found,) = [pod for pod_name, pod in pods(objects(values)) if pod_name.endswith(name)]
    check(found)
    return found


def test_one_registry_serves_every_image() -> None:
    values = {**DOWNLOAD, "global": {"imageRegistry": f"{REGISTRY}/"}, "image": {"repository": "team/tandem"}}
    images = [each["image"] for found in containers(values).values() for each in found]
    assert len(images) >= 6
    assert {image.partition("/")[0] for image in images} == {REGISTRY}
    assert f"{REGISTRY}/library/redis:7.4" in images  # without the registry of the default
    assert any(image.startswith(f"{REGISTRY}/team/tandem:") for image in images)


def test_secrets_of_registries_reach_every_pod_once() -> None:
    values = {
        **DOWNLOAD,
        "global": {"imagePullSecrets": ["corp", {"name": "mirror"}]},
        "image": {"pullSecrets": [{"name": "corp"}, {"name": "own"}]},
    }
    found = [pod["spec"]["imagePullSecrets"] for _, pod in pods(objects(values))]
    assert len(found) >= 6
    assert all(each == [{"name": "corp"}, {"name": "mirror"}, {"name": "own"}] for each in found)


@pytest.mark.parametrize(
    ("part", "name"), [("head", "headgroup"), ("gateway", "gateway"), ("pools.decode", "decode")]
)
def test_every_ray_pod_takes_containers_and_environment(part: str, name: str) -> None:
    more: Object = {
        "initContainers": [CONTAINER],
        "sidecars": [{**CONTAINER, "name": "proxy"}],
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "resources": {"requests": {"cpu": "1"}},
    }
    values: Any = more
    for key in reversed(part.split(".")):
        values = {key: values}
    spec = pod_of(name, values)["spec"]
    assert [each["name"] for each in spec["initContainers"]] == ["helper"]
    ray, proxy = spec["containers"]
    assert ray["name"].startswith("ray-")
    assert proxy["name"] == "proxy"
    assert ray["envFrom"] == [{"configMapRef": {"name": "proxy"}}]
    assert ray["resources"]["requests"]["cpu"] == "1"
    assert ray["resources"]["limits"]["cpu"] != "1" or part == "gateway"
    assert ray["resources"]["requests"]["memory"] == ray["resources"]["limits"]["memory"]


def test_a_companys_certificates_and_mesh_reach_the_download() -> None:
    values = {
        "model": {
            "source": "download",
            "name": "m",
            "download": {
                "command": ["aws", "s3", "sync", "s3://models/m", "$(MODEL_PATH)"],
                "env": [{"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"}],
                "volumes": [{"name": "ca", "configMap": {"name": "corp-ca"}}],
                "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                "labels": {"team": "ml"},
                "annotations": {"sidecar.istio.io/inject": "false"},
            },
        }
    }
    (job,) = [item for item in objects(values) if item["kind"] == "Job"]
    check(job)
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    (container,) = template["spec"]["containers"]
    assert container["command"][-5:] == ["aws", "s3", "sync", "s3://models/m", "$(MODEL_PATH)"]
    assert {"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"} in container["env"]
    assert {"name": "ca", "mountPath": "/ca"} in container["volumeMounts"]
    assert {"name": "ca", "configMap": {"name": "corp-ca"}} in template["spec"]["volumes"]


def test_another_command_is_another_download() -> None:
    def folder(source: str) -> str:
        values = {"model": {"source": "download", "name": "m", "download": {"command": ["fetch", source]}}}
        mounts = pod_of("decode", values)["spec"]["containers"][0]["volumeMounts"]
        return str(next(mount["subPath"] for mount in mounts if mount["name"] == "model"))

    assert folder("a") != folder("b")
    assert folder("a") == folder("a")


def test_the_bundled_redis_is_labelled_and_spread() -> None:
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]
    bundled = {"labels": {"team": "ml"}, "annotations": {"note": "x"}, "topologySpreadConstraints": spread}
    template = only(objects({"redis": {"bundled": bundled}}), "StatefulSet")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["annotations"]["note"] == "x"
    assert template["spec"]["topologySpreadConstraints"] == spread


def test_other_objects_are_rendered_with_the_release() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}\n"
    mapping = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-mapping"}}
    items = objects({"extraObjects": [text, mapping]})
    for name in ("text", "mapping"):
        check(only(items, "ConfigMap", f"tandem-{name}"))


def test_ranks_that_share_a_node_need_one_that_has_their_devices() -> None:
    wide: Object = {"device": "cuda", "tp": 16}
    pod = pod_of("decode", {"pools": {"decode": {"config": wide, "gpu": {"perNode": 16}}}})
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "16"
    staged = {"pools": {"decode": {"config": {"device": "cuda", "tp": 8, "pp": 2}, "stagesPerPod": 1}}}
    pod = pod_of("decode", staged)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_names_in_certificates_and_of_the_console_have_the_clusters_domain() -> None:
    values = {
        "clusterDomain": "k8s.corp.example",
        "redis": {"bundled": {"tls": {"enabled": True}}},
    }
    found = objects(values)
    (redis,) = [
        it for it in found if it["kind"] == "Certificate" and it["metadata"]["name"].endswith("-redis-tls")
    ]
    assert redis["spec"]["dnsNames"][-1] == "tandem-redis.llm.svc.k8s.corp.example"
    (application,) = serve_config(ray_service(values))["applications"]
    config = application["args"]["config"]
    assert "tandem-admin.llm.svc.k8s.corp.example" in config["gateway"]["console_hosts"]


def test_free_ports_can_be_pinned_so_that_firewalls_know_them() -> None:
    ports = {"first": 40000, "last": 41999, "pinned": True}
    values = {
        "networkPolicy": {"freePorts": ports},
        "podSecurityContext": {"sysctls": [{"name": "a", "value": "1"}]},
    }
    for name in ("headgroup", "gateway", "decode", "prefill"):
        sysctls = pod_of(name, values)["spec"]["securityContext"]["sysctls"]
        assert sysctls[-1] == {"name": "net.ipv4.ip_local_port_range", "value": "40000 41999"}
        assert len(sysctls) == 2
    without = pod_of("decode", {})["spec"]["securityContext"]
    assert "sysctls" not in without


def test_the_download_and_redis_may_request_less_than_their_limits() -> None:
    requests: Object = {"requests": {"cpu": "100m"}}
    values: Object = {
        "model": {**DOWNLOAD["model"], "download": {"repo": "org/name", "resources": requests}},
        "redis": {"bundled": {"resources": requests, "indexResources": requests}},
    }
    for name, least in (("download", 1), ("redis", 2)):
        found = [
            each
            for pod_name, pod in pods(objects(values))
            if name in pod_name
            for each in pod["spec"]["containers"]
        ]
        assert len(found) >= least
        for container in found:
            resources = container["resources"]
            assert resources["requests"]["cpu"] == "100m"
            assert resources["limits"]["cpu"] != "100m"
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            assert "requests" not in resources["limits"]
