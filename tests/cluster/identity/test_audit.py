"""The audit log: what is in it, what is never in it, and how it is rotated."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from callers import CREATED, Issuer, bearing, jwt_config, key_of
from console_harness import ConsoleHarness, Page
from gateway_harness import GatewayHarness, until

from cluster.api.authentication import METHOD_ACCESS
from cluster.api.generate_options import GenerateOptions
from cluster.console.http_server import API
from cluster.errors import CallError, StartError
from cluster.identity.api_key_file import revoke_key
from cluster.identity.api_keys import split_key
from cluster.identity.audit import (
    MAX_CHARS,
    MAX_ITEMS,
    NOBODY,
    OK,
    AuditEntry,
    AuditLog,
)
from cluster.identity.audit_limit import MAX_LINES_MIN, MAX_TENANT_LINES_S, AuditLimit
from cluster.identity.config import AuditConfig
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import ManualClock

PROMPT = "def confidential(): return the answer, the quick brown fox"
ADMIN_METHODS = {method for method in METHOD_ACCESS if method.startswith("/tandem.v1.Admin/")}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def named_lines(folder: Path, prefix: str) -> list[dict[str, Any]]:
    """Lines of the files of one kind, the oldest first."""
    paths = sorted(folder.glob(f"{prefix}*"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


async def refused(call: Awaitable[object]) -> str:
    with pytest.raises(CallError) as failed:
        await call
    name: str = failed.value.code.name
    return name


class Audited:
    """A gateway with console and audit log, that wants keys; and every secret that a test draws."""

    def __init__(self, harness: GatewayHarness, folder: Path) -> None:
        self.harness = harness
        self.front = ConsoleHarness(harness)
        self.folder = folder / "audit"
        self.keys = folder / "keys.yaml"
        self.issuer = Issuer()
        (folder / "issuer.pem").write_bytes(self.issuer.pem())
        self.user = key_of(self.keys, "acme", "user")
        self.viewer = key_of(self.keys, "acme", "viewer")
        self.operator = key_of(self.keys, "staff", "operator")
        self.expired = key_of(self.keys, "staff", "operator", expires=CREATED)
        self.forged = self.operator[:-1] + ("A" if self.operator[-1] != "A" else "B")
        self.token = self.issuer.token(aud="another")
        self.auth = {
            "mode": "required",
            "keys_file": str(self.keys),
            "jwt": jwt_config(folder / "issuer.pem"),
            "audit": {"folder": str(self.folder)},
        }
        # What is drawn later: cookies, resume tokens.
        self.secrets: list[str] = []

    def id_of(self, key: str) -> str:
        return (split_key(key) or ("", ""))[0]

    async def call_admin(self) -> None:
        """Every method of `Admin`, as an operator."""
        admin = self.harness.admin(self.front.gateway, credentials=bearing(self.operator))
        done = await self.harness.client(
            self.front.address, credentials=bearing(self.user)
        ).complete(PROMPT, GenerateOptions(max_tokens=3))  # fmt: skip
        await admin.status()
        await admin.paths()
        await admin.explain(done.request_id)
        await admin.requests()
        assert [part async for part in admin.recording(0.0)]
        await admin.store_stat()
        await admin.store_list(admin_pb.StoreListRequest())
        await admin.store_verify(
            admin_pb.StoreVerifyRequest(filter=admin_pb.StoreFilter(sharing_group="acme"))
        )
        await admin.store_purge(admin_pb.StorePurgeRequest(filter=admin_pb.StoreFilter(sharing_group="acme")))
        await admin.scale({"decode": 2})
        await admin.release(["decode"])
        await admin.traffic({"tandem": 1.0})

    async def be_refused(self) -> None:
        gateway = self.front.gateway
        viewer = self.harness.admin(gateway, credentials=bearing(self.viewer))
        assert await refused(viewer.scale({"decode": 3})) == "PERMISSION_DENIED"
        assert await refused(self.harness.admin(gateway).status()) == "UNAUTHENTICATED"
        for token in (self.forged, self.expired, self.token):
            client = self.harness.client(self.front.address, credentials=bearing(token))
            assert await refused(client.complete(PROMPT)) == "UNAUTHENTICATED"
        operator = self.harness.admin(gateway, credentials=bearing(self.operator))
        # Somebody who takes one field for another.
        assert await refused(operator.explain(self.operator)) == "NOT_FOUND"
        assert await refused(operator.store_purge(admin_pb.StorePurgeRequest())) == "INVALID_ARGUMENT"

    async def use_console(self) -> None:
        page = self.front.page
        assert (await page.order("sign-in", {"key": self.forged}))[0] == 401
        assert (await page.order("sign-in", {"key": self.user}))[0] == 403
        assert (await page.ask("GET", f"{API}/status"))[0] == 401
        headers = await self._cookie(page)
        body = json.dumps({"pool": "decode", "replicas": 3}).encode()
        assert (await page.ask("POST", f"{API}/scale", headers, body))[0] == 200
        assert (await page.ask("POST", f"{API}/release", headers, b'{"pool": "decode"}'))[0] == 200
        assert (await page.ask("POST", f"{API}/sign-out", headers, b"{}"))[0] == 200

    async def _cookie(self, page: Page) -> dict[str, str]:
        body = json.dumps({"key": self.operator}).encode()
        headers = {"Content-Type": "application/json"}
        async with page.session.post(f"{page.url}{API}/sign-in", data=body, headers=headers) as reply:
            cookie = reply.headers["Set-Cookie"].partition(";")[0]
        self.secrets.append(cookie.partition("=")[2])
        return {**headers, "Cookie": cookie}

    async def change_keys(self) -> str:
        """Returns the id of the new key."""
        added = key_of(self.keys, "later", "user")
        self.secrets.append(added.rpartition("_")[2])
        revoke_key(self.keys, self.id_of(self.viewer))
        await until(
            lambda: any("removed" in line["what"] for line in lines_of(self.folder)),
            "the keys were read again",
        )
        return self.id_of(added)

    def all_secrets(self) -> list[str]:
        keys = (self.user, self.viewer, self.operator, self.expired, self.forged)
        drawn = [key.rpartition("_")[2] for key in keys]
        secret = self.harness.trust.secret
        return [*drawn, *self.secrets, self.token, secret.hex(), repr(secret)[2:-1]]


async def test_everything_is_recorded_and_no_secret_is(
    harness: GatewayHarness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    audited = Audited(harness, tmp_path)
    await audited.front.start(auth=audited.auth)
    await audited.call_admin()
    await audited.be_refused()
    await audited.use_console()
    added = await audited.change_keys()
    await audited.front.stop()
    lines = lines_of(audited.folder)
    operator = f"key:{audited.id_of(audited.operator)}"

    def found(method: str, who: str, result: str = OK) -> list[dict[str, Any]]:
        return [it for it in lines if (it["method"], it["who"], it["result"]) == (method, who, result)]

    for line in lines:
        assert list(line)[:8] == ["at", "who", "tenant", "method", "what", "peer", "result", "detail"]
    assert {it["method"] for it in lines if it["who"] == operator} >= ADMIN_METHODS
    (purge,) = found("/tandem.v1.Admin/StorePurge", operator)
    assert (purge["what"]["filter"], purge["tenant"]) == ({"sharing_group": "acme"}, "staff")
    assert purge["peer"].startswith("ipv4:127.0.0.1:")
    (scale,) = found("/tandem.v1.Admin/Scale", operator)
    assert scale["what"]["replicas"] == {"decode": 2}
    (forbidden,) = found(
        "/tandem.v1.Admin/Scale", f"key:{audited.id_of(audited.viewer)}", "PERMISSION_DENIED"
    )
    assert "lacks the role" in forbidden["detail"]
    assert len(found("/tandem.v1.Inference/Generate", NOBODY, "UNAUTHENTICATED")) == 3
    assert found("/tandem.v1.Admin/Status", NOBODY, "UNAUTHENTICATED")
    (wrong,) = found("/tandem.v1.Admin/StorePurge", operator, "INVALID_ARGUMENT")
    assert "set `all`" in wrong["detail"]
    (mistaken,) = found("/tandem.v1.Admin/Explain", operator, "NOT_FOUND")
    assert mistaken["what"] == {"request_id": "[redacted]"}
    (signed_in,) = found("console/sign-in", operator)
    assert signed_in["peer"] == "127.0.0.1"
    tried = [it["what"]["key_id"] for it in lines if it["method"] == "console/sign-in" and it["result"] != OK]
    assert tried == [audited.id_of(audited.operator), audited.id_of(audited.user)]
    assert found("console/status", NOBODY, "UNAUTHENTICATED")
    for method in ("console/scale", "console/release", "console/sign-out"):
        assert found(method, operator)
    (reload,) = [it for it in lines if "added" in it["what"] or "removed" in it["what"]][:1]
    assert added in {it["what"].get("added") for it in lines}
    assert audited.id_of(audited.viewer) in {it["what"].get("removed") for it in lines}
    assert reload["what"]["file"] == "auth.keys_file"

    written = "".join(path.read_text() for path in audited.folder.iterdir())
    logged = "".join(it.getMessage() for it in caplog.records if it.name == "tandem.audit")
    for text in (written, logged, caplog.text):
        assert [secret for secret in audited.all_secrets() if secret in text] == []
    assert "confidential" not in written + logged
    assert [text for text in written.splitlines() if text not in logged] == []


# -------------------------------------------------------------------------------------------- the log alone


def entry(number: int = 0, **fields: Any) -> AuditEntry:
    return AuditEntry(**{"who": "key:abcdefgh", "method": f"m{number}", "result": OK, **fields})


def test_files_are_rotated_and_all_of_the_folder_is_bounded(tmp_path: Path) -> None:
    config = AuditConfig(folder=tmp_path, max_mb=0.002, keep=3)
    for life in range(4):
        log = AuditLog(config, f"gateway-{life}", ManualClock())
        for number in range(40):
            log.record(entry(100 * life + number))
        log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert all(size <= 2000 for size in sizes.values())
    assert sum(sizes.values()) <= 4 * 2000
    assert "audit-gateway-3.jsonl" in sizes
    assert lines_of(tmp_path)[-1]["method"] == "m339"
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_file_that_another_process_removed_begins_anew(tmp_path: Path) -> None:
    log = AuditLog(AuditConfig(folder=tmp_path), "g", ManualClock())
    log.record(entry(1))
    (tmp_path / "audit-g.jsonl").unlink()
    log.record(entry(2))
    log.close()
    assert [line["method"] for line in lines_of(tmp_path)] == ["m2"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"auth\.audit\.folder: "):
        AuditLog(AuditConfig(folder=tmp_path / "file"), "g", ManualClock())


def test_texts_are_cut_and_stay_one_line(tmp_path: Path) -> None:
    log = AuditLog(AuditConfig(folder=tmp_path), "g", ManualClock())
    what = {"text": "ä\n" * 5000, "many": list(range(1000)), "lone": "\udcff", "none": None, "n": {"x": 1.5}}
    log.record(entry(what=what, detail="x" * 5000))
    log.close()
    (line,) = lines_of(tmp_path)
    assert (len(line["what"]["text"]), len(line["detail"])) == (MAX_CHARS, MAX_CHARS)
    assert len(line["what"]["many"]) == MAX_ITEMS
    assert (line["what"]["none"], line["what"]["n"], line["what"]["lone"]) == (None, {"x": 1.5}, "?")


REFUSED: dict[str, Any] = {"kind": "refusal", "result": "UNAUTHENTICATED"}


def test_a_flood_of_strangers_does_not_fill_the_files(tmp_path: Path) -> None:
    clock = ManualClock(start_s=100.0)
    log = AuditLog(AuditConfig(folder=tmp_path), "g", clock)
    for number in range(1000):
        log.record(entry(number, who=NOBODY, **REFUSED))
    log.record(entry(1))
    clock.advance(1.0)
    log.record(entry(who=NOBODY, **REFUSED))
    log.close()
    strangers, acts = named_lines(tmp_path, "audit_refusals"), named_lines(tmp_path, "audit-")
    assert len(strangers) == MAX_TENANT_LINES_S + 1
    assert [line.get("num_left_out") for line in acts] == [1000 - MAX_TENANT_LINES_S]
    assert "num_left_out" not in strangers[-1]


@pytest.mark.parametrize("kind", ["refusal", "read", "session"])
def test_what_an_identity_can_repeat_is_limited_by_method_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO, "tandem.audit")
    clock = ManualClock(start_s=600.0)
    log = AuditLog(AuditConfig(folder=tmp_path), "g", clock)
    for _ in range(58):
        for _ in range(200):
            log.record(entry(1, tenant="evil", kind=kind))
        clock.advance(1.0)
    # The same identity calls another method, and another identity of its tenant the same one.
    log.record(entry(2, tenant="evil", kind=kind))
    log.record(entry(1, tenant="evil", kind=kind, who="key:bbbbbbbb"))
    clock.advance(2.0)
    log.record(entry(1, tenant="evil", kind=kind))
    log.close()
    lines = lines_of(tmp_path)
    assert len(lines) == MAX_LINES_MIN + 3
    assert [it.get("num_left_out") for it in lines[-3:]] == [58 * 200 - MAX_LINES_MIN, None, None]
    assert len([it for it in caplog.records if it.name == "tandem.audit"]) == len(lines)


def test_a_tenant_that_floods_hides_neither_another_tenant_nor_an_order(tmp_path: Path) -> None:
    log = AuditLog(AuditConfig(folder=tmp_path), "g", ManualClock(start_s=600.0))
    for number in range(3000):  # with many users of its token issuer, and all methods
        log.record(entry(number % 40, who=f"jwt:{number}", tenant="evil", **REFUSED))
    log.record(entry(who="key:bbbbbbbb", tenant="acme", **REFUSED))
    log.record(entry(who=NOBODY, **REFUSED))
    for number in range(100):
        log.record(entry(number, who="key:cccccccc", tenant="staff"))
    log.close()
    refused = named_lines(tmp_path, "audit_refusals-")
    assert [it["tenant"] for it in refused] == ["evil"] * MAX_TENANT_LINES_S + ["acme", ""]
    assert len(named_lines(tmp_path, "audit-")) == 100


def test_refusals_and_reads_never_displace_an_order(tmp_path: Path) -> None:
    clock = ManualClock()
    config = AuditConfig(folder=tmp_path, max_mb=0.002, keep=3)
    log = AuditLog(config, "g", clock)
    log.record(entry(7, what={"purged": "all"}))
    for _ in range(500):
        clock.advance(3.0)
        log.record(entry(tenant="evil", **REFUSED))
        log.record(entry(tenant="evil", kind="read"))
    log.close()
    assert [it["method"] for it in named_lines(tmp_path, "audit-")] == ["m7"]
    for prefix in ("audit-", "audit_reads-", "audit_refusals-"):
        assert sum(it.stat().st_size for it in tmp_path.glob(f"{prefix}*")) <= 4 * 2000
    # Neither does another process, which removes the oldest files of the folder.
    AuditLog(config, "h", clock).close()
    assert [it["method"] for it in named_lines(tmp_path, "audit-g")] == ["m7"]


def test_the_limit_remembers_a_bounded_number_of_callers() -> None:
    clock = ManualClock(start_s=600.0)
    limit = AuditLimit(clock)
    num_taken = sum(limit.takes(f"jwt:{number}", f"tenant-{number}", "m") for number in range(10_000))
    assert num_taken == 4096
    clock.advance(60.0)
    assert limit.takes("jwt:9999", "tenant-9999", "m")


@pytest.mark.parametrize("end", ["`", "", ".", "; or another"])
def test_the_advice_of_a_refusal_is_no_credential(tmp_path: Path, end: str) -> None:
    log = AuditLog(AuditConfig(folder=tmp_path), "g", ManualClock())
    advice = f"send the metadata `authorization: Bearer KEY{end}"
    log.record(entry(1, detail=advice))
    log.record(entry(2, detail="Bearer KEYring-of-secrets and Bearer KEY`secret"))
    log.close()
    assert [it["detail"] for it in lines_of(tmp_path)] == [
        advice,
        "Bearer [redacted] and Bearer [redacted]",
    ]


async def test_a_tenant_cannot_push_the_evidence_out(harness: GatewayHarness, tmp_path: Path) -> None:
    audited = Audited(harness, tmp_path)
    await audited.front.start(auth=audited.auth)
    page = audited.front.page
    operator = {"Authorization": f"Bearer {audited.operator}", "Content-Type": "application/json"}
    body = json.dumps({"pool": "decode", "replicas": 3}).encode()
    assert (await page.ask("POST", f"{API}/scale", operator, body))[0] == 200
    user = {"Authorization": f"Bearer {audited.user}"}
    for _ in range(3 * MAX_LINES_MIN):
        assert (await page.ask("GET", f"{API}/status", user))[0] == 403
    sign_in = json.dumps({"key": audited.viewer}).encode()
    for _ in range(2 * MAX_LINES_MIN):
        assert (await page.ask("POST", f"{API}/sign-in", operator, sign_in))[0] == 200
    await audited.front.stop()
    acts = named_lines(audited.folder, "audit-")
    signed_in = [it for it in acts if it["method"] == "console/sign-in"]
    # The minute of the limit may turn meanwhile.
    assert len([it for it in acts if it["method"] == "console/scale"]) == 1
    assert MAX_LINES_MIN <= len(signed_in) < 2 * MAX_LINES_MIN + 1
    refused_lines = named_lines(audited.folder, "audit_refusals-")
    assert MAX_LINES_MIN <= len(refused_lines) <= 2 * MAX_LINES_MIN
    num_left_out = sum(it.get("num_left_out", 0) for it in lines_of(audited.folder))
    assert len(signed_in) + len(refused_lines) + num_left_out >= 3 * MAX_LINES_MIN
