"""The checks of certificates: the gateway's, that of its clients' authority, and the inner one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from authority import CLIENT, SERVER, Authority
from doctor_harness import config_of, context_of, only, said

from cluster.doctor import tls
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import Severity
from cluster.serve.machine import Machine
from kvtransfer.common.clock import ManualClock, SystemClock

OK, NOTE, WARNING, ERROR = Severity
DAY_S = 86_400.0


def context(in_days: float = 0, **sections: Any) -> CheckContext:
    clock = ManualClock(SystemClock().wall() + DAY_S * in_days)
    return context_of(Machine(), config_of(**sections), clock=clock)


def pair(folder: Path, **settings: Any) -> dict[str, str]:
    cert_file, key_file = Authority("a").issue(folder, "gateway", **settings)
    return {"tls_cert_file": str(cert_file), "tls_key_file": str(key_file)}


AGES = [
    (0, OK, "valid until"),
    (90, WARNING, "10 days"),
    (101, ERROR, "expired"),
    (-3, ERROR, "not valid before"),
]


@pytest.mark.parametrize(("in_days", "severity", "word"), AGES)
def test_a_gateways_certificate_is_valid_now_and_for_some_time(
    tmp_path: Path, in_days: int, severity: Severity, word: str
) -> None:
    result = only(tls.gateway_tls, context(in_days, gateway=pair(tmp_path)))
    assert result.severity is severity
    assert word in result.seen
    assert "localhost, 127.0.0.1" in result.seen


def test_a_certificate_and_its_key_are_a_pair_that_can_be_read(tmp_path: Path) -> None:
    here = context(gateway=pair(tmp_path))
    key_file = tmp_path / "tls.key"
    key_file.chmod(0o644)
    assert [severity for severity, _ in said(tls.gateway_tls, here)] == [WARNING, OK]
    (tmp_path / "other").mkdir()
    key_file.write_bytes(Path(pair(tmp_path / "other")["tls_key_file"]).read_bytes())
    assert only(tls.gateway_tls, here).severity is ERROR
    key_file.unlink()
    assert only(tls.gateway_tls, here).severity is ERROR


def test_without_tls_keys_can_be_read_on_the_way() -> None:
    assert not said(tls.gateway_tls, context())
    everywhere = {"host": "0.0.0.0"}
    open_to_all = context(gateway=everywhere, auth={"insecure": True})
    assert only(tls.gateway_tls, open_to_all).severity is NOTE
    with_keys = context(gateway=everywhere, auth={"mode": "required", "keys_file": "/keys"})
    result = only(tls.gateway_tls, with_keys)
    assert result.severity is WARNING
    assert "API keys" in result.why


def test_the_authority_of_clients_is_one_and_somebody_has_a_name(tmp_path: Path) -> None:
    gateway = pair(tmp_path)
    names = [{"name": "batch", "tenant": "acme"}]
    ca_file = Authority("clients").write(tmp_path)

    def with_authority(path: Path, identities: list[Any], in_days: int = 0) -> CheckContext:
        settings = {"ca_file": str(path), "identities": identities}
        return context(in_days, gateway=gateway, auth={"mode": "required", "certificates": settings})

    assert only(tls.client_authority, with_authority(ca_file, names)).severity is OK
    assert only(tls.client_authority, with_authority(ca_file, names, 95)).severity is WARNING
    found = said(tls.client_authority, with_authority(ca_file, []))
    assert [severity for severity, _ in found] == [OK, WARNING]
    leaf = with_authority(Path(gateway["tls_cert_file"]), names)
    assert said(tls.client_authority, leaf)[0][0] is ERROR
    assert only(tls.client_authority, with_authority(tmp_path / "none", names)).severity is ERROR
    assert not said(tls.client_authority, context())


def inner(folder: Path, authority: Authority, **settings: Any) -> dict[str, str]:
    cert_file, key_file = authority.issue(folder, "inner", **settings)
    ca_file = authority.write(folder)
    return {"cert_file": str(cert_file), "key_file": str(key_file), "ca_file": str(ca_file)}


@pytest.mark.parametrize(("in_days", "severity", "word"), AGES)
def test_the_inner_certificate_is_valid_now_and_for_some_time(
    tmp_path: Path, in_days: int, severity: Severity, word: str
) -> None:
    files = inner(tmp_path, Authority("a"))
    found = said(tls.inner_tls, context(in_days, inner_tls=files))
    assert [each for each, _ in found] == [severity] * 2, "the certificate and its authority"
    assert all(word in seen for _, seen in found)


@pytest.mark.parametrize(
    ("uses", "missing"),
    [((), ""), ((CLIENT, SERVER), ""), ((SERVER,), "client"), ((CLIENT,), "server")],
)
def test_the_inner_certificate_is_for_both_sides(tmp_path: Path, uses: Any, missing: str) -> None:
    files = inner(tmp_path, Authority("a"), uses=uses)
    found = said(tls.inner_tls, context(inner_tls=files))
    assert [severity for severity, _ in found] == ([ERROR] if missing else []) + [OK, OK]
    if missing:
        assert f"is not for {missing} authentication" in found[0][1]


def test_the_inner_certificate_is_signed_by_its_authority(tmp_path: Path) -> None:
    files = inner(tmp_path, Authority("a"))
    Authority("a").write(tmp_path)  # the same name, another key
    found = said(tls.inner_tls, context(inner_tls=files))
    assert found[0][0] is ERROR
    assert "is not signed by an authority of ca_file" in found[0][1]
    Path(files["ca_file"]).unlink()
    assert only(tls.inner_tls, context(inner_tls=files)).severity is ERROR


def test_connections_between_hosts_without_encryption_are_a_note() -> None:
    assert not said(tls.inner_tls, context())
    assert only(tls.inner_tls, context(transfer={"data_host": "auto"})).severity is NOTE
