"""Bad input to `modicum run` is one line, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cli.commands import SMALL, Call, contents, good, own, own_config, small

pytestmark = pytest.mark.usefixtures("in_a_folder")


def nan_in_data() -> tuple[Path, tuple[str, ...], str]:
    good()
    own([[0.1, np.nan], [0.2, 0.3]], [0, 1])
    return own_config(), (), "NaN or Inf in record 0"


def infinity_in_data() -> tuple[Path, tuple[str, ...], str]:
    good()
    own([[0.1, 1.0], [np.inf, 0.3]], [0, 1])
    return own_config(), (), "NaN or Inf in record 1"


def no_data() -> tuple[Path, tuple[str, ...], str]:
    good()
    own(np.zeros((0, 2)), np.zeros(0, int))
    return own_config(), (), "client 'a' has no records"


def one_class() -> tuple[Path, tuple[str, ...], str]:
    own(np.ones((5, 2)), [1] * 5, "a")
    own(np.ones((5, 2)), [1] * 5, "b")
    return own_config(), (), "same label"


def label_too_large() -> tuple[Path, tuple[str, ...], str]:
    good()
    own(np.ones((3, 2)), [0, 1, 2])
    return own_config(classes=2), (), "label 2, outside 0–1"


def label_negative() -> tuple[Path, tuple[str, ...], str]:
    good()
    own(np.ones((3, 2)), [0, 1, -1])
    return own_config(), (), "label -1, outside"


def small_client() -> tuple[Path, tuple[str, ...], str]:
    return small(), ("--set", "method.batch=4000"), "fewer than the batch of 4000"


def zero_budget() -> tuple[Path, tuple[str, ...], str]:
    return small(SMALL.replace("[2.0, 8.0]", "[2.0, 0.0]")), (), "small.toml, line 7: a budget ε must be"


def negative_budget() -> tuple[Path, tuple[str, ...], str]:
    return small(SMALL.replace("[2.0, 8.0]", "-1.0")), (), "small.toml, line 7: a budget ε must be"


def many_clients() -> tuple[Path, tuple[str, ...], str]:
    return small(), ("--set", "data.clients=5000"), "more clients than records"


def model_does_not_fit() -> tuple[Path, tuple[str, ...], str]:
    return small(), ("--set", "data.name=breast-cancer", "--set", "model.name=cnn-small"), "model"


def unknown_key() -> tuple[Path, tuple[str, ...], str]:
    return small(SMALL + "epochs = 3\n"), (), "small.toml, line 14: unknown key 'run.epochs'"


def no_file() -> tuple[Path, tuple[str, ...], str]:
    return Path("nothing.toml"), (), "cannot read nothing.toml"


def metric_without_records() -> tuple[Path, tuple[str, ...], str]:
    return small(SMALL + "metrics = [{ every = 1 }]\n"), (), "no validation records"


BAD = [
    *(nan_in_data, infinity_in_data, no_data, one_class, label_too_large, label_negative, small_client),
    *(zero_budget, negative_budget, many_clients, model_does_not_fit, unknown_key, no_file),
    metric_without_records,
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.__name__)
def test_bad_input_is_one_line_and_leaves_nothing(
    call: Call, case: Callable[[], tuple[Path, tuple[str, ...], str]]
) -> None:
    file, options, said = case()
    code, out, err = call("run", file, *options, "--out", "r")
    assert (code, out) == (2, "")
    assert err.startswith("modicum: ")
    assert err.count("\n") == 1
    assert said in err
    assert not Path("r").exists()


def test_a_folder_that_cannot_be_written_to(call: Call) -> None:
    Path("file").write_text("mine")
    for out in ("file", "file/below"):
        code, _, err = call("run", small(), "--out", out)
        assert code == 2
        assert err.count("\n") == 1
    assert "cannot write to file/below" in err
    assert Path("file").read_text() == "mine"


def test_a_folder_with_something_in_it_is_left_alone(call: Call) -> None:
    Path("r").mkdir()
    Path("r/mine.txt").write_text("mine")
    code, _, err = call("run", small(), "--out", "r")
    assert (code, err) == (2, "modicum: r is not empty: continue it with --resume, or choose another folder\n")
    assert contents(Path("r")) == {"mine.txt": b"mine"}
