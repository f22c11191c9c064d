"""The chart, rendered by Helm itself, and what Kubernetes and KubeRay make of the result: objects that
are checked, and groups that start as Ray nodes on loopback with the parameters that KubeRay would give
them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import helm_python
import kubernetes_validate
import psutil
import yaml
from chart_schema import CHART
from child_processes import kill_family
from patience import START_S
from serving import environment, free_port

from kvtransfer.common.clock import SystemClock

RELEASE, NAMESPACE = "tandem", "llm"
KUBERNETES = "1.32"
EXAMPLES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("examples/*.yaml"))}
# Kinds of the Prometheus operator, of the Gateway API and of cert-manager, for which there is no schema here.
WITHOUT_SCHEMA = {
    *("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    *("GRPCRoute", "HTTPRoute"),
    *("Certificate", "Issuer"),
}

# The fast one, where PyYAML has it.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]


def render(values: Mapping[str, Any] | None = None, name: str = RELEASE) -> dict[str, str]:
    """Render template to text, as `helm template` does; `helm_python.HelmError` where Helm refuses."""
    return _render(json.dumps(values or {}), name)


def objects(values: Mapping[str, Any] | None = None) -> list[Object]:
    """Return all rendered objects, without the notes."""
    texts = (text for path, text in render(values).items() if not path.endswith("NOTES.txt"))
    return [item for text in texts for item in yaml.load_all(text, LOADER) if item is not None]


def only(items: list[Object], kind: str, name: str | None = None) -> Object:
    """Return the one object of this kind, and of this name where one is given."""
    (found,) = [item for item in items if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    return found


def ray_service(values: Mapping[str, Any] | None = None) -> Object:
    return only(objects(values), "RayService")


def serve_config(service: Object) -> Object:
    """Return the configuration that KubeRay sends to Ray Serve."""
    loaded: Object = yaml.safe_load(service["spec"]["serveConfigV2"])
    return loaded


def pods(items: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield every kind of pod that comes of these objects, by name, as a Pod; Ray's with KubeRay's labels."""
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
    """Check the object against the schema of its kind, with no unknown field; each object once."""
    _check(json.dumps(item, sort_keys=True))


def with_value(values: Mapping[str, Any], path: str, value: Any) -> Object:
    """Return `values` with one changed, by its dotted path."""
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


TOKEN = "the-token-of-the-test-cluster"
_IS_UP = "To terminate the Ray runtime"
_START_S = START_S
# Parameters of `ray start` with a port.
_FIXED_PORTS = {
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
}


