"""Records of every kind: tables with text and dates, frames, sequences of one public length, named labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.core.records import Field, each, fields_from_json, fields_to_json, leaves
from modicum.data import federate, from_csv, from_frame, from_npz_folder, from_parquet, from_torch
from modicum.data.arrays import Arrays, Peek
from modicum.data.columns import Column
from modicum.data.own import split_item
from modicum.data.sequences import NO_TOKEN, Padding, record_of
from modicum.errors import UserError

TABLE = """client,age,seen,note,sex,label
north,40,2020-01-01,short,f,benign
north,50,2025-01-01,a longer note,m,malignant
south,60,2030-01-01,,f,benign
"""
COLUMNS = {
    "age": Column(range=(0, 100)),
    "seen": Column(dates=("2020-01-01", "2030-01-01")),
    "note": Column(text=8),
    "sex": Column(categories=("f", "m")),
}


def write(folder: Path, text: str = TABLE) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_a_table_of_numbers_dates_texts_and_named_labels(tmp_path: Path) -> None:
    found = from_csv(write(tmp_path), columns=COLUMNS, labels=["benign", "malignant"])
    assert found.labels == ("benign", "malignant")
    assert found.train.y.tolist() == [0, 1, 0]
    assert found.train.x["numbers"][:, 0].tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert found.train.x["numbers"][1, 1] == pytest.approx(0.5, abs=1e-3)
    assert found.train.x["note"].tolist() == [
        [116, 105, 112, 115, 117, 0, 0, 0],
        [b + 1 for b in b"a longer"],
        [0] * 8,
    ]
    assert found.values == {"note": 257}
    assert found.peeks == ()


def test_one_text_alone_is_the_record(tmp_path: Path) -> None:
    path = write(tmp_path, "client,note,label\na,hello,0\nb,world,1\n")
    found = from_csv(path, columns={"note": Column(text=5)})
    assert found.train.x.shape == (2, 5)
    assert found.values == {"": 257}


def test_names_that_were_found_are_a_peek(tmp_path: Path) -> None:
    found = from_csv(write(tmp_path), columns=COLUMNS)
    assert found.labels == ("benign", "malignant")
    assert Peek.CLASSES in found.peeks


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        ("", {"note": Column(drop=True), "sex": Column(drop=True)}, "it looks like a date: "),
        ("", {"seen": Column(drop=True), "sex": Column(drop=True)}, r"a length as a text \({ text = 64 }\)"),
        ("", {"seen": Column(drop=True), "note": Column(drop=True)}, "give the column categories"),
        ("2025-01-01", COLUMNS, "'spring' is no date; write it as 2026-01-31"),
        (",malignant", COLUMNS, "row 3, column 'label': the label is missing"),
    ],
)
def test_every_message_says_what_to_do(
    change: str, columns: dict[str, Column], message: str, tmp_path: Path
) -> None:
    text = TABLE.replace(change, "spring" if change[:1] == "2" else ",") if change else TABLE
    with pytest.raises(UserError, match=message) as error:
        from_csv(write(tmp_path, text), columns=columns)
    assert "\n" not in str(error.value)


def test_an_unlisted_label_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'malignant' is not one of benign, none: list it in labels"):
        from_csv(write(tmp_path), columns=COLUMNS, labels=["benign", "none"])
    with pytest.raises(UserError, match="no column 'diagnosis': correct its name"):
        from_csv(write(tmp_path), label="diagnosis")


@pytest.mark.parametrize(
    "column",
    [
        lambda: Column(dates=("2030-01-01", "2020-01-01")),
        lambda: Column(dates=("soon", "later")),
        lambda: Column(text=0),
        lambda: Column(text=5, range=(0, 1)),
    ],
)
def test_bad_columns_are_refused(column: Any) -> None:
    with pytest.raises(UserError):
        column()


def test_several_label_columns_are_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "client,x,a,b\np,0.1,0,1\nq,0.2,1,1\n")
    found = from_csv(path, label=["a", "b"])
    assert found.train.y.tolist() == [[0, 1], [1, 1]]
    assert found.classes == 0


def test_frames_of_pandas_and_polars_and_parquet_are_the_same_table(tmp_path: Path) -> None:
    rows = {"client": ["a", "a", "b"], "x": [0.1, 0.2, 0.3], "label": ["no", "yes", "no"]}
    plain = from_csv(write(tmp_path, "client,x,label\na,0.1,no\na,0.2,yes\nb,0.3,no\n"))
    made = []
    for name in ("pandas", "polars"):
        module = pytest.importorskip(name, reason=f"{name} is not installed")
        made.append(from_frame(module.DataFrame(rows)))
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    parquet.write_table(arrow.table(rows), tmp_path / "t.parquet")
    made.append(from_parquet(tmp_path / "t.parquet"))
    for one in made:
        assert np.array_equal(one.train.x, plain.train.x)
        assert np.array_equal(one.train.y, plain.train.y)
        assert one.labels == plain.labels == ("no", "yes")
    (tmp_path / "no.parquet").write_bytes(b"PAR0")
    with pytest.raises(UserError, match="as a Parquet file"):
        from_parquet(tmp_path / "no.parquet")


def test_missing_cells_of_a_frame_are_missing() -> None:
    frame = pytest.importorskip("pandas", reason="pandas is not installed").DataFrame(
        {"client": ["a", "b"], "x": [0.1, None], "label": [0, 1]}
    )
    with pytest.raises(UserError, match="row 3, column 'x': the cell is empty; give the column a fill"):
        from_frame(frame)
    assert from_frame(frame, columns={"x": Column(fill=0.5)}).train.x[1, 0] == 0.5
    with pytest.raises(UserError, match="a table has columns, got list"):
        from_frame([1, 2])


SENTENCES = [([1, 2, 3], 0), ([4, 5, 6, 7, 8], 1), ([9], 0)]


def test_sequences_have_one_public_length() -> None:
    with pytest.raises(UserError, match=r"lengths from 1 to 5: say one public length"):
        from_torch([SENTENCES])
    found = from_torch([SENTENCES], length=4, values=10)
    assert found.train.x["tokens"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 7], [9, 0, 0, 0]]
    assert found.train.x["mask"].sum(1).tolist() == [3, 4, 1]
    assert found.values == {"tokens": 10}


def longest(records: list[Any]) -> int:
    """The negative control: how long records would be if they were padded to the longest of them."""
    return max(len(x) for x, _ in records)


def test_no_shape_follows_from_a_record() -> None:
    """Another record of another length changes no shape; padded to the longest, it would."""
    other = [*SENTENCES[:-1], ([3] * 30, 1)]
    shapes = [from_torch([rows], length=8, values=10).train.shape for rows in (SENTENCES, other)]
    assert shapes[0] == shapes[1]
    assert longest(SENTENCES) != longest(other)


def test_a_mask_of_its_own_is_kept() -> None:
    items = [({"input_ids": [1, 2], "attention_mask": [1, 1]}, 0), ({"input_ids": [3], "attention_mask": [1]}, 1)]
    found = from_torch([items], length=3).train.x
    assert set(found) == {"input_ids", "attention_mask"}
    assert found["attention_mask"].tolist() == [[True, True, False], [True, False, False]]


def test_records_alone_are_their_own_next_tokens() -> None:
    found = from_torch([[[1, 2, 3], [4, 5]]], length=4)
    assert found.train.y.tolist() == [[1, 2, 3, NO_TOKEN], [4, 5, NO_TOKEN, NO_TOKEN]]
    assert split_item({"input_ids": [1], "label": 2}, "label") == ({"input_ids": [1]}, 2)


def test_hugging_face_datasets_are_read_with_their_names() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    own = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [1, 0]}, features=features)
    found = from_torch([own], length=3, values=5)
    assert found.labels == ("no", "yes")
    assert found.train.x["input_ids"].tolist() == [[1, 2, 0], [3, 0, 0]]


def test_values_are_checked_and_else_a_peek() -> None:
    with pytest.raises(UserError, match="reach 9, and values = 5 allows 0 to 4"):
        from_torch([SENTENCES], length=4, values=5)
    assert Peek.VALUES in from_torch([SENTENCES], length=4).peeks


def test_npz_files_of_several_arrays_and_named_labels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        arrays = {"ids": np.arange(6).reshape(2, 3), "age": np.array([[0.1], [0.2]]), "who": np.array(["p", "q"])}
        np.savez(tmp_path / f"{name}.npz", **arrays, y=np.array(["no", "yes"]))
    found = from_npz_folder(tmp_path, values={"ids": 6}, labels=["no", "yes"], id="who")
    assert {name: leaf.dtype.kind for name, leaf in leaves(found.train.x)} == {"ids": "i", "age": "f"}
    assert found.train.y.tolist() == [0, 1, 0, 1]
    assert found.peeks == ()
    data = federate(found, test=0.5)
    assert data.labels == ("no", "yes")
    assert data.inputs["ids"] == Field((3,), "int", 6)


def test_what_a_record_is_made_of_survives_json() -> None:
    fields = {"ids": Field((3,), "int", 6), "deep": {"mask": Field((3,), "bool")}, "age": Field((1,))}
    assert fields_from_json(fields_to_json(fields)) == fields
    assert fields_to_json(Field((1, 8, 8))) == [1, 8, 8]
    drawn = torch.Generator().manual_seed(0)
    made = each(lambda field: field.sample(5, drawn), fields)
    assert int(made["ids"].max()) < 6
    assert made["deep"]["mask"][:, 0].all()


def test_padding_refuses_what_is_no_sequence() -> None:
    with pytest.raises(UserError, match="these records have none"):
        record_of(3, Padding(4))
    with pytest.raises(UserError, match="at least 1"):
        Padding(0)
    with pytest.raises(UserError, match="turn text and dates into numbers"):
        Arrays(np.array(["a"]), np.array([0]))
