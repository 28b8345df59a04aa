"""One hostile silo neither stops nor captures a federation (R14): single attacks, each with what it did before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modicum.core.messages import Broadcast, Noised, NoiseFacts, Released, encode
from modicum.deploy.flower.coordinator import Coordinator
from modicum.deploy.silo.wire import Answer, Code
from modicum.errors import UserError
from modicum.federation import server as server_module
from modicum.federation.plausible import limits
from modicum.federation.records import read_records
from tests.hostile.stage import HONEST, HOSTILE, Attack, Scripted, coordinator, play, prepare, text, unit

Change = Callable[[Noised], Noised | Released]
FACTS = NoiseFacts(1e-30, 0.0, {})
ATTACKS: dict[str, Change] = {
    "no signals": lambda m: replace(m, signals={}),
    "a bit of -1e9": lambda m: replace(m, signals={"clip-bit": -1e9}),
    "a bit of 1e4": lambda m: replace(m, signals={"clip-bit": 1e4}),
    "another signal": lambda m: replace(m, signals={**m.signals, "square-norm": 0.5}),
    "an update of 3e38": lambda m: replace(m, update=torch.full_like(m.update, 3e38)),
    "an update that is no number": lambda m: replace(m, update=m.update * float("nan")),
    "an update far away": lambda m: replace(m, update=m.update + 1e4),
    "facts of its own": lambda m: Released(m.client, m.round, m.update, m.signals, FACTS, m.metrics),
    "a metric that nobody declared": lambda m: replace(m, metrics={**m.metrics, "owned": 1.0}),
    "a metric of 1e300": lambda m: replace(m, metrics={"accuracy": 1e300}),
    "no metric": lambda m: replace(m, metrics={}),
}


def doing(change: Change) -> Attack:
    return lambda _, message: Answer(encode(change(message)))


# The median buys no signals, so that to send none is honest there.
@pytest.mark.parametrize(
    ("method", "name"),
    [(m, n) for m in ("aqc", "cgm-median") for n in ATTACKS if (m, n) != ("cgm-median", "no signals")],
)
def test_an_impossible_answer_is_absent_and_named(
    tmp_path: Path, name: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends in the same model as without that silo, over restarts too, and says who did what when."""
    experiment = text("noise-aware", rounds=3, method=method)
    attacked = Scripted(prepare(tmp_path / "attacked", experiment), doing(ATTACKS[name]))
    with caplog.at_level(logging.WARNING, "modicum.server"):
        made, records = play(attacked, restart_every=1)
    without, _ = play(Scripted(prepare(tmp_path / "without", experiment), absent=True))
    assert torch.equal(made.model, without.model)
    assert [r.answered for r in records] == [3, 3, 3]
    assert made.server.state.retired == {}
    for record in read_records(tmp_path / "attacked" / "server" / "metrics.jsonl"):
        assert set(record.impossible) == {HOSTILE}
        assert set(record.released) == {"accuracy"}
        line = f"round {record.round + 1}: {HOSTILE} counts as absent: {record.impossible[HOSTILE]}"
        assert caplog.messages.count(line) >= 1


def test_the_report_names_who_it_was(tmp_path: Path) -> None:
    made, _ = play(Scripted(prepare(tmp_path, text(rounds=2)), doing(ATTACKS["an update of 3e38"])))
    made = coordinator(Scripted(tmp_path))
    made.finish()
    made.close()
    page = (tmp_path / "server" / "report.html").read_text()
    assert "z: in 2 of 2 rounds; first in round 0: its update has norm" in page


def test_honest_answers_are_all_taken(tmp_path: Path) -> None:
    _, records = play(Scripted(prepare(tmp_path, text(rounds=6))))
    assert [(r.answered, dict(r.impossible)) for r in records] == [(4, {})] * 6


def _everything_is_possible(*_: object) -> None:
    return None


