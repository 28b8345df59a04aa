from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from modicum.data import federate, from_csv, from_frame, from_npz_folder, from_torch
from modicum.data.tables import csv_ids
from modicum.errors import UserError

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    example
    for page in ("data", "own-data")
    for example in re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["overview", "npz", "csv", "torch"])
def test_the_guides_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "guide", "exec"), {})


def _save(folder: Path, name: str, **arrays: object) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def test_npz_files_keep_their_test_records_apart(tmp_path: Path) -> None:
    _save(tmp_path / "f", "b", x=np.ones((6, 2)), y=np.arange(6) % 2, x_test=np.full((2, 2), 5.0), y_test=[0, 1])
    _save(tmp_path / "f", "a", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    data = federate(from_npz_folder(tmp_path / "f"))
    assert data.names == ("a", "b")
    assert data.sizes == (4, 6)
    assert [len(c.test) for c in data.clients] == [0, 2]
    assert data.clients[1].train.x.max() == 1


def test_bytes_are_images_only_where_a_scale_is_asked_for(tmp_path: Path) -> None:
    _save(tmp_path / "f", "a", x=np.full((4, 1, 8, 8), 51, np.uint8), y=np.arange(4))
    assert (from_npz_folder(tmp_path / "f").train.scaled() == 51).all()
    images = from_npz_folder(tmp_path / "f", scale=255).train
    assert images.x.dtype == np.uint8
    assert np.allclose(images.scaled(), 0.2)
    assert np.allclose(from_npz_folder(tmp_path / "f", scale=100).train.scaled(), 0.51)
    _save(tmp_path / "g", "a", x=np.zeros((4, 3)), y=np.arange(4))
    assert from_npz_folder(tmp_path / "g").train.x.dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 2))}, "needs arrays x and y"),
        ({"x": np.zeros((2, 2)), "y": [0, 1, 2]}, "one number per record"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "no records"),
        ({"x": np.full((2, 2), np.nan), "y": [0, 1]}, "NaN or Inf"),
        ({"x": np.zeros((2, 3)), "y": [0, 1]}, "shape"),
        ({"x": np.zeros((2, 2)), "y": [0, -1]}, "label -1"),
        ({"x": np.array(["p", "q"]), "y": [0, 1]}, "turn text and dates into numbers"),
        ({"x": np.array([{}, {}], dtype=object), "y": [0, 1]}, "cannot be read"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    _save(tmp_path / "f", "a", x=np.zeros((2, 2)), y=[0, 1])
    _save(tmp_path / "f", "b", **arrays)
    with pytest.raises(UserError, match=message) as error:
        from_npz_folder(tmp_path / "f")
    assert "b" in str(error.value)


def test_an_empty_folder_and_a_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.npz files"):
        from_npz_folder(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"PK damaged")
    with pytest.raises(UserError, match=r"a\.npz cannot be read"):
        from_npz_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,x,label\na,1,0\na,,1\n", "row 3, column 'x': the cell is empty"),
        ("client,x,label\na,one,0\n", "'one' is not a number"),
        ("client,x,label\na,1\n", "column 'label'"),
        ("client,x,label\na,nan,0\n", "the cell is empty"),
        ("who,x,label\na,1,0\n", "no column 'client'"),
        ("client,label\na,1\n", "one feature column"),
        ("client,x,label\n", "at least one row"),
        ("", "no column 'client'"),
        ("client;x;label\na;1;0\n", "';' between its cells"),
        ("client,x,x,label\na,1,2,0\n", "two columns of one name"),
        ("client,x,label\na,1,0,7\n", "row 2 has more cells than the header's 3"),
        ('client,x,label\na,"3,5",0\n', "decimals with a point"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        from_csv(path)


def test_a_missing_csv_is_a_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        from_csv(tmp_path / "absent.csv")


class Frame:
    """As far as one is told from a dataset."""

    def to_numpy(self) -> None:
        """As frames have it."""


def test_columns_may_be_options_as_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("client,age,label\na,30,0\na,60,1\n")
    read = from_csv(path, columns={"age": {"range": [0, 120]}})
    assert read.train.x.ravel().tolist() == [0.25, 0.5]
    for bad in ({"ranges": [0, 120]}, {"range": [0, "x"]}, [0, 120], {"range": 3}):
        with pytest.raises(UserError, match="'age' cannot be read by"):
            from_csv(path, columns={"age": bad})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="a fill is a number"):
        from_csv(path, columns={"age": {"dates": ["2000-01-01", "2030-01-01"], "fill": "2010-01-01"}})


def test_frames_that_are_none_have_a_line_and_truth_values_are_numbers() -> None:
    class Lazy:
        def collect(self) -> None:
            """As polars has it."""

    with pytest.raises(UserError, match=r"give frame\.collect\(\)"):
        from_frame(Lazy())
    table = {"client": ["a", "a"], "smokes": [True, False], "label": [0, 1]}
    assert from_frame(Columns(table)).train.x.ravel().tolist() == [1, 0]
    with pytest.raises(UserError, match="each its own column"):
        from_frame(Columns(table | {"smokes": [[1, 2], [3, 4]]}))


class Columns(dict[str, list[Any]]):
    """A table by its columns."""

    @property
    def columns(self) -> list[str]:
        """Their names."""
        return list(self)


def test_bad_torch_lists() -> None:
    pair = [(np.zeros(2, np.float32), 0), (np.ones(2, np.float32), 1)]
    assert from_torch([pair, pair]).client_names == ("client-00", "client-01")
    for datasets, settings, message in [
        ([], {}, "no datasets"),
        (TensorDataset(torch.zeros(2, 3), torch.zeros(2)), {}, "a list of datasets"),
        ([DataLoader(TensorDataset(torch.zeros(2, 3)))], {}, "loader.dataset"),
        ([Frame()], {}, "from_frame"),
        ([[(np.zeros(2), np.zeros(3), 0)]], {}, "3 parts"),
        ([[([[1, 2], [3]], 0)]], {}, "unlike shapes"),
        ([pair, []], {}, "client-01 has no records"),
        ([pair], {"names": ["a", "b"]}, "2 names for 1"),
        ([pair], {"classes": 1}, "label 1"),
    ]:
        with pytest.raises(UserError, match=message):
            from_torch(datasets, **settings)  # type: ignore[arg-type]


def test_ids_are_no_feature_and_belong_to_one_client(tmp_path: Path) -> None:
    path = tmp_path / "ward.csv"
    path.write_text("client,patient,age,label\na,p7,1,0\nb,p8,2,1\na,p9,3,1\n")
    assert from_csv(path, id="patient").train.x.shape == (3, 1)
    assert csv_ids(path, "a", client="client", id="patient") == ["p7", "p9"]
    with pytest.raises(UserError, match="no column 'who'"):
        from_csv(path, id="who")
    path.write_text("client,patient,age,label\na,,1,0\n")
    with pytest.raises(UserError, match="every record needs a value under 'patient'"):
        csv_ids(path, "a", client="client", id="patient")
