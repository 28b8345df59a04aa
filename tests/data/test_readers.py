from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from modicum.data import catalogue, load
from modicum.data.cifar import read_batches
from modicum.data.heart import FEATURES, read_hospital
from modicum.data.idx import read_idx
from modicum.errors import UserError
from tests.data import files


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODICUM_OFFLINE", "1")


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist_gzipped_or_not(tmp_path: Path, suffix: str) -> None:
    images = files.write_mnist(tmp_path / "mnist", suffix=suffix)
    data = load("mnist", tmp_path)
    assert data.train.x.dtype == np.uint8
    assert np.array_equal(data.train.x[:, 0], images)
    assert np.array_equal(data.test.y, np.arange(40) % 10)
    assert np.array_equal(data.train.scaled()[3, 0], images[3].astype(np.float32) / 255)
    assert data.note == "subset: 40 of 60,000 training and 40 of 10,000 test records"


def test_emnist_is_turned_upright_and_letters_count_from_zero(tmp_path: Path) -> None:
    images = files.write_emnist(tmp_path / "emnist", "letters", np.arange(52) % 26 + 1)
    data = load("emnist-letters", tmp_path)
    assert np.array_equal(data.train.x[5, 0], images[5].T)
    assert (data.train.y.min(), data.train.y.max(), data.classes) == (0, 25, 26)


def test_a_local_emnist_split_says_so_and_can_be_cut_to_its_letters(tmp_path: Path) -> None:
    files.write_emnist(tmp_path / "emnist", "merge47", np.arange(94) % 47)
    assert "not one of the publisher's" in load("emnist-merge47", tmp_path).note
    letters = load("emnist-merge47:10-46", tmp_path)
    assert letters.classes == 37
    assert sorted(set(letters.train.y.tolist())) == list(range(37))
    assert "37 of 47 classes" in letters.note


@pytest.mark.parametrize("classes", ["46-99", "5", "a-b", "3-3"])
def test_bad_class_ranges(tmp_path: Path, classes: str) -> None:
    files.write_emnist(tmp_path / "emnist", "merge47", np.arange(94) % 47)
    with pytest.raises(UserError, match="class"):
        load(f"emnist-merge47:{classes}", tmp_path)


@pytest.mark.parametrize(("classes", "folder"), [(10, "cifar-10-batches-py"), (100, "cifar-100-python")])
def test_cifar(tmp_path: Path, classes: int, folder: str) -> None:
    data = files.write_cifar(tmp_path / folder, classes)
    read = load(f"cifar-{classes}", tmp_path)
    assert len(read.train) == (100 if classes == 10 else 20)
    assert np.array_equal(read.test.x, data.reshape(-1, 3, 32, 32))
    assert np.array_equal(read.test.y, np.arange(20) % classes)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(_Evil.target),)

    target = Path()


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    """The same file, read by a plain unpickler, does run it."""
    _Evil.target = tmp_path / "owned"
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps({b"data": _Evil()}, protocol=2))
    with pytest.raises(UserError, match="no part of a CIFAR batch"):
        read_batches([path], b"labels")
    assert not _Evil.target.exists()
    pickle.loads(path.read_bytes())
    assert _Evil.target.exists()


def test_svhn_ten_is_zero(tmp_path: Path) -> None:
    x = files.write_svhn(tmp_path / "svhn")
    data = load("svhn", tmp_path)
    assert data.train.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert np.array_equal(data.train.x[7], x[:, :, :, 7].transpose(2, 0, 1))


def test_heart_has_four_hospitals_and_a_binary_target(tmp_path: Path) -> None:
    files.write_heart(tmp_path / "heart-disease")
    data = load("heart-disease", tmp_path)
    assert data.client_names == ("cleveland", "hungarian", "switzerland", "va")
    assert (len(data.train), len(data.test), data.classes) == (96, 24, 2)
    assert np.bincount(data.clients).tolist() == [24] * 4
    assert np.bincount(data.train.y).tolist() == [20, 76]  # diagnoses 1–4 are all 'present'


@pytest.mark.parametrize("missing", ["?", "-9", "0", "-9.0"])
def test_every_way_to_write_a_missing_value_reads_alike(tmp_path: Path, missing: str) -> None:
    row = f"54,1,4,{missing},{missing},0,0,{missing},0,0,{missing},{missing},{missing},1\n"
    path = tmp_path / "hospital"
    path.write_text(row)
    by_name = dict(zip(FEATURES, read_hospital(path).x[0], strict=True))
    expected = {"trestbps": 120, "chol": 200, "thalach": 150, "slope": 1, "ca": 0, "thal": 3}
    for name, value in expected.items():
        low, high, *_ = FEATURES[name]
        assert by_name[name] == pytest.approx(2 * (value - low) / (high - low) - 1, abs=1e-6)


