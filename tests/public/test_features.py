"""Public features under a federation: never fitted to a private record, kept with the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modicum as mo
from modicum.config import experiment, read
from modicum.core.setting import MethodSpec, Setting
from modicum.data import Dataset, federate, load
from modicum.data.arrays import Arrays, FederatedData
from modicum.data.geometry import Geometry, load_geometry
from modicum.errors import UserError
from modicum.federation.experiment import _feature_facts
from modicum.federation.identity import run_id
from modicum.methods import Auto, method
from modicum.models.backbone import Backbone, BackboneShape, save_backbone
from modicum.privacy.spec import PrivacySpec, Unit
from modicum.public import features
from modicum.public.features import behind, class_noise, parse, stand_on
from modicum.public.geometry import Public, fit_geometry

SPEC = PrivacySpec(unit=Unit.RECORD)
CONFIG = """
[data]
name = "digits:0-4"
clients = 4
proxy = "digits:5-9"
features = "discriminant:4"

[privacy]
budgets = 8.0

[method]
name = "dp-sgd"
batch = 64
steps = 1

[run]
rounds = 2
"""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_backbone(Backbone(BackboneShape(1, (8, 16), blocks=1, groups=4)), tmp_path / "b.npz", {"proxy": "toy"})
    return tmp_path / "b.npz"


def write(folder: Path, text: str = CONFIG) -> Path:
    (folder / "e.toml").write_text(text)
    return folder / "e.toml"


def garbage(data: FederatedData) -> FederatedData:
    """The same sizes and public records; whatever is private is noise with other labels."""
    rng = np.random.default_rng(99)

    def noise(a: Arrays) -> Arrays:
        return Arrays(rng.normal(size=a.x.shape) * 1e3, rng.integers(0, data.classes, len(a)))

    clients = tuple(
        replace(c, train=noise(c.train), validation=noise(c.validation), test=noise(c.test)) for c in data.clients
    )
    return replace(data, clients=clients, test=noise(data.test))


def proxies() -> list[tuple[str, FederatedData]]:
    share = federate(load("digits"), clients=4, proxy=0.2)
    other = federate(load("digits:0-4"), clients=4, proxy=load("digits:5-9"))
    return [("discriminant:5", share), ("discriminant:auto", share), ("discriminant:4", other)]


def geometry(data: FederatedData, name: str) -> Geometry:
    found = stand_on(data, name, (1.0,) * 4, lambda: SPEC).geometry
    assert found is not None
    return found


def same_whatever_clients_hold() -> None:
    """Non-interference: garbage in place of every private record, and the geometry has the same bits."""
    for name, data in proxies():
        one, other = geometry(data, name), geometry(garbage(data), name)
        assert one.digest == other.digest
        assert all(
            np.array_equal(getattr(one, f), getattr(other, f)) for f in ("mean", "matrix", "between", "within")
        )


def test_no_private_record_moves_the_geometry() -> None:
    same_whatever_clients_hold()


def test_a_geometry_that_looks_at_clients_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant fits to the clients' records as well."""
    honest = features._public

    def peeking(data: FederatedData, source: Dataset | None, backbone: str) -> Public:
        found = honest(data, source, backbone)
        return replace(found, records=Arrays.concatenate([found.records, *(c.train for c in data.clients)]))

    monkeypatch.setattr(features, "_public", peeking)
    with pytest.raises(AssertionError):
        same_whatever_clients_hold()


def test_held_out_public_records_stay_out() -> None:
    data = federate(load("digits"), clients=4, proxy=0.2)
    empty = replace(data, proxy_validation=Arrays.empty(data.proxy))
    assert geometry(data, "discriminant:5").digest == geometry(empty, "discriminant:5").digest


def test_a_proxy_with_other_labels_passes_through_the_same_backbone(weights: Path, tmp_path: Path) -> None:
    """What one call does for the proxy is what it does for the task's own records."""
    text = CONFIG.replace("[privacy]", f'backbone = "{weights}"\ndir = "{tmp_path}"\n\n[privacy]')
    data = experiment(read(write(tmp_path, text))).federation.data
    assert data.input_shape == (4,)
    assert data.proxy.shape == (4,)
    assert data.geometry is not None
    assert data.geometry.about["backbone"].startswith("b-")
    task, proxy, _ = behind(weights, tmp_path / "features", load("digits:0-4"), load("digits:5-9"), None)
    again = stand_on(federate(task, clients=4, proxy=proxy), "discriminant:4", (8.0,) * 4, lambda: SPEC)
    assert np.array_equal(again.proxy.x, data.proxy.x)
    assert np.array_equal(again.clients[2].train.x, data.clients[2].train.x)


