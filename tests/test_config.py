from __future__ import annotations

import math
from pathlib import Path

import pytest

from modicum.config import differences, experiment, read, to_toml
from modicum.config.fields import describe
from modicum.config.schema import DataConfig, MetricConfig, PrivacyConfig, RunConfig
from modicum.config.source import parse
from modicum.config.write import toml_value
from modicum.errors import UserError
from modicum.methods import METHODS

SMALL = """\
[data]
name = "digits"   # line 2
clients = 4

[privacy]
budgets = [1.0, 8.0]

[method]
name = "dp-sgd"

[run]
rounds = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "e.toml"
    path.write_text(text)
    return path


def test_defaults_fill_what_is_not_said(tmp_path: Path) -> None:
    config = read(write(tmp_path, SMALL))
    assert config.run == RunConfig(rounds=2)
    assert config.model.name == "logistic"
    assert config.method == METHODS["dp-sgd"]()
    assert (config.privacy.delta, config.privacy.adjacency) == (1e-5, "zero-out")


@pytest.mark.parametrize("method", METHODS)
def test_every_default_is_written_and_reads_back(tmp_path: Path, method: str) -> None:
    config = read(write(tmp_path, SMALL), [f"method.name={method}"])
    text = to_toml(config)
    assert all(
        f"{info.name} =" in text for cls in (DataConfig, PrivacyConfig, RunConfig) for info in describe(cls)
    )
    assert all(f"{info.name} =" in text for info in describe(METHODS[method]))
    again = read(write(tmp_path, text))
    assert again == config
    assert to_toml(again) == text
    assert list(differences(config, again)) == []


def test_everything_that_can_be_said_reads_back(tmp_path: Path) -> None:
    text = (
        SMALL.replace("budgets = [1.0, 8.0]", 'budgets = { "0.5" = 0.75, "inf" = 0.25 }\ndelta = 1e-4')
        .replace('name = "dp-sgd"', 'name = "dp-fedavg"\nview = "trusted-server"\nrate = 0.5')
        .replace("[run]", '[model]\nname = "mlp"\nhidden = 8\n\n[run]\nseed = 3')
        .replace("clients = 4", "clients = 4\nvalidation = 0.2")
    )
    text += '\n[[run.metrics]]\nname = "accuracy"\nevery = 2\nnoise_multiplier = 30.0\n'
    config = read(write(tmp_path, text))
    assert config.run.metrics == (MetricConfig(every=2, noise_multiplier=30.0),)
    assert read(write(tmp_path, to_toml(config))) == config
    built = experiment(config)
    assert sorted(built.federation.budgets) == [0.5, 0.5, 0.5, math.inf]
    assert built.metrics[0].every == 2
    assert built.model_options == {"hidden": 8}
    assert getattr(built.method, "delta") == 1e-4  # noqa: B009


@pytest.mark.parametrize("text", ["a\nb", 'say "x"', "back\\slash", "ε≤1", "\x01\x7f", "tab\t", "'"])
def test_text_survives_toml(text: str) -> None:
    assert parse(f"value = {toml_value(text)}\n", "t").tables["value"] == text


def test_options_go_on_top_and_seed_is_short(tmp_path: Path) -> None:
    options = ["run.rounds=7", "data.partition=dirichlet:0.3", "privacy.budgets=0.5,1", "run.simulation=false"]
    config = read(write(tmp_path, SMALL), options, seed=9)
    assert (config.run.rounds, config.run.seed, config.run.simulation) == (7, 9, False)
    assert config.data.partition == "dirichlet:0.3"
    assert config.privacy.budgets == "0.5,1"


def test_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    config = read(write(tmp_path, SMALL.replace('name = "digits"', 'csv = "own/table.csv"')))
    assert config.data.csv == str(tmp_path / "own" / "table.csv")


WRONG = [
    (('name = "digits"   # line 2', 'nmae = "digits"'), "line 2: unknown key 'data.nmae': did you mean 'name'?"),
    (("rounds = 2", "rounds = 2.5"), "line 12: rounds = 2.5 does not fit"),
    (("rounds = 2", 'rounds = "2"'), "line 12: rounds = '2' does not fit"),
    (("rounds = 2", "rounds = true"), "line 12: rounds = True does not fit"),
    (("rounds = 2", "rounds = 0"), "line 11: rounds must be at least 1"),
    (("rounds = 2", "rounds = 2020-01-01"), "line 11: dates"),
    (("rounds = 2", "seed = -1"), "line 11: seed must be 0 or more"),
    (("rounds = 2", "seed = 99999999999999999999"), "line 11: seed must be 0 or more, and fit into 63 bits"),
    (("clients = 4", 'backbone = "a\\u0000.npz"'), "line 1: a path holds no zero byte"),
    (("rounds = 2", "rounds = = 2"), "line 12: not valid TOML"),
    (("[run]", "[runs]"), "line 11: unknown table 'runs': did you mean 'run'?"),
    (("[run]\nrounds = 2", 'run = "fast"'), "line 11: unknown key 'method.run'"),
    (('name = "dp-sgd"', 'name = "dpsgd"'), "line 9: unknown method 'dpsgd': did you mean 'dp-sgd'?"),
    (('name = "dp-sgd"', "clip = 1.0"), "line 9: unknown key 'method.clip'"),
    (
        ('name = "dp-sgd"', 'name = "dp-sgd"\nclips = 1.0'),
        "line 10: unknown key 'method.clips': did you mean 'clip'?",
    ),
    (('name = "dp-sgd"', 'name = "dp-sgd"\nclip = "big"'), "line 10: clip = 'big' does not fit"),
    (('name = "dp-sgd"', 'name = "dp-sgd"\ndelta = 1e-5'), "line 10: delta belongs under [privacy]"),
    (("budgets = [1.0, 8.0]", 'adjacency = "swap"'), "line 6: adjacency = 'swap' does not fit"),
    (("budgets = [1.0, 8.0]", "budgets = [[1.0]]"), "line 6: budgets"),
    (
        ('name = "digits"   # line 2', 'name = "digits"\ncsv = "x"'),
        "line 1: give exactly one of name, npz, csv and parquet",
    ),
    (("rounds = 2", "rounds = 2\nmetrics = [{ evry = 1 }]"), "line 13: unknown key 'run.metrics.evry'"),
    (("rounds = 2", "rounds = 2\nmetrics = [{ every = 0 }]"), "line 13: a metric needs every of at least 1"),
    (("[run]", '[model]\nhidden = "many"\n\n[run]'), "line 12: the model option hidden must be a number"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_errors_name_file_and_line(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in SMALL
    path = write(tmp_path, SMALL.replace(*change))
    with pytest.raises(UserError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, {said}")
    assert "\n" not in str(error.value)


LATE = [
    (("clients = 4", "clients = 4000"), "line 1: more clients than records"),
    (("clients = 4", 'partition = "dirichlet:x"'), "line 1: "),
    (('name = "digits"   # line 2', 'name = "digit"'), "line 1: unknown dataset"),
    (("budgets = [1.0, 8.0]", "budgets = [1.0, 0.0]"), "line 6: a budget ε must be a positive number"),
    (("budgets = [1.0, 8.0]", 'budgets = { "x" = 1.0 }'), "line 6: budgets by weight are written"),
    (("[run]", '[model]\nname = "cnnn"\n\n[run]'), "line 11: unknown model 'cnnn'"),
    (("[run]", '[model]\nname = "mlp"\nwide = 8\n\n[run]'), "line 11: model 'mlp' has no option"),
    (("[run]", '[model]\nname = "mlp"\nhidden = -1\n\n[run]'), "line 11: model 'mlp' does not take"),
    (("[run]", '[model]\nname = "mlp"\nhidden = 1e19\n\n[run]'), "line 11: the model option hidden must be a fin"),
    (("[run]", '[model]\nname = "cnn8"\nwidth = nan\n\n[run]'), "line 11: the model option width must be a fin"),
    (("budgets = [1.0, 8.0]", "budgets = [1.0, 1e308]"), "line 1: client-01: the budget ε lies between"),
    (("budgets = [1.0, 8.0]", "budgets = 1e-300"), "line 1: client-00: the budget ε lies between"),
    (("[run]", "noise_multiplier = 1e-300\n\n[run]"), "line 8: the noise multiplier lies between"),
    (("rounds = 2", 'rounds = 2\ndevice = "gpu"'), "line 13: the device 'gpu' is not there"),
]


@pytest.mark.parametrize(("change", "said"), LATE, ids=[said for _, said in LATE])
def test_errors_of_the_parts_name_the_line_too(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in SMALL
    path = write(tmp_path, SMALL.replace(*change))
    with pytest.raises(UserError) as error:
        experiment(read(path))
    assert str(error.value).startswith(f"{path}, {said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("run.rounds", "--set run.rounds: write --set table.key=value"),
        ("rounds=3", "--set rounds=3: write --set table.key=value"),
        ("run.round=3", "--set run.round: unknown key 'run.round': did you mean 'rounds'?"),
        ("run.rounds=many", "--set run.rounds: rounds = 'many' does not fit"),
        ("run.rounds.more=1", "--set run.rounds.more=1: rounds is a value, not a table"),
    ],
)
def test_errors_of_options_name_the_option(tmp_path: Path, option: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        read(write(tmp_path, SMALL), [option])
    assert str(error.value).startswith(said)


def test_differences_name_what_decides_a_result(tmp_path: Path) -> None:
    one = read(write(tmp_path, SMALL))
    other = read(
        write(tmp_path, SMALL), ["run.rounds=3", "method.clip=2.0", "run.device=cpu", "data.dir=elsewhere"]
    )
    assert list(differences(one, other)) == [("method.clip", "1.0", "2.0"), ("run.rounds", "2", "3")]


@pytest.mark.parametrize("path", sorted(Path("examples").rglob("*.toml")), ids=str)
def test_examples_are_valid(path: Path) -> None:
    config = read(path)
    assert config.data.name is not None
    assert read(path) == config
