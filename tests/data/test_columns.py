"""Columns by public constants: what each setting does to a cell, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.config import federation, read, to_toml
from modicum.data import from_csv
from modicum.data.columns import Column, suggest, unscaled
from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.spec import read_spec
from modicum.errors import UserError
from modicum.public.columns import main

TABLE = "id,age,sex,chol,label\n1,30,f,200,0\n2,130,m,,1\n3,-5,x,300,0\n"
COLUMNS = {
    "age": Column(range=(0, 120)),
    "sex": Column(categories=("f", "m")),
    "chol": Column(range=(100, 300), fill=150),
}
EXPERIMENT = """
[data]
csv = "simulated.csv"
classes = 2
[data.columns]
age = { range = [0, 120] }
sex = { categories = ["f", "m"] }
chol = { range = [100, 300], fill = 150.0 }
[method]
name = "dp-sgd"
"""
SILO = """
[silo]
name = "clinic"
[grant]
budget = 1.0
[data]
csv = "table.csv"
classes = 2
id_column = "id"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    (tmp_path / "silo.toml").write_text(SILO)
    return tmp_path


def test_cells_are_scaled_clipped_filled_and_split_by_constants_alone(folder: Path) -> None:
    data = from_csv(folder / "table.csv", id="id", columns=COLUMNS, alone="clinic")
    expected = [[0.25, 1, 0, 0.5], [1, 0, 1, 0.25], [0, 0, 0, 1]]
    assert np.allclose(data.train.x, expected)
    assert data.client_names == ("clinic",)


def test_a_record_reads_the_same_whoever_else_is_in_the_table(folder: Path) -> None:
    """The negative control is min–max scaling by the table's own values, where one record moves all others."""
    lines = TABLE.splitlines()
    (folder / "fewer.csv").write_text("\n".join(lines[:2]) + "\n")
    few = from_csv(folder / "fewer.csv", id="id", columns=COLUMNS, alone="clinic").train.x
    many = from_csv(folder / "table.csv", id="id", columns=COLUMNS, alone="clinic").train.x
    assert np.array_equal(few[0], many[0])
    ages = np.array([30.0, 130.0, -5.0])
    assert (ages[0] - ages.min()) / np.ptp(ages) != (ages[0] - ages[:1].min()) / max(np.ptp(ages[:1]), 1)


def test_a_silo_reads_its_table_by_the_agreed_columns_and_needs_no_column_of_clients(folder: Path) -> None:
    own = own_experiment(read_spec(folder / "silo.toml")).federation.data
    assert own.names == ("clinic",)
    (folder / "simulated.csv").write_text(TABLE.replace("id,", "client,"))
    config = read(folder / "experiment.toml")
    assert np.array_equal(federation(config).data.clients[0].train.x, own.clients[0].train.x[:1])
    (folder / "again.toml").write_text(to_toml(config))
    assert read(folder / "again.toml").data.columns == config.data.columns


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("age = { range = [0, 120] }", "age = { range = [120, 0] }"), "smallest first"),
        (("age = { range = [0, 120] }", "age = { rnage = [0, 120] }"), "rnage"),
        (('sex = { categories = ["f", "m"] }', 'sex = { categories = ["f", "f"] }'), "must differ"),
        (('sex = { categories = ["f", "m"] }', 'sex = { categories = ["f"], fill = 1.0 }'), "not both"),
        (("age = { range = [0, 120] }", "age = { drop = true, fill = 1.0 }"), "dropped"),
        (("age = {", "height = {"), "no feature column 'height'"),
        ((", fill = 150.0", ""), "the cell is empty; give the column a fill"),
        (("sex = {", "# sex = {"), "'f' is not a number; give the column categories"),
        (('csv = "simulated.csv"\nclasses = 2', 'name = "digits"'), "columns belong to a csv or parquet file"),
    ],
)
def test_bad_columns_are_one_line(change: tuple[str, str], said: str, folder: Path) -> None:
    (folder / "experiment.toml").write_text(EXPERIMENT.replace(*change))
    with pytest.raises(UserError, match=said):
        own_experiment(read_spec(folder / "silo.toml"))


def test_an_account_needs_ids_where_columns_can_change(folder: Path) -> None:
    (folder / "silo.toml").write_text(SILO.replace('id_column = "id"', ""))
    with pytest.raises(UserError, match="add id_column"):
        read_spec(folder / "silo.toml")
    (folder / "silo.toml").write_text(SILO + "[data.columns]\nage = { range = [0, 1] }\n")
    with pytest.raises(UserError, match="agreed in the experiment file"):
        read_spec(folder / "silo.toml")


def test_suggestions_are_rounded_outwards_and_stay_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"a": "237", "b": "x", "c": ""}, {"a": "-41", "b": "y", "c": "0.5"}]
    found = suggest(rows, ["a", "b", "c"])
    assert found["a"] == Column(range=(-50, 300))
    assert found["b"] == Column(categories=("x", "y"))
    assert found["c"].fill is not None
    assert run(app, ["silo", "check", str(folder / "silo.toml"), "--suggest"]) == 0
    text = capsys.readouterr().out
    assert "[data.columns]" in text
    assert "Put public limits in their place" in text
    (folder / "experiment.toml").write_text(
        EXPERIMENT.split("[data.columns]")[0] + text + EXPERIMENT.split("}\n")[-1]
    )
    assert own_experiment(read_spec(folder / "silo.toml")).federation.data.names == ("clinic",)


def test_large_inputs_are_noticed() -> None:
    assert unscaled(np.ones((3, 2), dtype=np.float32)) == ""
    assert unscaled(np.full((3, 2), 255, dtype=np.uint8)) == ""
    assert "feature 1 reaches 300" in unscaled(np.array([[0.0, 300.0]]))


def test_numbers_bend_at_public_edges() -> None:
    column = Column(edges=(0, 10, 20, 100))
    cells = ["-5", "5", "10", "60", "1000"]
    assert column.table("dose", cells, "t").tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 0, 0], [1, 1, 0.5], [1, 1, 1]]
    for edges in ((1,), (2, 1), (1, 1), (0, float("inf"))):
        with pytest.raises(UserError, match="edges"):
            Column(edges=edges)
    with pytest.raises(UserError, match="one of"):
        Column(edges=(0, 1), range=(0, 1))


def test_columns_from_public_records_and_back_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    rows = [
        (f"{rng.exponential():.4f}", "0" if i % 3 else f"{i}", "ab"[i % 2], "x", f"{i % 4}") for i in range(400)
    ]
    text = "dose,gain,ward,same,code,label\n" + "".join(",".join((*row, "1")) + "\n" for row in rows)
    (tmp_path / "public.csv").write_text(text)
    assert main(["--csv", str(tmp_path / "public.csv")]) == 0
    found = capsys.readouterr().out
    (tmp_path / "e.toml").write_text(f'[data]\ncsv = "public.csv"\nclasses = 2\n{found}')
    columns = read(tmp_path / "e.toml").data.columns
    assert columns["ward"].categories == ("a", "b")
    assert columns["code"].categories == ("0", "1", "2", "3")
    assert columns["same"].drop
    edges, gain = columns["dose"].edges, columns["gain"].edges
    assert edges is not None
    parts = np.histogram([float(row[0]) for row in rows], edges)[0]
    assert parts.min() > 0.5 * parts.max()  # quantiles: as many records in each stretch
    assert gain is not None
    assert gain[0] == 0.0  # most are 0: quantiles of all would leave one stretch for the others
    assert len(gain) > 5
    assert main(["--csv", str(tmp_path / "nothing.csv")]) == 2