def test_features_of_ones_own_records_are_written_nowhere(weights: Path, tmp_path: Path) -> None:
    """Named datasets are public and cached; what is left of private images would outlive every run."""
    public = load("digits:0-4")
    (tmp_path / "own").mkdir()
    np.savez(tmp_path / "own" / "ward.npz", x=public.train.x[:40], y=public.train.y[:40])
    text = f"""
    [data]
    npz = "own"
    classes = 5
    backbone = "{weights}"
    dir = "{tmp_path}"
    """
    (x,) = (c.train.x for c in experiment(read(write(tmp_path, text))).federation.data.clients)
    assert not list(tmp_path.glob("features/*"))
    few = replace(public, train=public.train.take(slice(40)), test=Arrays.empty(public.test))
    cached, *_ = behind(weights, tmp_path / "features", few, False, None)
    assert len(list(tmp_path.glob("features/*"))) == 1  # the mutant
    assert np.array_equal(x, cached.train.x)


def test_in_a_real_run_only_public_records_are_cached(weights: Path, tmp_path: Path) -> None:
    text = CONFIG.replace("[privacy]", f'backbone = "{weights}"\ndir = "{tmp_path}"\n\n[privacy]')
    experiment(read(write(tmp_path, text + "simulation = false\n")))
    kept = {path.name for path in tmp_path.glob("features/*")}
    public = load("digits:5-9")
    behind(weights, tmp_path / "public", replace(public, test=Arrays.empty(public.test)), False, None)
    assert kept == {path.name for path in tmp_path.glob("public/*")} != set()
    experiment(read(write(tmp_path, text)))
    assert kept < {path.name for path in tmp_path.glob("features/*")}  # a simulation keeps the others as well


def test_what_does_not_fit_is_said_before_anything_is_computed(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("features were computed")

    monkeypatch.setattr("modicum.models.features.compute", never)
    nine = Arrays(np.zeros((4, 1, 9, 9), np.uint8), np.arange(4) % 2)
    large = Dataset("large", nine, nine, 2)
    with pytest.raises(UserError, match="cannot be fitted"):
        behind(weights, tmp_path, load("digits"), large, None)
    with pytest.raises(UserError, match="cannot be fitted"):
        behind(weights, tmp_path, load("digits"), False, large)
    given = f'backbone = "{weights}"\ndir = "{tmp_path}"'
    for old, new in (
        ("discriminant:4", "whitened:4"),
        ('proxy = "digits:5-9"', ""),
        ("[privacy]", "views = 11\n[privacy]"),
        (given, "views = 2"),
        (given, 'trained_on = ["toy"]'),
        (str(weights), f"{weights}:2"),
    ):
        text = CONFIG.replace("[privacy]", f"{given}\n[privacy]").replace(old, new)
        with pytest.raises(UserError, match=r"features are|views|stages that it was trained with"):
            experiment(read(write(tmp_path, text)))


def test_public_labels_and_another_dataset_for_features() -> None:
    """5% of the task's own labels stay the proxy; directions come from classes that nobody trains on."""
    task, proxy, source = behind(None, Path(), load("digits:0-4"), 0.1, load("digits:5-9"))
    data = stand_on(federate(task, clients=4, proxy=proxy), "discriminant:30", (1.0,) * 4, lambda: SPEC, source)
    assert data.proxy_classes == data.classes == 5
    assert data.geometry is not None
    assert (data.geometry.about["source"], data.geometry.about["records"]) == ("digits:5-9", len(source.train))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["discriminant", "discriminant:", "discriminant:0", "whitened:4", "discriminant:-3"]
)
def test_features_are_written_in_one_way(text: str) -> None:
    with pytest.raises(UserError, match="features are written"):
        parse(text)


def test_features_need_public_records() -> None:
    with pytest.raises(UserError, match="set a proxy"):
        mo.Federation.from_dataset("digits", clients=4, features="discriminant:4")
    with pytest.raises(UserError, match="set features"):
        mo.Federation.from_dataset("digits:0-4", clients=4, features_from="digits:5-9")


