"""The console of a running cluster in headless Chromium: what it shows is so, and its buttons scale pools.

With `--screenshot PATH` it also takes the README's picture, under some load.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from console_harness import Browser
from optional_programs import needs_chromium
from patience import WAIT_S
from serving import TINY, RunningCluster, free_port, tandem

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow, *needs_chromium]
MORE = 'section[aria-labelledby="pool-decode"] [data-act="more"]'
LESS = 'section[aria-labelledby="pool-decode"] [data-act="less"]'
DECODE_ROWS = 'section[aria-labelledby="pool-decode"] tbody tr'
FILE = f"""
model: {TINY}
pools:
  - {{name: prefill, role: prefill, engine: {{block_tokens: 16}}}}
  - {{name: decode, role: decode, engine: {{block_tokens: 16}}}}
gateway: {{console_port: 0}}
"""
PROMPT = "".join(f"def part_{number}(self, value):\n    return value + {number}\n\n" for number in range(12))
SCALE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    file = tmp_path_factory.mktemp("console") / "cluster.yaml"
    file.write_text(FILE)
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    processes = running.processes()
    yield running
    assert running.stop() == 0
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture
def token(cluster: RunningCluster) -> str:
    """As `tandem serve` tells where it is."""
    return Path(cluster.ray_variables["RAY_AUTH_TOKEN_PATH"]).read_text().strip()


class Load:
    """Requests, one after the other, until the end of the `with`; then none has failed."""

    def __init__(self, address: str, num_tokens: int) -> None:
        self._address = address
        self._num_tokens = num_tokens
        self._stop = threading.Event()
        self._errors: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self._errors == []

    def _run(self) -> None:
        with BlockingClient(self._address) as client:
            number = 0
            while not self._stop.is_set():
                number += 1
                options = GenerateOptions(
                    max_tokens=self._num_tokens,
                    ignore_eos=True,
                    request_id=f"task-{number:03}",
                    tenant=("search", "chat")[number % 2],
                )
                done = client.complete(f"# {number}\n{PROMPT}", options, timeout_s=60)
                if done.finish_reasons != ("length",):
                    self._errors.append(f"{number}: {done.finish_reasons}")


def status_json(cluster: RunningCluster) -> dict[str, Any]:
    done = tandem("status", "--admin-address", cluster.admin_address, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows_of(status: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Of each replica: what the page's first, second, fourth and fifth cells say."""
    rows = []
    for replica in sorted(status["replicas"], key=lambda it: it["replica_id"]):
        load = replica["load"]
        used = load["num_total_blocks"] - load["num_free_blocks"]
        rows.append(
            (
                replica["replica_id"],
                replica["state"],
                f"{load['num_running']} / {load['num_waiting']}",
                f"{used} / {load['num_total_blocks']}",
            )
        )
    return rows


def shown_rows(browser: Browser) -> list[tuple[str, str, str, str]]:
    script = (
        "return [...document.querySelectorAll('.pool tbody tr')].map((row) => [0, 1, 3, 4].map((at) => "
        "at === 0 ? row.cells[0].firstElementChild.innerText : row.cells[at].innerText.trim()))"
    )
    rows = [(cells[0], cells[1], cells[2], cells[3]) for cells in browser.run(script)]
    return sorted(rows)


def ready_decodes(status: admin_pb.StatusResponse) -> set[str]:
    ready = admin_pb.REPLICA_STATE_READY
    return {it.replica_id for it in status.replicas if it.pool == "decode" and it.state == ready}


