"""The experiments of ACDP-pFSD: cells have their own names, and tables never fill a gap."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modicum.comparing.workers import players
from modicum.compute.client_batched.fused import FusedBackend
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.training.plain import Supervised
from modicum_bench.acdp_pfsd import choose
from modicum_bench.acdp_pfsd.__main__ import main
from modicum_bench.acdp_pfsd.cells import GROUPS, HOT, METHODS, SEEDS, Cell, Choice, Choices, read_choices, spec_of
from modicum_bench.acdp_pfsd.figures import draw_all
from modicum_bench.acdp_pfsd.letters import CHARACTERS, CLASSES, RENDERED, Glyphs, Letters, label_of
from modicum_bench.acdp_pfsd.play import Bench
from modicum_bench.acdp_pfsd.report import best_constant, both, gap_ratio, network_constants, report
from modicum_bench.acdp_pfsd.small import FEATURES, rendered
from modicum_bench.acdp_pfsd.together import DeferredOutputs
from modicum_bench.acdp_pfsd.workers import Place, Work, Workers, stacks


def test_cells_can_be_told_apart_and_built() -> None:
    cells = [cell for group in GROUPS.values() for cell in group()]
    assert len({cell.name for cell in cells}) == len(cells)
    choices = read_choices()
    for cell in cells:
        if cell.method != "acdp-pfsd-pretrained":
            spec_of(cell, choices.of(cell), None)
    with pytest.raises(UserError, match="unknown method"):
        spec_of(replace(cells[0], method="magic"), Choice(), None)
    with pytest.raises(UserError, match="no settings were chosen for mars/pfsd"):
        choices.of(Cell("mars", "pfsd"))


@pytest.mark.parametrize("setting", choose.SEARCHES)
def test_settings_come_from_a_seed_that_no_table_reports_with_equal_effort(setting: str) -> None:
    assert choose.SEED not in SEEDS
    trials = list(choose.candidates(setting))
    assert {cell.seed for cell, _ in trials} == {choose.SEED}
    assert len(set(Counter(cell.method for cell, _ in trials).values())) == 1
    assert len({(cell, repr(choice)) for cell, choice in trials}) == len(trials)


def test_plays_a_cell() -> None:
    cell = Cell("digits", "acdp-pfsd", clients=5, per_round=5, rounds=4)
    result = Bench().play(cell, read_choices().of(cell))
    assert result["name"] == cell.name
    assert 0 < result["epsilon"] < 50
    assert len(result["bounds"]) == 4
    assert 0 <= result["personalised"] <= 1
    json.dumps(result, allow_nan=False)


def test_cells_played_together_are_what_they_are_alone() -> None:
    """Runs of other seeds and bounds share the clients' training; one that trains otherwise is kept apart."""
    first = Cell("digits", "dp-pfsd", clients=5, per_round=5, rounds=3)
    cells = [first, replace(first, seed=1), replace(first, clip=2.0), replace(first, method="bandit", sigma=2.0)]
    bench, choice = Bench(), Choice(momentum=0.9)
    for cell, result in zip(cells, bench.play_together([(c, choice) for c in cells]), strict=True):
        alone = bench.play(cell, choice)
        assert result["bounds"] == alone["bounds"]
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-3)
        assert result["public_curve"] == pytest.approx(alone["public_curve"], abs=0.08)
    other = (first, replace(choice, lr=0.2))
    with pytest.raises(ValueError, match="not alike"):
        list(bench.play_together([(first, choice), other]))
    assert [len(w.items) for w in stacks([(c, choice) for c in cells] + [other], "cuda")] == [4, 1]


def test_what_is_played_alone_is_played_for_each_of_its_settings() -> None:
    """As trials of a search: one cell, several choices."""
    for cell, device in ((Cell("emnist", "dp-pfsd"), "cpu"), (Cell("cifar-10", "dp-pfsd"), "cuda")):
        trials = [(cell, Choice(lr=lr)) for lr in (0.1, 0.2)]
        assert [w.items for w in stacks(trials, device)] == [(trial,) for trial in trials]


def test_runs_that_look_at_outputs_themselves_are_played_alone() -> None:
    """Two methods that are made one after the other may stand at one address: that does not make them alike."""
    cells = [Cell("digits", "acdp-pfsd-faithful", clients=5, per_round=5, seed=seed) for seed in range(4)]
    assert [len(w.items) for w in stacks([(c, Choice()) for c in cells], "cuda")] == [1, 1, 1, 1]


