"""Who may reach which port: the whole matrix of pods and ports, and values that would publish a port."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
from chart_harness import EXAMPLES, NAMESPACE, Object, merged, objects, only, render
from chart_policies import NAMESPACE_LABEL, Policies, pod
from chart_schema import values

RAY = {"headgroup", "gateway", "pool-prefill", "pool-decode"}
POOLS = {"pool-prefill", "pool-decode"}
# Of no pod of the chart.
OUTSIDE = {
    "stranger": pod("elsewhere", {"app": "stranger"}),
    "neighbour": pod(NAMESPACE, {"app": "neighbour"}),
    "client": pod("apps", {"app": "client"}),
    "operator": pod("ops", {"app": "shell"}),
    "prometheus": pod("monitoring", {"app": "prometheus"}),
    "kuberay": pod("kuberay-system", {"app.kubernetes.io/name": "kuberay-operator"}),
    "impostor": pod("elsewhere", {"app.kubernetes.io/name": "kuberay-operator"}),
    "clean-up": pod(NAMESPACE, {"ray.io/node-type": "redis-cleanup"}),
}
# Ports that no container names: Ray's own, and those that the kernel gives.
UNNAMED = {"node manager": 9931, "agent": 52365, "worker": 12345, "free port": 40000, "ssh": 22}


def namespace_of(name: str) -> list[Object]:
    return [{"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: name}}}]


PEERS = {
    "networkPolicy": {
        "gatewayFrom": namespace_of("apps"),
        "adminFrom": namespace_of("ops"),
        "dashboardFrom": namespace_of("ops"),
        "metricsFrom": namespace_of("monitoring"),
    }
}
NOBODY: set[str] = set()
OF_RAY = {"node manager": RAY, "agent": RAY, "worker": RAY, "ssh": NOBODY}
OF_POOL = {"serve": NOBODY, "metrics": {"prometheus"}, "free port": POOLS | {"gateway"}, **OF_RAY}
MATRIX: dict[str, dict[str, set[str]]] = {
    "headgroup": {
        "gcs-server": RAY,
        "dashboard": RAY | {"kuberay", "operator"},
        "client": NOBODY,
        "serve": {"kuberay"},
        "metrics": {"prometheus"},
        "as-metrics": {"prometheus"},
        "dash-metrics": {"prometheus"},
        "free port": NOBODY,
        **OF_RAY,
    },
    "gateway": {
        "grpc": {"client"},
        "http": {"client"},
        "admin": {"operator"},
        "console": {"operator"},
        "serve": NOBODY,
        "metrics": {"prometheus"},
        "free port": {"gateway"},
        **OF_RAY,
    },
    "pool-prefill": OF_POOL,
    "pool-decode": OF_POOL,
    "tandem-redis": {
        "redis": {"headgroup", "clean-up"},
        "index": RAY,
        **dict.fromkeys(UNNAMED, NOBODY),
    },
}


def reached(policies: Policies) -> dict[str, dict[str, set[str]]]:
    """By pod and port: who may connect."""
    sources: dict[str, Object | str] = {**OUTSIDE, **{name: name for name in policies.pods}}
    return {
        target: {
            name: {source for source, origin in sources.items() if policies.may(origin, target, port)}
            for name, port in {**policies.named_ports(target), **UNNAMED}.items()
        }
        for target in policies.pods
    }


def test_every_port_is_reached_by_those_who_need_it_and_by_nobody_else() -> None:
    assert reached(Policies(objects(PEERS))) == MATRIX


def test_by_default_clients_come_from_anywhere_and_nobody_administers_or_scrapes() -> None:
    found = reached(Policies(objects()))
    everybody = {*OUTSIDE, *RAY, "tandem-redis"}
    assert found["gateway"]["grpc"] == found["gateway"]["http"] == everybody
    assert found["gateway"]["console"] == found["gateway"]["admin"] == NOBODY
    assert found["headgroup"]["dashboard"] == RAY | {"kuberay"}
    assert {who for ports in found.values() for who in ports.get("metrics", NOBODY)} == NOBODY


def test_without_policies_everybody_reaches_everything() -> None:
    policies = Policies(objects({"networkPolicy": {"enabled": False}}))
    assert policies.may(OUTSIDE["stranger"], "headgroup", 6379)


def test_the_operators_namespace_can_be_another() -> None:
    policies = Policies(objects({"networkPolicy": {"operatorNamespace": "elsewhere"}}))
    assert policies.may(OUTSIDE["impostor"], "headgroup", 8265)
    assert not policies.may(OUTSIDE["kuberay"], "headgroup", 8265)


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor", "gatewayMonitor"])
def test_a_monitor_needs_peers_that_may_scrape(monitor: str) -> None:
    case: dict[str, Any] = {"monitoring": {monitor: {"enabled": True}}}
    case = merged(case, {"monitoring": {"gatewayMonitor": {"keySecretName": "viewer-key"}}})
    with pytest.raises(helm_python.HelmError, match=r"networkPolicy\.metricsFrom: must be given"):
        render(case)
    render(merged(case, PEERS))
    render(merged(case, {"networkPolicy": {"enabled": False}}))


def test_operators_have_a_service_of_their_own_which_stays_inside() -> None:
    for case in ({}, {"gateway": {"service": {"type": "LoadBalancer"}}}, *EXAMPLES.values()):
        items = objects(case)
        client, admin = only(items, "Service", "tandem"), only(items, "Service", "tandem-admin")
        assert [port["name"] for port in client["spec"]["ports"]] == ["grpc", "http"]
        assert [port["name"] for port in admin["spec"]["ports"]] == ["admin", "console"]
        assert admin["spec"]["type"] == "ClusterIP"
    assert values()["gateway"]["service"]["type"] == "ClusterIP"


OPEN: Object = {"auth": {"mode": "none"}}
TWICE: Object = {"auth": {"mode": "none", "publishUnauthenticated": True}}
PUBLISHED: dict[str, Object] = {
    "gateway.service.type: LoadBalancer": {"service": {"type": "LoadBalancer"}},
    "gateway.service.type: NodePort": {"service": {"type": "NodePort"}},
    "gateway.ingress.enabled": {"ingress": {"enabled": True, "host": "llm.example"}},
    "gateway.grpcRoute.enabled": {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    "gateway.httpIngress.enabled": {"httpIngress": {"enabled": True, "host": "llm.example"}},
    "gateway.httpRoute.enabled": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
}


@pytest.mark.parametrize("way", PUBLISHED)
def test_a_port_without_authentication_is_published_only_when_told_twice(way: str) -> None:
    case = {"gateway": PUBLISHED[way]}
    assert render(case)
    with pytest.raises(helm_python.HelmError) as caught:
        render({**case, **OPEN})
    assert f"{way}: publishes inference without authentication" in str(caught.value)
    assert "auth.publishUnauthenticated: true" in str(caught.value)
    assert render({**case, **TWICE})


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_administration_and_console_are_published_only_when_told_twice(kind: str) -> None:
    case = {"gateway": {"adminService": {"type": kind}}}
    for authentication in ({}, TWICE):
        with pytest.raises(helm_python.HelmError, match=r"adminService\.publish: true"):
            render(merged(case, authentication))
    told = merged(case, {"gateway": {"adminService": {"publish": True}}})
    assert render(told)
    with pytest.raises(helm_python.HelmError, match=r"auth\.publishUnauthenticated: true"):
        render(merged(told, OPEN))
    assert render(merged(told, TWICE))


def test_an_ingress_and_a_route_lead_clients_to_inference_alone() -> None:
    both: Object = {**PUBLISHED["gateway.ingress.enabled"], **PUBLISHED["gateway.grpcRoute.enabled"]}
    items = objects({"gateway": both})
    (rule,) = only(items, "Ingress")["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/tandem.v1.Inference/"]
    (rule,) = only(items, "GRPCRoute")["spec"]["rules"]
    assert [match["method"]["service"] for match in rule["matches"]] == ["tandem.v1.Inference"]


def test_an_ingress_and_a_route_for_http_lead_to_its_port_alone() -> None:
    ways: Object = {}
    for way in ("gateway.ingress.enabled", "gateway.httpIngress.enabled", "gateway.httpRoute.enabled"):
        ways |= PUBLISHED[way]
    annotated = {"httpIngress": {"annotations": {"proxy-read-timeout": "3600"}}}
    items = objects({"gateway": merged(ways, annotated)})
    service = only(items, "Service", "tandem")
    (number,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "http"]
    ingress = only(items, "Ingress", "tandem-http")
    assert ingress["metadata"]["annotations"] == {"proxy-read-timeout": "3600"}
    assert "annotations" not in only(items, "Ingress", "tandem")["metadata"]
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example"]}]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "tandem", "port": {"name": "http"}}
    (rule,) = only(items, "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "tandem", "port": number}]
    assert rule["timeouts"] == {"request": "0s"}, "a stream is not cut"


def test_without_http_its_port_is_nowhere() -> None:
    items = objects({"gateway": {"http": False}})
    assert [port["name"] for port in only(items, "Service", "tandem")["spec"]["ports"]] == ["grpc"]
    policies = Policies(items)
    assert "http" not in policies.named_ports("gateway")
    assert not policies.may(OUTSIDE["client"], "gateway", 8784)


def test_scrapers_of_gateways_show_a_key_and_reach_the_console_s_port() -> None:
    monitor = {"monitoring": {"gatewayMonitor": {"enabled": True, "keySecretName": "viewer-key"}}}
    items = objects(merged(PEERS, monitor))
    (endpoint,) = only(items, "ServiceMonitor", "tandem-gateways")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("console", "/metrics")
    assert endpoint["authorization"] == {"credentials": {"name": "viewer-key", "key": "viewer"}}
    assert "scheme" not in endpoint
    selector = only(items, "ServiceMonitor", "tandem-gateways")["spec"]["selector"]["matchLabels"]
    found = [
        it for it in items if it["kind"] == "Service" and selector.items() <= it["metadata"]["labels"].items()
    ]
    assert [service["metadata"]["name"] for service in found] == ["tandem-admin"]
    found_by = {**MATRIX["gateway"], "console": {"operator", "prometheus"}}
    assert reached(Policies(items))["gateway"] == found_by
    tls = {"gateway": {"tls": {"enabled": True, "secretName": "tls"}}}
    named = {"monitoring": {"gatewayMonitor": {"serverName": "llm.example"}}}
    items = objects(merged(merged(merged(PEERS, monitor), tls), named))
    (endpoint,) = only(items, "ServiceMonitor", "tandem-gateways")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "llm.example"})


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, r"gatewayMonitor\.keySecretName: must be given with auth\.mode required"),
        ({"gateway": {"console": False}}, r"gatewayMonitor\.enabled: needs gateway\.console"),
        (
            {"gateway": {"adminService": {"enabled": False}}},
            r"gatewayMonitor\.enabled: needs gateway\.console",
        ),
    ],
)
def test_a_monitor_of_gateways_that_cannot_work_is_refused(case: Object, reason: str) -> None:
    monitor = merged(PEERS, {"monitoring": {"gatewayMonitor": {"enabled": True}}})
    with pytest.raises(helm_python.HelmError, match=reason):
        render(merged(monitor, case))
    assert render(merged(monitor, OPEN)), "nobody asks for a key"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"ingress": {"enabled": True}}, r"gateway\.ingress\.host: must be given"),
        ({"grpcRoute": {"enabled": True}}, r"gateway\.grpcRoute\.parentRefs: must be given"),
        (
            {"ingress": {"enabled": True, "host": "a"}, "service": {"enabled": False}},
            r"gateway\.ingress\.enabled: needs gateway\.service\.enabled",
        ),
        ({"httpIngress": {"enabled": True}}, r"gateway\.httpIngress\.host: must be given"),
        ({"httpRoute": {"enabled": True}}, r"gateway\.httpRoute\.parentRefs: must be given"),
        (
            {"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]}, "service": {"enabled": False}},
            r"gateway\.httpRoute\.enabled: needs gateway\.service\.enabled",
        ),
        (
            {"httpIngress": {"enabled": True, "host": "a"}, "http": False},
            r"gateway\.httpIngress\.enabled: needs gateway\.http",
        ),
    ],
)
def test_a_way_in_that_cannot_work_is_refused(case: Object, reason: str) -> None:
    with pytest.raises(helm_python.HelmError, match=reason):
        render({"gateway": case})
