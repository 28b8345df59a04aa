"""Deployed runs of other tasks than classification, over tables whose columns stand in different orders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.config import read
from modicum.data import from_csv
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.errors import UserError
from modicum.privacy.verify import verify
from tests.deploy.flower.test_coordinator import NAMES, Direct, finish
from tests.deploy.silo.helpers import key_of, write_silo

EXPERIMENT = """
[data]
csv = "records.csv"
label_column = {label}
{columns}

[privacy]
budgets = 8.0

[task]
name = "{task}"

[model]
name = "logistic"

[method]
name = "dp-sgd"
clip = 1.0
lr = 0.5
steps = 5

[run]
rounds = 4
seed = 5

[run.silos]
client-00 = {{ records = 200, budget = 8.0 }}
client-01 = {{ records = 200, budget = 8.0 }}
"""
ORDER = 'feature_columns = ["dose", "age", "sugar"]'
LABELS = {"regression": "outcome", "multi-label": ["fever", "anaemia"]}
TRUE = {"dose": 0.9, "age": -0.4, "sugar": 0.1}


def table(path: Path, order: list[str], seed: int, missing: str = "", *, labels: bool = True) -> None:
    """Outcomes that follow from columns by name."""
    rng = np.random.default_rng(seed)
    values = {name: rng.uniform(size=200) for name in order}
    score = sum(weight * values[name] for name, weight in TRUE.items())
    values |= {"outcome": score, "fever": (score > 0.3) * 1, "anaemia": (values["age"] > 0.5) * 1}
    names = [name for name in values if name != missing and (labels or name not in ("fever", "anaemia"))]
    rows = (",".join(f"{values[name][i]:g}" for name in names) for i in range(200))
    path.write_text("\n".join([",".join(names), *rows]) + "\n")
    path.chmod(0o600)


def deployed(folder: Path, task: str, columns: str = ORDER, missing: str = "") -> torch.Tensor:
    label = str(LABELS[task]).replace("'", '"') if isinstance(LABELS[task], list) else f'"{LABELS[task]}"'
    text = EXPERIMENT.format(label=label, task=task, columns=columns)
    made = {}
    for seed, (name, order) in enumerate(
        zip(NAMES, (["age", "dose", "sugar"], ["sugar", "age", "dose"]), strict=True)
    ):
        table(folder / f"{name}.csv", order, seed, missing if seed else "", labels=bool(columns))
        path = write_silo(
            folder,
            name,
            experiment=text,
            budget=8.0,
            simulation=False,
            grant='unit = "record"',
            data=f'\n[data]\ncsv = "{name}.csv"\n',
        )
        made[name] = Silo(read_spec(path))
    try:
        server = key_of(folder, "server")
        patience = Patience(1, 1, 1)
        config = read(folder / "experiment.toml")
        return finish(Coordinator(config, NAMES, folder / "server", Direct(made), server, patience))
    finally:
        for silo in made.values():
            silo.close()


@pytest.mark.parametrize("task", LABELS)
def test_silos_learn_another_task_from_columns_matched_by_name(tmp_path: Path, task: str) -> None:
    """A linear model's weights stand in the order of `feature_columns`, whatever the tables' own."""
    model = deployed(tmp_path, task)
    outputs = 2 if task == "multi-label" else 1
    assert len(model) == outputs * (3 + 1)
    dose, age, sugar = model[:3].tolist()
    assert dose > sugar > age if task == "regression" else dose > age
    for folder in ("server", *(f"state-{name}" for name in NAMES)):
        assert verify(tmp_path / folder).matches
    assert f'"{task}"' in (tmp_path / "server" / "summary.json").read_text()


def test_negative_control_without_the_list_columns_come_in_each_tables_own_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = deployed(tmp_path, "regression", columns="")
    dose, age, sugar = model[:3].tolist()
    assert not dose > sugar > age
    assert "table's own order" in caplog.text


def test_a_silo_whose_table_lacks_a_column_is_told_which(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no feature column 'sugar'"):
        deployed(tmp_path, "regression", missing="sugar")


def test_rows_of_labels_that_the_agreed_file_does_not_tell_of_are_refused(tmp_path: Path) -> None:
    """The server, which has no records, would train a model of another size, and every answer would be refused."""
    text = (
        EXPERIMENT.format(label='"fever"', task="multi-label", columns=ORDER)
        .replace("csv", "npz")
        .split("[privacy]")
    )
    npz = '[data]\nnpz = "records-client-00"\n[privacy]' + text[1]
    (tmp_path / "records-client-00").mkdir()
    y = np.zeros((200, 2), np.float32)
    np.savez(tmp_path / "records-client-00" / "client-00.npz", x=np.zeros((200, 3), np.float32), y=y)
    for path in (tmp_path / "records-client-00").iterdir():
        path.chmod(0o600)
    own = '\n[data]\nnpz = "records-client-00"\n'
    path = write_silo(tmp_path, experiment=npz, budget=8.0, grant='unit = "record"', data=own)
    with pytest.raises(UserError, match=r"outputs = 2 under \[task\]"):
        Silo(read_spec(path))


def test_features_come_by_name_in_the_order_that_was_asked_for(tmp_path: Path) -> None:
    table(tmp_path / "a.csv", ["age", "dose", "sugar"], 0)
    found = from_csv(tmp_path / "a.csv", label="fever", features=["sugar", "age"], alone="me")
    whole = from_csv(tmp_path / "a.csv", label="fever", alone="me")
    np.testing.assert_array_equal(found.train.x, whole.train.x[:, [2, 0]])
    for wrong, said in ((["suger"], "did you mean"), ([], "at least one"), (["age", "age"], "once each")):
        with pytest.raises(UserError, match=said):
            from_csv(tmp_path / "a.csv", label="fever", features=wrong, alone="me")
