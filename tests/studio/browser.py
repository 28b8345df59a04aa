"""A real browser for tests of pages: Debian's Chromium, or what MODICUM_CHROMIUM and MODICUM_CHROMEDRIVER name."""

from __future__ import annotations

import base64
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NO_BROWSER

SHOTS = Path(__file__).parents[2] / "artefacts" / "studio"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
# Everything that can be used has a name that a screen reader can say.
NAMELESS = """
const named = (e) => e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length || e.placeholder;
return [...document.querySelectorAll("button, a[href], input:not([hidden]), select, summary, svg[tabindex]")]
  .filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 120));
"""


def open_browser() -> Any:
    """A driver; the test is skipped where there is no browser, driver or selenium."""
    chromium = os.environ.get("MODICUM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    driver = os.environ.get("MODICUM_CHROMEDRIVER") or shutil.which("chromedriver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        pytest.skip(NO_BROWSER)
    if not chromium or not driver:
        pytest.skip(NO_BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


class Page:
    """What tests do with a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """A screen of this width in pixels, light or dark."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def go(self, address: str) -> None:
        """A fresh page, whatever part after # it has."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def js(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 20) -> Any:
        """Until the script gives something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: self.js(f"return {script}"))

    def text(self, selector: str = "main") -> str:
        return str(self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def shoot(self, name: str) -> None:
        """Kept to be looked at."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        """What the browser's console holds against the page, and what has no name."""
        said = [
            entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]
        return said + list(self.js(NAMELESS))

    def printed_pages(self) -> int:
        """How many sheets it prints on."""
        pdf = base64.b64decode(self.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
        return len(re.findall(rb"/Type\s*/Page[^s]", pdf))
