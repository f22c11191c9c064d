"""The chart, rendered by Helm itself, and what Kubernetes and KubeRay would make of the result."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import kubernetes_validate
import yaml
from chart_schema import CHART

RELEASE, NAMESPACE = "tandem", "llm"
KUBERNETES = "1.32"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("examples/*.yaml"))}
# Kinds of the Prometheus operator, for which there is no schema here.
MONITORING = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}

# The fast one, where PyYAML has it.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]


def render(values: Mapping[str, Any] | None = None, name: str = RELEASE) -> dict[str, str]:
    """Template to text, as `helm template` makes it; `helm_python.HelmError` where Helm refuses."""
    return _render(json.dumps(values or {}), name)


def objects(values: Mapping[str, Any] | None = None) -> list[Object]:
    """Everything that is rendered but the notes."""
    texts = (text for path, text in render(values).items() if not path.endswith("NOTES.txt"))
    return [item for text in texts for item in yaml.load_all(text, LOADER) if item is not None]


def only(items: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of this kind, and of this name where one is given."""
    (found,) = [item for item in items if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    return found


def ray_service(values: Mapping[str, Any] | None = None) -> Object:
    return only(objects(values), "RayService")


def serve_config(service: Object) -> Object:
    """What KubeRay sends to Ray Serve."""
    loaded: Object = yaml.safe_load(service["spec"]["serveConfigV2"])
    return loaded


def pods(items: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every kind of pod that comes of these objects, by name, as a Pod; Ray's with KubeRay's labels."""
    for item in items:
        name = item["metadata"]["name"]
        if item["kind"] in ("StatefulSet", "Job", "Deployment"):
            yield name, _pod(name, item["spec"]["template"], {})
        elif item["kind"] == "RayService":
            cluster = item["spec"]["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                is_head = "groupName" not in group
                labels = {
                    "ray.io/is-ray-node": "yes",
                    "ray.io/cluster": f"{name}-abcde",
                    "ray.io/node-type": "head" if is_head else "worker",
                    "ray.io/group": "headgroup" if is_head else group["groupName"],
                }
                yield labels["ray.io/group"], _pod(labels["ray.io/group"], group["template"], labels)


def matches(selector: Mapping[str, str], pod: Object) -> bool:
    labels = pod["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.items())


def check(item: Object) -> None:
    """Against the schema of its kind, with no unknown field; each object once."""
    _check(json.dumps(item, sort_keys=True))


def with_value(values: Mapping[str, Any], path: str, value: Any) -> Object:
    """`values` with one changed, by its dotted path."""
    changed: Object = json.loads(json.dumps(values))
    *parents, last = path.split(".")
    place = changed
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return changed


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Object:
    """As Helm merges one values file over another."""
    result: Object = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


@functools.cache
def _render(values: str, name: str) -> dict[str, str]:
    with helm_python.Chart.load(str(CHART)) as chart:
        return chart.render(json.loads(values), name=name, namespace=NAMESPACE)


@functools.cache
def _check(item: str) -> None:
    kubernetes_validate.validate(json.loads(item), KUBERNETES, strict=True)


def _pod(name: str, template: Object, labels: dict[str, str]) -> Object:
    metadata = {**template["metadata"], "name": name, "namespace": NAMESPACE}
    metadata["labels"] = {**metadata["labels"], **labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
