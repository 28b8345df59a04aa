"""A look: figures within their errors, and a training whose certificate has them within its budget."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import modicum as mo
from modicum.cli.app import app
from modicum.config import experiment, read, to_toml
from modicum.core.statistics import ASKED, Questions
from modicum.data.asked import AskedColumn
from modicum.data.look import Look, figures
from modicum.errors import UnsoundError, UserError
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import set_up
from modicum.preparing.look import finish, look
from modicum.privacy.certificate import Certificate
from modicum.privacy.lifetime import DrawRefused, Filter
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.planning import lifetime_for
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.spec import Unit
from modicum.privacy.verify import verify
from modicum.runs import carry_out

TEXT = """
[data]
csv = "table.csv"
client_column = "site"
label_column = "ill"
classes = 2
test = 0.1
{uses}
[data.columns]
age = {{ range = [20, 90], fill = 55 }}
pressure = {{ range = [80, 200], fill = 120 }}
pain = {{ categories = ["none", "some", "much"] }}
{more}
[privacy]
budgets = 3.0
{privacy}
[method]
name = "dp-sgd"
view = "{view}"
{method}
[run]
rounds = 3
secure_aggregation = "{masks}"
"""
SITES, EACH = ("north", "south", "west"), 200


def write(
    folder: Path, uses: str = "", more: str = "", privacy: str = "", method: str = "", sums: bool = True
) -> Path:
    """Three sites' table, where pressure follows age and a tenth of it is missing; and an experiment file."""
    draw = np.random.default_rng(5)
    lines = ["site,age,pressure,pain,ill"]
    for site in SITES:
        for _ in range(EACH):
            age = draw.normal(60, 8)
            pressure = "" if draw.random() < 0.1 else f"{1.5 * age + 40 + draw.normal(0, 4):.1f}"
            pain, ill = draw.choice(["none", "some", "much"], p=[0.6, 0.3, 0.1]), int(draw.random() < 0.25)
            lines.append(f"{site},{age:.2f},{pressure},{pain},{ill}")
    (folder / "table.csv").write_text("\n".join(lines))
    view, masks = ("secure-aggregation", "protocol") if sums else ("server-sees-messages", "ideal")
    text = TEXT.format(uses=uses, more=more, privacy=privacy, method=method, view=view, masks=masks)
    (folder / "e.toml").write_text(text)
    return folder / "e.toml"


def train(file: Path, folder: Path) -> Certificate:
    config, files = read(file), RunFolder(folder)
    files.make(fresh=True)
    carry_out(experiment(config), files, to_toml(config))
    return Certificate.read(folder / "certificate.json")


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Look]:
    folder = tmp_path_factory.mktemp("look")
    file = write(folder, uses='standardise = "first"')
    return folder, look(file, 2.0, statistics=tuple(ASKED), folder=folder / "first")


def test_figures_lie_within_their_errors_of_the_truth(taken: tuple[Path, Look]) -> None:
    """Four standard deviations of ten figures: a false alarm in 1,500 seeds, and this is one."""
    _, found = taken
    age, pressure, pain = found.columns
    assert age.mean is not None
    assert age.deviation is not None
    assert abs(age.mean.value - 60) < 4 * age.mean.error + 1
    assert age.mean.error < 3
    assert abs(pressure.missing.value - 0.1) < 4 * pressure.missing.error + 0.03
    assert pain.bars == pytest.approx([324, 162, 54], abs=4 * pain.bar_error + 30)
    assert abs(found.classes[1].value - 135) < 4 * found.classes[1].error + 20
    assert found.correlations[0][1].value > 0.3
    median = next(q for q in age.quantiles if q.share == 0.5)
    assert median.low - 1 < 60 < median.high + 1
    assert all(q.low <= q.value <= q.high for one in (age, pressure) for q in one.quantiles)


