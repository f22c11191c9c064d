"""Who may use the console where calls are authenticated: sign-in, sessions and their ends, roles, TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from http.cookies import Morsel
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from callers import Issuer, jwt_config, key_of
from certificates import name_of, write_certificate
from console_harness import ConsoleHarness, Page
from gateway_harness import GatewayHarness

from cluster.console.http_server import API, ROUTE_ACCESS
from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.identity.api_key_file import revoke_key
from cluster.identity.api_keys import split_key
from cluster.identity.authenticator import Authenticator
from cluster.identity.config import AuthConfig
from cluster.identity.sessions import Sessions
from kvtransfer.common.clock import ManualClock
from kvtransfer.rpc.trust import Trust

JSON = {"Content-Type": "application/json"}
COOKIE = "tandem-session-tandem"


class Guarded:
    """A console that wants an API key, keys for each role, and pages that nobody has signed in at."""

    def __init__(self, front: ConsoleHarness, folder: Path) -> None:
        self.front = front
        self.keys = folder / "keys.yaml"
        self.issuer = Issuer()
        (folder / "issuer.pem").write_bytes(self.issuer.pem())
        self.user = key_of(self.keys, "acme", "user")
        self.viewer = key_of(self.keys, "acme", "viewer")
        self.operator = key_of(self.keys, "staff", "operator")
        self.auth = {
            "mode": "required",
            "keys_file": str(self.keys),
            "jwt": jwt_config(folder / "issuer.pem"),
        }
        self._sessions: list[aiohttp.ClientSession] = []

    def page(self, url: str = "") -> Page:
        """A browser that holds no cookie yet."""
        jar = aiohttp.CookieJar(unsafe=True)  # also those of an address
        self._sessions.append(aiohttp.ClientSession(cookie_jar=jar))
        return Page(url or self.front.page.url, self._sessions[-1])

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


@pytest.fixture
async def guarded(harness: GatewayHarness, tmp_path: Path) -> AsyncIterator[Guarded]:
    front = ConsoleHarness(harness)
    built = Guarded(front, tmp_path)
    await front.start(auth=built.auth)
    yield built
    await built.close()
    await front.stop()


async def sign_in(page: Page, key: str) -> tuple[int, dict[str, Any]]:
    return await page.order("sign-in", {"key": key})


def cookie_of(page: Page, name: str = COOKIE) -> Morsel[str]:
    return next(it for it in page.session.cookie_jar if it.key == name)


# ------------------------------------------------------------------------------------------ who may do what


async def test_every_route_but_the_sign_in_wants_a_session(guarded: Guarded) -> None:
    page = guarded.page()
    for (method, path), access in ROUTE_ACCESS.items():
        status, fields = await page.ask(method, path, JSON, b"{}")
        assert (status == 401) == (access != "open"), (method, path, status, fields)
    for path in ("/console", "/console/console.js", "/console/session.js"):
        async with page.session.get(page.url + path) as reply:
            assert reply.status == 200
    assert (await page.ask("GET", f"{API}/nothing"))[0] == 404
    shown = await page.get(f"{API}/session")
    assert shown == {"auth": "required", "insecure": False, "identity": None}


async def test_a_viewer_reads_and_an_operator_orders_under_his_name(guarded: Guarded) -> None:
    viewer, operator = guarded.page(), guarded.page()
    status, fields = await sign_in(viewer, guarded.viewer)
    assert (status, fields["identity"]["roles"]) == (200, ["viewer"])
    assert (await sign_in(operator, guarded.operator))[0] == 200
    for name in ("about", "status", "paths", "requests", "curves", "trends?span_s=300"):
        await viewer.get(f"{API}/{name}")
        await operator.get(f"{API}/{name}")
    order = {"pool": "decode", "replicas": 2}
    status, fields = await viewer.order("scale", order)
    assert (status, "lacks the role 'operator'" in fields["error"]) == (403, True)
    assert (await viewer.order("release", {"pool": "decode"}))[0] == 403
    assert guarded.front.dashboard.orders == []
    assert (await operator.order("scale", order))[0] == 200
    key_id, _ = split_key(guarded.operator) or ("", "")
    assert [move.by for move in (await guarded.front.view()).moves] == [f"key:{key_id}"]


async def test_users_of_tenants_strangers_and_tokens_do_not_sign_in(guarded: Guarded) -> None:
    page = guarded.page()
    wrong = guarded.viewer[:-1] + ("A" if guarded.viewer[-1] != "A" else "B")
    assert [(await sign_in(page, key))[0] for key in (guarded.user, wrong, "x", guarded.issuer.token())] == [
        403, 401, 401, 401,
    ]  # fmt: skip
    assert (await sign_in(page, ""))[0] == 400
    assert (await sign_in(page, "k" * 3000))[0] == 400
    assert len(page.session.cookie_jar) == 0


async def test_programs_show_their_key_or_token_with_every_request(guarded: Guarded) -> None:
    page = guarded.page()
    for token, status in (
        (guarded.viewer, 200),
        (guarded.issuer.token(roles=["viewer"]), 200),
        (guarded.issuer.token(), 403),
        (guarded.user, 403),
        (guarded.issuer.token(aud="another", roles=["viewer"]), 401),
        (guarded.viewer + "x", 401),
    ):
        headers = {"Authorization": f"Bearer {token}"}
        assert (await page.ask("GET", f"{API}/about", headers))[0] == status
    await sign_in(page, guarded.viewer)
    assert (await page.ask("GET", f"{API}/about", {"Authorization": "Bearer wrong"}))[0] == 401


# ------------------------------------------------------------------------------------- the session's cookie


async def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(guarded: Guarded) -> None:
    page = guarded.page()
    headers = {**JSON, "Origin": page.url}
    body = f'{{"key": "{guarded.operator}"}}'.encode()
    async with page.session.post(f"{page.url}{API}/sign-in", data=body, headers=headers) as reply:
        (text,) = reply.headers.getall("Set-Cookie")
    attributes = {part.strip().partition("=")[0].lower() for part in text.split(";")[1:]}
    assert {"httponly", "samesite", "path", "max-age"} <= attributes
    assert "samesite=strict" in text.lower()
    assert "secure" not in attributes  # over HTTP no browser would send it
    assert int(cookie_of(page)["max-age"]) == pytest.approx(AuthConfig().session_s, abs=5)
    _, secret = split_key(guarded.operator) or ("", "")
    assert secret not in text
    for more in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        order = b'{"pool": "decode", "replicas": 2}'
        assert (await page.ask("POST", f"{API}/scale", {**JSON, **more}, order))[0] == 403
        assert (await page.ask("POST", f"{API}/sign-out", {**JSON, **more}, b"{}"))[0] == 403
    assert guarded.front.dashboard.orders == []
    assert (await page.get(f"{API}/session"))["identity"]["name"].startswith("key:")


async def test_a_revoked_key_ends_its_sessions(guarded: Guarded) -> None:
    page, other = guarded.page(), guarded.page()
    await sign_in(page, guarded.viewer)
    await sign_in(other, guarded.operator)
    key_id, _ = split_key(guarded.viewer) or ("", "")
    revoke_key(guarded.keys, key_id)
    statuses: list[int] = []

    async def ask() -> int:
        status, fields = await page.ask("GET", f"{API}/about")
        assert status == 200 or "not valid any more" in fields["error"]
        return status

    while (status := await ask()) == 200:
        statuses.append(status)
    assert status == 401
    await other.get(f"{API}/about")


async def test_who_signs_out_is_out_at_every_gateway(guarded: Guarded) -> None:
    front = guarded.front
    await front.harness.register(front.gateway, front.address)
    second, _ = await front.harness.add_known_gateway(front.config, front.operations())
    page = guarded.page()
    elsewhere = guarded.page(f"http://127.0.0.1:{second.console_port}")
    await sign_in(page, guarded.viewer)
    stolen = {"Cookie": f"{COOKIE}={cookie_of(page).value}"}
    assert (await elsewhere.ask("GET", f"{API}/about", stolen))[0] == 200
    assert (await page.order("sign-out", {}))[0] == 200
    assert len(page.session.cookie_jar) == 0
    for each in (page, elsewhere):
        assert (await each.ask("GET", f"{API}/about", stolen))[0] == 401
    assert (await page.order("sign-out", {}))[0] == 200  # once more, of nobody


async def test_where_nobody_is_authenticated_there_is_nothing_to_sign_in_to(front: ConsoleHarness) -> None:
    shown = await front.page.get(f"{API}/session")
    assert (shown["auth"], shown["identity"]["name"]) == ("none", "local")
    assert (await sign_in(front.page, "x"))[0] == 412


async def test_the_console_speaks_tls_with_the_gateways_certificate(
    harness: GatewayHarness, tmp_path: Path
) -> None:
    cert_file, key_file = write_certificate(tmp_path, "first")
    front = ConsoleHarness(harness)
    guarded = Guarded(front, tmp_path)
    files = {"tls_cert_file": str(cert_file), "tls_key_file": str(key_file)}
    await front.start(auth=guarded.auth, **files)
    page = guarded.page(f"https://127.0.0.1:{front.gateway.console_port}")
    trusting = ssl.create_default_context(cafile=str(cert_file))
    body = f'{{"key": "{guarded.viewer}"}}'.encode()
    async with page.session.post(f"{page.url}{API}/sign-in", data=body, headers=JSON, ssl=trusting) as reply:
        (text,) = reply.headers.getall("Set-Cookie")
        assert reply.status == 200
    assert text.startswith(f"__Host-{COOKIE}=")
    assert "; secure" in text.lower()

    async def shown() -> str:
        place = ("127.0.0.1", front.gateway.console_port)
        pem = await asyncio.to_thread(ssl.get_server_certificate, place)
        return name_of(ssl.PEM_cert_to_DER_cert(pem))

    assert await shown() == "first"
    write_certificate(tmp_path, "second")
    assert await shown() == "second"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{front.gateway.console_port}/console")
    await guarded.close()
    await front.stop()


# ------------------------------------------------------------------------------------------ sessions alone


class Clocked:
    """Sessions over a file of keys, on a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.keys = folder / "keys.yaml"
        self.key = key_of(self.keys, "staff", "operator")
        self.trust = Trust.draw()
        self.sessions = self.another()

    def another(self, trust: Trust | None = None) -> Sessions:
        """Those of another gateway."""
        config = AuthConfig(mode="required", keys_file=self.keys, session_s=100.0)
        return Sessions(trust or self.trust, Authenticator(config, self.clock), self.clock)


