"""What the chart renders: for every example and with every boolean both ways, valid and complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml
from chart_harness import (
    EXAMPLES,
    LOADER,
    WITHOUT_SCHEMA,
    Object,
    check,
    matches,
    merged,
    objects,
    only,
    pods,
    ray_service,
    render,
    with_value,
)
from chart_schema import BEGIN, CHART, END, schema, table, values

CASES: dict[str, Object] = {"defaults": {}, **EXAMPLES}
SCRAPED: Object = {"networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]}}
# What must be said besides, when a boolean is changed.
NEEDS: dict[str, Object] = {
    "gateway.tls.enabled": {"gateway": {"tls": {"secretName": "tandem-tls"}}},
    "gateway.ingress.enabled": {"gateway": {"ingress": {"host": "llm.example"}}},
    "gateway.grpcRoute.enabled": {"gateway": {"grpcRoute": {"parentRefs": [{"name": "public"}]}}},
    "gateway.httpIngress.enabled": {"gateway": {"httpIngress": {"host": "llm.example"}}},
    "gateway.httpRoute.enabled": {"gateway": {"httpRoute": {"parentRefs": [{"name": "public"}]}}},
    "auth.apiKeys.enabled": {
        "auth": {"jwt": {"keys": "{}"}},
        "config": {"auth": {"jwt": {"issuer": "https://issuer.example", "audience": "tandem"}}},
    },
    "monitoring.serviceMonitor.enabled": SCRAPED,
    "monitoring.podMonitor.enabled": SCRAPED,
    "monitoring.gatewayMonitor.enabled": {
        **SCRAPED,
        "monitoring": {"gatewayMonitor": {"keySecretName": "tandem-viewer"}},
    },
    # Tandem's own autoscaler would have no pods to grow into.
    "autoscaler.enabled": {"config": {"scaling": {"autoscale": False}}},
}


def booleans(below: Any = None, path: str = "") -> Iterator[tuple[str, bool]]:
    """Every boolean value of the chart, by its dotted path, with its default."""
    for key, value in (values() if below is None else below).items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, bool):
            yield here, value
        elif isinstance(value, dict):
            yield from booleans(value, here)


# Permissions: they change nothing but what is refused.
PERMISSIONS = {"auth.publishUnauthenticated", "gateway.adminService.publish"}
BOOLEANS = {path: default for path, default in booleans() if path not in PERMISSIONS}
FLIPPED = {f"{path}={not default}".lower(): (path, not default) for path, default in BOOLEANS.items()}


# What companies set besides booleans, several at once.
COMBINED: dict[str, Object] = {
    "a hub's mirror": {
        "model": {
            "source": "download",
            "download": {
                "repo": "org/name",
                "endpoint": "https://hub.example",
                "tokenSecret": {"name": "hub"},
            },
        }
    },
    "a bucket": {
        "model": {
            "source": "download",
            "name": "m",
            "download": {"command": ["aws", "s3", "sync", "s3://m", "$(MODEL_PATH)"], "backoffLimit": 2},
        }
    },
    "a model of the nodes": {
        "model": {
            "source": "nodes",
            "cache": {"volume": {"hostPath": {"path": "/var/lib/tandem"}}},
            "download": {"repo": "org/name", "revision": "0" * 40, "tokenSecret": {"name": "hub"}},
        },
    },
    "a cache beside a claim": {
        "model": {
            "source": "pvc",
            "pvc": {"claim": "models"},
            "cache": {"volume": {"emptyDir": {"sizeLimit": "50Gi"}}},
        },
    },
    "a claim": {"model": {"source": "pvc", "pvc": {"claim": "models", "subPath": "m"}}},
    "a Redis of one's own": {
        "redis": {"mode": "external", "external": {"secretName": "redis", "address": "redis.example:6379"}}
    },
    "a private registry": {
        "global": {"imageRegistry": "registry.example:5000", "imagePullSecrets": ["pull"]},
        "image": {"digest": f"sha256:{'0' * 64}", "cpuDigest": f"sha256:{'1' * 64}"},
    },
    "a mesh": {
        "clusterDomain": "corp.example",
        "networkPolicy": {"freePorts": {"first": 40000, "last": 44999, "pinned": True}},
        "poolDefaults": {"annotations": {"sidecar.istio.io/inject": "true"}},
        "commonLabels": {"team": "llm"},
    },
    "both pools in one": {
        "pools": {"prefill": None, "decode": {"config": {"role": "both", "replicas": 4}, "replicasPerPod": 2}}
    },
    "stages over nodes": {
        "pools": {
            "decode": {"config": {"device": "cuda", "pp": 2, "tp": 4}, "stagesPerPod": 1, "hostNetwork": True}
        }
    },
    "sidecars": {
        "gateway": {"sidecars": [{"name": "logs", "image": "logs:1"}], "replicas": 3},
        "head": {"initContainers": [{"name": "wait", "image": "wait:1"}]},
    },
}


@pytest.fixture(scope="session")
def crd(request: pytest.FixtureRequest) -> Object:
    """KubeRay's schema of a RayService, in which an unknown field is an error (the API server drops it)."""
    folder: Path | None = request.config.getoption("--kuberay-crds")
    if folder is None:
        pytest.skip("needs --kuberay-crds FOLDER with rayservices.yaml of a KubeRay release")
    definition = yaml.load((folder / "rayservices.yaml").read_text(), LOADER)
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    found: Object = version["schema"]["openAPIV3Schema"]
    _close(found)
    found["properties"]["metadata"] = {"type": "object"}
    return found