def test_errors_cover_what_they_say() -> None:
    """Of 300 draws of the noise two standard deviations hold about 95% of the time, half of one far less."""
    asked = Questions(("classes", "moments", "histograms", "correlations"), 8, 2, 2)
    rng, columns = np.random.default_rng(0), [AskedColumn("a", 0, 10), AskedColumn("b", -1, 1)]
    x = np.clip(rng.normal(0.5, 0.15, (4000, 2)), 0, 1)
    u = 2 * x - 1
    bars = np.stack([np.histogram(c, 8, (0, 1))[0] / len(x) for c in x.T])
    products = [(u[:, 0] * u[:, 1]).mean()]
    exact = np.concatenate([[0.5, 0.5], [0, 0], u.mean(0), (u**2 - 0.5).mean(0), bars.flatten(), products])
    noise = dict.fromkeys(asked.blocks, 0.01)
    truth = (2000.0, 10 * x[:, 0].mean(), 10 * x[:, 0].std(), float(np.corrcoef(x.T)[0, 1]), 5.0)
    hits, tight = np.zeros(5), np.zeros(5)
    for _ in range(300):
        found = figures(exact + rng.normal(0, 0.01, exact.size), noise, asked, columns, 4000)
        a = found["columns"][0]
        one = (found["classes"][0], a.mean, a.deviation, found["correlations"][0][1])
        off = [abs(f.value - t) / f.error for f, t in zip(one, truth, strict=False)]
        median = next(q for q in a.quantiles if q.share == 0.5)
        middle = 10 * np.median(x[:, 0])
        hits += [*(o <= 2 for o in off), median.low - 0.05 <= middle <= median.high + 0.05]
        tight += [*(o <= 0.5 for o in off), 0]
    assert (hits >= 0.90 * 300).all(), hits / 300
    assert (tight[:4] <= 0.5 * 300).all()


def test_the_training_states_the_total_and_verify_finds_it(taken: tuple[Path, Look]) -> None:
    folder, found = taken
    certificate = train(folder / "e.toml", folder / "training")
    line = certificate.clients["north"]
    assert line.before == {f"look:{found.run}": pytest.approx(2.0, abs=1e-3)}
    assert 2.9 < line.epsilon <= 3.0
    assert "released before" in line.meaning
    assert verify(folder / "training").matches
    config = read(folder / "e.toml")
    age = config.data.columns["age"]
    assert (age.mean, age.deviation) == (found.columns[0].mean.value, found.columns[0].deviation.value)  # type: ignore[union-attr]


def test_a_certificate_that_forgets_the_look_is_caught(taken: tuple[Path, Look]) -> None:
    folder, _ = taken
    train(folder / "e.toml", folder / "forged")
    path = folder / "forged" / "certificate.json"
    value = json.loads(path.read_text())
    for terms in value["terms"]:
        del terms["before"]
    path.write_text(json.dumps(value))
    assert not verify(folder / "forged").matches


def test_what_the_columns_become_follows_from_the_look(taken: tuple[Path, Look]) -> None:
    """A look of other figures gives other columns; without one they stay as they were declared."""
    folder, found = taken
    plain = read(folder / "e.toml", looks=False).data.columns
    moved = {**found.to_dict()}
    moved["columns"][0]["mean"]["value"] += 1
    other = Look.from_dict(json.loads(json.dumps(moved)))
    for use in ("standardise", "impute"):
        assert found.refined(plain, use) != plain
        assert found.refined(plain, use)["age"] != other.refined(plain, use)["age"]
        assert found.refined(plain, use)["pain"] == plain["pain"]
    low, high = found.refined(plain, "ranges")["age"].range or (0, 0)
    assert 20 <= low < high <= 90
    assert found.weights()[1] > found.weights()[0]


def test_one_and_all_uses_cost_the_look_once(tmp_path: Path) -> None:
    file = write(
        tmp_path, 'standardise = "l"\nimpute = "l"', privacy='looks = ["l"]', more="[task]\nweights = 'l'"
    )
    look(file, 1.0, folder=tmp_path / "l")
    config = read(file)
    assert len(config.looks) == 1
    assert len(config.task.options["weights"]) == 2
    plans = set_up(experiment(config), SimulatedNoise(0)).plans
    assert all(len(plan.before) == 1 for plan in plans.values())
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert read(again).looks == config.looks
    assert read(again).data == config.data


