"""The checks of authentication, of what is exposed, and of the files behind both, on real files."""

from __future__ import annotations

import base64
import json
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from doctor_harness import config_of, context_of, only, said

from cluster.doctor import access
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import Severity
from cluster.identity.api_key_file import add_key
from cluster.identity.identity import Role
from cluster.serve.machine import Machine
from kvtransfer.common.clock import ManualClock

OK, NOTE, WARNING, ERROR = Severity
NOW = datetime(2027, 1, 15, tzinfo=UTC)
SECRET = "0123456789abcdef0123456789abcdef"


def context(auth: dict[str, Any] | None = None, **sections: Any) -> CheckContext:
    config = config_of(auth=auth or {}, **sections)
    return context_of(Machine(), config, clock=ManualClock(NOW.timestamp()))


def required(keys_file: Path, **more: Any) -> dict[str, Any]:
    return {"mode": "required", "keys_file": str(keys_file), **more}


def new_key(path: Path, *, roles: tuple[Role, ...] = ("user",), days: float | None = None) -> str:
    """The id of a key that is added."""
    expires = None if days is None else NOW + timedelta(days=days)
    key = add_key(path, secrets.token_bytes, tenant="acme", roles=roles, created=NOW, expires=expires)
    return key.split("_")[1]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """With one key for an operator."""
    path = tmp_path / "keys.yaml"
    new_key(path, roles=("operator",))
    return path


def test_no_authentication_is_said_plainly_with_the_remedy() -> None:
    result = only(access.authentication, context())
    assert result.severity is NOTE
    assert "NOT authenticated" in result.seen
    assert "tandem key new" in result.remedy
    open_to_all = context({"insecure": True}, gateway={"host": "0.0.0.0"})
    assert only(access.authentication, open_to_all).severity is WARNING


def test_the_ways_to_authenticate_are_listed(keys_file: Path) -> None:
    jwt = {"keys_file": str(keys_file), "issuer": "i", "audience": "a"}
    result = only(access.authentication, context(required(keys_file, jwt=jwt)))
    assert (result.severity, result.seen) == (
        OK,
        "callers are authenticated, by API keys, JSON Web Tokens",
    )


def test_ports_for_operators_that_others_reach_are_named(keys_file: Path) -> None:
    everywhere = {"host": "0.0.0.0", "port": 8780, "admin_port": 9001, "console_port": 9002}
    assert only(access.exposure, context()).severity is OK
    result = only(access.exposure, context(required(keys_file), gateway=everywhere))
    assert result.severity is NOTE
    assert "9001" in result.seen
    assert "9002" in result.seen
    without = {**everywhere, "console_port": None}
    assert "console" not in only(access.exposure, context(required(keys_file), gateway=without)).seen
    assert only(access.exposure, context({"insecure": True}, gateway=everywhere)).severity is WARNING


def test_keys_that_are_valid_are_counted(keys_file: Path) -> None:
    new_key(keys_file)
    result = only(access.api_keys, context(required(keys_file)))
    assert result.severity is OK
    assert result.figures == {"num_keys": 2}
    assert not said(access.api_keys, context())


def test_keys_that_expire_soon_or_have_expired_are_named(keys_file: Path) -> None:
    ids = [new_key(keys_file, days=days) for days in (-1, 5, 100)]
    found = said(access.api_keys, context(required(keys_file)))
    assert [severity for severity, _ in found] == [NOTE, WARNING, OK]
    assert ids[0] in found[0][1]
    assert ids[1] in found[1][1]
    assert "in 5 days" in found[1][1]


