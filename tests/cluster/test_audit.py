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
from cluster.api.client import GenerateOptions
from cluster.console.http_server import API
from cluster.errors import CallError, StartError
from cluster.identity.api_keys import revoke_key, split_key
from cluster.identity.audit import (
    MAX_CHARS,
    MAX_ITEMS,
    MAX_REFUSED_S,
    NOBODY,
    OK,
    AuditEntry,
    AuditLog,
)
from cluster.identity.config import AuditConfig
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.clock import ManualClock

PROMPT = "def confidential(): return the answer, the quick brown fox"
ADMIN_METHODS = {method for method in METHOD_ACCESS if method.startswith("/tandem.v1.Admin/")}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
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


def test_a_flood_of_refusals_does_not_fill_the_files(tmp_path: Path) -> None:
    clock = ManualClock(start_s=100.0)
    log = AuditLog(AuditConfig(folder=tmp_path), "g", clock)
    for _ in range(1000):
        log.record(entry(who=NOBODY, result="UNAUTHENTICATED"))
    log.record(entry(1))
    clock.advance(1.0)
    log.record(entry(who=NOBODY, result="UNAUTHENTICATED"))
    log.close()
    lines = lines_of(tmp_path)
    assert len(lines) == MAX_REFUSED_S + 2
    assert [line.get("num_left_out") for line in lines[-2:]] == [1000 - MAX_REFUSED_S, None]
