"""Identity and encryption by the chart: which Secrets it makes and keeps, who mounts them, and what the
cluster's file says of them."""

from __future__ import annotations

import base64
from pathlib import Path

import helm_python
import pytest
from chart_cluster import SecretsServer
from chart_harness import (
    EXAMPLES,
    Object,
    merged,
    objects,
    only,
    pods,
    ray_service,
    render,
    serve_config,
)

from cluster.config import parse_config
from cluster.errors import UnauthenticatedError
from cluster.identity.api_key_file import parse_keys
from cluster.identity.authenticator import Authenticator, Credentials
from cluster.identity.key_roots import parse_key_roots
from kvtransfer.common.clock import SystemClock

JWT: Object = {"issuer": "https://issuer.example", "audience": "tandem"}
WITH_TLS: Object = {"gateway": {"tls": {"enabled": True, "secretName": "tandem-tls"}}}
NAMES: Object = {"identities": [{"name": "batch", "tenant": "acme"}]}
# What only gateways may read.
OF_GATEWAYS = {"tandem-api-keys", "tandem-key-root"}
RAY = {"headgroup", "gateway", "pool-prefill", "pool-decode"}


def config_of(values: Object) -> Object:
    """The cluster's file, which the product accepts."""
    (application,) = serve_config(ray_service(values))["applications"]
    raw: Object = application["args"]["config"]
    parse_config(raw, "rendered")
    return raw


def mounted(values: Object) -> dict[str, set[str]]:
    """By Secret or ConfigMap: the pods that mount it."""
    found: dict[str, set[str]] = {}
    for name, pod in pods(objects(values)):
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                found.setdefault(volume["secret"]["secretName"], set()).add(name)
            if "configMap" in volume:
                found.setdefault(volume["configMap"]["name"], set()).add(name)
    return found


def file_of(values: Object, path: str) -> tuple[str, str]:
    """The Secret or ConfigMap, and its key, that the gateways have at this path."""
    spec = dict(pods(objects(values)))["gateway"]["spec"]
    folder, _, file = path.rpartition("/")
    (mount,) = [it for it in spec["containers"][0]["volumeMounts"] if it["mountPath"] == folder]
    assert mount["readOnly"]
    assert "subPath" not in mount, "such a file is never renewed"
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == mount["name"]]
    source = volume.get("secret") or volume["configMap"]
    (item,) = [item for item in source["items"] if item["path"] == file]
    return source.get("secretName") or source["name"], item["key"]


def secret_text(data: dict[str, str], key: str) -> str:
    return base64.b64decode(data[key]).decode()


def test_by_default_every_call_needs_a_key() -> None:
    auth = config_of({})["auth"]
    assert auth["mode"] == "required"
    assert file_of({}, auth["keys_file"]) == ("tandem-api-keys", "keys.yaml")
    assert file_of({}, auth["key_root_file"]) == ("tandem-key-root", "key-root")