def test_a_sampled_training_needs_a_plan_from_before_the_look(tmp_path: Path) -> None:
    file = write(tmp_path, 'standardise = "l"', method="batch = 20", sums=False)
    look(file, 1.0, folder=tmp_path / "l")
    assert set_up(experiment(read(file)), SimulatedNoise(0)).plans["north"].before
    with pytest.raises(UnsoundError, match="draws its records at random"):
        set_up(experiment(read(file, ["run.rounds=4"])), SimulatedNoise(0))
    for fewer in (["data.test=0.6"], ["data.validation=0.5"]):  # the rate is batch over records
        with pytest.raises(UnsoundError, match="draws its records at random"):
            set_up(experiment(read(file, fewer)), SimulatedNoise(0))
    rounds = write(tmp_path, 'standardise = "l"', sums=False)
    assert set_up(experiment(read(rounds, ["run.rounds=5"])), SimulatedNoise(0)).plans["north"].before


def test_another_promise_is_refused(taken: tuple[Path, Look]) -> None:
    folder, _ = taken
    other = ['method.view="server-sees-messages"', 'run.secure_aggregation="ideal"']
    for changed in (other, ['privacy.adjacency="replace-one"']):
        with pytest.raises(UserError, match="give both the same"):
            set_up(experiment(read(folder / "e.toml", changed)), SimulatedNoise(0))


def test_a_budget_under_the_looks_price_is_one_line(tmp_path: Path) -> None:
    file = write(tmp_path, privacy='looks = ["l"]', sums=False)
    look(file, 3.5, folder=tmp_path / "l")
    with pytest.raises(UserError, match="cannot be met"):
        set_up(experiment(read(file)), SimulatedNoise(0))


def test_a_budget_that_was_changed_after_the_look_is_no_cap(taken: tuple[Path, Look]) -> None:
    folder, _ = taken
    for other in ("2.5", "6.0", "{north = 3.0, south = 3.0, west = 4.0}"):
        with pytest.raises(UnsoundError, match=r"budgets was 3\.0 when"):
            read(folder / "e.toml", [f"privacy.budgets={other}"])


def test_a_sampled_training_follows_one_look_alone(tmp_path: Path) -> None:
    """Whether there is a second one, and its price, may follow from the first: then the plan was not fixed."""
    file = write(tmp_path, 'standardise = "l"', method="batch = 20", privacy='looks = ["m"]', sums=False)
    look(file, 0.5, folder=tmp_path / "l")
    look(file, 0.7, of=["age"], folder=tmp_path / "m")
    with pytest.raises(UnsoundError, match="follows 2 looks"):
        set_up(experiment(read(file)), SimulatedNoise(0))
    whole = write(tmp_path, 'standardise = "l"', privacy='looks = ["m"]', sums=False)
    assert len(set_up(experiment(read(whole)), SimulatedNoise(0)).plans["north"].before) == 2


def test_two_looks_with_real_noise_are_paid_for_twice(tmp_path: Path) -> None:
    """One file, two folders: what was drawn differs, so neither stands for the other."""
    file = write(tmp_path, 'standardise = "a/l"', privacy='looks = ["b/l"]', sums=False)
    options = ["run.simulation=false"]
    taken = [look(file, 1.0, folder=tmp_path / name / "l", options=options) for name in "ab"]
    assert taken[0].classes != taken[1].classes
    plan = set_up(experiment(read(file)), SimulatedNoise(0)).plans["north"]
    assert {r.purpose for r in plan.before} == {f"look:{one.run}" for one in taken}
    assert len(plan.before) == 2


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command(taken: tuple[Path, Look], tmp_path: Path) -> None:
    folder, found = taken
    told = call("look", folder / "first", "--json")
    assert json.loads(told.stdout)["run"] == found.run
    assert "pressure" in call("look", folder / "first").stdout
    assert "What each question cost" in (folder / "first" / "report.html").read_text()
    assert (folder / "first" / "report.png").stat().st_size > 10_000
    assert finish(folder / "first") == found
    file = write(tmp_path)
    few = call(
        "look", file, "--epsilon", 0.5, "--of", "pain", "--statistics", "missing", "--out", tmp_path / "few"
    )
    assert few.exit_code == 0, few.output
    assert "pressure" not in few.stdout


