"""What all tests share."""

from __future__ import annotations

from typing import Any

NO_BROWSER = "no browser here"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was not looked at: a green run without a browser has seen no page."""
    missed = [r for r in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(r.longrepr)]
    if missed:
        terminalreporter.write_line(
            f"{len(missed)} tests of pages were SKIPPED: {NO_BROWSER} (Debian: chromium, chromium-driver; "
            "Python: selenium)"
        )