def test_browsers_reach_the_console_by_the_names_of_its_service() -> None:
    own = {"config": {"gateway": {"console_hosts": ["console.example"]}}}
    names = config_of(own)["gateway"]["console_hosts"]
    inside = ["tandem-admin", "tandem-admin.llm", "tandem-admin.llm.svc"]
    assert names == [*inside, "tandem-admin.llm.svc.cluster.local", "console.example"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_keys_and_roots_are_in_no_pod_but_the_gateways(example: str) -> None:
    found = mounted(EXAMPLES[example])
    for name in OF_GATEWAYS:
        assert found[name] == {"gateway"}
    assert "tandem-first-keys" not in found
    assert found["tandem-cluster"] == RAY


def test_the_first_keys_open_what_they_are_for(tmp_path: Path) -> None:
    with SecretsServer() as server:
        drawn = server.apply({"auth": {"apiKeys": {"firstTenant": "acme"}}})
    text = secret_text(drawn["tandem-api-keys"], "keys.yaml")
    (tmp_path / "keys.yaml").write_text(text)
    auth = {"mode": "required", "keys_file": str(tmp_path / "keys.yaml")}
    config = parse_config({**config_of({}), "auth": auth}, "test")
    authenticator = Authenticator(config.auth, SystemClock())
    for who in ("operator", "user"):
        key = secret_text(drawn["tandem-first-keys"], who)
        identity = authenticator.identify(Credentials(f"Bearer {key}"))
        assert (identity.tenant, set(identity.roles)) == ("acme", {who})
        assert key.rpartition("_")[2] not in text
        wrong = key[:-1] + ("a" if key[-1] != "a" else "b")
        with pytest.raises(UnauthenticatedError):
            authenticator.identify(Credentials(f"Bearer {wrong}"))


def test_what_is_drawn_is_kept_over_upgrades_and_so_is_what_operators_changed() -> None:
    with SecretsServer() as server:
        first = server.apply()
        assert server.apply() == first
        changed = base64.b64encode(b"keys: []\n").decode()
        rotated = base64.b64encode(b"k2 " + base64.b64encode(b"2" * 32) + b"\n").decode()
        server.secrets["tandem-api-keys"]["data"]["keys.yaml"] = changed
        server.secrets["tandem-key-root"]["data"]["key-root"] = rotated
        del server.secrets["tandem-first-keys"]
        again = server.apply()
    assert again["tandem-api-keys"] == {"keys.yaml": changed}
    assert again["tandem-key-root"] == {"key-root": rotated}
    assert "tandem-first-keys" not in again
    assert again["tandem-cluster"] == first["tandem-cluster"]


def test_each_release_draws_its_own() -> None:
    draws = []
    for _ in range(2):
        with SecretsServer() as server:
            draws.append(server.apply())
    for name in OF_GATEWAYS | {"tandem-first-keys", "tandem-cluster"}:
        assert draws[0][name] != draws[1][name]
    (root,) = parse_key_roots(secret_text(draws[0]["tandem-key-root"], "key-root").encode())
    assert root.id == "k1"
    assert len(parse_keys(secret_text(draws[0]["tandem-api-keys"], "keys.yaml").encode())) == 2


def test_secrets_of_others_are_used_as_they_are() -> None:
    values: Object = {
        "auth": {
            "apiKeys": {"existingSecret": "my-keys", "key": "keys"},
            "keyRoot": {"existingSecret": "my-root", "key": "root"},
        }
    }
    auth = config_of(values)["auth"]
    assert file_of(values, auth["keys_file"]) == ("my-keys", "keys")
    assert file_of(values, auth["key_root_file"]) == ("my-root", "root")
    secrets = {item["metadata"]["name"] for item in objects(values) if item["kind"] == "Secret"}
    assert not secrets & (OF_GATEWAYS | {"tandem-first-keys"})


def test_without_authentication_nothing_of_it_is_made_but_caches_stay_apart() -> None:
    values: Object = {"auth": {"mode": "none"}, "config": {"auth": {"jwt": JWT, "resume_s": 60}}}
    auth = config_of(values)["auth"]
    assert auth["insecure"] is True
    assert auth.keys() == {"mode", "insecure", "key_root_file", "resume_s"}
    assert "tandem-api-keys" not in mounted(values)
    assert "WARNING: auth.mode none" in render(values)["tandem/templates/NOTES.txt"]


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"keys": '{"keys": []}'}, "tandem-jwks"),
        ({"existingConfigMap": "issuer"}, "issuer"),
        ({"existingSecret": "issuer-secret"}, "issuer-secret"),
    ],
)
def test_public_keys_of_tokens_come_from_values_or_from_an_object(given: Object, source: str) -> None:
    values: Object = {"auth": {"jwt": given}, "config": {"auth": {"jwt": JWT}}}
    settings = config_of(values)["auth"]["jwt"]
    assert settings["issuer"] == JWT["issuer"]
    assert file_of(values, settings["keys_file"]) == (source, "jwks.json")
    if "keys" in given:
        assert only(objects(values), "ConfigMap", source)["data"]["jwks.json"].strip() == given["keys"]