def test_a_look_that_was_cut_off_is_gone_on_with(taken: tuple[Path, Look], tmp_path: Path) -> None:
    """It was paid for: its folder says how, and the figures are those of a look that was not cut off."""
    shutil.copytree(taken[0], tmp_path / "copy")
    folder = tmp_path / "copy" / "first"
    for name in ("checkpoint.pt", "look.json", "certificate.json", "metrics.jsonl"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="modicum run --resume"):
        finish(folder)
    again = call("look", write(tmp_path), "--epsilon", 0.3, "--out", folder)
    assert f"modicum look {folder}" in str(again.exception)
    assert call("run", "--resume", folder).exit_code == 0
    assert finish(folder).to_dict() == taken[1].to_dict()


def test_a_look_that_claims_nothing_has_no_errors(tmp_path: Path) -> None:
    found = look(write(tmp_path, sums=False), float("inf"), folder=tmp_path / "clear")
    age = found.column("age")
    assert age.missing.value == age.missing.error == age.bar_error == 0
    assert sum(age.bars) == pytest.approx(found.records)
    assert all(q.low == q.value == q.high for q in age.quantiles)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "say what each client pays"),
        (("--epsilon", 1, "--of", "agee"), "did you mean 'age'"),
        (("--epsilon", 1, "--statistics", "modes"), "unknown statistic"),
        (("--epsilon", 1, "--bins", 2), "3 categories"),
        (("--epsilon", 1, "--of", ","), "names nothing"),
        (("--epsilon", 1, "--statistics", ""), "names nothing"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, words: tuple[Any, ...], said: str) -> None:
    done = call("look", write(tmp_path), *words, "--out", tmp_path / "new")
    assert isinstance(done.exception, UserError), done.output
    assert said in str(done.exception)
    assert not (tmp_path / "new").exists()


def test_a_look_draws_on_the_files_account(tmp_path: Path) -> None:
    """And the training that follows draws what is its own beside it."""
    account = f'[account]\nbudget = 4.0\nfolder = "{tmp_path / "account"}"\n'
    file = write(tmp_path, 'standardise = "first"', more=account)
    first = look(file, 2.0, folder=tmp_path / "first")
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        assert set(kept.draws) == {first.run}
    with pytest.raises(DrawRefused):
        look(file, 3.8, folder=tmp_path / "second", seed=1)


