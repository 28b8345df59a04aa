"""Methods of other packages: found by name, named in the certificate, and no reason to crash where broken."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modicum.cli import run as command_line
from modicum.cli.app import app
from modicum.config import read
from modicum.errors import UserError
from modicum.methods import METHODS, DpSgd, method, method_names
from modicum.methods.installed import all_installed

CODE = '''
"""A method from elsewhere."""
from dataclasses import dataclass
from modicum.methods import Composed
from modicum.parts.options import option
from modicum.policies import Fixed


@dataclass(frozen=True)
class OwnBound(Fixed):
    pass


@dataclass(frozen=True, kw_only=True)
class Acme:
    """Somebody else's method."""

    clip: float = option(0.5, "the bound")

    def build(self, setting):
        return Composed(OwnBound(self.clip), name="acme").build(setting)


nothing = 3
'''
FILE = """
[data]
name = "digits"
clients = 2

[method]
name = "acme"
clip = 0.25

[run]
rounds = 1
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with these entry points where Python looks for packages."""
    made: list[str] = []

    def put(package: str, entries: dict[str, str], code: str = CODE) -> None:
        site = tmp_path / f"site-{package}"
        about = site / f"{package}-1.2.dist-info"
        about.mkdir(parents=True)
        (site / f"{package}.py").write_text(code)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {where}" for name, where in entries.items()]
        (about / "entry_points.txt").write_text("[modicum.methods]\n" + "\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(site)
        made.append(package)

    yield put
    for package in made:
        sys.modules.pop(package, None)


def test_is_found_by_its_name(install: Install, tmp_path: Path) -> None:
    install("acme_fl", {"acme": "acme_fl:Acme"})
    assert method_names() == (*METHODS, "acme")
    assert "acme_fl" not in sys.modules  # a name is known before any code is run
    assert type(method("dp-sgd")) is DpSgd
    assert "acme_fl" not in sys.modules
    spec = method("acme", clip=0.25)
    assert type(spec).__module__ == "acme_fl"
    (tmp_path / "x.toml").write_text(FILE)
    assert read(tmp_path / "x.toml").method == spec
    with pytest.raises(UserError, match="has no setting 'size': it has clip"):
        method("acme", size=3)


def test_the_commands_name_the_package(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme_fl", {"acme": "acme_fl:Acme"})
    listed = {line.split()[0]: line for line in printed(capsys, "methods").splitlines() if line}
    assert listed["acme"].endswith("Somebody else's method. [acme_fl 1.2]")
    assert "[" not in listed["dp-sgd"]
    (entry,) = [e for e in json.loads(printed(capsys, "methods", "--json")) if e["name"] == "acme"]
    assert entry["package"] == "acme_fl 1.2"
    assert "In Python: acme_fl.Acme(…)" in printed(capsys, "methods", "acme")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command_line(app, list(arguments)) == 0
    return capsys.readouterr().out


def test_a_run_names_its_parts_as_foreign(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("acme_fl", {"acme": "acme_fl:Acme"})
    (tmp_path / "x.toml").write_text(FILE)
    printed(capsys, "run", str(tmp_path / "x.toml"), "--out", str(tmp_path / "run"), "--json")
    certificate = (tmp_path / "run" / "certificate.json").read_text()
    assert "method acme_fl.Acme" in certificate
    assert "policy acme_fl.OwnBound" in certificate


BROKEN = {
    "raises": ({"acme": "acme_fl:Acme"}, "raise RuntimeError('not\\ntoday')", r"RuntimeError: not\): repair"),
    "missing": ({"acme": "acme_fl:Other"}, CODE, "AttributeError"),
    "no method": ({"acme": "acme_fl:nothing"}, CODE, "it is no dataclass with build"),
    "clash": ({"dp-sgd": "acme_fl:Acme"}, CODE, "Modicum ships a method of that name"),
    "posing as ours": ({"acme": "modicum.methods.dp_sgd:DpSgd"}, CODE, "claims to be Modicum's own"),
}


@pytest.mark.parametrize(("entries", "code", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_is_a_line_and_no_crash(
    entries: dict[str, str], code: str, said: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("acme_fl", entries, code)
    with caplog.at_level(logging.WARNING, "modicum.methods"):
        assert all_installed(METHODS) == {}
    (record,) = caplog.records
    assert "of acme_fl 1.2 cannot be used" in record.getMessage()
    assert "\n" not in record.getMessage()
    (name,) = entries
    if name in METHODS:
        assert type(method(name)) is METHODS[name]
    else:
        with pytest.raises(UserError, match=said):
            method(name)


def test_two_packages_with_one_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("acme_fl", {"acme": "acme_fl:Acme"})
    install("other_fl", {"acme": "other_fl:Acme"})
    with caplog.at_level(logging.WARNING, "modicum.methods"):
        assert all_installed(METHODS) == {}
    with pytest.raises(UserError, match="another package has a method of that name"):
        method("acme")


def test_without_the_objection_a_package_would_pass_as_ours(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    from modicum.methods import installed

    install("acme_fl", {"mine": "modicum.methods.dp_sgd:DpSgd", "dp-sgd": "acme_fl:Acme"})
    monkeypatch.setattr(installed, "_objection", lambda *_: None)
    assert set(all_installed(METHODS)) == {"mine", "dp-sgd"}
