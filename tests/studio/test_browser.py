"""The studio and a report in a real browser: drawn, read by keys, live, printed, no complaints."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modicum.studio.server import make_server
from tests.studio.browser import Page, open_browser
from tests.studio.conftest import NASTY


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    driver = open_browser()
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="module")
def folder(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(made, tmp_path_factory.mktemp("shown") / "runs")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    server, place, address = make_server(folder, 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    yield address
    server.should_exit = True
    thread.join(10)


def row(page: Page, name: str) -> str:
    """The address part of a run in the list."""
    found = "[...document.querySelectorAll('a.row')].find((a) => a.textContent.includes(arguments[0]))"
    return str(page.js(f"return {found}.hash", name))


def test_watch_draws_reads_by_keys_and_takes_no_name_for_markup(page: Page, address: str) -> None:
    page.size(1280)
    page.go(address)
    page.wait("document.querySelectorAll('svg').length >= 3")
    assert NASTY in page.text(".side")
    assert page.js("return document.querySelectorAll('img').length") == 0
    assert "simulated ground truth" in page.text()
    page.js("document.querySelector('[data-chart=accuracy] svg').focus()")
    page.keys("\ue014", "\ue014")  # arrow right, twice
    assert page.text("[data-chart=accuracy] .tip").startswith("round 2")
    page.js("document.querySelector('[data-chart=accuracy] .values summary').click()")
    assert page.wait("document.querySelectorAll('[data-chart=accuracy] .values tbody tr').length") == 3
    page.shoot("watch-1280-light")
    assert page.complaints() == []


def test_watch_follows_a_run_as_it_goes_on(page: Page, address: str, folder: Path) -> None:
    live = shutil.copytree(folder / "two" / "a", folder / "live")
    for name in ("summary.json", "report.html", "certificate.json"):
        (live / name).unlink()
    metrics = live / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0])
    page.go(address)
    page.wait("document.querySelector('a.row')")
    page.go(address + row(page, "live"))
    page.wait("document.querySelector('main').innerText.includes('1 / 3')")
    time.sleep(0.2)
    with open(metrics, "ab") as file:
        file.write(lines[1])
    assert page.wait("document.querySelector('main').innerText.includes('2 / 3')", 10)
    assert page.js("return document.querySelectorAll('[data-chart=accuracy] circle').length") >= 2
    shutil.rmtree(live)


def test_compare_toggles_and_zooms_by_keys(page: Page, address: str) -> None:
    page.size(1280, dark=True)
    page.go(address + "#compare")
    page.wait("document.querySelectorAll('.side input[type=checkbox]').length === 3")
    page.js("document.querySelectorAll('.side input[type=checkbox]:not(:checked)').forEach((one) => one.click())")
    page.wait("document.querySelectorAll('[data-chart=accuracy] .legend button').length === 2")
    page.js("document.querySelector('[data-chart=accuracy] .legend button').focus()")
    page.keys(" ")
    assert page.js("return document.activeElement.getAttribute('aria-pressed')") == "false"
    assert page.js("return document.querySelectorAll('[data-chart=accuracy] path.line').length") == 1
    page.keys(" ")
    page.js("document.querySelector('[data-chart=accuracy] svg').focus()")
    page.keys("+")
    assert page.wait("!document.querySelector('[data-chart=accuracy] .reset').hidden")
    page.keys("-")
    assert page.wait("document.querySelector('[data-chart=accuracy] .reset').hidden")
    page.shoot("compare-1280-dark")
    assert page.complaints() == []


def test_plan_answers_and_hands_out_a_file(page: Page, address: str) -> None:
    page.size(1280)
    page.go(address + "#plan")
    page.wait("document.querySelector('#toml')")
    before = page.text("main table")
    page.js("const f = document.querySelector('#rounds'); f.value = 50; f.dispatchEvent(new Event('input'))")
    page.wait("document.querySelector('#toml')?.innerText.includes('rounds = 50')")
    assert page.text("main table") != before
    page.shoot("plan-1280-light")
    page.js("const f = document.querySelector('#budgets'); f.value = '-1'; f.dispatchEvent(new Event('input'))")
    assert page.wait("document.querySelector('[role=alert]')?.innerText.includes('positive')")
    assert [said for said in page.complaints() if "status of 400" not in said] == []


@pytest.mark.usefixtures("here")
def test_audit_of_dropped_files_fits_on_one_sheet(page: Page, address: str, folder: Path) -> None:
    page.size(1280)
    page.go(address + "#audit")
    page.wait("document.querySelector('#files')")
    names = [str(folder / "two" / "a" / name) for name in ("certificate.json", "ledger.sqlite")]
    page.driver.find_element("css selector", "#files").send_keys("\n".join(names))
    page.wait("document.querySelector('.verdict')", 60)
    assert "Matches" in page.text(".verdict")
    assert page.js("return !!document.querySelector('.simulated ~ .verdict')")  # said before any match
    assert "protected nobody" in page.text()
    page.js("document.querySelector('.term').click()")
    assert page.wait("!document.querySelector('.gloss').hidden")
    page.shoot("audit-1280-light")
    assert page.printed_pages() == 1
    assert page.complaints() == []


def test_every_page_can_be_used_at_400_pixels(page: Page, address: str) -> None:
    for dark, name in ((False, "watch"), (True, "compare"), (False, "plan"), (True, "audit")):
        page.size(400, dark=dark)
        page.go(f"{address}#{name}")
        page.wait("document.querySelector('main .split')")
        page.wait(f"document.title.startsWith('{name.capitalize()}')")
        assert page.js("return document.documentElement.scrollWidth") <= 400, name
        page.shoot(f"{name}-400-{'dark' if dark else 'light'}")


def test_a_report_draws_itself_from_one_file(page: Page, folder: Path) -> None:
    page.size(1280)
    page.go((folder / "two" / "a" / "report.html").as_uri())
    page.wait("document.querySelectorAll('svg').length >= 3")
    page.shoot("report-1280-light")
    assert page.js("return performance.getEntriesByType('resource').length") == 0
    assert page.complaints() == []
