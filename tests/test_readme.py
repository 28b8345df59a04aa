"""What the front page and the guides say is run and compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import modicum
from modicum.config.fields import describe
from modicum.config.read import check
from modicum.config.schema import DataConfig, MetricConfig, PrivacyConfig, RunConfig
from modicum.config.source import parse
from modicum.models import names

ROOT = Path(__file__).parents[1]


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_the_five_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("README.md", "python")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    exec(code, space)
    run = space["run"]
    assert isinstance(run, modicum.Run)
    assert run.accuracy > 0.7
    assert 2.9 < run.certificate.epsilon("client-07") <= 3.0
    assert run.folder.parent == Path("runs")
    assert modicum.verify(run.folder).matches


def test_the_lines_of_the_page_on_comparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/compare.md", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    space: dict[str, Any] = {}
    exec(code, space)
    assert [row["method"] for row in space["rows"]] == ["dp-sgd", "dp-sgd", "fedavg", "fedavg"]


def test_the_columns_of_the_guide_are_valid() -> None:
    (text,) = [block for block in blocks("docs/own-data.md", "toml") if "columns" in block]
    columns = check(parse(text + '[method]\nname = "dp-sgd"\n', "guide")).data.columns
    assert columns["sex"].categories == ("f", "m")


def test_the_file_of_the_guide_is_valid() -> None:
    text, *_ = blocks("docs/config.md", "toml")
    assert check(parse(text, "guide")).method.lr == 4.0


@pytest.mark.parametrize("table", [DataConfig, PrivacyConfig, RunConfig, MetricConfig])
def test_the_guide_has_every_setting(table: type) -> None:
    guide = "".join((ROOT / "docs" / name).read_text() for name in ("config.md", "config-run.md"))
    for info in describe(table):
        assert re.search(rf"^\| `{info.name}` \| .*\| {re.escape(info.help)} \|$", guide, re.MULTILINE), info.name


def test_the_guide_has_every_model() -> None:
    guide = (ROOT / "docs/config.md").read_text()
    assert all(f"| `{name}` |" in guide for name in names())


def test_public_names_exist() -> None:
    for name in modicum.__all__:
        assert getattr(modicum, name) is not None
        assert name in dir(modicum)
    with pytest.raises(AttributeError):
        modicum.nothing  # noqa: B018