def test_client_certificates_are_verified_by_the_authority_that_is_named() -> None:
    values = merged(
        WITH_TLS,
        {
            "auth": {"apiKeys": {"enabled": False}, "certificates": {"existingSecret": "clients"}},
            "config": {"auth": {"certificates": NAMES}},
        },
    )
    auth = config_of(values)["auth"]
    assert "keys_file" not in auth
    assert auth["certificates"]["identities"] == NAMES["identities"]
    assert file_of(values, auth["certificates"]["ca_file"]) == ("clients", "ca.crt")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"auth": {"apiKeys": {"enabled": False}}}, "auth.mode required: nobody could be let in"),
        (
            {"auth": {"jwt": {"keys": "a", "existingSecret": "b"}}, "config": {"auth": {"jwt": JWT}}},
            "auth.jwt: keys and existingSecret exclude each other",
        ),
        ({"auth": {"jwt": {"keys": "a"}}}, "config.auth.jwt: must be given with auth.jwt"),
        ({"config": {"auth": {"jwt": JWT}}}, "auth.jwt: keys, existingConfigMap or existingSecret must be"),
        ({"auth": {"certificates": {"existingSecret": "c"}}}, "one needs the other"),
        ({"config": {"auth": {"certificates": NAMES}}}, "one needs the other"),
        (
            {
                "auth": {"certificates": {"existingSecret": "c"}},
                "config": {"auth": {"certificates": NAMES}},
            },
            "auth.certificates.existingSecret: needs gateway.tls.enabled",
        ),
        ({"config": {"auth": {"keys_file": "/k"}}}, "'keys_file' not allowed"),
        ({"config": {"auth": {"mode": "none"}}}, "'mode' not allowed"),
    ],
)
def test_what_would_let_nobody_in_or_everybody_is_refused(values: Object, reason: str) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render(values)
    assert reason in str(caught.value)


def certificates(values: Object) -> dict[str, Object]:
    """cert-manager's, by name."""
    return {
        item["metadata"]["name"]: item["spec"] for item in objects(values) if item["kind"] == "Certificate"
    }


def test_inner_certificates_are_in_all_ray_pods_and_made_by_an_authority_of_the_chart() -> None:
    values: Object = {"innerTls": {"enabled": True}}
    inner = config_of(values)["inner_tls"]
    folder = "/tandem/secrets/inner-tls"
    assert inner == {
        "cert_file": f"{folder}/tls.crt",
        "key_file": f"{folder}/tls.key",
        "ca_file": f"{folder}/ca.crt",
    }
    assert mounted(values)["tandem-inner"] == RAY - {"headgroup"}
    made = certificates(values)
    assert made.keys() == {"tandem-inner-authority", "tandem-inner"}
    assert made["tandem-inner-authority"]["isCA"]
    assert {"server auth", "client auth"} <= set(made["tandem-inner"]["usages"])
    assert made["tandem-inner"]["issuerRef"]["name"] == "tandem-inner-authority"
    assert made["tandem-inner"]["secretName"] == "tandem-inner"


def test_an_issuer_or_a_secret_of_others_is_used() -> None:
    issuer = {"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    values: Object = {"innerTls": {"enabled": True}, "certManager": {"issuerRef": issuer}}
    made = certificates(values)
    assert made.keys() == {"tandem-inner"}
    assert made["tandem-inner"]["issuerRef"] == issuer
    assert "Issuer" not in {item["kind"] for item in objects(values)}
    values = {"innerTls": {"enabled": True, "existingSecret": "inner"}}
    assert certificates(values) == {}
    assert "gateway" in mounted(values)["inner"]


REDIS_TLS: Object = {"redis": {"bundled": {"tls": {"enabled": True}}}}


def test_redis_speaks_tls_to_ray_and_to_the_stores() -> None:
    items = objects(REDIS_TLS)
    options = only(items, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "rediss://tandem-redis:6379"
    assert secret_text(only(items, "Secret", "tandem-redis")["data"], "url").startswith("rediss://:")
    names = certificates(REDIS_TLS)["tandem-redis-tls"]["dnsNames"]
    assert {"tandem-redis", "tandem-redis.llm.svc"} <= set(names)
    for name, pod in pods(items):
        if name != "tandem-redis":
            env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
            assert env["RAY_REDIS_CA_CERT"] == "/tandem/secrets/redis-ca/ca.crt", name
    assert config_of(REDIS_TLS)["store"]["redis_ca_file"] == "/tandem/secrets/redis-ca/ca.crt"


def test_the_authority_of_an_external_redis_can_be_named() -> None:
    external: Object = {
        "address": "rediss://redis.example:6379",
        "secretName": "redis",
        "ca": {"secretName": "redis-authority"},
    }
    values: Object = {"redis": {"mode": "external", "external": external}}
    assert "headgroup" in mounted(values)["redis-authority"]
    assert config_of(values)["store"]["redis_ca_file"] == "/tandem/secrets/redis-ca/ca.crt"