def test_what_fails_or_has_no_time_left_is_said_and_the_rest_is_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def played(_: Bench, items: list[tuple[Cell, Choice]]) -> list[dict[str, Any]]:
        if items[0][0].seed == 1:
            raise ValueError("broken")
        return [{"name": cell.name, "seconds": 1.0} for cell, _ in items]

    monkeypatch.setattr(Bench, "play_together", played)
    works = [Work(((Cell("digits", "pfsd", seed=seed), Choice()),)) for seed in range(3)]
    place = Place("cpu", None, tmp_path, 10, None, None)
    with players() as hand_out:
        found = list(Workers(hand_out, place, math.inf).do(works))
        late = list(Workers(hand_out, place, 0.0).do(works))
    assert [work for work, _ in found] == [works[0], works[2]]
    assert late == []
    err = capsys.readouterr().err
    assert "seed1: Traceback" in err
    assert "broken" in err
    assert err.count("no time left") == 3


def test_rendered_characters_have_the_classes_of_emnist() -> None:
    assert [label_of(c) for c in "09AZabtcz"] == [0, 9, 10, 35, 36, 37, 46, 12, 35]
    assert {label_of(c) for c in CHARACTERS} == set(range(CLASSES))
    rng = torch.Generator().manual_seed(0)
    masks = torch.randint(256, (2, len(CHARACTERS), 40, 40), generator=rng, dtype=torch.uint8)
    glyphs = Glyphs(masks, masks[0, :10], torch.arange(10))
    x, y = Letters(glyphs, 1).batch(400)
    assert x.shape == (400, 1, 28, 28)
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert set(y.tolist()) == set(range(CLASSES))
    assert torch.equal(Letters(glyphs, 1).batch(400)[0], x)


def test_a_head_on_rendered_characters(tmp_path: Path) -> None:
    """Their features decide directions and, for a hot start, the first head."""
    with pytest.raises(UserError, match="no rendered characters at"):
        rendered(tmp_path)
    rng = np.random.default_rng(0)
    y = np.arange(470) % CLASSES
    x = rng.normal(size=(CLASSES, 64))[y] + 0.3 * rng.normal(size=(470, 64))
    np.savez(tmp_path / RENDERED, x=x.astype(np.float16), y=y.astype(np.uint8))
    found = rendered(tmp_path)
    assert found.geometry.size == FEATURES
    torch.testing.assert_close(found.x.norm(dim=1), torch.ones(470))
    cold, hot = (found.first_model(hot=hot)(found.x).argmax(1) == found.y for hot in (False, True))
    assert float(cold.float().mean()) < 0.1
    assert float(hot.float().mean()) > 0.9


def test_settings_of_a_cell() -> None:
    """A private method that was not searched for has DP-pFSD's; a variant has its own."""
    found = {"emnist/dp-pfsd": Choice(lr=1.0), "emnist-hot/dp-pfsd": Choice(lr=2.0), "emnist-hot": Choice(lr=3.0)}
    choices = Choices(found)
    assert choices.of(Cell("emnist", "aqc")).lr == 1.0
    assert choices.of(Cell("emnist", "aqc", variant="hot")).lr == 2.0
    assert choices.of(Cell("emnist", "pfsd", variant="hot")).lr == 3.0
    assert [Cell("emnist", "aqc", variant=v).hot_start for v in ("", "hot")] == [0, HOT]
    assert [Cell("svhn", "aqc", variant=v).steps for v in ("", "q20")] == [5, 20]
    assert (Cell("svhn", "aqc", model="cnn8").network, Cell("svhn", "aqc").network) == ("cnn8", "resnet18")


def test_a_smaller_network_and_a_hot_start_have_lines_of_their_own(tmp_path: Path) -> None:
    results = [made("acdp-pfsd", 0.9, variant="hot"), made("acdp-pfsd", 0.4, variant="plain")]
    small = {**made("acdp-pfsd", 0.3, model="cnn8"), "name": "svhn"}
    small["cell"] = {**small["cell"], "task": "svhn"}
    longer = {**small, "name": "longer", "cell": {**small["cell"], "variant": "q20"}, "personalised": 0.35}
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*results, small, longer]))
    lines = report(tmp_path).splitlines()
    assert any("Q = 20" in line and "35.00" in line for line in lines)
    assert any("hot start" in line and "90.00" in line for line in lines)
    assert any("as printed" in line and "40.00" in line for line in lines)
    assert any("cnn8" in line and "30.00" in line for line in lines)
    assert not any("here, ResNet-18" in line for line in lines)
    nothing = [line for line in lines if line.startswith("| | |  | here |")]
    assert len(nothing) == 7  # EMNIST at two σ, CIFAR-10 at three, SVHN at two
    assert all(line.count("not run") == 4 for line in nothing)