def test_the_page_shows_what_the_command_line_says(cluster: RunningCluster, browser: Browser) -> None:
    url = cluster.addresses["console"]
    assert url.endswith("/console")
    assert url in "".join(tandem("status", "--admin-address", cluster.admin_address).stdout.split())
    with BlockingClient(cluster.address) as client:
        done = client.complete(PROMPT, GenerateOptions(max_tokens=8, request_id="one"), timeout_s=60)
        explained = client.explain("one")
    browser.open(url)
    browser.wait_text("#requests", "one")
    cluster.wait_for(lambda status: all(it.load.num_running == 0 for it in status.replicas))
    reported = status_json(cluster)
    expected = rows_of(reported)
    browser.wait(lambda: shown_rows(browser) == expected, f"{shown_rows(browser)} becomes {expected}")
    assert {it["name"]: it["desired"] for it in reported["pools"]} == {"prefill": 1, "decode": 1}
    assert browser.texts(".desired") == ["1", "1"]
    figures = dict(zip(browser.texts("#figures dt"), browser.texts("#figures dd"), strict=True))
    assert int(figures["finished"]) == reported["num_finished_requests"]
    tiers = [tier["tier"] for node in reported["store_stats"] for tier in node["tiers"]]
    assert browser.texts("#tiers tr td:nth-child(2)") == tiers
    (path,) = (path for replica in reported["paths"] for path in replica["paths"])
    assert path["transport"] in browser.text("#paths tbody td")
    assert f"{path['gb_s']:.2f} GB/s" in browser.text("#paths tbody td")
    cells = browser.texts("#requests tr:first-child > *")
    usage = done.finished.usage
    assert cells[3:5] == [str(usage.prompt_tokens), str(usage.completion_tokens)]
    browser.click("#requests button")
    browser.wait_text("#explain-body", "Timeline")
    names = browser.texts("#explain-body > .scroll tbody td:nth-child(2)")
    assert names == [event.name for event in explained.timeline]
    browser.click("#explain-close")
    assert browser.errors() == []


def test_a_click_scales_a_pool_and_a_killed_replica_goes(
    cluster: RunningCluster, browser: Browser, request: pytest.FixtureRequest
) -> None:
    browser.open(cluster.addresses["console"])
    assert cluster.status().pools[1].desired == 1
    browser.click(MORE)
    browser.click("#scale-yes")
    browser.wait_text("#message", "pool decode will have 2 replicas")
    with Load(cluster.address, 40):
        badges = f"{DECODE_ROWS} .badge"
        browser.wait(lambda: browser.texts(badges) == ["ready"] * 2, "a second replica", SCALE_S)
        browser.wait(lambda: browser.texts(".desired") == ["1", "2"], "the desired count")
        before = ready_decodes(cluster.status())
        assert sorted(browser.texts(f"{DECODE_ROWS} th span")) == sorted(before)
        browser.wait_text("#moves", "local")
        browser.wait(lambda: browser.texts(".pinned") == ["pinned by an operator"], "the pool is pinned")
        if picture := request.config.getoption("--screenshot"):
            cluster.wait_for(lambda status: status.num_finished_requests >= 300)
            browser.screenshot(Path(picture))
            browser.resize(1280, 900)
        victim = next(it for it in cluster.status().replicas if it.pool == "decode")
        os.kill(victim.process_id, signal.SIGKILL)
        names = f"{DECODE_ROWS} th span"
        browser.wait(lambda: victim.replica_id not in browser.texts(names), "the killed one is gone", 30)
        browser.wait(
            lambda: browser.texts(badges) == ["ready"] * 2 and victim.replica_id not in browser.texts(names),
            "Serve has replaced it",
            SCALE_S,
        )
    assert sorted(browser.texts(names)) == sorted(ready_decodes(cluster.status()))
    browser.click(LESS)
    browser.click("#scale-yes")
    browser.wait_text("#message", "pool decode will have 1 replica")
    browser.wait(lambda: len(browser.texts(names)) == 1, "one replica is left", SCALE_S)
    browser.click('section[aria-labelledby="pool-decode"] [data-act="release"]')
    browser.wait_text("#message", "pool decode is released")
    browser.wait(lambda: not browser.find(".pinned"), "no pool is pinned")
    assert [it.pinned for it in cluster.status().pools] == [False, False]


def test_the_token_is_in_no_log(cluster: RunningCluster, token: str) -> None:
    logs = Path(cluster.addresses["logs"])
    texts = [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    assert len(texts) > 5
    assert not any(token in text for text in texts)
    assert token not in "".join(cluster.lines)
