"""Who calls, by all methods together; the section `auth`; files that are followed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from callers import Issuer, jwt_config, key_of, write_jwks
from gateway_harness import until

from cluster.config import GatewayConfig, load_config, parse_config
from cluster.errors import ConfigError, ForbiddenError, UnauthenticatedError
from cluster.identity.authenticator import Authenticator, Credentials, require
from cluster.identity.certificates import names_of_auth_context
from cluster.identity.config import AuthConfig
from cluster.identity.identity import LOCAL, ROLES
from cluster.identity.watched_file import WatchedFile
from kvtransfer.common.clock import ManualClock, SystemClock

POOLS = [{"name": "both", "role": "both"}]
IDENTITIES = [
    {"name": "spiffe://example/batch", "tenant": "batch"},
    {"name": "ops", "tenant": "ops", "roles": ["operator"]},
]


def config_of(**auth: Any) -> AuthConfig:
    return AuthConfig.model_validate(auth)


def test_where_nobody_is_authenticated_everybody_may_do_everything() -> None:
    known = Authenticator(config_of(), ManualClock())
    for credentials in (Credentials(), Credentials("Bearer x"), Credentials("", ("a",))):
        identity = known.identify(credentials)
        assert identity is LOCAL
        assert identity.names_tenants
        for role in ROLES:
            require(identity, role)


def test_each_credential_is_looked_up_where_it_belongs(tmp_path: Path) -> None:
    issuer = Issuer()
    key = key_of(tmp_path / "keys.yaml", "by-key")
    jwks = write_jwks(tmp_path / "jwks.json", [issuer])
    config = config_of(
        mode="required",
        keys_file=tmp_path / "keys.yaml",
        jwt=jwt_config(jwks),
        certificates={"ca_file": tmp_path / "ca.crt", "identities": IDENTITIES},
    )
    known = Authenticator(config, SystemClock())
    token = issuer.token(tenant="by-token")
    found = [
        known.identify(credentials)
        for credentials in (
            Credentials(f"Bearer {key}"),
            Credentials(f"bearer {token}"),
            Credentials("", ("unknown", "spiffe://example/batch")),
            Credentials("", ("ops", "spiffe://example/batch")),
            Credentials(f"Bearer {key}", ("ops",)),
        )
    ]
    assert [it.tenant for it in found] == ["by-key", "by-token", "batch", "batch", "by-key"]
    assert [it.method for it in found] == ["key", "jwt", "certificate", "certificate", "key"]
    assert found[2].name == "cert:spiffe://example/batch"
    with pytest.raises(UnauthenticatedError, match="no name that is known"):
        known.identify(Credentials("", ("somebody",)))
    with pytest.raises(UnauthenticatedError, match="no credentials"):
        known.identify(Credentials())
    with pytest.raises(UnauthenticatedError, match="not valid"):
        known.identify(Credentials("Bearer x", ("ops",)))  # a wrong token is not made good by a certificate


def test_a_key_is_no_token_and_a_token_no_key(tmp_path: Path) -> None:
    issuer = Issuer()
    key = key_of(tmp_path / "keys.yaml", "t")
    jwks = write_jwks(tmp_path / "jwks.json", [issuer])
    only_keys = Authenticator(config_of(mode="required", keys_file=tmp_path / "keys.yaml"), SystemClock())
    only_tokens = Authenticator(config_of(mode="required", jwt=jwt_config(jwks)), SystemClock())
    for known, token in ((only_keys, issuer.token()), (only_tokens, key)):
        with pytest.raises(UnauthenticatedError, match="not valid here"):
            known.identify(Credentials(f"Bearer {token}"))


def test_a_role_is_required_or_one_that_includes_it() -> None:
    known = Authenticator(
        config_of(mode="required", certificates={"ca_file": "ca", "identities": IDENTITIES}), ManualClock()
    )
    operator = known.identify(Credentials("", ("ops",)))
    user = known.identify(Credentials("", ("spiffe://example/batch",)))
    require(operator, "operator")
    require(operator, "viewer")
    with pytest.raises(ForbiddenError, match="cert:ops lacks the role 'user'"):
        require(operator, "user")
    require(user, "user")
    for role in ("viewer", "operator"):
        with pytest.raises(ForbiddenError):
            require(user, role)


def test_the_names_of_a_certificate_come_from_the_connection() -> None:
    found = {
        "transport_security_type": [b"ssl"],
        "x509_common_name": [b"ops"],
        "x509_subject_alternative_name": [b"a.example", b"spiffe://x", b"\xff"],
    }
    assert names_of_auth_context(found) == ("ops", "a.example", "spiffe://x", "\ufffd")
    assert names_of_auth_context({}) == ()


@pytest.mark.parametrize(
    ("auth", "problem"),
    [
        ({"mode": "required"}, "at least one of keys_file, jwt and certificates"),
        ({"mode": "required", "keys_file": "k", "insecure": True}, "insecure contradicts"),
        ({"keys_file": "k"}, "set mode: required"),
        ({"mode": "some"}, r"auth\.mode: "),
        ({"tenants": {"a b": {}}}, "'a b' must be 1 to 64 letters"),
        ({"tenants": {"a": {"max_priority": 101}}}, r"auth\.tenants\.a\.max_priority: "),
        ({"tenants": {"a": {"device_kv_share": 0}}}, r"auth\.tenants\.a\.device_kv_share: "),
        ({"tenants": {"a": {"limit": 0}}}, r"auth\.tenants\.a\.limit: "),
        ({"mode": "required", "jwt": {"keys_file": "k", "issuer": "i"}}, r"auth\.jwt\.audience: "),
        ({"mode": "required", "certificates": {"ca_file": "c"}}, r"set gateway\.tls_cert_file"),
        ({"resume_s": 0}, r"auth\.resume_s: "),
    ],
)
def test_a_wrong_setting_is_named(auth: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({"model": "m", "pools": POOLS, "auth": auth}, "file")


@pytest.mark.parametrize("host", ["0.0.0.0", "auto", "10.1.2.3", "::", "example.com"])
def test_without_authentication_only_this_host_is_served_unless_told_twice(host: str) -> None:
    raw: dict[str, Any] = {"model": "m", "pools": POOLS, "gateway": {"host": host}}
    with pytest.raises(ConfigError, match=r"set auth\.mode: required, or auth\.insecure: true"):
        parse_config(raw, "file")
    parse_config({**raw, "auth": {"insecure": True}}, "file")
    parse_config({**raw, "auth": {"mode": "required", "keys_file": "k"}}, "file")
    for loopback in ("127.0.0.1", "::1", "localhost"):
        parse_config({**raw, "gateway": {"host": loopback}}, "file")


def test_the_limits_of_a_tenant_are_its_own_or_those_of_all() -> None:
    config = config_of(tenants={"a": {"max_priority": 5}, "*": {"max_priority": 1, "sharing_group": "rest"}})
    assert (config.limits("a").max_priority, config.sharing_group("a")) == (5, "a")
    assert (config.limits("b").max_priority, config.sharing_group("b")) == (1, "rest")
    assert (config_of().limits("b").max_priority, config_of().sharing_group("b")) == (0, "b")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: m\npools: [{name: both, role: both}]\n"
        "gateway: {tls_cert_file: c, tls_key_file: k}\n"
        "auth:\n  mode: required\n  keys_file: keys.yaml\n  key_root_file: /abs/roots\n"
        "  jwt: {keys_file: jwks.json, issuer: i, audience: a}\n"
        "  certificates: {ca_file: ca.crt}\n  audit: {folder: audit}\n"
    )
    auth = load_config(file).auth
    assert auth.jwt is not None
    assert auth.certificates is not None
    assert auth.keys_file == tmp_path / "keys.yaml"
    assert auth.key_root_file == Path("/abs/roots")
    assert auth.jwt.keys_file == tmp_path / "jwks.json"
    assert auth.certificates.ca_file == tmp_path / "ca.crt"
    assert auth.audit.folder == tmp_path / "audit"


def test_the_port_for_operators_is_a_free_one_where_the_port_is_set() -> None:
    assert GatewayConfig().admin_port == 8782
    assert GatewayConfig.model_validate({"port": 0}).admin_port == 0
    assert GatewayConfig.model_validate({"port": 9000, "admin_port": 9001}).admin_port == 9001


async def test_files_are_followed(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "keys.yaml"
    first = key_of(path, "one")
    known = Authenticator(config_of(mode="required", keys_file=path), clock)
    following = asyncio.create_task(known.follow())
    second = key_of(path, "two")

    def is_known() -> bool:
        clock.advance(1.0)
        try:
            return known.identify(Credentials(f"Bearer {second}")).tenant == "two"
        except UnauthenticatedError:
            return False

    await until(is_known, "the new key is known")
    assert known.identify(Credentials(f"Bearer {first}")).tenant == "one"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_whoever_follows_a_file_is_called_when_it_changed(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "file"
    path.write_text("1")
    file = WatchedFile(path, "field", int)
    seen: list[int] = []
    following = asyncio.create_task(file.follow(clock, lambda: seen.append(file.content)))

    def has_seen(count: int) -> bool:
        clock.advance(1.0)
        return len(seen) == count

    path.write_text("23")
    await until(lambda: has_seen(1), "the change is seen")
    path.write_text("no number")
    await until(lambda: file._is_broken or has_seen(2), "the content is refused")
    path.write_text("456")
    await until(lambda: has_seen(2), "the next change is seen")
    assert seen == [23, 456]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_a_file_may_be_large_but_not_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.identity.watched_file.MAX_FILE_BYTES", 10)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert WatchedFile(path, "field", len).content == 10
    path.write_bytes(b"x" * 11)
    with pytest.raises(ConfigError, match=r"field: .*larger than 10 bytes"):
        WatchedFile(path, "field", len)
