"""What of the chart follows from values.yaml and from the product's own configuration: values.schema.json,
and the table of values in README.md. `make chart` (or running this file) writes both; a test compares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.identity.identity import TENANT_PATTERN

CHART = Path(__file__).resolve().parent.parent.parent / "helm" / "tandem"
BEGIN, END = "<!-- values -->", "<!-- /values -->"

_CONFIG_SECTIONS = {
    "router": "RouterConfig",
    "transfer": "TransferConfig",
    "store": "StoreConfig",
    "gateway": "GatewayConfig",
    "auth": "AuthConfig",
    "scaling": "ScalingConfig",
    "logs": "LogConfig",
    "tracing": "TracingConfig",
    "recording": "RecordingConfig",
    "costs": "CostConfig",
    "debug": "DebugConfig",
}
_SET_BY_THE_CHART = {
    "PoolConfig": ("name", "resources"),
    "StoreConfig": ("redis_url", "redis_url_file", "redis_ca_file", "nvme_path"),
    "AuthConfig": ("mode", "insecure", "keys_file", "key_root_file"),
    "JwtConfig": ("keys_file",),
    "CertificateConfig": ("ca_file",),
    "GatewayConfig": (
        "host",
        "port",
        "console_port",
        "admin_port",
        "replicas",
        "resources",
        "tls_cert_file",
        "tls_key_file",
        "health_port",
        "max_connection_age_s",
        "model_name",
    ),
    "HttpConfig": ("port",),
}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
# The chart selects pods by its own.
_MORE_LABELS = {**_TEXTS, "propertyNames": {"not": {"pattern": "^(tandem|app.kubernetes)[.]io/"}}}
_ANYTHING = {"type": "object"}
_ITEMS = {"type": "array", "items": {"type": "object"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_QUANTITY = {"type": ["string", "number"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"}
_COUNT = {"type": "integer", "minimum": 1}
_COUNT_OR_NULL = {"type": ["integer", "null"], "minimum": 1}
_FROM_ZERO_OR_NULL = {"type": ["integer", "null"], "minimum": 0}
_PORT = {"type": "integer", "minimum": 1024, "maximum": 65535}
_DIGEST = {"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"}
_DURATION = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}
_NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"}
# The rules by the last names of a path; the longest that matches holds. Other values are typed by their
# default.
_RULES: dict[str, dict[str, Any]] = {
    "app": _NAME,
    "fullnameOverride": {"type": "string", "maxLength": 40},
    "rayVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
    "digest": _DIGEST,
    "cpuDigest": _DIGEST,
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "model.source": {"enum": ["image", "pvc", "download", "nodes"]},
    "model.path": {"type": "string", "pattern": "^/"},
    "command": _STRINGS,
    "accessModes": {
        "type": "array",
        "minItems": 1,
        "items": {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]},
    },
    "backoffLimit": {"type": "integer", "minimum": 0},
    "replicasPerPod": _COUNT,
    "stagesPerPod": _COUNT_OR_NULL,
    "pods": _COUNT_OR_NULL,
    "minPods": _FROM_ZERO_OR_NULL,
    "maxPods": _COUNT_OR_NULL,
    "minAvailable": _FROM_ZERO_OR_NULL,
    "terminationGracePeriodSeconds": _COUNT_OR_NULL,
    "clusterDeletionDelaySeconds": _COUNT_OR_NULL,
    "ttlSecondsAfterFinished": _FROM_ZERO_OR_NULL,
    "maxConnectionAgeSeconds": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "poolDefaults.resources.cpu": {**_QUANTITY, "type": ["string", "number", "null"]},
    "cpu": _QUANTITY,
    "memory": _QUANTITY,
    "storage.size": _QUANTITY,
    "persistence.size": _QUANTITY,
    "sharedMemory": _QUANTITY,
    "hugePages.size": {"enum": ["", "2Mi", "1Gi"]},
    "hugePages.amount": {"type": "string", "pattern": "^$|^[0-9]+[KMGT]i$"},
    "rdma.count": _COUNT,
    "nvme.volume": {"type": "object", "minProperties": 1},
    "cache.volume": {"type": "object"},
    "gateway.replicas": _COUNT,
    "port": _PORT,
    "consolePort": _PORT,
    "httpPort": _PORT,
    "adminPort": _PORT,
    "healthPort": _PORT,
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "adminService.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "freePorts.first": _PORT,
    "freePorts.last": _PORT,
    "operatorNamespace": _NAME,
    **dict.fromkeys(("loadBalancerSourceRanges", "hostnames"), _STRINGS),
    "rayService.upgradeStrategy": {"enum": ["NewCluster", "None"]},
    "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
    "idleTimeoutSeconds": _COUNT,
    "auth.mode": {"enum": ["required", "none"]},
    "issuerRef.kind": {"enum": ["Issuer", "ClusterIssuer"]},
    "requestTimeout": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
    "duration": _DURATION,
    "renewBefore": _DURATION,
    "firstTenant": {"type": "string", "pattern": TENANT_PATTERN},
    "rayAuth.mode": {"enum": ["token", "disabled"]},
    "redis.mode": {"enum": ["bundled", "external"]},
    "runAsUser": {"type": "integer", "minimum": 1},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "extra": {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
    "pullSecrets": {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
    **dict.fromkeys(("annotations", "nodeSelector", "operatorPodLabels"), _TEXTS),
    **dict.fromkeys(("labels", "commonLabels"), _MORE_LABELS),
    **dict.fromkeys(("affinity", "podSecurityContext", "containerSecurityContext"), _ANYTHING),
    **dict.fromkeys(("tolerations", "topologySpreadConstraints", "env", "volumes", "volumeMounts"), _ITEMS),
    **dict.fromkeys(("envFrom", "initContainers", "sidecars"), _ITEMS),
    "requests": {"type": "object", "additionalProperties": _QUANTITY},
    "perNode": _COUNT,
    "imagePullSecrets": {"type": "array", "items": {"type": ["string", "object"]}},
    "extraObjects": {"type": "array", "items": {"type": ["string", "object"]}},
    **dict.fromkeys(
        ("gatewayFrom", "adminFrom", "dashboardFrom", "metricsFrom", "egressTo", "parentRefs"), _ITEMS
    ),
}


def values() -> dict[str, Any]:
    """Return the chart's values.yaml."""
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def schema() -> dict[str, Any]:
    """Return the schema that values.schema.json must contain."""
    definitions = _definitions()
    root = _of("", values(), _descriptions())
    pool = root["properties"]["poolDefaults"]
    definitions["pool"] = {
        **pool,
        "required": ["config"],
        "properties": {
            **pool["properties"],
            "config": {"allOf": [{"$ref": "#/$defs/PoolConfig"}, {"required": ["role"]}]},
        },
    }
    root["properties"]["pools"] = {
        "description": root["properties"]["pools"]["description"],
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"pattern": _NAME["pattern"]},
        "additionalProperties": {"$ref": "#/$defs/pool"},
    }
    # Parent charts put names of their own there.
    root["properties"]["global"]["additionalProperties"] = True
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the tandem chart",
        **root,
        "$defs": definitions,
    }