@pytest.mark.parametrize("name", ["no signals", "a bit of -1e9", "an update of 3e38"])
def test_without_the_check_the_run_is_stopped_or_captured(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a server that takes whatever has the right shape."""
    monkeypatch.setattr(server_module, "objection", _everything_is_possible)
    attacked = Scripted(prepare(tmp_path / "attacked", text(rounds=3)), doing(ATTACKS[name]))
    without, _ = play(Scripted(prepare(tmp_path / "without", text(rounds=3)), absent=True))
    try:
        made, _ = play(attacked)
        distance = float((made.model - without.model).norm())
    except (KeyError, OverflowError):
        distance = float("inf")  # stopped
    assert not distance <= 1e3


def _as_reported(m: Noised, facts: NoiseFacts) -> Released:
    return Released(m.client, m.round, m.update, m.signals, FACTS if m.client == HOSTILE else facts, m.metrics)


def test_a_server_that_believed_a_variance_would_be_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: facts as reported. The hostile update then has nearly all of the weight."""
    experiment = text("noise-aware", rounds=1, method="dp-fedavg")

    def far(b: Broadcast, m: Noised) -> Answer:
        reach = made.server.public.multipliers[HOSTILE] * b.decision.bound * m.update.numel() ** 0.5
        return Answer(encode(replace(m, update=reach * unit(m.update))))

    shares = {}
    for believing in (False, True):
        carrier = Scripted(prepare(tmp_path / str(believing), experiment), far)
        made = coordinator(carrier)
        if believing:
            monkeypatch.setattr(Noised, "known", _as_reported)
        before = made.server.state.model
        made.step()
        step = made.server.state.model - before
        sent = made.server.public.multipliers[HOSTILE] * 0.5 * step.numel() ** 0.5
        shares[believing] = float(step @ unit(step)) / sent
        made.close()
    assert shares[False] < 0.35
    assert shares[True] > 0.99


def test_a_model_that_is_not_finite_is_not_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without privacy nothing bounds an update: the last good model stays, and nobody retires."""
    experiment = (
        text("mean", rounds=3, method="fedavg")
        .replace("clip = 0.5\n", "")
        .replace('view = "server-sees-messages"\n', "")
    )
    huge = doing(lambda m: replace(m, update=torch.full_like(m.update, 3e38)))

    class Clear(Scripted):
        def honest(self, b: Broadcast) -> Noised:
            return Noised(b.client, b.round, torch.full_like(b.model, 2e38), {}, dict.fromkeys(b.metrics, 0.5))

    made, records = play(Clear(prepare(tmp_path, experiment), huge))
    assert bool(torch.isfinite(made.model).all())
    assert [r.abandoned for r in records][-1]
    assert made.server.state.retired == {}
    monkeypatch.setattr(server_module, "finite", lambda _: True)  # mutant: it proposes an endless model
    with pytest.raises(AssertionError):
        play(Clear(prepare(tmp_path / "mutant", experiment), huge))


@pytest.mark.parametrize("code", [Code.BAD_MODEL, Code.BOUND_OUT_OF_RANGE, Code.NOISE_TOO_SMALL, Code.MALFORMED])
def test_nobody_retires_for_what_the_server_proposed(tmp_path: Path, code: Code) -> None:
    made, records = play(Scripted(prepare(tmp_path, text(rounds=3)), lambda *_: Answer(refused=code)))
    assert made.server.state.retired == {}
    assert [(r.answered, dict(r.refused)) for r in records] == [(3, {HOSTILE: str(code)})] * 3


def test_a_refusal_for_good_still_retires(tmp_path: Path) -> None:
    made, _ = play(Scripted(prepare(tmp_path, text(rounds=3)), lambda *_: Answer(refused=Code.BUDGET)))
    assert made.server.state.retired == {HOSTILE: "budget"}


def test_bounds_stay_where_everybody_agreed(tmp_path: Path) -> None:
    """A silo that always says as much as it may pushes C no further than the terms allow."""
    experiment = (
        text(rounds=30)
        .replace("seed = 3", "seed = 3\nbounds = [0.45, 0.55]")
        .replace("clip = 0.5", "clip = 0.5\nclip_lr = 2.0")
    )
    carrier = Scripted(prepare(tmp_path, experiment))
    made = coordinator(carrier)

    def most(b: Broadcast, m: Noised) -> Answer:
        return Answer(
            encode(
                replace(m, signals={"clip-bit": limits(made.silos._expected(b), b.model).signals["clip-bit"][1]})
            )
        )

    carrier.attack = most
    records = list(made.rounds())
    made.close()
    assert all(r.answered == 4 for r in records)
    assert all(0.45 <= r.bound <= 0.55 for r in records)
    assert made.server.state.policy["bound"] < 0.45 or made.server.state.policy["bound"] > 0.55  # it wanted to


@pytest.mark.parametrize("said", [{"records": 10**9}, {"budget": 1e6}, {"validation": 0}, {"budget": None}])
def test_a_card_decides_nothing(tmp_path: Path, said: dict[str, object]) -> None:
    """A silo that says otherwise than was agreed is named when a run begins, and left out when it continues."""
    experiment = text("weighted", rounds=4)
    with pytest.raises(UserError, match=r"silo 'z' has .* agreed are 300, 40 and 8"):
        coordinator(Scripted(prepare(tmp_path / "new", experiment), hello=said))
    carrier = Scripted(prepare(tmp_path / "old", experiment))
    made = coordinator(carrier)
    made.step()
    made.close()
    carrier.hello, carrier.joins = {**said, "shape": [9]}, Answer(refused=Code.FACTS_DIFFER)
    made = coordinator(carrier)
    assert {c.records for c in made.server.public.clients} == {300}
    assert made.server.state.aggregation == {"weights": dict.fromkeys((*HONEST, HOSTILE), 300.0)}
    list(made.rounds())
    made.close()


@pytest.mark.parametrize("said", [{"shape": [9]}, {"shape": [10**12]}, {"classes": 3}, {"simulation": True}])
def test_who_differs_from_all_others_is_named(tmp_path: Path, said: dict[str, object]) -> None:
    """Before anything of that shape is made; without the name nobody knew whom to ask."""
    with pytest.raises(UserError, match=r"silos differ in .*; unlike most are z: make them alike"):
        coordinator(Scripted(prepare(tmp_path, text()), hello=said))
    assert not (tmp_path / "server" / "kinds.json").exists()


def test_a_deployment_without_agreed_silos_says_what_to_write(tmp_path: Path) -> None:
    folder = prepare(tmp_path, text())
    carrier = Scripted(folder)
    path = folder / "experiment.toml"
    path.write_text(path.read_text().split("[run.silos]")[0])
    with pytest.raises(UserError, match=r"silo 'a' is not both agreed on .* \[run.silos\] a = \{ records"):
        coordinator(carrier)


def test_the_scripted_silos_are_those_of_the_terms(tmp_path: Path) -> None:
    made: Coordinator = coordinator(Scripted(prepare(tmp_path, text())))
    assert [f.name for f in made.join.facts] == [*HONEST, HOSTILE]
    made.close()


def test_a_card_of_megabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mutant, a card that is read whatever its length, lets the run begin."""
    folder, much = prepare(tmp_path, text(rounds=1)), {"more": "x" * (2 << 20)}
    with pytest.raises(UserError, match="'z' introduces itself in a way"):
        coordinator(Scripted(folder, hello=much))
    monkeypatch.setattr("modicum.deploy.flower.card.SMALL", 1 << 30)
    coordinator(Scripted(folder, hello=much)).close()