def made(method: str, value: float, seed: int = 0, **settings: Any) -> dict[str, Any]:
    cell = Cell("emnist", method, seed=seed, **settings)
    figures = dict.fromkeys(("personalised", "tuned", "global", "global_own", "validation", "public"), value)
    return {"cell": cell.to_dict(), "name": cell.name, "epsilon": 8.0, **figures}


def test_pictures_of_what_was_run(tmp_path: Path) -> None:
    curves = {"curve": {"1": [0.3, 0.2], "2": [0.4, 0.3]}, "bounds": [1.5, 1.4], "norms": [2.0, 1.9]}
    longer = made("acdp-pfsd", 0.4, model="cnn8", variant="q20") | curves
    longer["cell"]["task"] = "cifar-10"
    runs = [longer, made("pfsd", 0.9) | curves, made("aqc", 0.7, clients=100, shards="s1")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in runs))
    drawn = draw_all(tmp_path, tmp_path)
    assert [p.stem.removeprefix("acdp-pfsd-") for p in drawn] == [
        "emnist-sigma1",
        "cifar-10-sigma1",
        "shards-network",
    ]
    assert all(p.stat().st_size > 5000 for p in drawn)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--groups", "first,last"], "unknown group 'last'"),
        (["--stage", "choose", "--settings", "mnist"], "unknown setting 'mnist'"),
        (["--device", "gpu"], "the device 'gpu' is not there"),
        (["--groups", "sigmas", "--data-dir", "nowhere"], "dataset 'emnist-merge47': put"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a worker finds it."""
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


HEAD: dict[str, Any] = {"model": "components", "epsilon": 8.0}


def test_tables_say_what_was_not_run(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(made("dp-pfsd", 0.4, **HEAD)) + "\n")
    text = report(tmp_path)
    assert text == (tmp_path / "results.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| dp-pfsd | 40.00")]
    assert row == "| dp-pfsd | 40.00 | 40.00 | 40.00 | 40.00 | 8.00 | 1 |"
    for method in set(METHODS) - {"dp-pfsd"}:
        rows = [line for line in text.splitlines() if line.startswith(f"| {method} |")]
        assert rows
        assert all("not run" in line for line in rows)
    assert both([]) == "not run"
    assert both([made("aqc", 0.4), made("aqc", 0.6, 1)]) == " / ".join(["50.00 ± 14.1"] * 3) + " (2 seeds)"


def test_the_gap_of_ppo_over_that_of_the_best_constant() -> None:
    """The bound is judged on validation and public records, the gap on test records."""
    results = [made("dp-pfsd", 0.5), made("dp-pfsd", 0.7, clip=2.0), made("dp-pfsd", 0.9, clip=2.0, clients=100)]
    results[0] |= {"personalised": 0.8}
    constants = network_constants(results)
    assert {C for C, rows in constants.items() if rows} == {0.5, 2.0}
    assert best_constant(constants, "personalised") == best_constant(constants, "global") == 2.0
    free, agent = [made("pfsd", 0.9)], [made("acdp-pfsd", 0.6)]
    assert gap_ratio(free, agent, constants[2.0], "global") == pytest.approx(1.5)
    assert gap_ratio([made("pfsd", 0.6)], agent, constants[2.0], "global") is None
    assert best_constant({1.0: []}, "global") is None


def test_a_classroom_answers_when_gradients_are_asked_for() -> None:
    """Teachers' outputs, all at once, are what each would have given alone; read too early they are no numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    backend = FusedBackend(model)
    room, thetas = DeferredOutputs(backend, 3), torch.randn(4, backend.layout.dimension)
    records = [Batch(torch.randn(n, 1, 5, 5), {"y": torch.zeros(n, dtype=torch.int64)}) for n in (6, 6, 4, 6)]
    answers = [room.outputs(theta, batch.x) for theta, batch in zip(thetas, records, strict=True)]
    assert all(answer.isnan().all() for answer in answers)
    losses = Supervised().losses
    torch.testing.assert_close(room.gradients(thetas, records, losses), backend.gradients(thetas, records, losses))
    for theta, batch, answer in zip(thetas, records, answers, strict=True):
        torch.testing.assert_close(answer, backend.outputs(theta, batch.x))
