"""Values that cannot be right are refused before anything is installed, with their path and the reason."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
from chart_harness import EXAMPLES, render, with_value

from cluster.serve.resource_needs import ENGINE_CORE_BYTES
from workers.model.rank_memory import PROCESS_BYTES

# Path: (value, part of the message).
BY_THE_SCHEMA = {
    "pools.decode.config.tp": (0, "minimum: got 0, want 1"),
    "pools.decode.config.role": ("decoder", "must be one of 'prefill', 'decode', 'both'"),
    "pools.decode.config.devise": ("cuda", "'devise' not allowed"),
    "pools.decode.config.resources": ({"x": 1}, "'resources' not allowed"),
    "pools.Decode": ({"config": {"role": "decode"}}, "'Decode' does not match pattern"),
    "pools.more": ({}, "missing property 'config'"),
    "pools.prefill.config.engine.block_tokens": ("64k", "got string, want integer"),
    "pools.prefill.hugePages.size": ("4Ki", "must be one of '', '2Mi', '1Gi'"),
    "pools.prefill.resources.memory": ("much", "does not match pattern"),
    "config.transfer.transports": (["carrier-pigeon"], "must be one of"),
    "config.store.redis_url": ("redis://elsewhere", "'redis_url' not allowed"),
    "config.gateway.port": (1, "'port' not allowed"),
    "config.auth.keys_file": ("/keys", "'keys_file' not allowed"),
    "config.auth.tenants": ({"acme": {"max_priority": 1000}}, "maximum: got 1,000, want 100"),
    "image.digest": ("latest", "does not match pattern"),
    "redis.bundled.image.digest": ("sha256:1", "does not match pattern"),
    "auth.mode": ("optional", "must be one of 'required', 'none'"),
    "certManager.duration": ("90 days", "does not match pattern"),
    "auth.apiKeys.firstTenant": ("a b", "does not match pattern"),
    "config.scaling.interval_s": (0, "exclusiveMinimum"),
    "config.pools": ([], "'pools' not allowed"),
    "gateway.port": (80, "minimum: got 80, want 1,024"),
    "gateway.service.type": ("ExternalName", "must be one of 'ClusterIP'"),
    "gateway.service.console": (True, "'console' not allowed"),
    "networkPolicy.freePorts.first": (80, "minimum: got 80, want 1,024"),
    "gateway.tls.enabled": ("yes", "got string, want boolean"),
    "model.source": ("hub", "must be one of 'image', 'pvc', 'download', 'nodes'"),
    "model.path": ("models/tiny", "does not match pattern"),
    "rayVersion": ("latest", "does not match pattern"),
    "rayAuth.mode": ("none", "must be one of 'token', 'disabled'"),
    "redis.bundled.labels": ({"tandem.io/release": "y"}, "tandem.io/release"),
    "commonLabels": ({"app.kubernetes.io/name": "y"}, "app.kubernetes.io/name"),
    "global.imageRegistry": (5000, "got number, want string"),
    "pools.prefill.envFrom": ({"secretRef": "x"}, "got object, want array"),
    "pools.prefill.resources.requests": ({"cpu": "many"}, "does not match pattern"),
    "extraObjects": ([5], "got number, want"),
    "redis.mode": ("none", "must be one of 'bundled', 'external'"),
    "replicas": (3, "'replicas' not allowed"),
}

BY_THE_TEMPLATES: list[tuple[dict[str, Any], str]] = [
    ({"gateway": {"tls": {"enabled": True}}}, "gateway.tls.secretName: must be given"),
    ({"model": {"source": "pvc"}}, "model.pvc.claim: must be given"),
    ({"model": {"source": "download"}}, "model.download.repo: must be given"),
    ({"model": {"source": "nodes"}}, "model.download.repo: must be given with model.source nodes"),
    ({"model": {"source": "nodes", "download": {"repo": "org/name"}}}, "model.download.revision: must be a"),
    (
        {"model": {"source": "nodes", "download": {"repo": "org/name", "revision": "0" * 40}}},
        "model.cache.volume: must be given with model.source nodes",
    ),
    (
        {"model": {"cache": {"volume": {"emptyDir": {}, "hostPath": {"path": "/m"}}}}},
        "model.cache.volume: exactly one volume source",
    ),
    ({"model": {"download": {"file": "m.gguf"}}}, "model.download.file: one file is fetched with"),
    (
        {"model": {"source": "download", "download": {"command": ["fetch"]}}},
        "model.name: must be given with model.download.command",
    ),
    (
        {"pools": {"decode": {"config": {"device": "cuda", "tp": 16}}}},
        "pools.decode.config.tp: a pod asks for 16 GPUs, and a node has 8 (pools.decode.gpu.perNode)",
    ),
    (
        {"gateway": {"resources": {"requests": {"cpu": "999"}}}},
        "gateway.resources.requests.cpu: 999 is more than its limit",
    ),
    (
        {"pools": {"decode": {"resources": {"requests": {"memory": "9Ti"}}}}},
        "pools.decode.resources.requests.memory: 9Ti is more than its limit",
    ),
    ({"redis": {"mode": "external"}}, "redis.external.secretName: must be given"),
    (
        {"redis": {"mode": "external", "external": {"secretName": "r"}}},
        "redis.external.address: must be given",
    ),
    ({"pools": {"decode": {"hugePages": {"size": "2Mi"}}}}, "pools.decode.hugePages.amount: must be given"),
    (
        {"pools": {"decode": {"config": {"drain_s": 300}, "terminationGracePeriodSeconds": 60}}},
        "pools.decode.terminationGracePeriodSeconds: 60 must be more than drain_s 300",
    ),
    (
        {"pools": {"decode": {"config": {"pp": 4}, "stagesPerPod": 3}}},
        "pools.decode.stagesPerPod: 3 does not divide pp 4",
    ),
    (
        {"pools": {"decode": {"config": {"pp": 2}, "stagesPerPod": 1, "replicasPerPod": 2}}},
        "pools.decode: with stagesPerPod below pp, replicasPerPod must be 1",
    ),
    (
        {"pools": {"decode": {"pods": 3, "maxPods": 2}}},
        "pools.decode: minPods 2, pods 3 and maxPods 2 must not fall",
    ),
    (
        {"poolDefaults": {"config": {"cpus_per_rank": None}}},
        "pools.decode.config.cpus_per_rank: must be given",
    ),
    (
        {"config": {"store": {"dram_gb": 200}}},
        "pools.decode.resources.memory: 16Gi holds 17.2 GB, and a pod takes more than 200.5 GB "
        "(config.store.dram_gb 200.0, processes 0.5): raise it to 187Gi and what the model "
        "takes, or lower config.store.dram_gb",
    ),
    (
        {
            "pools": {
                "decode": {"resources": {"memory": "4Gi"}, "hugePages": {"size": "2Mi", "amount": "2Gi"}}
            }
        },
        "pools.decode.resources.memory: 4Gi holds 4.3 GB, and a pod takes more than 4.5 GB",
    ),
    (
        {"config": {"scaling": {"autoscale": True, "pools": {"decode": {"max": 8}}}}},
        "config.scaling.pools.decode.max: 8 replicas take 8 pods, there are 1, and nobody adds any: set "
        "autoscaler.enabled, raise pools.decode.pods to 8, or lower max",
    ),
    (
        {
            "config": {"scaling": {"autoscale": True, "pools": {"decode": {"max": 8}}}},
            "autoscaler": {"enabled": True},
            "pools": {"decode": {"maxPods": 2}},
        },
        "config.scaling.pools.decode.max: 8 replicas take 8 pods, and pools.decode.maxPods allows 2",
    ),
    (
        {"pools": {"decode": {"sidecars": [{"name": "ray-worker", "image": "x"}]}}},
        "pools.decode.sidecars: the name ray-worker is the chart's own",
    ),
    (
        {"gateway": {"initContainers": [{"name": "wait-model", "image": "x"}]}},
        "gateway.initContainers: the name wait-model is the chart's own",
    ),
    (
        {"pools": {"decode": {"volumes": [{"name": "shared-memory", "emptyDir": {}}]}}},
        "pools.decode.volumes: the name shared-memory is the chart's own",
    ),
    (
        {
            "model": {
                "source": "download",
                "download": {"repo": "org/name", "volumes": [{"name": "model", "emptyDir": {}}]},
            }
        },
        "model.download.volumes: the name model is the chart's own",
    ),
    (
        {"redis": {"bundled": {"resources": {"requests": {"memory": "9Gi"}}}}},
        "redis.bundled.resources.requests.memory: 9Gi is more than its limit",
    ),
    (
        {"redis": {"bundled": {"indexResources": {"requests": {"gpu": "1"}}}}},
        "redis.bundled.indexResources.requests.gpu: has no limit; name it in redis.bundled.indexResources",
    ),
    (
        {"networkPolicy": {"freePorts": {"first": 40000, "last": 40100}}},
        "networkPolicy.freePorts: 40000 to 40100 are fewer than 1,000 ports",
    ),
    (
        {"networkPolicy": {"freePorts": {"pinned": True}}, "pools": {"decode": {"hostNetwork": True}}},
        "networkPolicy.freePorts.pinned: pods with pools.decode.hostNetwork have the ports of their node",
    ),
    ({"pools": {"decode": None}}, "pools: at least one needs config.role decode or both"),
    (
        {"gateway": {"terminationGracePeriodSeconds": 5}},
        "gateway.terminationGracePeriodSeconds: 5 must be at least config.gateway.drain_s 120 and 20 s",
    ),
    (
        {"config": {"gateway": {"drain_s": 90}}, "gateway": {"terminationGracePeriodSeconds": 100}},
        "must be at least config.gateway.drain_s 90 and 20 s for streams to move; leave it out for 130",
    ),
]


@pytest.mark.parametrize("path", BY_THE_SCHEMA)
def test_the_schema_refuses_a_broken_value_by_its_path(path: str) -> None:
    value, reason = BY_THE_SCHEMA[path]
    with pytest.raises(helm_python.HelmError) as caught:
        render(with_value({}, path, value))
    message = str(caught.value)
    assert reason in message
    parent = "/" + path.rpartition(".")[0].replace(".", "/")
    # Of a name, the validator tells the name alone.
    assert f"at '{parent}" in message or parent == "/" or "propertyName" in message, message


@pytest.mark.parametrize(("values", "reason"), BY_THE_TEMPLATES)
def test_what_the_schema_cannot_see_is_refused_too(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert reason in str(caught.value)


def test_the_memory_of_a_pod_is_reckoned_as_the_doctor_does() -> None:
    """The same sizes of processes, down to the byte."""
    dram_bytes, num_ranks = 4_000_000_000, 2 * 2 * 3
    enough = dram_bytes + num_ranks * PROCESS_BYTES + 3 * ENGINE_CORE_BYTES
    config = {"role": "decode", "tp": 2, "pp": 2}
    pool = {
        "config": config,
        "replicasPerPod": 3,
        "gpu": {"perNode": 12},
        "resources": {"memory": str(enough)},
    }
    render({"pools": {"decode": pool}})
    for memory in (str(enough - 1), f"{enough // 1024 - 1}Ki", "8G", "8192Mi"):
        with pytest.raises(helm_python.HelmError, match=r"pools\.decode\.resources\.memory"):
            render(with_value({"pools": {"decode": pool}}, "pools.decode.resources.memory", memory))
    huge = {"resources": {"memory": "4Gi"}, "hugePages": {"size": "2Mi", "amount": "4Gi"}}
    render({"pools": {"decode": huge}})


def test_headroom_for_the_autoscaler_is_required_only_where_it_may_use_it() -> None:
    limits = {"pools": {"decode": {"max": 8}}}
    render({"config": {"scaling": limits}})
    render({"config": {"scaling": {"autoscale": True, **limits}}, "autoscaler": {"enabled": True}})
    render({"config": {"scaling": {"autoscale": True, **limits}}, "pools": {"decode": {"pods": 8}}})


# Where the image comes from, without which there is a warning.
PULLED: dict[str, Any] = {"global": {"imageRegistry": "registry.example"}}


@pytest.mark.parametrize(
    ("values", "warnings"),
    [
        ({}, 1),
        (PULLED, 0),
        ({"image": {"repository": "registry.example/tandem"}}, 0),
        ({**PULLED, "config": {"debug": {"allow_pins": True}}}, 1),
        ({**PULLED, "gateway": {"service": {"type": "LoadBalancer"}}}, 1),
        ({**PULLED, "auth": {"mode": "none"}}, 1),
        (
            {
                **PULLED,
                "gateway": {"service": {"type": "LoadBalancer"}},
                "auth": {"mode": "none", "publishUnauthenticated": True},
            },
            2,
        ),
    ],
)
def test_what_is_unwise_is_said_after_the_installation(values: dict[str, Any], warnings: int) -> None:
    assert render(values)["tandem/templates/NOTES.txt"].count("WARNING") == warnings


def test_a_default_pool_can_be_removed_but_not_all() -> None:
    both = {"config": {"role": "both"}}
    texts = render({"pools": {"prefill": None, "decode": None, "all": both}})
    assert "groupName: pool-all" in texts["tandem/templates/rayservice.yaml"]
    assert "pool-decode" not in texts["tandem/templates/rayservice.yaml"]
    with pytest.raises(helm_python.HelmError, match="pools"):
        render({"pools": {"prefill": None, "decode": None}})


def test_a_long_release_name_still_gives_names_that_kubernetes_takes() -> None:
    text = render(EXAMPLES["cpu"], name="a-name-that-is-rather-long-for-a-release-of-a-chart")
    names = [line.split()[-1] for part in text.values() for line in part.splitlines() if "  name: a-" in line]
    assert names
    assert max(map(len, names)) <= 63
