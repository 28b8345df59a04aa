"""modicum attack: one table, one page, goes on where it was, and says in one line what it cannot do."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from modicum.attacks.campaign import stage_of
from modicum.attacks.ceilings import NOTHING
from modicum.attacks.images import Likeness
from modicum.attacks.membership.evidence import Auc, rate_at
from modicum.attacks.order import EFFORTS, INVERSIONS, MEMBERSHIP, Effort, Order
from modicum.attacks.outcome import Membership, Quality, Reconstruction
from modicum.attacks.reasons import checks
from modicum.cli import run as command
from modicum.cli.app import app
from modicum.core.setting import Setting
from modicum.federation.experiment import Federation
from modicum.methods import Censor, DpSgd, FedAvg, Soteria
from tests.attacks.stage import federation, play

SETTING = Setting(clients=2, per_round=2, rounds=1)
CONFIG = """
[data]
name = "digits"
clients = 700
partition = "iid"

[privacy]
budgets = {budget}

[model]
name = "{model}"

[method]
name = "dp-sgd"
batch = 2
steps = 1

[run]
rounds = 2
per_round = 4
evaluate_every = 100
transcript = {transcript}
"""


def recorded(folder: Path, budget: str = "4.0", model: str = "mlp", transcript: str = "true") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "e.toml"
    config.write_text(CONFIG.format(budget=budget, model=model, transcript=transcript))
    assert command(app, ["run", str(config), "--out", str(folder / "run"), "--json"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("private"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(dlg=8, starts=1, ig=8, gi=8, seeds=2, bayes=150, shadows=4)
    monkeypatch.setitem(EFFORTS, "quick", effort)


def test_a_table_a_page_and_figures(private: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert command(app, ["attack", str(private), "--attack", "bayes,ig,matched", "--targets", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by = {o["attack"]: o for o in told["outcomes"]}
    bayes = by["bayes"]
    assert bayes["reference"]["psnr"] > bayes["floor"]["psnr"] + 10  # it works where nothing is hidden,
    assert bayes["quality"]["psnr"] < bayes["floor"]["psnr"] + 5  # and hardly behind ε = 4
    assert bayes["quality"]["hits_low"] <= bayes["ceiling"] < 1
    assert by["matched"]["ceilings"][0] < 0.2
    assert not by["matched"]["rates"][0]["supported"]
    assert by["matched"]["members"] == 16  # of the clients that sent something
    held = {check["name"]: check["holds"] for check in told["checks"]}
    assert [held[name] for name in "bdef"] == [True] * 4  # it falls with noise, knows it, stays under the ceiling
    shares, psnrs = zip(*bayes["falls"], strict=True)
    assert shares == (0.0, 0.01, 0.1, 1.0)
    assert psnrs[0] == bayes["reference"]["psnr"] > psnrs[-1]
    page = (private / "attacks" / "attacks.html").read_text()
    assert "data:image/png;base64" in page
    assert "this is what was tried" in page
    assert "Would a failure mean anything?" in page
    assert command(app, ["attack", str(private), "--attack", "bayes,ig,matched", "--targets", "2"]) == 0
    said = capsys.readouterr()
    text, last = said.out, said.err.splitlines()[-1]
    total = 4 * (150 + 8) + 8  # four tries of each inversion, and one message after another
    assert last == f"step={total} steps={total}"
    assert "unsupported" in text
    assert "The attacker brings 187 records" in text


def test_who_attacks_a_real_run_is_told_to_keep_the_page(
    private: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The certificate says whether it was: the file that a deployment recorded may read like a simulation's."""
    kept = private / "certificate.json"
    before = kept.read_text()
    order = ["attack", str(private), "--attack", "matched", "--json"]
    for simulated in (True, False):
        told = json.loads(before)
        told["noise"]["simulation"] = simulated
        kept.write_text(json.dumps(told))
        assert command(app, order) == 0
        assert ("Keep RUN/attacks" in capsys.readouterr().err) is not simulated
    kept.write_text(before)


