"""Records brought together by person: what is kept goes by order alone, and keys stay behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modicum.core.persons import Slot
from modicum.data import federate, from_csv, from_frame, from_npz_folder, in_persons
from modicum.data.arrays import Arrays, Dataset
from modicum.data.persons import grouped, present_rows
from modicum.errors import UserError

TABLE = """client,patient_id,age,label
north,B,1,0
north,A,2,1
south,C,3,0
north,B,4,1
north,B,5,1
south,D,6,1
north,A,7,0
"""


def table(tmp_path: Path, text: str = TABLE) -> Dataset:
    (tmp_path / "t.csv").write_text(text)
    return from_csv(tmp_path / "t.csv", person="patient_id", classes=2)


def test_a_person_is_one_example_with_its_first_rows(tmp_path: Path) -> None:
    persons = in_persons(table(tmp_path), 2)
    assert persons.train.shape == (2, 1)
    assert persons.train.x[:, :, 0].tolist() == [[1, 4], [2, 7], [3, 0], [6, 0]]
    assert persons.train.y.tolist() == [[[1, 0], [1, 1]], [[1, 1], [1, 0]], [[1, 0], [0, 0]], [[1, 1], [0, 0]]]
    assert federate(persons).sizes == (2, 2)


def test_no_value_decides_over_what_is_kept() -> None:
    """Other features and labels in the same rows: the same rows stay."""
    rng = np.random.default_rng(0)
    who = rng.integers(0, 20, 100)
    _, who = np.unique(who, return_inverse=True)
    slot, number = Slot(3), np.arange(100, dtype=np.float32)
    for other in (rng.normal(size=100), -number, np.full(100, np.nan)):
        x = np.stack([number, other.astype(np.float32)], 1)
        held = grouped(Arrays(x, rng.integers(0, 2, 100)), who, slot)
        kept = present_rows(held, ()).x[:, 0].astype(int)
        first = [i for i in range(100) if Counter(who[:i].tolist())[who[i]] < 3]
        assert sorted(kept.tolist()) == first


def test_no_other_slot_sees_how_many_rows_a_person_has() -> None:
    rng = np.random.default_rng(1)
    who = np.r_[np.arange(10), rng.integers(0, 10, 30)]
    rows = Arrays(rng.normal(size=(40, 2)).astype(np.float32), rng.integers(0, 2, 40))
    more = np.r_[who, np.full(50, 4)]
    longer = Arrays.concatenate([rows, rows.take(np.zeros(50, int))])
    one, other = grouped(rows, who, Slot(4)), grouped(longer, more, Slot(4))
    others = np.arange(10) != 4
    assert len(one) == len(other) == 10
    assert np.array_equal(one.x[others], other.x[others])


def test_spellings_of_one_key_are_one_person(tmp_path: Path) -> None:
    """As accounts know them: spreadsheets write 7 as 7.0 and drop zeros."""
    data = table(tmp_path, "client,patient_id,age,label\na,7,1,0\na,7.0,2,1\na,007,3,0\na,8,4,1\n")
    assert len(in_persons(data, 4).train) == 2


def test_nothing_that_is_divided_holds_a_key(tmp_path: Path) -> None:
    data = federate(in_persons(table(tmp_path), 2))
    assert not hasattr(data, "persons")
    assert data.input_shape == (2, 1)  # the column is no feature


def test_somebody_at_two_clients_is_refused(tmp_path: Path) -> None:
    shared = table(tmp_path, TABLE + "south,A,9,0\n")
    with pytest.raises(UserError, match="records at north and at south") as refused:
        in_persons(shared, 2)
    assert "'A'" not in str(refused.value)  # nobody is named
    assert federate(in_persons(table(tmp_path), 2), clients=2, partition="iid").sizes == (2, 2)


def test_shares_are_of_persons(tmp_path: Path) -> None:
    rows = "".join(f"a,p{i % 20},{i},{i % 2}\n" for i in range(100))
    data = federate(
        in_persons(table(tmp_path, "client,patient_id,age,label\n" + rows), 8), validation=0.25, test=0.25
    )
    (own,) = data.clients
    assert [len(part) for part in (own.train, own.validation, own.test)] == [10, 5, 5]
    ages = [{*present_rows(part, ()).x[:, 0].astype(int) % 20} for part in (own.train, own.validation, own.test)]
    assert not ages[0] & ages[1] | ages[0] & ages[2] | ages[1] & ages[2]  # nobody is in two of them


class Frame:
    """Whatever gives names of columns and a list for each."""

    column_names = ("client", "who", "age", "label")

    def __getitem__(self, name: str) -> list[object]:
        return {"client": ["a"] * 4, "who": [1, 1, 2, 3], "age": [1.0, 2, 3, 4], "label": [0, 1, 0, 1]}[name]  # type: ignore[return-value]


def test_frames_and_npz_files_know_persons_too(tmp_path: Path) -> None:
    assert len(in_persons(from_frame(Frame(), person="who"), 2).train) == 3
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.array([0, 1, 0, 1]), who=np.array([1, 1, 2, 2]))
    assert len(in_persons(from_npz_folder(tmp_path, person="who"), 2).train) == 2


@pytest.mark.parametrize("gap", ["", " ", "NaN", "nan", "NULL", "?", "na"])
def test_a_key_that_says_missing_is_nobodys(gap: str, tmp_path: Path) -> None:
    """All rows without a key would be one person, and somebody known elsewhere would have a second slot."""
    with pytest.raises(UserError, match="every record needs a value under 'patient_id'"):
        table(tmp_path, TABLE + f"north,{gap},1,1\n")


class NoValue:
    """As pandas marks a gap: comparing it gives it back, and it is neither true nor false."""

    def __ne__(self, other: object) -> NoValue:  # type: ignore[override]
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


def test_a_key_of_zero_is_a_key_and_a_gap_is_none() -> None:
    frame = {"client": ["a"] * 4, "who": [0, 0, 1, 1], "x": [0.1, 0.2, 0.3, 0.4], "label": [0, 1, 0, 1]}
    made = from_frame(Columns(frame), person="who")
    assert len(in_persons(made, 2).train) == 2
    frame["who"][3] = NoValue()
    with pytest.raises(UserError, match="every record needs a value"):
        from_frame(Columns(frame), person="who")


class Columns:
    """A frame of lists."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.column_names, self.all = list(columns), columns

    def __getitem__(self, name: str) -> Column:
        return Column(self.all[name])


class Column:
    def __init__(self, cells: list[Any]) -> None:
        self.cells = cells

    def to_list(self) -> list[Any]:
        return self.cells


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whose records are whose"):
        in_persons(from_csv(_plain(tmp_path)), 2)
    with pytest.raises(UserError, match="from 1 to"):
        in_persons(table(tmp_path), 0)
    with pytest.raises(UserError, match="persons already"):
        in_persons(in_persons(table(tmp_path), 2), 2)
    with pytest.raises(UserError, match="every record needs a value under 'patient_id'"):
        table(tmp_path, TABLE + "north,,1,1\n")
    with pytest.raises(UserError, match="persons have none"):
        federate(in_persons(table(tmp_path), 2), clients=2, partition="dirichlet:0.5")


def _plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.csv"
    path.write_text("client,age,label\na,1,0\na,2,1\n")
    return path