class RayGroups:
    """Call `start` for the head first; `close` ends what was started."""

    def __init__(self, service: Object) -> None:
        self._cluster = service["spec"]["rayClusterConfig"]
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie below it
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._clock = SystemClock()
        self.address = f"127.0.0.1:{free_port()}"
        self._dashboard_port = free_port()
        # Nodes of one host cannot all have the chart's ports: by the port that is used, the chart's.
        self._chart_ports: dict[int, int] = {}

    def start(self, group: str) -> None:
        """Start one node of the group; return when it is up, since two at once get in each other's way on one
        host."""
        given = self._group(group)
        parameters = {**given["rayStartParams"], "node-ip-address": "127.0.0.1"}
        fixed = {name: int(port) for name, port in parameters.items() if name in _FIXED_PORTS}
        fixed["metrics-export-port"] = 8080
        parameters["resources"] = parameters.get("resources", "'{}'").strip("'")
        if group == "headgroup":
            parameters |= {
                "port": self.address.rpartition(":")[2],
                "dashboard-host": "127.0.0.1",
                "dashboard-port": str(self._dashboard_port),
            }
            fixed["ray-client-server-port"] = 10001
            self._chart_ports |= {int(parameters["port"]): 6379, self._dashboard_port: 8265}
        else:
            parameters["address"] = self.address
        for name, port in fixed.items():
            used = free_port()
            parameters[name] = str(used)
            self._chart_ports[used] = port
        container = given["template"]["spec"]["containers"][0]
        variables = {item["name"]: item["value"] for item in container["env"] if item["name"] != "HOME"}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += ["--head"] if group == "headgroup" else []
        command += [f"--{name}={value}" for name, value in parameters.items()]
        file = self._folder / f"ray-{len(self._processes)}.log"
        with file.open("wb") as log:
            process = subprocess.Popen(command, env=self._environment(variables), stdout=log, stderr=log)
        self._processes.append((group, process))
        self.until(
            lambda: _IS_UP in file.read_text() or process.poll() is not None,
            _START_S,
            lambda: f"a node of {group} is up",
        )
        assert process.poll() is None, self.logs()

    def ask(self, path: str, body: Any = None, method: str = "GET") -> Any:
        """Return the dashboard's answer; None while there is none."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard_port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from error
        except OSError:
            return None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def wait_for_dashboard(self, timeout_s: float) -> None:
        self.until(lambda: self.ask("/api/version") is not None, timeout_s, lambda: "the dashboard answers")

    def deploy(self, config: Object) -> None:
        """As KubeRay does."""
        self.ask("/api/serve/applications/", config, "PUT")

    def application(self, name: str, status: str, timeout_s: float) -> Any:
        """Return Serve's report on the application as soon as it has this status."""
        found: Any = {}

        def look() -> bool:
            found.update((self.ask("/api/serve/applications/") or {}).get("applications", {}).get(name, {}))
            return bool(found.get("status") == status)

        self.until(look, timeout_s, lambda: f"{name} is {status}: {found}")
        return found

    def replicas(
        self, name: str, deployment: str, condition: Callable[[list[str]], bool], timeout_s: float
    ) -> list[str]:
        """Return the nodes of the deployment's running replicas, as soon as they fulfil the condition and no
        other replica is starting or stopping."""
        found: list[str] = []

        def look() -> bool:
            applications = (self.ask("/api/serve/applications/") or {}).get("applications", {})
            reported = applications.get(name, {}).get("deployments", {}).get(deployment, {"replicas": []})
            found[:] = places_of(reported)
            return len(found) == len(reported["replicas"]) and condition(found)

        self.until(look, timeout_s, lambda: f"replicas of {deployment} are where they shall be: {found}")
        return found

    def drain(self, node_id: str, deadline_s: int) -> None:
        """As the `preStop` hook of a pod does for its own node."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "the pod ends", "--deadline-remaining-seconds", str(deadline_s)]
        subprocess.run(command, env=self._environment({}), check=True, timeout=60, capture_output=True)

    def connections(self) -> set[tuple[str, str, int]]:
        """Return the TCP connections between groups that are open now: from, to, and the port by the
        chart."""
        listening: dict[int, str] = {}
        connected: list[tuple[str, int]] = []
        for group, process in self._processes:
            for each in _family(process):
                with suppress(psutil.Error):
                    for item in each.net_connections("tcp"):
                        if item.status == psutil.CONN_LISTEN:
                            listening[item.laddr.port] = group
                        elif item.status == psutil.CONN_ESTABLISHED:
                            connected.append((group, item.raddr.port))
        return {
            (group, listening[port], self._chart_ports.get(port, port))
            for group, port in connected
            if listening.get(port, group) != group
        }

    def until(self, condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
        """Return when `condition` holds; fail with `what` and the logs after `timeout_s`."""
        pause, end = Event(), self._clock.now() + timeout_s
        while not condition():
            assert self._clock.now() < end, f"not within {timeout_s} s: {what()}\n{self.logs()}"
            pause.wait(0.5)

    def logs(self) -> str:
        """Return the last lines of the nodes, and of all processes that complained."""
        nodes = [file.read_text(errors="replace")[-500:] for file in self._folder.glob("ray-*.log")]
        texts = [file.read_text(errors="replace")[-2000:] for file in self._folder.rglob("worker-*.err")]
        return "\n".join([*nodes, *(text for text in texts if "Error" in text)])

    def close(self) -> None:
        """Kill them: an orderly end is drained for half a minute."""
        for _, process in reversed(self._processes):
            kill_family(process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _group(self, name: str) -> Object:
        if name == "headgroup":
            head: Object = self._cluster["headGroupSpec"]
            return head
        return next(group for group in self._cluster["workerGroupSpecs"] if group["groupName"] == name)

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        return {**environment(), **variables, **token, "RAY_TMPDIR": str(self._folder)}


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the process and all below it."""
    first = psutil.Process(process.pid)
    return [first, *first.children(recursive=True)]


def places_of(deployment: Any) -> list[str]:
    """Return the nodes of its running replicas."""
    return [replica["node_id"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"]