def test_it_goes_on_where_it_was(
    private: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = ["attack", str(private), "--attack", "bayes,quantile", "--targets", "3", "--json", "--no-reference"]
    assert command(app, order) == 0
    first = capsys.readouterr().out

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was found before")

    monkeypatch.setitem(INVERSIONS, "bayes", replace(INVERSIONS["bayes"], search=never))
    monkeypatch.setitem(MEMBERSHIP, "quantile", replace(MEMBERSHIP["quantile"], score=never))
    assert command(app, order) == 0
    assert capsys.readouterr().out == first
    with pytest.raises(AssertionError, match="found before"):
        command(app, [*order, "--seed", "1"])


BAD = {
    "no config.toml": ["attack", "{there}/nothing"],
    "unknown attack 'dgl'": ["attack", "{run}", "--attack", "dgl"],
    "no attack is named": ["attack", "{run}", "--attack", " , "],
    "at least 1 target": ["attack", "{run}", "--targets", "0"],
    "unknown preset": ["attack", "{run}", "--preset", "slow"],
    "Invalid value for '--party'": ["attack", "{run}", "--party", "client-00"],
    "sees more than the server": ["attack", "{run}", "--party", "aggregator"],
    "is not a valid integer": ["attack", "{run}", "--targets", "many"],
    "device": ["attack", "{run}", "--device", "abacus"],
    "there is no transcript": ["attack", "{bare}"],
    "is damaged": ["attack", "{damaged}"],
    "another model": ["attack", "{other}"],
}


@pytest.fixture(scope="module")
def places(private: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    there = tmp_path_factory.mktemp("bad")
    for name in ("bare", "damaged", "other"):
        (there / name).mkdir()
        text = (private / "config.toml").read_text()
        (there / name / "config.toml").write_text(text.replace('"mlp"', '"logistic"') if name == "other" else text)
    (there / "damaged" / "transcript.bin").write_bytes(b"nonsense\n" * 9)
    (there / "other" / "transcript.bin").write_bytes((private / "transcript.bin").read_bytes())
    return {"there": str(there), "run": str(private), **{n: str(there / n) for n in ("bare", "damaged", "other")}}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_line(message: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert command(app, [part.format(**places) for part in BAD[message]]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def quality(psnr: float, hits_low: float = 0.0) -> Quality:
    return replace(Quality.of([Likeness(0.1, psnr, None)]), hits_low=hits_low)


def test_what_may_be_said_of_an_inversion() -> None:
    """(f) and (a): a failure means something only where the attack works, and where no search would do better."""
    base = Reconstruction("ig", 1, 1, quality(11), 1.0, quality(11), None, quality(30), 1.0, 0.5, 0.1)
    assert base.verdict == "at the floor: what it needs is not in the messages"
    assert "shows nothing here" in replace(base, reference=quality(11.5)).verdict
    assert "search failed" in replace(base, missing=0.0).verdict
    assert "says nothing" in replace(base, reference=None).verdict
    assert replace(base, quality=quality(20)).verdict == "leaks"
    assert replace(base, quality=None).verdict == "not tried"
    assert replace(base, quality=quality(20, hits_low=0.6)).over_ceiling
    assert not base.over_ceiling


def test_whether_a_failure_would_mean_anything() -> None:
    """Each of the six questions can be answered no, and is not answered where nothing was asked."""
    good = Reconstruction(
        "ig",
        2,
        1,
        quality(11),
        1.0,
        quality(11),
        quality(9),
        quality(30),
        1.0,
        0.5,
        0.1,
        ((0, 30), (0.1, 20), (1, 11)),
    )
    bad = replace(
        good,
        missing=0.0,
        falls=((0.0, 11.0), (1.0, 15.0)),
        control=quality(20),
        quality=quality(11, hits_low=0.6),
        reference=quality(11),
    )
    nothing = replace(good, quality=None, ceiling=1.0)
    sound, open_ = DpSgd().build(SETTING).mechanism, FedAvg().build(SETTING).mechanism
    assert [c.holds for c in checks([good], sound, ["ig", "bayes"])] == [True] * 6
    assert [c.holds for c in checks([bad], sound, ["ig"])] == [False] * 6
    assert [c.holds for c in checks([nothing], open_, ["matched"])] == [None, None, None, True, None, None]
    for method, needed in ((Soteria(), "ig-adaptive"), (Censor(), "lengths")):
        defence = method.build(SETTING).mechanism
        assert checks([good], defence, ["bayes"])[3].answer == f"add {needed}"
        assert checks([good], defence, [needed])[3].holds


def test_what_may_be_said_of_membership() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.normal(2, 1, 20_000), rng.normal(0, 1, 20_000)
    rate = rate_at(members, others, 0.01)
    base = Membership("lira", 1, 1, Auc(0.9, 0.8, 1.0), (rate,), (1.0,), 0.0, None, Auc(0.5, 0.4, 0.6), None)
    assert base.verdict == "leaks"
    assert not base.over_ceiling
    assert replace(base, ceilings=(0.02,)).over_ceiling
    assert replace(base, claimed=1.0, epsilon_lower=1.2).over_ceiling
    assert "not fair" in replace(base, fair=Auc(0.7, 0.6, 0.8)).verdict
    assert "inverted" in replace(base, auc=Auc(0.3, 0.2, 0.4)).verdict
    assert "so many records" in replace(base, auc=Auc(0.5, 0.4, 0.6)).verdict
    assert NOTHING.hits(0.0) == 1.0


def test_targets_are_of_one_kind(tmp_path: Path) -> None:
    """Of clients that differ in records, two that are alike; of none alike, one client's in several rounds."""
    for sizes, expected in (((3, 2, 3, 4), ["client-00", "client-02"]), ((3, 2, 4), ["client-01", "client-01"])):
        whole = federation(1, sum(sizes), side=None, budget=8.0).data
        ends = np.cumsum([0, *sizes])
        clients = tuple(
            replace(whole.clients[0], name=f"client-{i:02d}", train=whole.clients[0].train.take(np.arange(a, b)))
            for i, (a, b) in enumerate(pairwise(ends))
        )
        fed = Federation(replace(whole, clients=clients), (8.0,) * len(sizes))
        run = play(DpSgd(batch=None, steps=1, lr=0.1), fed, tmp_path / str(len(sizes)), model="mlp", rounds=3)
        stage = stage_of(
            run.experiment,
            run.seen.seen,
            Order(("bayes",), 2, reference=len(sizes) == 3),
            tmp_path / f"found-{len(sizes)}",
        )
        assert [o.sender for o in stage.chosen] == expected
        one = stage.outcome("bayes").to_dict()
        assert one["quality"] is not None
        assert (one["control"] is None) is (len(set(expected)) == 1)