@pytest.fixture(scope="session")
def known() -> set[str]:
    """Those that have been checked: most values do not change the RayService."""
    return set()


def test_helm_lints_it() -> None:
    for case in CASES.values():
        report = helm_python.lint(str(CHART), case, strict=True)
        reported = [message["error"] for message in report["messages"]]
        assert reported == ["icon is recommended"]
        assert report["errors"] == []


@pytest.mark.parametrize("case", CASES)
def test_every_example_is_one_valid_ray_service(case: str) -> None:
    items = objects(CASES[case])
    assert [item["kind"] for item in items].count("RayService") == 1
    check_all(items)
    assert "kubectl" in render(CASES[case])["tandem/templates/NOTES.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("flip", FLIPPED)
def test_every_boolean_renders_both_ways(flip: str) -> None:
    path, value = FLIPPED[flip]
    differ = False
    for example in (CASES["defaults"], CASES["prefill-tp2-decode-tp4"]):
        case = merged(example, NEEDS.get(path, {}))
        items = objects(with_value(case, path, value))
        check_all(items)
        differ |= comparable(items) != comparable(objects(with_value(case, path, not value)))
    assert differ, f"{path} changes nothing"


@pytest.mark.parametrize("case", COMBINED)
def test_values_of_companies_are_valid_together(case: str) -> None:
    items = objects(COMBINED[case])
    check_all(items)
    assert comparable(items) != comparable(objects({}))


@pytest.mark.parametrize("case", [*CASES, *COMBINED, *FLIPPED])
def test_the_ray_service_is_what_kuberay_knows(case: str, crd: Object, known: set[str]) -> None:
    chosen = (CASES | COMBINED).get(case)
    if chosen is None:
        path, value = FLIPPED[case]
        chosen = with_value(NEEDS.get(path, {}), path, value)
    service = ray_service(chosen)
    if (text := json.dumps(service)) not in known:
        jsonschema.Draft202012Validator(crd).validate(service)
        known.add(text)


def test_a_field_that_kuberay_does_not_know_would_be_seen(crd: Object) -> None:
    wrong = with_value(ray_service(), "spec.rayClusterConfig.gcsFaultTolerance", {})
    with pytest.raises(jsonschema.ValidationError, match="gcsFaultTolerance"):
        jsonschema.Draft202012Validator(crd).validate(wrong)


def test_the_schema_and_the_table_of_values_are_up_to_date() -> None:
    assert json.loads((CHART / "values.schema.json").read_text()) == schema(), "run `make chart`"
    shown = (CHART / "README.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table(), "run `make chart`"


@pytest.mark.parametrize("case", CASES)
def test_every_selector_finds_its_pods(case: str) -> None:
    everything = with_value(merged(CASES[case], SCRAPED), "monitoring.serviceMonitor.enabled", True)
    everything = with_value(
        everything,
        "pools.more",
        {"config": {"role": "both", "replicas": 3}, "resources": {"memory": "300Gi"}},
    )
    items = objects(with_value(everything, "gateway.replicas", 3))
    found = dict(pods(items))
    groups = {name for name in found if name == "gateway" or name.startswith("pool-")}
    ray = groups | {"headgroup"}
    expected = {
        "Service/tandem": {"gateway"},
        "Service/tandem-gateways": {"gateway"},
        "Service/tandem-admin": {"gateway"},
        "Service/tandem-metrics": ray,
        "Service/tandem-redis": {"tandem-redis"},
        "NetworkPolicy/tandem-ray": ray,
        "NetworkPolicy/tandem-head": {"headgroup"},
        "NetworkPolicy/tandem-gateway": {"gateway"},
        "NetworkPolicy/tandem-pools": groups - {"gateway"},
        "NetworkPolicy/tandem-redis": {"tandem-redis"},
        "PodDisruptionBudget/tandem-gateway": {"gateway"},
        "PodDisruptionBudget/tandem-pool-more": {"pool-more"},
    }
    selectors = {f"{item['kind']}/{item['metadata']['name']}": selector(item) for item in items}
    for name, wanted in expected.items():
        assert {pod for pod in found if matches(selectors[name] or {}, found[pod])} == wanted, name


@pytest.mark.parametrize("case", CASES)
def test_every_port_that_is_named_is_there(case: str) -> None:
    items = objects(CASES[case])
    found = dict(pods(items))
    services = [item for item in items if item["kind"] == "Service"]
    assert services
    for service in services:
        for name, pod in found.items():
            if matches(service["spec"]["selector"], pod):
                named = {
                    port["name"] for container in pod["spec"]["containers"] for port in container["ports"]
                }
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= named, name


@pytest.mark.parametrize("case", CASES)
def test_everything_that_pods_mount_or_name_is_rendered_or_given(case: str) -> None:
    items = objects(CASES[case])
    rendered = {(item["kind"], item["metadata"]["name"]): item for item in items}
    given = {("Secret", "tandem-tls"), ("PersistentVolumeClaim", "models")}
    given |= {("Secret", item["spec"]["secretName"]) for item in items if item["kind"] == "Certificate"}
    for name, pod in pods(items):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claimed = {"data"} if name == "tandem-redis" else set()
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        assert mounted == set(volumes) | (mounted & claimed), name
        references = list(_references(pod))
        assert references, name
        for reference, key in references:
            assert reference in rendered or reference in given, f"{name}: {reference}"
            if key is not None and reference in rendered:
                assert key in rendered[reference]["data"], f"{name}: {reference} has no {key}"


@pytest.mark.parametrize("case", CASES)
def test_no_pod_runs_as_root_or_may_become_it(case: str) -> None:
    for name, pod in pods(objects(CASES[case])):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}, name


def test_an_autoscaler_may_speak_to_kubernetes_and_nobody_else() -> None:
    for is_on in (False, True):
        found = dict(pods(objects({"autoscaler": {"enabled": is_on}})))
        able = {name for name, pod in found.items() if pod["spec"]["automountServiceAccountToken"]}
        assert able == ({"headgroup"} if is_on else set())


def test_dashboards_and_rules_arrive_as_they_are() -> None:
    items = objects({"monitoring": {"rules": {"enabled": True}}})
    dashboards = sorted(CHART.glob("dashboards/*.json"))
    assert dashboards
    for path in dashboards:
        data = only(items, "ConfigMap", f"tandem-dashboard-{path.stem}")["data"]
        assert json.loads(data[path.name]) == json.loads(path.read_text())
    rules = sorted(CHART.glob("rules/*.yaml"))
    assert rules
    for path in rules:
        spec = only(items, "PrometheusRule", f"tandem-{path.stem}")["spec"]
        assert spec == yaml.safe_load(path.read_text())
        assert spec["groups"]


def test_alerts_lead_to_the_runbooks_where_operators_read_them() -> None:
    address = "https://git.example/tandem/docs/runbooks.md"
    items = objects({"monitoring": {"rules": {"enabled": True, "runbooks": address}}})
    (rule_file,) = [item for item in items if item["kind"] == "PrometheusRule"]
    links = [
        rule["annotations"]["runbook_url"]
        for group in rule_file["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert f"{address}#tandempooldown" in links
    assert all(link.startswith(f"{address}#tandem") for link in links)


def check_all(items: list[Object]) -> None:
    """Each object against its schema, Ray's pods as the pods that they become."""
    for item in items:
        if item["kind"] not in WITHOUT_SCHEMA | {"RayService"}:
            check(item)
    for name, pod in pods(items):
        assert name
        check(pod)


def comparable(items: list[Object]) -> list[Object]:
    """Without what is drawn anew each time."""
    return [{**item, "data": None} if item["kind"] == "Secret" else item for item in items]


def selector(item: Object) -> dict[str, str] | None:
    found = item["spec"].get("selector") or item["spec"].get("podSelector") if "spec" in item else None
    if found is None:
        return None
    labels: dict[str, str] = found.get("matchLabels", found)
    return labels


def _references(pod: Object) -> Iterator[tuple[tuple[str, str], str | None]]:
    """What the pod needs: (kind, name), and the key in it."""
    for volume in pod["spec"]["volumes"]:
        if "secret" in volume:
            reference = "Secret", volume["secret"]["secretName"]
            yield reference, None
            yield from ((reference, item["key"]) for item in volume["secret"].get("items", ()))
        if "persistentVolumeClaim" in volume:
            yield ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]), None
        if "configMap" in volume:
            yield ("ConfigMap", volume["configMap"]["name"]), None
    yield ("ServiceAccount", pod["spec"]["serviceAccountName"]), None


def _close(part: Any) -> None:
    """Let objects with named fields have no others."""
    if isinstance(part, list):
        for item in part:
            _close(item)
    if not isinstance(part, dict):
        return
    is_open = part.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in part
    if isinstance(part.get("properties"), dict) and part.get("type") == "object" and not is_open:
        part["additionalProperties"] = False
    for value in part.values():
        _close(value)
