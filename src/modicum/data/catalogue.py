"""Every dataset that has a name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modicum.data import cifar, embedded, fetch, heart, idx, svhn
from modicum.data.arrays import Arrays, Dataset
from modicum.data.fetch import Download
from modicum.errors import UserError

Read = Callable[[list[Path]], Dataset]


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset: what it is, which files it needs, and how they are read."""

    name: str
    line: str
    folder: str = ""  # under the data folder; empty for embedded data
    files: tuple[str, ...] = ()
    sources: tuple[Download, ...] = ()
    read: Read | None = None
    published: tuple[int, int] | None = None  # training and test records in the publisher's files

    def found(self, data_dir: str | os.PathLike[str] | None = None) -> bool:
        """Whether `load` would need no download."""
        folder = fetch.data_folder(data_dir) / self.folder
        return all(fetch.find(folder, name) is not None for name in self.files)


def catalogue() -> tuple[DatasetEntry, ...]:
    """All named datasets, embedded ones first."""
    return _ENTRIES


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """A dataset by name, e.g. `mnist`; `emnist-balanced:10-46` keeps a range of classes, relabelled from 0.

    Args:
        name: As `modicum datasets` lists them.
        data_dir: Folder of dataset files [default: the user's].

    Returns:
        The dataset.

    Raises:
        UserError: Where there is no such dataset, or its files are missing: the line says how to get them.
    """
    plain, _, classes = name.partition(":")
    entry = next((e for e in _ENTRIES if e.name == plain), None)
    if entry is None:
        raise UserError(f"unknown dataset {plain!r}: choose one of {', '.join(e.name for e in _ENTRIES)}")
    assert entry.read is not None
    try:
        paths = fetch.require(fetch.data_folder(data_dir) / entry.folder, entry.files, entry.sources)
    except UserError as error:
        raise UserError(f"dataset {plain!r}: {error}") from None
    dataset = entry.read(paths)
    _check_labels(dataset)
    dataset = replace(dataset, name=name, note=_note(entry, dataset))
    return dataset.only(_class_range(name, classes)) if classes else dataset


def _check_labels(dataset: Dataset) -> None:
    for part in (dataset.train, dataset.test):
        if len(part) and not 0 <= part.y.min() <= part.y.max() < dataset.classes:
            raise UserError(
                f"{dataset.name}: labels run from {part.y.min()} to {part.y.max()} where 0–{dataset.classes - 1} "
                "are expected: the files belong to another dataset"
            )


def _note(entry: DatasetEntry, dataset: Dataset) -> str:
    here = (len(dataset.train), len(dataset.test))
    if entry.published is None or here == entry.published:
        return dataset.note
    train, test = entry.published
    return f"subset: {here[0]:,} of {train:,} training and {here[1]:,} of {test:,} test records"