def table() -> str:
    """Return the rows of README.md: every value, its default and its meaning."""
    rows = ["| value | default | |", "|---|---|---|"]
    descriptions = _descriptions()
    for path, default in _leaves("", values()):
        shown = json.dumps(default, separators=(", ", ": ")).replace("|", "\\|")
        rows.append(f"| `{path}` | `{shown}` | {descriptions.get(path, '').replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def write() -> None:
    """Bring both files up to date."""
    (CHART / "values.schema.json").write_text(json.dumps(schema(), indent=2) + "\n")
    readme = (CHART / "README.md").read_text()
    before, _, rest = readme.partition(BEGIN)
    (CHART / "README.md").write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


def _definitions() -> dict[str, Any]:
    """Return the product's own configuration, without the values that the chart sets itself."""
    found: dict[str, Any] = ClusterConfig.model_json_schema(ref_template="#/$defs/{model}")["$defs"]
    for name, fields in _SET_BY_THE_CHART.items():
        for field in fields:
            del found[name]["properties"][field]
        found[name]["required"] = [field for field in found[name].get("required", ()) if field not in fields]
    # Pools take from `poolDefaults` what they do not say; the chart asks for the rest.
    found["PoolConfig"].pop("required")
    cleaned = {name: _without_titles(definition) for name, definition in sorted(found.items())}
    assert isinstance(cleaned, dict)
    return cleaned


def _without_titles(part: Any, *, is_names: bool = False) -> Any:
    """Return the schema without titles, descriptions and defaults. `is_names`: the keys of `part` are names
    of properties, one of which may be `title`."""
    if isinstance(part, list):
        return [_without_titles(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: _without_titles(value, is_names=key == "properties" and not is_names)
        for key, value in part.items()
        if is_names or key not in ("title", "description", "default")
    }


def _of(path: str, default: Any, descriptions: dict[str, str]) -> dict[str, Any]:
    """Return the schema of the value at `path`, by its rule or its default."""
    described = {"description": descriptions[path]} if path in descriptions else {}
    rule = _rule(path)
    if rule is not None:
        return {**described, **rule}
    if isinstance(default, dict):
        properties = {
            key: _of(f"{path}.{key}".lstrip("."), value, descriptions) for key, value in default.items()
        }
        return {**described, "type": "object", "additionalProperties": False, "properties": properties}
    kinds = {bool: "boolean", str: "string", int: "integer", float: "number"}
    return {**described, "type": kinds[type(default)]}


def _rule(path: str) -> dict[str, Any] | None:
    section = path.removeprefix("config.")
    if path == f"config.{section}":
        return {"$ref": f"#/$defs/{_CONFIG_SECTIONS[section]}"}
    if path == "poolDefaults.config":
        return {"$ref": "#/$defs/PoolConfig"}
    names = path.split(".")
    suffixes = (".".join(names[start:]) for start in range(len(names)))
    return next((_RULES[suffix] for suffix in suffixes if suffix in _RULES), None)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and _rule(path) is None:
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}".lstrip("."), below)
    else:
        yield path, value


def _descriptions() -> dict[str, str]:
    """Return the description of every key with a comment above it, by its path."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if match := re.match(r"\s*# ?(.*)", line):
            comment.append(match[1])
            continue
        if match := re.match(r"( *)([\w./-]+):", line):
            indent = len(match[1])
            parents = [parent for parent in parents if parent[0] < indent] + [(indent, match[2])]
            if comment:
                found[".".join(name for _, name in parents)] = " ".join(comment)
        comment = []
    return found


if __name__ == "__main__":
    write()
