"""A gateway with its console over scripted replicas, a scaler before a stand-in for Ray's dashboard, and a
headless Chromium that waits for what a test looks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
from child_processes import closed_on_error
from gateway_harness import GatewayHarness
from optional_programs import find_program
from patience import WAIT_S
from scaling_harness import TOKEN, FakeApp, FakeDashboard, FakePool
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from cluster.roster.messages import RosterView
from cluster.scaling.orders import Operations
from cluster.scaling.scaler import Scaler
from cluster.scaling.serve_client import ServeClient
from cluster.serve.gateway_server import Gateway
from kvtransfer.common.clock import SystemClock


@dataclass
class Page:
    """The page as a browser would use it, without one."""

    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        """Return the JSON of a 200."""
        async with self.session.get(self.url + path) as reply:
            body = await reply.text()
            assert reply.status == 200, body
            return json.loads(body)

    async def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, data: bytes | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON."""
        async with self.session.request(method, self.url + path, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def order(self, what: str, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """As the page gives it."""
        headers = {"Content-Type": "application/json"}
        return await self.ask("POST", f"/console/api/{what}", headers, json.dumps(order).encode())


class ConsoleHarness:
    """p0 (prefill), d0 (decode), a gateway with a console, a scaler, a dashboard, and a page."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.app = FakeApp({"prefill": FakePool(1, 1, ["RUNNING"]), "decode": FakePool(1, 1, ["RUNNING"])})
        self.dashboard = FakeDashboard(self.app)
        self.scaler: Scaler
        self.gateway: Gateway
        self.address = ""
        self.page: Page

    async def start(self, **settings: Any) -> None:
        """Start the console; `settings` are those of `GatewayHarness.config`."""
        await self.dashboard.start()
        await self.harness.add_replica("p0", "prefill")
        await self.harness.add_replica("d0", "decode")
        self.config = self.harness.config(console_port=0, console_hosts=["console.example"], **settings)
        config = self.config
        self.scaler = Scaler(config, self.harness.roster, self._open_client, self.harness.clock)
        self.gateway, self.address = await self.harness.add_gateway(config, self.operations())
        self.page = Page(f"http://127.0.0.1:{self.gateway.console_port}", aiohttp.ClientSession())

    @property
    def admin_address(self) -> str:
        return f"127.0.0.1:{self.gateway.admin_port}"

    async def stop(self) -> None:
        """Stop the console; the harness itself is stopped by its fixture."""
        await self.page.session.close()
        await self.dashboard.stop()

    def operations(self) -> Operations:
        """As a gateway's process has them, without Ray."""

        async def dashboard_url() -> str:
            return self.dashboard.url

        return Operations(dashboard_url, self.scaler.obey)

    async def view(self) -> RosterView:
        return await self.harness.roster.view(-1, 0.0)

    async def _open_client(self) -> ServeClient:
        return ServeClient(self.dashboard.url, "tandem", TOKEN)


# WCAG 2.1's contrast of every visible text against what lies behind it: those below 4.5 to 1.
_CONTRAST = """
const parse = (color) => {
  const parts = color.match(/[\\d.]+/g).map(Number);
  return {rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1};
};
const linear = (value) => (
  value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4
);
const light = (rgb) => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
const behind = (node) => {
  for (let each = node; each; each = each.parentElement) {
    const color = parse(getComputedStyle(each).backgroundColor);
    if (color.alpha === 1) return color.rgb;
  }
  return [255, 255, 255];
};
const low = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || !node.checkVisibility() || node.disabled || node.matches("option, noscript, svg *")) continue;
  const shades = [light(parse(getComputedStyle(node).color).rgb), light(behind(node))].sort((a, b) => b - a);
  const ratio = (shades[0] + 0.05) / (shades[1] + 0.05);
  if (ratio < 4.5) low.push(`${node.tagName}.${node.className} "${node.textContent}" ${ratio.toFixed(2)}`);
}
return low;
"""
_UNNAMED = """
const named = (node) => (
  node.ariaLabel || node.textContent.trim() || (node.labels && node.labels.length)
  || (node.getAttribute("aria-labelledby") && document.getElementById(node.getAttribute("aria-labelledby")))
);
return [...document.querySelectorAll("button, a, input, section, dialog, svg, [role=region], [role=group]")]
  .filter((node) => node.checkVisibility() && !named(node)).map((node) => node.outerHTML);
"""


class Browser:
    """One window. Use as a context manager."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = find_program("chromium")
        for argument in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-dev-shm-usage",
            "hide-scrollbars",
        ):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver = webdriver.Chrome(options, Service(find_program("chromedriver")))
        self._clock = SystemClock()
        with closed_on_error(self):
            self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._driver.quit()

    def open(self, url: str) -> None:
        """Open the page from scratch, also where only the fragment differs. The errors of the page before it
        are forgotten: the server of an earlier test's page is gone."""
        self._driver.get("about:blank")
        self.errors()
        self._driver.get(url)

    @property
    def url(self) -> str:
        return self._driver.current_url

    def resize(self, width: int, height: int) -> None:
        """Resize the part that a page sees."""
        self._driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, scheme: str) -> None:
        """Have pages see that the user prefers this scheme of colors: "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def find(self, selector: str) -> list[WebElement]:
        """Find the elements that are visible."""
        return [each for each in self._driver.find_elements(By.CSS_SELECTOR, selector) if each.is_displayed()]

    def texts(self, selector: str) -> list[str]:
        """Return the texts of the visible elements; read them again where the page has just replaced one."""
        while True:
            try:
                return [each.text for each in self.find(selector)]
            except StaleElementReferenceException:
                continue

    def text(self, selector: str) -> str:
        """Return the text of the only element."""
        (text,) = self.texts(selector)
        return text

    def click(self, selector: str) -> None:
        (element,) = self.wait(lambda: self.find(selector), f"{selector} can be seen")
        element.click()

    def press(self, *keys: str) -> None:
        """Press the keys at the element that has the focus."""
        ActionChains(self._driver).send_keys(*keys).perform()

    def type(self, selector: str, text: str) -> None:
        """As `text` and Enter."""
        (element,) = self.wait(lambda: self.find(selector), f"{selector} can be seen")
        element.send_keys(text, Keys.ENTER)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._driver.execute_script(script, *arguments)

    def low_contrasts(self) -> list[str]:
        found: list[str] = self.run(_CONTRAST)
        return found

    def unnamed(self) -> list[str]:
        """Return visible elements that assistive technology could not name."""
        found: list[str] = self.run(_UNNAMED)
        return found

    def errors(self) -> list[str]:
        """Return the errors since the last call: exceptions, failed loads, breaches of the policy."""
        entries = self._driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def wait(self, condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
        """Wait for the first true value of `condition`, and return it."""
        deadline = self._clock.now() + wait_s
        while True:
            try:
                if value := condition():
                    return value
            except (StaleElementReferenceException, ValueError):
                pass  # the page has just changed
            assert self._clock.now() < deadline, f"not within {wait_s} s: {what}"
            threading.Event().wait(0.05)

    def wait_text(self, selector: str, part: str, wait_s: float = WAIT_S) -> str:
        """Return the text of the only element, once it has `part`."""
        found: str = self.wait(
            lambda: next((text for text in self.texts(selector) if part in text), ""),
            f"{selector} says {part!r}, but {self.texts(selector)}",
            wait_s,
        )
        return found

    def screenshot(self, path: Path) -> None:
        """Save the whole page at its width."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        self.resize(width, height)
        self._driver.save_screenshot(str(path))
