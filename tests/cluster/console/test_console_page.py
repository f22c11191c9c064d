"""The console's page in headless Chromium, over scripted replicas: orders, a gateway that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from callers import key_of
from console_harness import Browser, ConsoleHarness
from gateway_harness import PROMPT, GatewayHarness, until
from optional_programs import needs_chromium
from selenium.webdriver.common.keys import Keys

from cluster.api.generate_options import GenerateOptions
from cluster.identity.api_key_file import revoke_key
from cluster.identity.api_keys import split_key
from cluster.roster.messages import GatewayRecord
from workers.stats_record import PathMeasure

pytestmark = [pytest.mark.slow, *needs_chromium]
NUM_UPDATES = (
    "return performance.getEntriesByType('resource').filter((it) => it.name.endsWith('/api/curves')).length"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


async def look(work: Any, *arguments: Any) -> Any:
    """The browser blocks, and the gateway that it asks runs in this loop."""
    return await asyncio.to_thread(work, *arguments)


async def test_the_page_shows_the_cluster_and_breaks_none_of_its_rules(
    front: ConsoleHarness, browser: Browser
) -> None:
    d0 = front.harness.replicas["d0"].identity
    path = PathMeasure(d0, 0, 0, "tcp", 2.5, 30.0, "lo", "shm: another user")
    front.harness.replicas["p0"].report([path])
    record = GatewayRecord("g0", 1, front.address, 7, f"127.0.0.1:{front.gateway.console_port}")
    await front.harness.roster.register(record)
    client = front.harness.client(front.address)
    await client.complete(PROMPT, GenerateOptions(max_tokens=20, request_id="first", tenant="them"))

    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#paths td", "2.50 GB/s")
        assert browser.text("#ready") == "ready"
        assert browser.texts(".pool h3") == ["prefill", "decode"]
        assert browser.texts(".pool tbody th span") == ["p0", "d0"]
        assert browser.texts(".pool tbody .badge") == ["ready", "ready"]
        assert browser.texts("#requests .badge") == ["finished"]
        assert browser.text("#notes li") == "p0 writes to d0 over tcp: shm: another user"
        assert "g0 (this one)" in browser.text("#gateways")
        assert browser.find("#ttft svg path.first")
        assert "p99" in browser.run("return document.querySelector('#itl svg').ariaLabel")
        assert browser.errors() == []

    await look(check)


async def test_classes_and_tenants_are_shown_with_their_shares_and_refusals(
    front: ConsoleHarness, browser: Browser
) -> None:
    record = GatewayRecord("g0", 1, front.address, 7, f"127.0.0.1:{front.gateway.console_port}")
    await front.harness.roster.register(record)
    client = front.harness.client(front.address)
    await client.complete(PROMPT, GenerateOptions(max_tokens=3, request_id="first", tenant="them"))

    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#shares", "them")
        assert browser.texts("#admission th") == ["interactive", "standard", "batch"]
        assert browser.texts("#shares th") == ["them"]
        assert "100" in browser.text("#shares")
        assert "undefined" not in browser.text("#gateways") + browser.text("#admission")
        assert browser.errors() == []

    await look(check)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (800, "light")])
async def test_the_page_can_be_read(front: ConsoleHarness, browser: Browser, width: int, scheme: str) -> None:
    client = front.harness.client(front.address)
    await client.complete(PROMPT, GenerateOptions(max_tokens=3, request_id="x" * 120))

    def check() -> None:
        browser.resize(width, 900)
        browser.prefer(scheme)
        browser.open(f"{front.page.url}/console")
        browser.wait(lambda: browser.find("#requests button"), "a request")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.low_contrasts() == []
        assert browser.unnamed() == []
        browser.click("#requests button")
        browser.wait(lambda: browser.find("#explain td"), "the explanation")
        assert browser.low_contrasts() == []
        browser.prefer("light")
        browser.resize(1280, 900)

    await look(check)


async def test_the_focus_stays_while_the_page_updates(front: ConsoleHarness, browser: Browser) -> None:
    def check() -> None:
        browser.open(f"{front.page.url}/console")
        more = '.pool:nth-child(2) [data-act="more"]'
        browser.wait(lambda: browser.find(more), "the button")
        browser.run("document.querySelector(arguments[0]).focus()", more)
        before = browser.run(NUM_UPDATES)
        browser.wait(lambda: browser.run(NUM_UPDATES) >= before + 2, "two updates")
        assert browser.run("return document.activeElement.ariaLabel") == "One decode replica more"

    await look(check)


async def test_an_order_is_given_once_it_was_confirmed(front: ConsoleHarness, browser: Browser) -> None:
    def order() -> None:
        browser.open(f"{front.page.url}/console")
        browser.click('.pool:nth-child(2) [data-act="more"]')
        browser.click("#scale-yes")
        browser.wait_text("#message", "pool decode will have 2 replicas")
        assert browser.text(".pool:nth-child(2) .desired").startswith("2")
        browser.wait_text("#moves", "local")
        assert browser.errors() == []

    await look(order)
    assert front.dashboard.orders == [("decode", 2)]


async def test_nothing_is_shown_before_a_key_and_orders_need_an_operator(
    harness: GatewayHarness, tmp_path: Path, browser: Browser
) -> None:
    keys = tmp_path / "keys.yaml"
    viewer, operator = key_of(keys, "acme", "viewer"), key_of(keys, "staff", "operator")
    key_id, _ = split_key(operator) or ("", "")
    front = ConsoleHarness(harness)
    await front.start(auth={"mode": "required", "keys_file": str(keys)})

    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#sign-in", "Sign in")
        assert browser.find("#main") == []
        assert browser.low_contrasts() == []
        assert browser.unnamed() == []
        browser.type("#key-input", "tandem_wrong")
        browser.wait_text("#sign-in-error", "not valid here")
        browser.type("#key-input", viewer)
        browser.wait_text("#identity", "(viewer)")
        browser.wait(lambda: browser.texts(".pool h3") == ["prefill", "decode"], "the pools")
        more = '.pool:nth-child(2) [data-act="more"]'
        assert not browser.find(more)[0].is_enabled()
        kept = "return document.cookie + JSON.stringify({...sessionStorage, ...localStorage})"
        assert browser.run(kept) == "{}"
        browser.click("#sign-out")
        browser.wait_text("#identity", "not signed in")
        assert browser.find("#main") == []
        browser.type("#key-input", operator)
        browser.wait_text("#identity", f"key:{key_id} (operator, viewer)")
        browser.click(more)
        browser.click("#scale-yes")
        browser.wait_text("#message", "pool decode will have 2 replicas")
        browser.wait_text("#moves", f"key:{key_id}")
        revoke_key(keys, key_id)
        browser.wait_text("#sign-in-error", "not valid any more")
        browser.errors()

    await look(check)
    await front.stop()


async def test_the_fleet_is_shown_and_who_of_it_does_not_answer(
    front: ConsoleHarness, browser: Browser
) -> None:
    await front.harness.register(front.gateway, front.address)
    _, address = await front.harness.add_known_gateway(front.config, front.operations())
    client = front.harness.client(address)
    await client.complete(PROMPT, GenerateOptions(max_tokens=2, request_id="there"))

    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#requests", "there")
        assert browser.texts("#requests td:last-child") != []
        browser.wait(lambda: browser.texts("#gateways td:nth-child(5)") == ["0", "1"], "the totals of each")
        assert browser.text("#identity") == "no authentication"
        browser.click("#requests button")
        browser.wait_text("#explain-body", "at g1")
        browser.click("#explain-close")
        assert browser.errors() == []

    await look(check)
    await front.harness.gateways[1].stop()
    await look(browser.wait_text, "#notes", "g1 could not be asked")


async def test_replicas_are_ordered_after_a_question_that_names_their_cost(
    front: ConsoleHarness, browser: Browser
) -> None:
    def order() -> None:
        browser.open(f"{front.page.url}/console")
        browser.click('.pool:nth-child(2) [data-act="more"]')
        browser.wait_text("#scale-what", "decode from 1 to 2")
        assert browser.text("#scale-cost") == "One more replica takes 1 process on CPUs."
        browser.click("#scale-yes")
        browser.wait_text("#message", "pool decode will have 2 replicas")
        less = '.pool:nth-child(2) [data-act="less"]'
        browser.click(less)
        browser.wait_text("#scale-what", "decode from 2 to 1")
        browser.click("#scale-cancel")
        browser.wait(lambda: not browser.find("#scale-what"), "the question is closed")
        assert browser.text(".pool:nth-child(2) .desired").startswith("2")
        browser.click(less)
        browser.click("#scale-yes")
        browser.wait_text("#message", "pool decode will have 1 replica")

    await look(order)
    assert front.dashboard.orders == [("decode", 2), ("decode", 1)]


async def test_the_cost_of_a_replica_follows_from_its_shape_and_its_pools_gpus(
    front: ConsoleHarness, browser: Browser
) -> None:
    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#figures", "last minute")
        assert browser.run(_COST, 1, [10], 0.5) == "0.5 GPUs"
        assert browser.run(_COST, 1, [10], 1) == "1 GPU"
        assert browser.run(_COST, 2, [10, 18], 1) == "4 GPUs (tp 2 x 2 stages)"
        assert browser.run(_COST, 2, [10], 0) == "2 processes on CPUs (tp 2 x 1 stage)"

    await look(check)


_COST = """
const status = {replicas: [{pool: "p", tp: arguments[0], stage_layers: arguments[1]}]};
return import("/console/pools.js").then((pools) => pools.costOf(status, "p", arguments[2]));
"""


async def test_experts_are_shown_where_there_are_any(front: ConsoleHarness, browser: Browser) -> None:
    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#figures", "last minute")
        assert browser.run(_EXPERTS, 0, 0.0) == ""
        shown = "experts: imbalance 1.8, hottest layer 3 expert 17 at 12 %"
        assert browser.run(_EXPERTS, 1.8, 0.12) == shown
        assert browser.run(_EXPERTS, 1.8, 0.12, 6) == f"{shown}, 6 copies: ranks 2.1 to 1.1"

    await look(check)


_EXPERTS = """
const load = {
  expert_imbalance: arguments[0], hottest_expert_layer: 3, hottest_expert: 17,
  hottest_expert_share: arguments[1], num_expert_copies: arguments[2],
  expert_uncopied_imbalance: 2.1, expert_rank_imbalance: 1.1,
};
return import("/console/pools.js").then((pools) => pools.expertsOf(load));
"""


async def test_groups_of_layers_are_shown_where_there_are_several(
    front: ConsoleHarness, browser: Browser
) -> None:
    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#figures", "last minute")
        assert browser.run(_LAYERS, {"full": "4"}, "0") == ""
        shown = "full 2.0 kB a token, 25 % used; state 3.0 MB a sequence, 50 % used"
        assert browser.run(_LAYERS, {"full": "100", "state": "8"}, "0") == shown
        misses = "; 3 of 12 prompts computed 512 cached tokens again"
        assert browser.run(_LAYERS, {"full": "100", "state": "8"}, "3") == shown + misses

    await look(check)


_LAYERS = """
const load = {
  num_layers_blocks: arguments[0], num_free_layers_blocks: { full: "75", state: "4" },
  layers_token_bytes: { full: "2000" }, layers_sequence_bytes: { state: "3000000" },
  num_snapshot_misses: arguments[1], num_snapshot_hits: "9", num_recomputed_tokens: "512",
};
return import("/console/pools.js").then((pools) => pools.layersOf(load));
"""


async def test_a_refused_order_says_why(front: ConsoleHarness, browser: Browser) -> None:
    front.dashboard.refusal = (412, "external_scaler_enabled=false")

    def order() -> None:
        browser.open(f"{front.page.url}/console")
        browser.click('.pool:nth-child(2) [data-act="more"]')
        browser.click("#scale-yes")
        browser.wait_text("#message", "external_scaler_enabled=false")
        assert browser.text(".pool:nth-child(2) .desired") == "1"
        browser.errors()

    await look(order)
    assert front.dashboard.orders == []


async def test_a_request_is_explained_by_keyboard(front: ConsoleHarness, browser: Browser) -> None:
    client = front.harness.client(front.address)
    await client.complete(PROMPT, GenerateOptions(max_tokens=3, request_id="why:me"))
    explained = await client.explain("why:me")

    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait(lambda: browser.find("#requests button"), "a request")
        browser.run("document.querySelector('#requests button').focus()")
        browser.press(Keys.ENTER)
        browser.wait_text("#explain-body", "Timeline")
        assert browser.text("#explain-title") == "Request why:me"
        rows = browser.texts(".decision tbody tr")
        (decision,) = explained.decisions
        assert len(rows) == len(decision.candidates)
        assert sorted(row.split()[1] for row in rows if row.startswith("✓")) == ["d0", "p0"]
        names = browser.texts("#explain-body > .scroll tbody td:nth-child(2)")
        assert names == [event.name for event in explained.timeline]
        browser.press(Keys.ESCAPE)
        browser.wait(lambda: not browser.find("#explain"), "the dialog is closed")

    await look(check)


async def test_a_gateway_that_is_away_is_shown_and_waited_for(
    front: ConsoleHarness, browser: Browser
) -> None:
    await look(browser.open, f"{front.page.url}/console")
    await look(browser.wait_text, "#ready", "ready")
    await front.gateway.stop()
    reported = await look(browser.wait_text, "#away", "The gateway does not answer")
    assert "last update" in reported
    assert "s ago" in reported
    await look(browser.wait_text, "#freshness", "last update 4 s ago")
    config = front.harness.config(console_port=front.gateway.console_port)
    again, _ = await front.harness.add_gateway(config)
    await until(lambda: front.harness.is_connected(again), "the replicas are connected")
    await look(lambda: browser.wait(lambda: not browser.find("#away"), "the page goes on"))
    assert await look(browser.text, "#ready") == "ready"
    await look(browser.errors)


async def test_figures_of_the_last_minute_are_none_without_tokens(
    front: ConsoleHarness, browser: Browser
) -> None:
    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#figures", "last minute")
        assert browser.text("#ttft .muted") == "no tokens in the last minute"
        assert browser.text("#itl .muted") == "no tokens in the last minute"
        flow = {"tenant": "team", "service_class": "standard", "served_s": 0.1}
        assert browser.run(_SHARES, [flow]) == ["standard01100 %\N{EN DASH}", "team100 %standard 100 %"]
        assert browser.run(_SHARES, []) == ["standard01\N{EN DASH}\N{EN DASH}", ""]
        assert "TTFT p90\n\N{EN DASH}" in browser.text("#figures")

    await look(check)


async def test_requests_are_filtered_and_the_range_is_chosen(front: ConsoleHarness, browser: Browser) -> None:
    client = front.harness.client(front.address)
    for name, tenant in (("one", "them"), ("two", "us"), ("three", "them")):
        await client.complete(PROMPT, GenerateOptions(max_tokens=2, request_id=name, tenant=tenant))

    def check() -> None:
        browser.open(f"{front.page.url}/console")
        browser.wait(lambda: len(browser.find("#requests button")) == 3, "all requests")
        browser.type("#filter", "THEM fini")
        browser.wait(lambda: browser.texts("#requests button") == ["three", "one"], "those of them")
        assert browser.text("#filter-count") == "2 of 3"
        browser.type("#filter", " nobody")
        assert browser.text("#requests-empty") == "No request has all these words."
        assert not browser.find("#gpu-memory")
        browser.run(_CHOOSE, "21600")
        browser.wait(lambda: "\N{MINUS SIGN}6 h" in browser.run(_TICKS, "throughput"), "six hours")
        assert "\N{MINUS SIGN}6 h" in browser.run(_TICKS, "ttft")

    await look(check)


_CHOOSE = """
const range = document.querySelector("#range");
range.value = arguments[0];
range.dispatchEvent(new Event("change"));
"""
_TICKS = "return [...document.querySelectorAll(`#${arguments[0]} .tick`)].map((it) => it.textContent);"
# What the tables of classes and tenants say of who was served lately.
_SHARES = """
const admission = {
  classes: [{service_class: "standard", num_waiting: 0, num_released: 1, num_refused: {}}],
  flows: arguments[0],
};
return import("/console/tables.js").then((tables) => {
  tables.showAdmission([{admission}]);
  return ["#admission", "#shares"].map((name) => document.querySelector(name).textContent);
});
"""
# What overflows without being in a part that scrolls, ids that are broken into lines, labels that overlap.
_BROKEN = """
const found = [];
const name = (node) => node.outerHTML.slice(0, 80);
const page = document.documentElement;
if (page.scrollWidth > innerWidth) found.push(`page: ${page.scrollWidth}`);
const ids = "#requests td:first-child, #gateways th, #shares th, #admission th, .badge";
for (const node of document.querySelectorAll(ids)) {
  if (node.checkVisibility() && node.getBoundingClientRect().height > 44) found.push(`broken: ${name(node)}`);
}
for (const svg of document.querySelectorAll(".chart svg")) {
  const ticks = [...svg.querySelectorAll(".tick")].map((tick) => tick.getBoundingClientRect());
  ticks.forEach((one, index) => ticks.slice(index + 1).forEach((other) => {
    const isBeside = one.left >= other.right || other.left >= one.right;
    const isAbove = one.top >= other.bottom || other.top >= one.bottom;
    if (!isBeside && !isAbove) found.push(`overlap: ${svg.ariaLabel}`);
  }));
}
return found;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1440, 1920])
async def test_nothing_is_cut_or_broken_at_any_width(
    front: ConsoleHarness, browser: Browser, width: int, scheme: str, tmp_path: Path
) -> None:
    client = front.harness.client(front.address)
    options = GenerateOptions(
        max_tokens=5, request_id="a-request-with-a-rather-long-id-0001", tenant="team-a"
    )
    await client.complete(PROMPT, options)
    record = GatewayRecord("gateway-with-a-long-name", 1, front.address, 7, "127.0.0.1:65001")
    await front.harness.roster.register(record)

    def check() -> None:
        browser.resize(width, 900)
        browser.prefer(scheme)
        browser.open(f"{front.page.url}/console")
        browser.wait_text("#requests", "a-request-with")
        browser.screenshot(tmp_path / f"console-{width}-{scheme}.png")
        assert browser.run(_BROKEN) == []
        browser.prefer("light")
        browser.resize(1280, 900)

    await look(check)
