"""What the console does not answer, what every answer carries, and that its page needs nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from console_harness import ConsoleHarness, Page
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.replies import Fresh
from cluster.console.request_guard import HEADERS, refused_order
from cluster.errors import HTTP_STATUS, STATUS_TABLE
from cluster.http.guards import refused_host
from kvtransfer.common.clock import ManualClock

STATIC = Path(__file__).resolve().parents[3] / "cluster" / "console" / "static"
ORDER = json.dumps({"pool": "decode", "replicas": 3}).encode()


@pytest.fixture
def page(front: ConsoleHarness) -> Page:
    return front.page


# ----------------------------------------------------------------------------------- hosts, origins, tokens


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8781",
        "127.0.0.1",
        "localhost:1",
        "LocalHost",
        "[::1]:8781",
        "10.1.2.3:80",
        "console.example:8781",
    ],
)
def test_hosts_that_nobody_can_turn_round_are_answered(host: str) -> None:
    assert refused_host(host, {"console.example"}) == ""


@pytest.mark.parametrize(
    "host",
    [None, "", ":8781", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "a@127.0.0.1",
     "127.0.0.1:port", "[::1", "127.0.0.1/evil", "evil.example#127.0.0.1", "evil.example?localhost",
     "xconsole.example"],
)  # fmt: skip
def test_other_hosts_are_not(host: str | None) -> None:
    assert refused_host(host, {"console.example"}) != ""


@given(st.text())
def test_any_host_has_an_answer(host: str) -> None:
    assert isinstance(refused_host(host, ()), str)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None),
        ({"Origin": "http://127.0.0.1:8781"}, None),
        ({"Origin": "https://127.0.0.1:8781", "Sec-Fetch-Site": "same-origin"}, None),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "text/plain; application/json"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, None),
    ],
)
def test_orders_come_from_the_page_itself(headers: dict[str, str], status: int | None) -> None:
    refusal = refused_order({"Host": "127.0.0.1:8781", "Content-Type": "application/json", **headers})
    assert (refusal[0] if refusal else None) == status


def test_every_refusal_has_a_status() -> None:
    assert set(STATUS_TABLE.values()) == set(HTTP_STATUS)


# ------------------------------------------------------------------------------------------------ over HTTP


async def test_a_page_of_another_site_gets_nothing(front: ConsoleHarness, page: Page) -> None:
    for path in ("/console", "/console/console.js", "/console/api/status", "/console/api/requests"):
        assert (await page.ask("GET", path, {"Host": "evil.example"}))[0] == 421
    scale = "/console/api/scale"
    for headers, status in (
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
        ({"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 421),
    ):
        assert (await page.ask("POST", scale, headers, ORDER))[0] == status
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert (await page.ask("OPTIONS", scale, preflight))[0] == 405
    assert front.dashboard.orders == []
    named = {
        "Content-Type": "application/json",
        "Host": "console.example",
        "Origin": "http://console.example",
    }
    assert (await page.ask("POST", scale, named, ORDER))[0] == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"null", "object"),
        (b"[" * 4000, "object"),
        (b'{"pool": ' + b"[" * 4000, "$.pool"),
        (b'{"x": ' + b"[" * 4000, "x"),
        (b'{"pool": "decode"}', "replicas"),
        (b'{"pool": "decode", "replicas": 0}', "$.replicas"),
        (b'{"pool": "decode", "replicas": -1}', "$.replicas"),
        (b'{"pool": "decode", "replicas": 1e3}', "$.replicas"),
        (b'{"pool": "decode", "replicas": 100000}', "$.replicas"),
        (b'{"pool": "decode", "replicas": true}', "$.replicas"),
        (b'{"pool": 7, "replicas": 3}', "$.pool"),
        (b'{"pool": "decode", "replicas": 3, "more": 1}', "more"),
        (b'{"pool": "\xff", "replicas": 3}', ""),
    ],
)
async def test_garbage_is_refused_by_name(front: ConsoleHarness, page: Page, body: bytes, named: str) -> None:
    headers = {"Content-Type": "application/json"}
    status, fields = await page.ask("POST", "/console/api/scale", headers, body)
    assert status == 400
    assert named in fields["error"]
    assert front.dashboard.orders == []


async def test_what_is_not_there_has_an_answer(front: ConsoleHarness, page: Page) -> None:
    headers = {"Content-Type": "application/json"}
    status, fields = await page.order("scale", {"pool": "nobody", "replicas": 3})
    assert (status, "decode, prefill" in fields["error"]) == (400, True)
    status, _ = await page.ask("POST", "/console/api/scale", headers, ORDER + b" " * 5000)
    assert status == 413
    for path in ("/nothing", "/console/api/", "/console/nothing.js", "/console/../server.py",
                 "/console/%2e%2e/server.py", "/console/static/console.js"):  # fmt: skip
        assert (await page.ask("GET", path))[0] == 404
    for method in ("PUT", "DELETE", "PATCH", "POST"):
        assert (await page.ask(method, "/console/api/status", headers))[0] == 405
    assert (await page.ask("GET", "/console/api/scale"))[0] == 405
    assert front.dashboard.orders == []


async def test_no_bytes_bring_it_down(front: ConsoleHarness, page: Page) -> None:
    for raw in (
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET /console HTTP/1.1\r\n\r\n",
        b"GET /console HTTP/1.0\r\n\r\n",
        b"GET /console HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /console/api/scale HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"GET /console HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /console HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.console_port)
        writer.write(raw)
        answer = await reader.readline()
        assert re.match(rb"HTTP/1\.[01] 4\d\d ", answer), (raw[:60], answer)
        writer.close()
    assert (await page.get("/console/api/about"))["app"] == "tandem"


async def test_every_answer_forbids_what_the_page_does_not_need(front: ConsoleHarness, page: Page) -> None:
    for path in ("/console", "/console/console.js", "/console/api/status", "/nothing", "/"):
        async with page.session.get(page.url + path, allow_redirects=False) as reply:
            assert {name: reply.headers[name] for name in HEADERS} == HEADERS
            assert "Access-Control-Allow-Origin" not in reply.headers
    async with page.session.get(page.url + "/") as reply:
        assert reply.url.path == "/console"
        assert reply.headers["Content-Type"].startswith("text/html")


# ------------------------------------------------------------------------------------------------- the page


class References(HTMLParser):
    """What a page loads, and what a strict policy forbids in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.forbidden: list[str] = []
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        self._open = tag
        self.loaded |= {value for name in ("src", "href") if (value := fields.get(name))}
        self.forbidden += [f"{tag} {name}" for name in fields if name == "style" or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.forbidden.append(f"{self._open}: {data.strip()[:40]}")


async def test_the_page_loads_its_own_files_and_no_other(page: Page) -> None:
    found = References()
    found.feed((STATIC / "index.html").read_text())
    assert found.forbidden == []
    loaded = {path for path in found.loaded if not path.startswith("#")}
    for script in STATIC.glob("*.js"):
        loaded |= set(re.findall(r'from "([^"]+)"', script.read_text()))
    assert loaded == {f"/console/{file.name}" for file in STATIC.iterdir()} - {"/console/index.html"}
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path in loaded:
        async with page.session.get(page.url + path) as reply:
            assert (reply.status, reply.content_type) == (200, kinds[Path(path).suffix])
            assert await reply.read() == (STATIC / Path(path).name).read_bytes()
    urls = re.findall(r"https?://[^\s\"'`]+", "".join(file.read_text() for file in STATIC.iterdir()))
    assert {url for url in urls if "www.w3.org" not in url} <= {"http://${gateway.console}/console"}


def test_no_text_becomes_markup() -> None:
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert [file.name for file in STATIC.glob("*.js") if re.search(banned, file.read_text())] == []


async def test_what_costs_something_is_made_once_for_all_who_ask() -> None:
    clock = ManualClock()
    made = 0

    async def make() -> int:
        nonlocal made
        made += 1
        await asyncio.sleep(0)
        return made

    fresh = Fresh(make, 0.5, clock)
    assert await asyncio.gather(*(fresh.get() for _ in range(5))) == [1] * 5
    clock.advance(0.4)
    assert await fresh.get() == 1
    clock.advance(0.1)
    assert list(await asyncio.gather(fresh.get(), fresh.get())) == [2, 2]


# ------------------------------------------------------------------------------ the page, without a browser


def test_the_page_has_every_part_that_its_scripts_name() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', (STATIC / "index.html").read_text()))
    scripts = [script.read_text() for script in STATIC.glob("*.js")]
    named = {name for script in scripts for name in re.findall(r'byId\("([\w-]+)"\)', script)}
    assert {"scale-dialog", "paths-more", "message"} <= named <= ids


def test_scripts_import_what_there_is() -> None:
    for script in STATIC.glob("*.js"):
        for names, module in re.findall(r'import \{([^}]*)\} from "/console/([\w.]+)"', script.read_text()):
            exported = set(
                re.findall(r"export (?:async )?(?:function|const) (\w+)", (STATIC / module).read_text())
            )
            assert {name.strip() for name in names.split(",")} <= exported, (script.name, module)


def test_no_token_is_read_from_an_address() -> None:
    scripts = {script.name: script.read_text() for script in STATIC.glob("*.js")}
    assert not [name for name, text in scripts.items() if re.search(r"location\.(hash|search|href)", text)]