def test_somebody_must_be_an_operator(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    new_key(path)
    found = said(access.api_keys, context(required(path)))
    assert [severity for severity, _ in found] == [OK, WARNING]
    assert "nobody has the role operator" in found[1][1]
    jwt = {"keys_file": str(path), "issuer": "i", "audience": "a"}
    assert only(access.api_keys, context(required(path, jwt=jwt))).severity is OK


@pytest.mark.parametrize(
    ("mode", "severities"), [(0o600, [OK]), (0o640, [OK]), (0o644, [NOTE, OK]), (0o660, [WARNING, OK])]
)
def test_who_can_write_the_keys_makes_some(keys_file: Path, mode: int, severities: list[Severity]) -> None:
    keys_file.chmod(mode)
    assert [severity for severity, _ in said(access.api_keys, context(required(keys_file)))] == severities


@pytest.mark.parametrize("text", ["keys: {", "keys: [{id: x}]", None])
def test_a_file_of_keys_that_cannot_be_used_is_an_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    result = only(access.api_keys, context(required(path)))
    assert result.severity is ERROR
    assert str(path) in result.seen


def jwk(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    numbers = key.public_key().public_numbers()
    sides = {"x": numbers.x, "y": numbers.y}
    encoded = {
        name: base64.urlsafe_b64encode(value.to_bytes(32, "big")).decode().rstrip("=")
        for name, value in sides.items()
    }
    return {"kty": "EC", "crv": "P-256", "kid": "one", **encoded}


def test_public_keys_are_read_and_fit_the_allowed_algorithms(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    settings = {"keys_file": str(path), "issuer": "https://i", "audience": "a"}
    auth = {"mode": "required", "jwt": settings}
    assert only(access.jwt_keys, context(auth)).severity is ERROR
    path.write_text(json.dumps({"keys": [jwk(ec.generate_private_key(ec.SECP256R1()))]}))
    result = only(access.jwt_keys, context(auth))
    assert (result.severity, result.seen) == (OK, "tokens of https://i are verified by 1 keys (ES256)")
    pem = ed25519.Ed25519PrivateKey.generate().public_key()
    path.write_bytes(pem.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert only(access.jwt_keys, context(auth)).severity is OK
    other = {"mode": "required", "jwt": {**settings, "algorithms": ["RS256"]}}
    result = only(access.jwt_keys, context(other))
    assert result.severity is ERROR
    assert "EdDSA only" in result.seen
    path.write_text("{}")
    assert only(access.jwt_keys, context(auth)).severity is ERROR
    assert not said(access.jwt_keys, context())


def root(name: str, byte: bytes) -> str:
    return f"{name} {base64.b64encode(byte * 32).decode()}\n"


def test_the_root_of_block_keys_is_there_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "root"
    auth = {"key_root_file": str(path)}
    assert only(access.key_root, context(auth)).severity is ERROR
    path.write_text(root("a", b"1"))
    path.chmod(0o600)
    assert only(access.key_root, context(auth)).severity is OK
    path.chmod(0o644)
    assert [severity for severity, _ in said(access.key_root, context(auth))] == [WARNING, OK]
    path.chmod(0o600)
    path.write_text(root("b", b"2") + root("a", b"1"))
    result = only(access.key_root, context(auth))
    assert result.severity is NOTE
    assert "b replaces a" in result.seen
    path.write_text("a short")
    assert only(access.key_root, context(auth)).severity is ERROR


def test_a_root_beside_the_kv_on_disk_is_a_note(tmp_path: Path) -> None:
    store = {"nvme_path": str(tmp_path), "nvme_gb": 1}
    result = only(access.key_root, context(store=store))
    assert result.severity is NOTE
    assert str(tmp_path / "key-root") in result.seen
    assert not said(access.key_root, context())


def test_gateways_can_write_the_audit_log(tmp_path: Path) -> None:
    assert only(access.audit_folder, context({"audit": {"folder": str(tmp_path / "new")}})).severity is OK
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    refused = only(access.audit_folder, context({"audit": {"folder": str(tmp_path / "file")}}))
    assert refused.severity is ERROR
    assert refused.seen.startswith("auth.audit.folder: ")
    assert not said(access.audit_folder, context())


def test_the_secret_is_long_enough_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    here = context(secret_file=str(path))
    assert only(access.secret, here).severity is ERROR
    path.write_text("short")
    path.chmod(0o600)
    assert only(access.secret, here).severity is ERROR
    path.write_text(SECRET)
    assert only(access.secret, here).severity is OK
    path.chmod(0o640)
    assert only(access.secret, here).severity is WARNING
    assert not said(access.secret, context())