def test_noise_of_class_means_is_what_a_simulation_finds() -> None:
    """Five clients with unequal budgets and sizes, one class of two, precision-weighted."""
    budgets, sizes = (0.5, 1.0, 1.0, 8.0, 8.0), (100, 100, 300, 50, 10)
    from modicum.privacy.accounting.calibration import calibrate_noise
    from modicum.privacy.events import NoSampling

    z = np.array([calibrate_noise(SPEC, e, NoSampling(), 1) for e in budgets])
    k = np.array(sizes) / 2
    weights = k / z**2 / np.sum(k**2 / z**2)  # of the sums; their weighted sum is the mean
    noisy = np.random.default_rng(0).normal(size=(200_000, 5)) * z
    assert class_noise(SPEC, budgets, sizes, 2) == pytest.approx(np.var(noisy @ weights), rel=0.02)
    assert class_noise(SPEC, (1.0, np.inf), (10, 10), 2) == 0
    with pytest.raises(UserError, match="not of whole clients"):
        class_noise(PrivacySpec(unit=Unit.CLIENT), (1.0,), (10,), 2)


def test_behind_a_sum_noise_is_that_of_all_clients_together() -> None:
    """A simulation of R13: parts scaled to the least noise, summed, divided by the scaled number of records."""
    from modicum.core.setting import Setting
    from modicum.methods import Auto
    from modicum.privacy.accounting.calibration import calibrate_noise
    from modicum.privacy.events import NoSampling

    spec = Auto(view="secure-aggregation").build(Setting(5, 5, 1)).mechanism.spec
    budgets, sizes = (0.5, 1.0, 1.0, 8.0, 8.0), (100, 100, 300, 50, 10)
    z = np.array([calibrate_noise(spec, e, NoSampling(), 1) for e in budgets])
    scale, k = z.min() / z, np.array(sizes) / 2
    noisy = np.random.default_rng(0).normal(size=(200_000, 5)).sum(1) * z.min() / (scale * k).sum()
    assert class_noise(spec, budgets, sizes, 2) == pytest.approx(np.var(noisy), rel=0.02)
    same = (1.0,) * 5
    assert class_noise(spec, same, (100,) * 5, 2) < class_noise(SPEC, same, (100,) * 5, 2) / 3


