"""Who may connect to which port of which pod, by the rendered NetworkPolicies: read as Kubernetes defines
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chart_harness import NAMESPACE, Object, matches, pods

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def pod(namespace: str, labels: Mapping[str, str]) -> Object:
    """Return a pod that the chart did not make."""
    return {"metadata": {"namespace": namespace, "labels": dict(labels)}, "spec": {"containers": []}}


class Policies:
    """The policies among `items`, and the pods that come of `items`."""

    def __init__(self, items: list[Object]) -> None:
        self._policies = [item for item in items if item["kind"] == "NetworkPolicy"]
        self.pods = dict(pods(items))

    def named_ports(self, target: str) -> dict[str, int]:
        """Return the ports of the target's containers, by name."""
        containers = self.pods[target]["spec"]["containers"]
        return {
            port["name"]: port["containerPort"] for container in containers for port in container["ports"]
        }

    def may(self, source: Object | str, target: str, port: int) -> bool:
        """Whether the source may open a TCP connection; a name is that of a pod of the chart."""
        origin = self.pods[source] if isinstance(source, str) else source
        selecting = [
            policy["spec"]
            for policy in self._policies
            if "Ingress" in policy["spec"]["policyTypes"]
            and matches(policy["spec"]["podSelector"]["matchLabels"], self.pods[target])
        ]
        rules = [rule for spec in selecting for rule in spec["ingress"]]
        return not selecting or any(
            _is_from(origin, rule.get("from")) and self._is_to(target, port, rule.get("ports"))
            for rule in rules
        )

    def _is_to(self, target: str, port: int, ports: list[Any] | None) -> bool:
        """Return whether the ports allow this port of the target; None allows every port."""
        if ports is None:
            return True
        for item in ports:
            first = item["port"]
            if isinstance(first, str):
                first = self.named_ports(target).get(first)
            if first is not None and first <= port <= item.get("endPort", first):
                return True
        return False


def _is_from(origin: Object, peers: list[Any] | None) -> bool:
    """Return whether the peers allow traffic from this origin; None allows every origin."""
    return peers is None or any(_is_peer(origin, peer) for peer in peers)


def _is_peer(origin: Object, peer: Object) -> bool:
    namespace = origin["metadata"]["namespace"]
    if "namespaceSelector" in peer:
        wanted = peer["namespaceSelector"].get("matchLabels", {})
        if not wanted.items() <= {NAMESPACE_LABEL: namespace}.items():
            return False
    elif namespace != NAMESPACE:
        return False
    return matches(peer.get("podSelector", {}).get("matchLabels", {}), origin)
