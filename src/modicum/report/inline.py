"""Style, scripts and data put inside a page, so that one file is all there is: no network, no build step.

The studio serves the same files one by one; here imports and exports between them are taken out, and they follow
one another in one module.
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("dom.js", "scales.js", "charts.js", "run_view.js", "compare_view.js")
# Nothing may be fetched, sent or embedded, whatever stands in the page.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
)


@cache
def asset(name: str) -> str:
    """The text of a file that reports and studio share."""
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def scripts() -> str:
    """All shared scripts as one module."""
    joined = "\n".join(asset(name) for name in SCRIPTS)
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", joined, flags=re.MULTILINE), flags=re.MULTILINE)


def as_data(value: Any) -> str:
    """JSON that cannot end the script element that it stands in, nor begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def drawn(value: Any, call: str, instead: str) -> str:
    """A place that the script `call(host, data)` draws `value` into; `instead` is for readers without scripts."""
    return (
        f'<div id="drawn"></div><noscript>{instead}</noscript>'
        f'<script type="application/json" id="data">{as_data(value)}</script>'
        f'<script type="module">{scripts()}\n'
        f'{call}(document.getElementById("drawn"), JSON.parse(document.getElementById("data").textContent));'
        "</script>"
    )


def page(title: str, parts: list[str]) -> str:
    """A whole page of its parts; empty ones leave no trace."""
    body = "\n".join(part for part in parts if part)
    style = asset("style.css") + asset("charts.css")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)} · Modicum</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style>'
        f'</head>\n<body><main class="report"><h1>{escape(title)}</h1>\n{body}\n</main></body></html>\n'
    )
