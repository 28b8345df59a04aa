"""Persons as the unit, and other tasks than classification, over live Flower: processes, TLS, node keys, one silo
killed on the way. Each ends in the model of a simulation, and everybody's certificate says what was hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.federation.records import read_records
from modicum.privacy.verify import verify
from tests.deploy.flower.helpers import alone, deployed_model, deployment, in_process, silent

WARDS = ("ward-a", "ward-b")
PERSONS = 40
EXPERIMENT = """
[data]
csv = "{table}"
client_column = "ward"
test = 0.0
{data}

[privacy]
budgets = 8.0
fixed_shapes = "auto"
{privacy}

[task]
name = "{task}"

[model]
name = "logistic"

[method]
name = "dp-sgd"
clip = 1.0
lr = 0.5
batch = 8
steps = 3

[run]
rounds = 3
seed = 5
simulation = true
"""
TASKS = {
    "regression": ("regression", 'label_column = "outcome"\nfeature_columns = ["dose", "age"]', "", "record"),
    "multi-label": (
        "multi-label",
        'label_column = ["fever", "anaemia"]\nfeature_columns = ["dose", "age"]',
        "",
        "record",
    ),
    "persons": (
        "classification",
        'label_column = "fever"\nfeature_columns = ["dose", "age"]\nclasses = 2\nperson = "patient"\n'
        "rows_per_person = 3",
        'unit = "person"',
        "person",
    ),
    "regression of persons": (
        "regression",
        'label_column = "outcome"\nfeature_columns = ["dose", "age"]\nperson = "patient"\nrows_per_person = 3',
        'unit = "person"',
        "person",
    ),
}


def table(path: Path) -> None:
    """Forty patients a ward, of one to five visits each."""
    rng = np.random.default_rng(0)
    lines = ["ward,patient,dose,age,outcome,fever,anaemia"]
    for ward in WARDS:
        for patient in np.repeat(np.arange(PERSONS), rng.integers(1, 6, PERSONS)):
            dose, age = rng.uniform(size=2).round(4)
            outcome = round(0.9 * dose - 0.4 * age, 4)
            lines.append(f"{ward},{ward}-{patient},{dose},{age},{outcome},{int(dose > age)},{int(age > 0.5)}")
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", TASKS)
def test_it_ends_in_the_model_of_a_simulation(kind: str, tmp_path: Path) -> None:
    task, data, privacy, unit = TASKS[kind]
    table(tmp_path / "visits.csv")
    text = EXPERIMENT.format(table=tmp_path / "visits.csv", data=data, privacy=privacy, task=task)

    def watch(record: Any) -> None:
        process = made.crew.members["silo-ward-b"].process
        if record.round == 0 and process is not None:
            process.kill()

    with alone():
        made = deployment(tmp_path, text)
        with made.running(silent):
            made.run(watch, silent)
    assert made.crew.restarts
    assert [r.answered for r in read_records(made.at.server / "metrics.jsonl")] == [2, 2, 2]
    own, _ = in_process(tmp_path, text)
    deployed = deployed_model(made)
    assert all(torch.allclose(deployed[name], own[name], atol=1e-5) for name in deployed)
    for folder in (made.at.server, *(made.at.state(ward) for ward in WARDS)):
        found = verify(folder)
        assert found.matches
        assert {str(c.spec.unit) for c in found.clients} == {unit}
    if unit == "person":  # what was agreed on counts persons
        assert {agreed.records for agreed in made.config.run.silos.values()} == {PERSONS}