def test_a_session_ends_in_time_and_is_one_of_its_cluster(tmp_path: Path) -> None:
    made = Clocked(tmp_path)
    session = made.sessions.begin(made.key)
    assert session.lifetime_s == 100.0
    assert made.another().identify(session.cookie) == session.identity
    with pytest.raises(UnauthenticatedError, match="not one of this cluster"):
        made.another(Trust.draw()).identify(session.cookie)
    made.clock.advance(99.9)
    made.sessions.identify(session.cookie)
    made.clock.advance(0.2)
    with pytest.raises(UnauthenticatedError, match="has ended"):
        made.sessions.identify(session.cookie)


def test_a_cookie_that_was_changed_is_none(tmp_path: Path) -> None:
    made = Clocked(tmp_path)
    cookie = made.sessions.begin(made.key).cookie
    for number in range(0, len(cookie), 5):
        changed = cookie[:number] + ("A" if cookie[number] != "A" else "B") + cookie[number + 1 :]
        with pytest.raises(UnauthenticatedError):
            made.sessions.identify(changed)
    for text in ("", "=", "ä", cookie[:-4], cookie + "AAAA", "A" * 10_000):
        with pytest.raises(UnauthenticatedError):
            made.sessions.identify(text)


def test_a_key_that_lost_its_role_or_was_replaced_has_no_session(tmp_path: Path) -> None:
    made = Clocked(tmp_path)
    cookie = made.sessions.begin(made.key).cookie
    text = made.keys.read_text()
    made.keys.write_text(text.replace("- operator", "- user"))
    with pytest.raises(ForbiddenError):
        made.another().identify(cookie)
    other = Clocked(tmp_path / "..")  # another secret under another id
    entry = other.keys.read_text()
    other.keys.unlink()
    old_id, new_id = (split_key(key)[0] for key in (made.key, other.key))  # type: ignore[index]
    made.keys.write_text(entry.replace(new_id, old_id))
    with pytest.raises(UnauthenticatedError, match="not valid any more"):
        made.another().identify(cookie)


def test_no_session_outlives_its_key(tmp_path: Path) -> None:
    made = Clocked(tmp_path)
    ends_at = datetime.fromtimestamp(made.clock.wall() + 60, UTC)
    key = key_of(made.keys, "staff", "viewer", expires=ends_at)
    session = made.another().begin(key)
    assert session.lifetime_s == pytest.approx(60.0)


def test_sessions_are_ended_by_others_too(tmp_path: Path) -> None:
    made = Clocked(tmp_path)
    session = made.sessions.begin(made.key)
    there = made.another()
    there.forget(made.sessions.end(session.cookie))
    for each in (made.sessions, there):
        with pytest.raises(UnauthenticatedError, match="has ended"):
            each.identify(session.cookie)