def _class_range(name: str, text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise UserError(
            f"cannot read the classes of {name!r}: write them as first-last, e.g. emnist-balanced:10-46"
        )
    return range(int(first), int(last) + 1)


def _idx_entry(name: str, line: str, url: str, md5: tuple[str, str, str, str]) -> DatasetEntry:
    files = tuple(
        f"{part}-{kind}.gz" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    sources = tuple(Download(url + file, digest) for file, digest in zip(files, md5, strict=True))

    def read(p: list[Path]) -> Dataset:
        return Dataset(name, idx.read_images(p[0], p[1]), idx.read_images(p[2], p[3]), classes=10)

    return DatasetEntry(name, line, name, files, sources, read, (60_000, 10_000))


def _emnist_entry(split: str, line: str, classes: int, published: tuple[int, int] | None) -> DatasetEntry:
    name = f"emnist-{split}"
    files = tuple(
        f"{name}-{part}-{kind}.gz"
        for part in ("train", "test")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    url = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    sources = (Download(url, "58c8d27c78d21e728a6bc7b3cc06412e", files),) if published else ()
    first_label = 1 if split == "letters" else 0

    def read(p: list[Path]) -> Dataset:
        train, test = (
            idx.read_images(images, labels, transposed=True, first_label=first_label)
            for images, labels in ((p[0], p[1]), (p[2], p[3]))
        )
        return Dataset(
            name, train, test, classes, note="" if published else "not one of the publisher's own splits"
        )

    return DatasetEntry(name, line, "emnist", files, sources, read, published)


def _cifar_entry(classes: int, line: str, folder: str, md5: str) -> DatasetEntry:
    train = tuple(f"data_batch_{i}" for i in range(1, 6)) if classes == 10 else ("train",)
    test = "test_batch" if classes == 10 else "test"
    label = b"labels" if classes == 10 else b"fine_labels"
    url = f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz"

    def read(p: list[Path]) -> Dataset:
        return Dataset(
            f"cifar-{classes}", cifar.read_batches(p[:-1], label), cifar.read_batches(p[-1:], label), classes
        )

    files = (*train, test)
    return DatasetEntry(
        f"cifar-{classes}", line, folder, files, (Download(url, md5, files),), read, (50_000, 10_000)
    )


def _read_svhn(p: list[Path]) -> Dataset:
    return Dataset("svhn", svhn.read_mat(p[0]), svhn.read_mat(p[1]), classes=10)


def _read_heart(p: list[Path]) -> Dataset:
    parts = [heart.read_hospital(path) for path in p]
    rows = Arrays.concatenate(parts)
    hospital = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held = embedded.fixed_test_rows(2 * hospital + rows.y)
    return Dataset(
        "heart-disease",
        rows.take(~held),
        rows.take(held),
        classes=2,
        clients=hospital[~held],
        test_clients=hospital[held],
        client_names=heart.HOSPITALS,
    )


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_HEART_FILES = tuple(f"processed.{hospital}.data" for hospital in heart.HOSPITALS)

_ENTRIES: tuple[DatasetEntry, ...] = (
    DatasetEntry("digits", "8×8 digits, 10 classes (embedded)", read=lambda _: embedded.digits()),
    DatasetEntry(
        "breast-cancer", "30 features of tumours, 2 classes (embedded)", read=lambda _: embedded.breast_cancer()
    ),
    _idx_entry(
        "mnist",
        "28×28 digits, 10 classes",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    _idx_entry(
        "fashion-mnist",
        "28×28 clothes, 10 classes",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    _emnist_entry("balanced", "28×28 digits and letters, 47 classes of equal size", 47, (112_800, 18_800)),
    _emnist_entry("letters", "28×28 letters, 26 classes, upper and lower case together", 26, (124_800, 20_800)),
    _emnist_entry("digits", "28×28 digits, 10 classes", 10, (240_000, 40_000)),
    _emnist_entry("bymerge", "28×28 digits and letters, 47 classes of natural size", 47, (697_932, 116_323)),
    _emnist_entry("byclass", "28×28 digits and letters, 62 classes of natural size", 62, (697_932, 116_323)),
    _emnist_entry("merge47", "28×28 digits and letters, 47 classes, a split of your own making", 47, None),
    _cifar_entry(10, "32×32 colour images, 10 classes", "cifar-10-batches-py", "c58f30108f718f92721af3b95e74349a"),
    _cifar_entry(100, "32×32 colour images, 100 classes", "cifar-100-python", "eb9058c3a382ffc7106e4002c42a8d85"),
    DatasetEntry(
        "svhn",
        "32×32 colour house numbers, 10 classes",
        "svhn",
        ("train_32x32.mat", "test_32x32.mat"),
        (
            Download(_SVHN + "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            Download(_SVHN + "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
        _read_svhn,
        (73_257, 26_032),
    ),
    DatasetEntry(
        "heart-disease",
        "13 features of patients of four hospitals, 2 classes",
        "heart-disease",
        _HEART_FILES,
        tuple(Download(_UCI + file) for file in _HEART_FILES),
        _read_heart,
    ),
)
