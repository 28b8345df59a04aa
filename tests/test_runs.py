from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import modicum as mo
from modicum.core.parts import Batch
from modicum.federation.records import MetricsFile, RoundRecord, read_records
from modicum.federation.settings import regrouped
from modicum.runs import new_folder


@pytest.fixture(scope="module")
def federation() -> mo.Federation:
    return mo.Federation.from_dataset("digits", clients=3, budgets=[2.0, 8.0], test=0.2)


def linear(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def test_a_module_of_ones_own_is_not_changed(federation: mo.Federation, tmp_path: Path) -> None:
    model = linear(10)
    before = copy.deepcopy(model.state_dict())
    run = mo.train(federation, model=model, method=mo.methods.DpSgd(), rounds=2, folder=tmp_path / "r")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert run.parameters.keys() == before.keys()
    assert any(not torch.equal(before[name], value) for name, value in run.parameters.items())


def test_a_model_that_does_not_fit_the_labels(federation: mo.Federation, tmp_path: Path) -> None:
    with pytest.raises(mo.UserError, match="give the last layer 10 outputs"):
        mo.train(federation, model=linear(9), method=mo.methods.DpSgd(), rounds=2, folder=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_same_seed_gives_the_same_bits_and_another_does_not(federation: mo.Federation, tmp_path: Path) -> None:
    runs = [
        mo.train(federation, method=mo.methods.DpSgd(), rounds=2, seed=seed, folder=tmp_path / name)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    files = [(run.folder / "model.safetensors").read_bytes() for run in runs]
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_resuming_asks_for_the_same_experiment(federation: mo.Federation, tmp_path: Path) -> None:
    settings = {"method": mo.methods.DpSgd(), "rounds": 2, "folder": tmp_path / "r"}
    first = mo.train(federation, **settings)
    again = mo.train(federation, **settings, resume=True)
    assert again.summary == first.summary
    for change in ({"seed": 1}, {"rounds": 3}, {"model": "mlp"}, {"method": mo.methods.DpSgd(clip=2.0)}):
        with pytest.raises(mo.UserError):
            mo.train(federation, **{**settings, **change}, resume=True)
    with pytest.raises(mo.UserError, match="is not empty"):
        mo.train(federation, **settings)
    with pytest.raises(mo.UserError, match="give its folder"):
        mo.train(federation, method=mo.methods.DpSgd(), resume=True)


def test_accuracy_is_reported_by_budget_group(federation: mo.Federation, tmp_path: Path) -> None:
    run = mo.train(federation, method=mo.methods.DpSgd(), rounds=2, folder=tmp_path / "r")
    groups = run.summary.groups
    assert [(group.budget, group.clients) for group in groups] == [(2.0, 2), (8.0, 1)]
    assert all(0 < group.epsilon.min <= group.epsilon.max <= group.budget for group in groups)
    assert all(group.accuracy is not None for group in groups)
    assert all(group.releases_made == group.releases_planned for group in groups)
    run.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:1 run beside this one")
def test_with_real_noise_no_test_record_is_looked_at(tmp_path: Path) -> None:
    """Neither the clients' own nor what is pooled from them: nothing of it is in any file that a run shows."""
    divided = mo.Federation.from_dataset("digits", clients=4, budgets=4.0, test=0.2)
    method = mo.methods.DpPfsd(view="server-sees-messages")
    runs = {
        simulation: mo.train(
            divided, method=method, rounds=2, simulation=simulation, folder=tmp_path / str(simulation)
        )
        for simulation in (True, False)
    }
    figures = {s: [record.simulated for record in run.records] for s, run in runs.items()}
    assert all("personalised_accuracy" in record for record in figures[True])
    assert figures[False] == [{}, {}]
    assert runs[True].summary.groups[0].accuracy is not None
    assert runs[False].summary.groups[0].accuracy is None
    assert runs[False].summary.accuracy is None
    assert runs[False].summary.loss is None
    page = (tmp_path / "False" / "report.html").read_text()
    assert "No accuracy" in page
    assert "ground truth" not in page.split("<script")[0]
    told = json.loads(page.split('id="data">')[1].split("</script>")[0])  # all that its tables and pictures draw
    assert {told["about"]["accuracy"], told["about"]["loss"], *(g["accuracy"] for g in told["groups"])} == {None}
    assert "_accuracy" not in json.dumps(told)


@pytest.mark.parametrize("there", [False, True], ids=["new", "there already"])
def test_nobody_else_may_enter_the_folder(there: bool, federation: mo.Federation, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if there:
        folder.mkdir(mode=0o755)
    mo.train(federation, method=mo.methods.FedAvg(), rounds=1, folder=folder)
    assert folder.stat().st_mode & 0o077 == 0


def test_a_new_folder_is_new(tmp_path: Path) -> None:
    first = new_folder("x", tmp_path)
    first.mkdir()
    assert not new_folder("x", tmp_path).exists()


def record(round: int, loss: float = 1.0) -> RoundRecord:
    return RoundRecord(round, {"a": 1.0}, 1, {}, False, 0.5, simulated={"test_loss": loss})


def test_metrics_keep_what_the_checkpoint_knows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for round in range(3):
        file.append(record(round, float("nan") if round == 0 else 1.0))
    with path.open("ab") as torn:
        torn.write(b'{"round": 3, "bou')
    again = MetricsFile(path, 2)
    again.append(record(2))
    kept = read_records(path)
    assert [r.round for r in kept] == [0, 1, 2]
    assert kept[0].simulated["test_loss"] != kept[0].simulated["test_loss"]  # a diverged loss stays not-a-number
    with pytest.raises(mo.UserError, match="does not hold the rounds before 5"):
        MetricsFile(path, 5)


def test_metrics_of_an_earlier_version_are_read_under_their_new_name(tmp_path: Path) -> None:
    line = {"round": 0, "bounds": {"a": 1.0}, "answered": 1, "refused": {}, "abandoned": False, "reserved": 0.5}
    groups: dict[str, dict[str, float | None]] = {"public": {}, "paid": {"accuracy": None}, "simulated": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | groups) + "\n")
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(record.released["accuracy"])
    assert "paid" not in record.to_dict()


def test_a_run_is_read_back_from_its_folder(tmp_path: Path) -> None:
    data = mo.federate(mo.load_dataset("digits"), clients=4, test=0.2)
    run = mo.train(data, method="dp-sgd", budgets=[4.0, 8.0], rounds=2, folder=tmp_path / "r")
    again = mo.load(tmp_path / "r")
    assert (again.summary, again.certificate, again.records) == (run.summary, run.certificate, run.records)
    right = again.predict(data.test.x).numpy() == data.test.y
    assert right.mean() == pytest.approx(run.accuracy)
    assert len(repr(run).splitlines()) == 4
    assert "dp-sgd on digits" in repr(again)
    assert str(tmp_path / "r") in repr(again)


def test_the_layers_of_a_method_come_back_too(tmp_path: Path) -> None:
    """auto trains a head of its own; a run is read back with it, whoever asks."""
    fed = mo.Federation.from_dataset("digits", clients=4, budgets=4.0, proxy=0.1)
    run = mo.train(fed, method="auto", rounds=2, folder=tmp_path / "r")
    found = [r.predict(fed.data.test.x).numpy() for r in (run, mo.load(tmp_path / "r"))]
    assert (found[0] == found[1]).all()
    assert (found[0] == fed.data.test.y).mean() == pytest.approx(run.accuracy)


@pytest.fixture(scope="module")
def finished(federation: mo.Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mo.train(federation, method="dp-sgd", rounds=1, folder=tmp_path_factory.mktemp("finished") / "r").folder


@pytest.mark.parametrize("file", ["summary.json", "config.toml", "model.safetensors", "certificate.json"])
def test_a_damaged_run_is_refused_in_one_line(file: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "r")
    (tmp_path / "r" / file).write_bytes(b"{}" if file.endswith("json") else b"[x")
    with pytest.raises(mo.UserError) as error:
        mo.load(tmp_path / "r")
    assert "\n" not in str(error.value)


SPOILED = [
    ("summary.json", '"epsilon": {', '"epsilon": 5, "x": {'),
    ("metrics.jsonl", '"round": 0', '"round": "x"'),
    ("metrics.jsonl", '"reserved":', '"unknown":'),
    ("metrics.jsonl", '"noise": {}', '"noise": null'),
    ("config.toml", '[model]\nname = "logistic"', "[model]\nname = []"),
    ("config.toml", "seed = 0", "seed = nan"),
]


@pytest.mark.parametrize(("file", "old", "new"), SPOILED)
def test_values_of_another_kind_are_refused_in_one_line(
    file: str, old: str, new: str, finished: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "r")) / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(mo.UserError, match="intact folder") as error:
        mo.load(tmp_path / "r").predict(torch.zeros(2, 1, 8, 8))
    assert "\n" not in str(error.value)


def test_a_module_of_ones_own_is_asked_for(federation: mo.Federation, tmp_path: Path) -> None:
    run = mo.train(federation, model=linear(10), method="dp-sgd", rounds=1, folder=tmp_path / "r")
    x = federation.data.test.x
    with pytest.raises(mo.UserError, match="a model of your own"):
        mo.load(tmp_path / "r").predict(x)
    assert torch.equal(mo.load(tmp_path / "r", model=linear(10)).predict(x), run.predict(x))
    with pytest.raises(mo.UserError, match="do not fit"):
        mo.load(tmp_path / "r", model=linear(9)).predict(x)


def test_personal_layers_leave_the_server_without_a_model(federation: mo.Federation, tmp_path: Path) -> None:
    run = mo.train(
        federation, model="mlp", method=mo.methods.FedPer(personal="3"), rounds=1, folder=tmp_path / "r"
    )
    with pytest.raises(mo.UserError, match="is personal and stays with each client"):
        run.predict(federation.data.test.x)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budgets": 1.0}, "has budgets already"),
        ({"method": "nonsense"}, "unknown method"),
        ({"method": mo.methods.DpSgd}, r"DpSgd\(\)"),
        ({"method": 3}, "a method is a name"),
    ],
)
def test_what_train_is_given_is_checked(change: dict[str, object], said: str, federation: mo.Federation) -> None:
    with pytest.raises(mo.UserError, match=said):
        mo.train(federation, **{"method": "dp-sgd", **change})  # type: ignore[arg-type]


def test_records_alone_need_budgets_and_nothing_else(tmp_path: Path) -> None:
    data = mo.federate(mo.load_dataset("digits"), clients=4)
    with pytest.raises(mo.UserError, match="say which ε the clients grant"):
        mo.train(data)
    assert mo.train(data, budgets=8.0, rounds=1, folder=tmp_path / "r").summary.method == "auto"
    with pytest.raises(mo.UserError, match="train takes a federation, got str"):
        mo.train("digits", method="dp-sgd")  # type: ignore[arg-type]
    with pytest.raises(mo.UserError, match="no finished run"):
        mo.load("nowhere")


def _table(path: Path, odd_label: int) -> Path:
    rows = [f"{'ab'[i % 2]},{i // 2 % 2 if i else odd_label},{i % 5},{i % 7}" for i in range(40)]
    path.write_text("client,label,x,z\n" + "\n".join(rows) + "\n")
    return path


def _real(folder: Path, federated: object) -> mo.Run:
    method = mo.methods.DpSgd(steps=1)
    return mo.train(federated, budgets=1.0, method=method, rounds=1, folder=folder, simulation=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "division", "said"),
    [
        ({}, {}, "largest label of private records"),
        ({"classes": 3}, {"proxy": 0.2}, "share of private records is not public"),
        ({"classes": 3}, {"partition": "dirichlet:1", "clients": 2}, "follow from private labels"),
        ({"classes": 3}, {"partition": "size-skew:2", "clients": 2}, "follow from private labels"),
    ],
)
def test_with_real_noise_no_record_decides_what_is_told(
    own: dict[str, int], division: dict[str, object], said: str, tmp_path: Path
) -> None:
    data = mo.federate(mo.from_csv(_table(tmp_path / "t.csv", 2), **own), **division)  # type: ignore[arg-type]
    with pytest.raises(mo.UserError, match=said):
        _real(tmp_path / "r", data)
    assert not (tmp_path / "r").exists()