def test_the_choice_follows_budgets_and_sizes() -> None:
    data = federate(load("digits"), clients=4, proxy=0.3)

    def size(budget: float) -> int:
        found = stand_on(data, "discriminant:auto", (budget,) * 4, lambda: SPEC).geometry
        assert found is not None
        return found.size

    sizes = [size(e) for e in (0.05, 0.5, 8.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_python_and_a_file_choose_the_same_for_the_methods_own_view() -> None:
    """Behind a sum there is less noise, hence room for more dimensions; whole clients have no such rule."""

    def found(spec: MethodSpec | None) -> Geometry:
        given: dict[str, Any] = {"clients": 4, "proxy": 0.3, "budgets": 0.05, "features": "discriminant:auto"}
        made = mo.Federation.from_dataset("digits", method=spec, **given).data.geometry
        assert made is not None
        return made

    data = federate(load("digits"), clients=4, proxy=0.3)
    behind_sum = Auto(view="secure-aggregation")
    promised = behind_sum.build(Setting(4, 4, 1)).mechanism.spec
    expected = stand_on(data, "discriminant:auto", (0.05,) * 4, lambda: promised).geometry
    assert expected is not None
    assert found(behind_sum).digest == expected.digest
    assert found(behind_sum).size > found(None).size == found(Auto()).size
    with pytest.raises(UserError, match="not of whole clients"):
        found(method("dp-fedavg"))


def test_a_run_keeps_its_geometry_and_says_so(tmp_path: Path) -> None:
    e = experiment(read(write(tmp_path)))
    run = mo.train(e.federation, method=e.method, rounds=2, folder=tmp_path / "run")
    kept = load_geometry(tmp_path / "run" / "geometry.npz")
    assert e.federation.data.geometry is not None
    assert kept.digest == e.federation.data.geometry.digest
    assert kept.digest in run.summary.note
    assert kept.digest in (tmp_path / "run" / "report.html").read_text()
    assert "of digits:5-9 (5 classes)" in json.loads((tmp_path / "run" / "summary.json").read_text())["note"]


def test_only_a_networks_features_are_wide(weights: Path, tmp_path: Path) -> None:
    """Pixels behind a geometry are no public network's, however many there are."""
    plain = experiment(read(write(tmp_path))).federation.data
    text = CONFIG.replace("[privacy]", f'backbone = "{weights}"\ndir = "{tmp_path}"\n\n[privacy]')
    behind_one = experiment(read(write(tmp_path, text))).federation.data
    assert [_feature_facts(data, None).width for data in (plain, behind_one)] == [0, 24]


def test_report_and_certificate_name_the_network(weights: Path, tmp_path: Path) -> None:
    """And another network is another run, though nothing else differs."""
    text = CONFIG.replace("[privacy]", f'backbone = "{weights}"\ndir = "{tmp_path}"\n\n[privacy]')
    e = experiment(read(write(tmp_path, text)))
    assert e.federation.data.made_by is not None
    line = e.federation.data.made_by.line
    assert line.startswith("features from b (trained on toy; licence your own; sha256 ")
    run = mo.train(e.federation, method=e.method, rounds=2, folder=tmp_path / "run")
    assert line in run.summary.note
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert any(line in said for said in certificate["assumptions"])
    two = replace(e, federation=replace(e.federation, data=replace(e.federation.data, made_by=None)))
    assert run_id(two) != run_id(e)


def test_a_network_that_saw_the_private_dataset_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    proxy = {"proxy": "digits:3-9"}
    save_backbone(Backbone(BackboneShape(1, (8, 16), blocks=1, groups=4)), tmp_path / "own.npz", proxy)
    text = CONFIG.replace("[privacy]", f'backbone = "own.npz"\ndir = "{tmp_path}"\n\n[privacy]')
    with pytest.raises(UserError, match="was trained on digits:3-9, which shares records with digits:0-4"):
        experiment(read(write(tmp_path, text)))
    assert not list(tmp_path.glob("features/*"))


@pytest.mark.parametrize("own", ["digits:0-4", "digits", "digits:4-9"])
@pytest.mark.parametrize("key", ["proxy", "features_from"])
def test_private_records_are_no_public_ones(tmp_path: Path, own: str, key: str) -> None:
    """Else directions that are kept, shown and given to everybody would be fitted to them."""
    with pytest.raises(UserError, match=f"{own} shares records with digits:0-4"):
        experiment(read(write(tmp_path, CONFIG.replace('proxy = "digits:5-9"', f'{key} = "{own}"'))))
    public: Any = {"proxy": load(own)} if key == "proxy" else {key: own}
    with pytest.raises(UserError, match="shares records"):
        mo.Federation.from_dataset("digits:0-4", clients=4, features="discriminant:4", **public)


def test_a_geometry_of_private_records_is_refused(tmp_path: Path) -> None:
    """One of a public share of the same data is used where the same share is public, and nowhere else."""
    whole = Public(load("digits:0-4").train, "digits", same_task=False)
    (tmp_path / "g.npz").write_bytes(fit_geometry(whole, 4).to_bytes())
    kept = CONFIG.replace('"discriminant:4"', '"g.npz"')
    with pytest.raises(UserError, match=r"g\.npz was fitted to records of digits, which shares records"):
        experiment(read(write(tmp_path, kept)))
    share = CONFIG.replace('"digits:5-9"', "0.2")
    fitted = experiment(read(write(tmp_path, share))).federation.data
    assert fitted.geometry is not None
    (tmp_path / "g.npz").write_bytes(fitted.geometry.to_bytes())
    again = experiment(read(write(tmp_path, share.replace('"discriminant:4"', '"g.npz"')))).federation.data
    assert np.array_equal(again.clients[1].train.x, fitted.clients[1].train.x)
    with pytest.raises(UserError, match="not public for them"):
        experiment(read(write(tmp_path, kept.replace('"digits:5-9"', "0.1"))))


def test_a_kept_geometry_gives_the_same_features_and_names_the_run(tmp_path: Path) -> None:
    fitted = experiment(read(write(tmp_path)))
    assert fitted.federation.data.geometry is not None
    (tmp_path / "g.npz").write_bytes(fitted.federation.data.geometry.to_bytes())
    text = CONFIG.replace('"discriminant:4"', '"g.npz"').replace('proxy = "digits:5-9"\n', "")
    used = experiment(read(write(tmp_path, text)))
    assert np.array_equal(used.federation.data.clients[1].train.x, fitted.federation.data.clients[1].train.x)
    elsewhere = {**fitted.federation.data.geometry.about, "source": "elsewhere"}
    (tmp_path / "g.npz").write_bytes(replace(fitted.federation.data.geometry, about=elsewhere).to_bytes())
    changed = experiment(read(write(tmp_path, text)))
    assert run_id(changed) != run_id(used)


def test_a_geometry_behind_another_backbone_is_refused(weights: Path, tmp_path: Path) -> None:
    data = federate(load("digits:0-4"), clients=4, proxy=load("digits:5-9"))
    (tmp_path / "g.npz").write_bytes(geometry(data, "discriminant:4").to_bytes())
    text = CONFIG.replace('"discriminant:4"', f'"g.npz"\nbackbone = "{weights}"\ndir = "{tmp_path}"')
    with pytest.raises(UserError, match=r"was fitted behind no backbone and data\.backbone is b-"):
        experiment(read(write(tmp_path, text)))