def people(folder: Path, many: int, **how: Any) -> Path:
    """The same table, whose rows are visits: the first patient of each site has `many`, the others two each."""
    file = write(folder, **how)
    head, *lines = (folder / "table.csv").read_text().splitlines()
    told, seen = [f"patient,{head}"], dict.fromkeys(SITES, 0)
    for line in lines:
        site = line.partition(",")[0]
        number = max(0, (seen[site] - many) // 2 + 1)
        told.append(f"{site}-{number},{line}")
        seen[site] += 1
    (folder / "table.csv").write_text("\n".join(told))
    text = file.read_text().replace("[data]", '[data]\nperson = "patient"\nrows_per_person = 2')
    file.write_text(text.replace("[privacy]", '[privacy]\nunit = "person"'))
    return file


def test_a_look_and_its_training_hide_persons(tmp_path: Path) -> None:
    file = people(tmp_path, 2, uses='standardise = "l"')
    found = look(file, 2.0, folder=tmp_path / "l")
    assert found.spec.unit is Unit.PERSON
    assert found.sizes == dict.fromkeys(SITES, EACH // 2 * 9 // 10)  # a tenth of the persons is held out
    assert sum(one.value for one in found.classes) == pytest.approx(found.records)
    age = found.column("age")
    assert age is not None
    assert age.mean is not None
    assert abs(age.mean.value - 60) < 4 * age.mean.error + 1
    line = train(file, tmp_path / "training").clients["north"]
    assert line.before == {f"look:{found.run}": pytest.approx(2.0, abs=1e-3)}
    assert line.spec.unit is Unit.PERSON
    assert verify(tmp_path / "training").matches
    assert "persons" in (tmp_path / "l" / "report.html").read_text()


def test_a_look_of_records_is_no_look_of_persons(tmp_path: Path) -> None:
    """Each visit was hidden alone: a patient with a hundred of them moved its figures a hundred times as far."""
    file = people(tmp_path, 2, uses='standardise = "l"')
    plain = tmp_path / "plain.toml"
    rows = file.read_text().replace('unit = "person"', "").replace('person = "patient"\nrows_per_person = 2', "")
    plain.write_text(rows.replace('standardise = "l"', ""))
    look(plain, 1.0, of=["age"], folder=tmp_path / "l")
    with pytest.raises(UserError, match="promises for a record"):
        set_up(experiment(read(file)), SimulatedNoise(0))


def test_surplus_rows_move_no_figure(tmp_path: Path) -> None:
    """A patient's third and later visits are left out, whatever stands in them."""
    told = []
    for name, age in (("one", "20"), ("two", "90")):
        folder = tmp_path / name
        folder.mkdir()
        file = people(folder, 12, sums=False)
        lines = (folder / "table.csv").read_text().splitlines()
        head, first = lines[0], [i for i, line in enumerate(lines) if line.startswith("north-0,")]
        for i in first[2:]:
            cells = lines[i].split(",")
            cells[head.split(",").index("age")] = age
            lines[i] = ",".join(cells)
        assert len(first) == 12
        (folder / "table.csv").write_text("\n".join(lines))
        told.append(look(file, float("inf"), folder=folder / "l").columns)
    assert told[0] == told[1]


@pytest.mark.parametrize("sums", [True, False])
def test_a_look_under_workers_is_the_same(sums: bool, tmp_path: Path) -> None:
    told = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        file = write(folder, sums=sums)
        found = look(file, 1.0, options=[f"run.workers={workers}"], folder=folder / "l")
        told.append((found.classes, found.columns))
    assert told[0] == told[1]


def cheaper(told: dict[str, Any]) -> None:
    told["releases"]["north"][0]["noise_multiplier"] *= 100


def free(told: dict[str, Any]) -> None:
    told["releases"]["north"] = []


def weaker(told: dict[str, Any]) -> None:
    told["spec"]["delta"] *= 10


def renamed(told: dict[str, Any]) -> None:
    told["run"] = "0" * 16


@pytest.mark.parametrize("edit", [cheaper, free, weaker, renamed])
def test_a_look_whose_price_was_edited_is_refused(edit: Any, taken: tuple[Path, Look], tmp_path: Path) -> None:
    folder, _ = taken
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "first" / "look.json"
    told = json.loads(file.read_text())
    edit(told)
    file.write_text(json.dumps(told))
    with pytest.raises(UserError, match="another price, than its ledger"):
        train(tmp_path / "copy" / "e.toml", tmp_path / "training")
    finish(tmp_path / "copy" / "first")  # what the page of the error says to do
    train(tmp_path / "copy" / "e.toml", tmp_path / "again")


def test_without_the_check_an_edited_price_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate would state a total under which the look was nearly free, and verify would agree with it."""
    file = write(tmp_path, 'standardise = "l"', sums=False)
    look(file, 2.0, folder=tmp_path / "l")
    told = json.loads((tmp_path / "l" / "look.json").read_text())
    for name in SITES:
        told["releases"][name][0]["noise_multiplier"] *= 100
    (tmp_path / "l" / "look.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="another price, than its ledger"):
        train(file, tmp_path / "refused")
    monkeypatch.setattr("modicum.federation.simulation.check_paid", lambda _: None)
    line = train(file, tmp_path / "training").clients["north"]
    assert max(line.before.values()) < 0.05
    assert verify(tmp_path / "training").matches


def test_a_look_without_its_ledger_is_no_look(taken: tuple[Path, Look], tmp_path: Path) -> None:
    folder, _ = taken
    for name in ("e.toml", "table.csv"):
        shutil.copy(folder / name, tmp_path / name)
    shutil.copy(folder / "first" / "look.json", tmp_path / "first")
    with pytest.raises(UserError, match="name the whole folder"):
        train(tmp_path / "e.toml", tmp_path / "training")


def test_in_python_a_look_is_within_the_budgets(tmp_path: Path) -> None:
    file = write(tmp_path, sums=False)
    found = look(file, 2.0, folder=tmp_path / "l")
    columns = found.refined(read(file).data.columns, "standardise")
    table = mo.from_csv(tmp_path / "table.csv", client="site", label="ill", classes=2, columns=columns)
    told = []
    for given in (found, tmp_path / "l"):
        place = tmp_path / str(len(told))
        data = mo.federate(table, test=0.1)
        run = mo.train(data, budgets=3.0, method="dp-sgd", rounds=2, looks=[given], folder=place)
        line = run.certificate.clients["north"]
        assert line.before == {f"look:{found.run}": pytest.approx(2.0, abs=1e-3)}
        assert 2.9 < line.epsilon <= 3.0
        assert "looks = " in (place / "config.toml").read_text()
        assert verify(place).matches
        told.append(line)
    assert told[0] == told[1]
    sums = mo.methods.DpSgd(view="secure-aggregation")
    with pytest.raises(UserError, match="give both the same"):
        mo.train(mo.federate(table), budgets=3.0, method=sums, looks=[found], folder=tmp_path / "sums")


def test_in_python_no_sampled_training_follows_a_look(tmp_path: Path) -> None:
    """Whatever a caller says was planned before."""
    found = look(write(tmp_path, sums=False), 1.0, folder=tmp_path / "l")
    columns = read(tmp_path / "e.toml", looks=False).data.columns
    table = mo.from_csv(tmp_path / "table.csv", client="site", label="ill", classes=2, columns=columns)
    said = replace(found, planned_before=True)
    with pytest.raises(UnsoundError, match="draws its records at random"):
        mo.train(
            mo.federate(table, test=0.1),
            budgets=3.0,
            method=mo.methods.DpSgd(batch=20),
            looks=[said],
            folder=tmp_path / "r",
        )


def test_an_account_that_a_look_opens_fits_the_training_that_samples(tmp_path: Path) -> None:
    """Opened for the look alone it would charge the training as if nothing were sampled: many times the grant."""
    account = f'[account]\nbudget = 4.0\nfolder = "{tmp_path / "account"}"\n'
    file = write(tmp_path, 'standardise = "first"', method="batch = 20", more=account, sums=False)
    look(file, 0.5, folder=tmp_path / "first")
    config = read(file)
    plan = set_up(experiment(config), SimulatedNoise(0)).plans["north"]
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        opened, (drawn,) = kept.lifetime, kept.draws.values()
    assert opened.filter is Filter.RDP
    assert drawn.cost + opened.price(plan) < opened.cap
    alone = lifetime_for(4.0, 1e-5, [drawn.plan])
    assert alone.filter is Filter.GDP
    assert alone.price(plan) > alone.cap
    whole = write(tmp_path, more=account.replace('/account"', '/whole"'), sums=False)
    look(whole, 0.5, folder=tmp_path / "second")
    with DatasetAccount.open(tmp_path / "whole", read_only=True) as kept:
        assert kept.lifetime.filter is Filter.GDP
