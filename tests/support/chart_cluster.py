"""A cluster as far as Helm's `lookup` sees it: an API server with Secrets, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import helm_python
import yaml
from chart_harness import LOADER, NAMESPACE, RELEASE, Object
from chart_schema import CHART

_SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets/"
_RESOURCES = {
    "kind": "APIResourceList",
    "groupVersion": "v1",
    "resources": [{"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get"]}],
}
_NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


class SecretsServer:
    """Holds `secrets` by name; `apply` renders the chart against them, and keeps those that result."""

    def __init__(self) -> None:
        self.secrets: dict[str, Object] = {}
        holder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                body: Object | None = None
                if path == "/api/v1":
                    body = _RESOURCES
                elif path.startswith(_SECRETS):
                    body = holder.secrets.get(path.removeprefix(_SECRETS))
                text = json.dumps(_NOT_FOUND if body is None else body).encode()
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def apply(self, values: Mapping[str, Any] | None = None) -> dict[str, dict[str, str]]:
        """As `helm upgrade --install` does, of the Secrets alone; returns their data by name."""
        place = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        context = {"cluster": "test", "user": "test"}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": place}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        with (
            helm_python.Config(kubeconfig_content=json.dumps(kubeconfig), namespace=NAMESPACE) as config,
            helm_python.Chart.load(str(CHART)) as chart,
        ):
            texts = config.render(chart, dict(values or {}), name=RELEASE, namespace=NAMESPACE)
        items = yaml.load_all(texts["tandem/templates/secrets.yaml"], LOADER)
        self.secrets = {item["metadata"]["name"]: item for item in items if item["kind"] == "Secret"}
        return {name: item["data"] for name, item in self.secrets.items()}
