"""The report is one file that needs nothing else, and no name in a run becomes a part of it."""

from __future__ import annotations

import re
from pathlib import Path

from modicum.federation.records import RoundRecord
from modicum.report.inline import SCRIPTS, as_data, asset, drawn, scripts
from modicum.report.view import RunView
from tests.studio.conftest import NASTY

EVIL = "</script><script>alert(1)</script><!--"


def record(round: int = 0, **more: object) -> RoundRecord:
    plain: dict[str, object] = {"bounds": {"a": 1.0, "b": 2.0}, "answered": 1, "refused": {}, "abandoned": False}
    return RoundRecord(round=round, reserved=0.5, **{**plain, **more})  # type: ignore[arg-type]


def test_a_report_is_one_small_file_without_outside_parts(made: Path) -> None:
    page = (made / "two" / "a" / "report.html").read_text()
    assert len(page.encode()) < 1.5e6
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert not re.search(r"\bimport\b.*from|\bfetch\(|https?://(?!www\.w3\.org)", page)
    assert "default-src 'none'" in page
    assert "Simulated ground truth" in page


def test_all_scripts_are_inlined_once_and_nothing_is_left_to_import() -> None:
    joined = scripts()
    for name in SCRIPTS:
        for function in re.findall(r"^export (?:async )?function (\w+)", asset(name), re.MULTILINE):
            assert len(re.findall(rf"^(?:async )?function {function}\(", joined, re.MULTILINE)) == 1
    assert not re.search(r"^(import|export) ", joined, re.MULTILINE)
    names = re.findall(r"^(?:const|function|let) (\w+)", joined, re.MULTILINE)
    assert len(names) == len(set(names)), "two files use one name: joined they would not run"


def test_names_cannot_leave_the_data() -> None:
    view = RunView().take([record(refused={EVIL: "budget"}, impossible={NASTY: EVIL}, void=EVIL)])
    page = drawn(view.to_dict(), "runReport", "")
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert as_data({"a": EVIL}).count("<") == 0


def test_scripts_never_read_text_as_markup() -> None:
    """One way to make elements, by text nodes; a mutant with innerHTML would be found here."""
    studio = Path(__file__).parents[2] / "src" / "modicum" / "studio" / "assets"
    texts = [asset(name) for name in SCRIPTS] + [path.read_text() for path in studio.glob("*.js")]
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc")
    assert not any(forbidden.search(text) for text in texts)
    assert forbidden.search("box.innerHTML = name")


def test_who_refused_and_was_not_asked_again_is_retired() -> None:
    rounds = [
        record(0, refused={"a": "bad-model"}),
        record(1, refused={"b": "plan-exhausted"}, answered=1),
        record(2, bounds={"a": 1.0}, answered=0),
    ]
    points = RunView().take(rounds).to_dict()["points"]
    assert [(p["retired"], p["refused"], p["absent"]) for p in points] == [(0, 1, 0), (1, 1, 0), (1, 0, 1)]


def test_traffic_is_told_by_round_and_party_and_points_stay_small() -> None:
    many = {f"silo-{i:04}": {"bytes_up": float(i), "bytes_down": 1.0, "seconds": 0.5} for i in range(500)}
    bounds = {f"client-{i:05}": 1.0 + i % 3 for i in range(10_000)}
    budgets = {name: (1.0, 8.0)[i % 2] for i, name in enumerate(bounds)}
    shown = RunView(budgets).take([record(0, parties=many, bounds=bounds, answered=9_000)]).to_dict()
    assert shown["parties"][0] == {"name": "silo-0499", "bytes_up": 499.0, "bytes_down": 1.0, "seconds": 0.5}
    assert (len(shown["parties"]), shown["parties_in_all"]) == (40, 500)
    assert shown["points"][0]["absent"] == 1_000
    assert len(as_data(shown)) < 10_000