@pytest.mark.filterwarnings("ignore:1 run beside this one")
def test_agreed_classes_and_clients_of_their_own_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record's label shows in nothing public; without the refusal it shows in the model's very shape."""

    def told(odd_label: int, folder: str, **own: int) -> object:
        data = mo.federate(mo.from_csv(_table(tmp_path / "t.csv", odd_label), **own))  # type: ignore[arg-type]
        run = _real(tmp_path / folder, data)
        shapes = {name: tuple(value.shape) for name, value in run.parameters.items()}
        return shapes, run.summary.run.partition("-")[0]  # what follows is drawn anew in every folder

    assert told(2, "a", classes=3) == told(1, "b", classes=3)
    monkeypatch.setattr("modicum.runs.playing.refuse_peeks", lambda _: None)
    assert told(2, "c") != told(1, "d")


def test_settings_by_their_own_names_warn_and_mean_the_same(tmp_path: Path) -> None:
    fed = mo.Federation.from_dataset("digits", clients=4, budgets=2.0)
    with pytest.warns(DeprecationWarning, match=r"becomes cohorts=mo.Cohorts\(per_round=…\)"):
        old = mo.train(fed, method="dp-sgd", rounds=2, per_round=2, folder=tmp_path / "old")
    new = mo.train(fed, method="dp-sgd", rounds=2, cohorts=mo.Cohorts(per_round=2), folder=tmp_path / "new")
    assert old.certificate == new.certificate
    with pytest.raises(TypeError, match="unexpected keyword argument 'pre_round'"):
        mo.train(fed, pre_round=2)
    with pytest.warns(DeprecationWarning, match=r"becomes engine=mo.Engine\(workers=…\)"):
        groups = regrouped({"workers": 2}, mo.Cohorts(), mo.Server(), mo.Engine(), mo.Watching())
    assert groups[2] == mo.Engine(workers=2)


BAD = {
    "engine": ({"engine": {"workers": 2}}, r"engine=mo\.Engine\(device=…\), got"),
    "cohorts": ({"cohorts": 2}, r"cohorts=mo\.Cohorts\(per_round=…\), got 2"),
    "noise": ({"noise": "integer"}, r"noise=mo\.Noise\(kind=…\), got 'integer'"),
    "watching": ({"watching": print}, r"watching=mo\.Watching\(progress=…\), got"),
    "account": ({"account": "a"}, r"account is a lifetime grant, mo\.Account"),
    "looks": ({"looks": "runs/look"}, r"looks=\['runs/look'\]"),
    "metrics": ({"metrics": "accuracy"}, r"metrics are a tuple of mo\.Metric"),
}


@pytest.mark.parametrize("given", BAD)
def test_what_is_no_setting_is_refused_in_a_line(tmp_path: Path, given: str) -> None:
    named, line = BAD[given]
    fed = mo.Federation.from_dataset("digits", clients=2, budgets=2.0)
    with pytest.raises(mo.UserError, match=line):
        mo.train(fed, method="dp-sgd", folder=tmp_path / "run", **named)
    assert not (tmp_path / "run").exists()


def test_parts_and_methods_that_are_none_are_refused_in_a_line() -> None:
    with pytest.raises(mo.UserError, match="policy is an object with init, decide, observe, got DpSgd"):
        mo.methods.Composed(mo.methods.DpSgd())
    with pytest.raises(mo.UserError, match="a method is settings"):
        mo.check("dp-sgd")


def test_what_is_printed_of_a_federation_is_public() -> None:
    """A notebook or a log shows sizes, and no record."""
    fed = mo.Federation.from_dataset("digits", clients=3, budgets=2.0)
    assert repr(fed) == "Federation(FederatedData('digits', 3 clients, 1438 records), ε = 2)"
    assert "[" not in repr(fed.data.clients[0])
    batch = Batch(torch.tensor([[0.25]]), {"y": torch.tensor([7])})
    assert repr(batch) == "Batch(part_of=None)"