def test_one_patient_moves_no_other_patients_features(tmp_path: Path) -> None:
    """Standardising by the hospital's own mean, the usual recipe, fails the same check."""
    path = tmp_path / "hospital"
    rows = ["50,1,2,130,200,0,0,150,0,0,1,0,3,0\n", "60,0,3,?,250,0,0,140,0,1,2,0,3,1\n"]
    old, young = "70,1,4,180,390,1,2,90,1,4,3,3,7,2\n", "25,0,1,90,110,0,0,210,0,0,1,0,3,0\n"
    before, after = (read_hospital(_write(path, [*rows, last])).x for last in (old, young))
    assert np.array_equal(before[:2], after[:2])

    def standardised(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-6)

    assert not np.allclose(standardised(before)[:2], standardised(after)[:2])


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("name", "records", "shape"), [("digits", 1797, (1, 8, 8)), ("breast-cancer", 569, (30,))]
)
def test_embedded(name: str, records: int, shape: tuple[int, ...]) -> None:
    data = load(name)
    assert len(data.train) + len(data.test) == records
    assert data.train.shape == shape
    assert data.train.scaled().min() >= -1
    assert data.train.scaled().max() <= 1
    assert np.array_equal(load(name).test.x, data.test.x)  # the test set never changes
    spread = np.bincount(data.train.y) / len(data.train) - np.bincount(data.test.y) / len(data.test)
    assert np.abs(spread).max() < 0.01


def test_every_entry_has_a_line_of_its_own() -> None:
    entries = catalogue()
    assert len({e.name for e in entries}) == len(entries)
    assert all(e.line and "\n" not in e.line and e.read for e in entries)


def test_a_missing_dataset_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load("mnist", tmp_path)
    assert "train-images-idx3-ubyte.gz" in str(error.value)
    assert str(tmp_path / "mnist") in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown dataset 'nist'.*mnist"):
        load("nist")


def _damage_mnist(folder: Path) -> None:
    files.write_mnist(folder / "mnist")
    path = folder / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:200])


def _not_gzip(folder: Path) -> None:
    files.write_mnist(folder / "mnist")
    (folder / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(b"<html>not found</html>")


def _short_idx(folder: Path) -> None:
    files.write_mnist(folder / "mnist")
    path = folder / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))


def _fewer_labels(folder: Path) -> None:
    files.write_mnist(folder / "mnist")
    files.write_idx(folder / "mnist" / "train-labels-idx1-ubyte.gz", np.zeros(39))


def _strange_label(folder: Path) -> None:
    files.write_mnist(folder / "mnist")
    files.write_idx(folder / "mnist" / "train-labels-idx1-ubyte.gz", np.full(40, 46))


def _damage_cifar(folder: Path) -> None:
    files.write_cifar(folder / "cifar-10-batches-py", 10)
    (folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"\x80\x02garbage")


def _other_cifar(folder: Path) -> None:
    files.write_cifar(folder / "cifar-10-batches-py", 10)
    batch = {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [0]}
    (folder / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(batch))


def _damage_svhn(folder: Path) -> None:
    files.write_svhn(folder / "svhn")
    path = folder / "svhn" / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])


def _damage_heart(folder: Path) -> None:
    files.write_heart(folder / "heart-disease")
    (folder / "heart-disease" / "processed.va.data").write_text("1,2,three\n")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("mnist", _damage_mnist),
        ("mnist", _not_gzip),
        ("mnist", _short_idx),
        ("mnist", _fewer_labels),
        ("mnist", _strange_label),
        ("cifar-10", _damage_cifar),
        ("cifar-10", _other_cifar),
        ("svhn", _damage_svhn),
        ("heart-disease", _damage_heart),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, name: str, damage: object) -> None:
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError) as error:
        load(name, tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_idx_of_other_types_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "floats"
    path.write_bytes(b"\x00\x00\x0d\x01\x00\x00\x00\x01\x00\x00\x00\x00")
    with pytest.raises(UserError, match="not an idx file of bytes"):
        read_idx(path)


def test_importing_the_data_module_pulls_in_nothing_heavy() -> None:
    heavy = ("torch", "sklearn", "scipy", "matplotlib")
    code = f"import sys, modicum.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
