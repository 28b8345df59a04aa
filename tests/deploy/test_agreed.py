"""What everybody's copy of an experiment has to say alike, and how a difference is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from modicum.config import read
from modicum.config.schema import DataConfig
from modicum.deploy.flower.coordinator import Coordinator
from modicum.deploy.silo import terms
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import agreed_parts, differences, digest
from modicum.deploy.silo.versions import differing, unlike, versions
from modicum.errors import UserError
from tests.deploy.flower.helpers import RECORD_LEVEL
from tests.deploy.flower.test_coordinator import Direct, coordinator, silos
from tests.deploy.silo.helpers import write_silo

TABLE = """
[data]
csv = "records.csv"
classes = 2
[data.columns]
age = { range = [0, 120] }
sex = { categories = ["f", "m"] }
[method]
name = "dp-sgd"
"""
CHANGES = {
    "categories swapped": ('["f", "m"]', '["m", "f"]', "data.columns"),
    "range halved": ("[0, 120]", "[0, 60]", "data.columns"),
    "columns in another order": ("classes", 'feature_columns = ["sex", "age"]\nclasses', "data.feature_columns"),
    "a backbone": ("classes = 2", 'classes = 2\nbackbone = "efficientnet-lite0"', "data.backbone"),
    "another seed": ("[method]", "[run]\nseed = 1\n[method]", "run.seed"),
    "another average": ("[method]", "[run]\naverage = 0.5\n[method]", "run.average"),
    "classes swapped": ("classes = 2", 'labels = ["sick", "well"]', "data.labels"),
    "another clip": ('"dp-sgd"', '"dp-sgd"\nclip = 0.7', "method"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_differs_is_another_experiment(tmp_path: Path, change: str) -> None:
    old, new, name = CHANGES[change]
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(TABLE)
    second.write_text(TABLE.replace(old, new))
    one, other = read(first), read(second)
    assert digest(one) == digest(read(first))
    assert digest(one) != digest(other)
    assert differences(agreed_parts(one), agreed_parts(other)).split(" ")[0] == name


def own_data(folder: Path, experiment: str, data: str) -> DataConfig:
    """What a silo takes its records as."""
    return read_spec(write_silo(folder, "ward", experiment=experiment, data=data)).experiment.data


LABELLED = (
    TABLE.replace("classes = 2", 'labels = ["well", "sick"]').split("[data.columns]")[0]
    + "[method]\n"
    + ('name = "dp-sgd"\n')
)


def test_which_class_is_which_is_everybody_s(tmp_path: Path) -> None:
    """A hospital that lists its classes in another order once took part, and its sick were everybody's well."""
    own = '\n[data]\ncsv = "own.csv"\nlabel_column = "state"\n'
    assert own_data(tmp_path, LABELLED, own).labels == ["well", "sick"]
    with pytest.raises(UserError, match="labels is agreed in the experiment file"):
        own_data(tmp_path, LABELLED, own + 'labels = ["sick", "well"]\n')
    silent = own_data(tmp_path, TABLE, own + 'id_column = "nr"\nlabels = ["sick", "well"]\n')
    mine = replace(read(tmp_path / "experiment.toml"), data=silent)
    assert differences(agreed_parts(read(tmp_path / "experiment.toml")), agreed_parts(mine)).startswith(
        "data.labels"
    )


def test_by_what_inputs_are_divided_is_everybody_s(tmp_path: Path) -> None:
    scaled = LABELLED.replace('csv = "records.csv"', 'npz = "records"\nscale = 255.0')
    own = '\n[data]\nnpz = "own"\n'
    assert own_data(tmp_path, scaled, own).scale == 255.0
    with pytest.raises(UserError, match="scale is agreed in the experiment file"):
        own_data(tmp_path, scaled, own + "scale = 1.0\n")
    by_itself = own_data(tmp_path, scaled.replace("scale = 255.0", ""), own + "scale = 255.0\n")
    mine = replace(read(tmp_path / "experiment.toml"), data=by_itself)
    assert digest(mine) != digest(read(tmp_path / "experiment.toml"))


def test_negative_control_what_is_left_out_of_the_list_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "NUMBERED", ())
    with pytest.raises(AssertionError):
        test_a_copy_that_differs_is_another_experiment(tmp_path, "classes swapped")


def test_a_short_value_is_said_in_words(tmp_path: Path) -> None:
    with silos(tmp_path, RECORD_LEVEL) as held:
        path = tmp_path / "experiment.toml"
        path.write_text(path.read_text().replace("seed = 5", "seed = 6"))
        with pytest.raises(UserError, match=r"another experiment: run.seed \(6 here, 5 there\) differ"):
            coordinator(tmp_path, Direct(held))


def test_without_its_part_a_difference_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a digest that leaves the seed out lets the run begin."""
    monkeypatch.setattr(terms, "AGREED", tuple(name for name in terms.AGREED if name != "seed"))
    with silos(tmp_path, RECORD_LEVEL) as held:
        path = tmp_path / "experiment.toml"
        path.write_text(path.read_text().replace("seed = 5", "seed = 6"))
        made: Coordinator = coordinator(tmp_path, Direct(held))
        made.close()


def test_versions_are_compared_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = versions()
    assert unlike(own, own) is None
    assert unlike(own, {**own, "modicum": own["modicum"] + ".post1"}) is None
    assert differing(own, {**own, "torch": "0.1"}) == f"torch 0.1 there and {own['torch']} here"
    with silos(tmp_path, RECORD_LEVEL) as held:
        monkeypatch.setattr("modicum.deploy.silo.silo.versions", lambda: {**own, "modicum": "9.0.0"})
        with pytest.raises(UserError, match=r"cannot take part: it runs Modicum 9\.0\.0 and the server"):
            coordinator(tmp_path, Direct(held))
