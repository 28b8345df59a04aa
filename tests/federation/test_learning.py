"""Runs of other tasks, of records that are several tensors, and of models that are frozen in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import modicum as mo
from modicum.core.facts import Metric
from modicum.data import FederatedData, federate, from_torch
from modicum.errors import UserError
from modicum.report.table import table

ROWS, WORDS, LENGTH = 120, 20, 6


def numbers(rows: int = ROWS) -> Tensor:
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(1))


def tokens(rows: int = ROWS) -> Tensor:
    return torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(2))


def fed(x: Any, y: Tensor, **held: float) -> FederatedData:
    half = len(y) // 2
    parts = [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, half), (half, len(y)))]
    return federate(from_torch(parts), **({"test": 0.2} | held))


def train(data: FederatedData, folder: Path, **settings: Any) -> mo.Run:
    given = {"method": mo.methods.DpSgd(lr=1.0), "rounds": 2, "budgets": 8.0} | settings
    return mo.train(data, folder=folder / "run", **given)


class Reader(nn.Module):
    """A small encoder, as anybody would write it."""

    def __init__(self, outputs: int = 2, *, each: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.each = nn.Embedding(WORDS, 8), each
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(x), src_key_padding_mask=x == 0)
        logits: Tensor = self.head(hidden if self.each else hidden.mean(1))
        return logits


@pytest.mark.filterwarnings("ignore")
def test_a_plain_transformer_encoder_is_taken(tmp_path: Path) -> None:
    x = tokens()
    run = train(fed(x, (x[:, 0] > 9).long()), tmp_path, model=Reader())
    assert 0 <= run.accuracy <= 1
    assert run.predict(x[:3]).shape == (3,)
    again = mo.load(tmp_path / "run", model=Reader())
    assert torch.equal(again.predict(x), run.predict(x))


def test_float_labels_are_no_classes(tmp_path: Path) -> None:
    x = numbers()
    data = fed(x, 5 * x[:, 0])
    with pytest.raises(UserError, match='set task = "regression"'):
        train(data, tmp_path)
    run = train(data, tmp_path, task="regression", rounds=4)
    assert list(run.metrics) == ["r2", "rmse", "mae", "loss"]
    assert run.score == run.summary.metrics["r2"]
    assert run.predict(x).dtype == torch.float32
    assert torch.equal(mo.load(tmp_path / "run").predict(x), run.predict(x))
    assert "R²*" in table([run.summary])
    assert "accuracy" not in table([run.summary])


def test_several_labels_a_record(tmp_path: Path) -> None:
    x = numbers()
    data = fed(x, (x[:, :3] > 0.5).long())
    with pytest.raises(UserError, match='task = "multi-label"'):
        train(data, tmp_path)
    with pytest.raises(UserError, match="2 weights and the labels are 3"):
        train(data, tmp_path, task=mo.tasks.multi_label(weights=[1, 2]))
    run = train(data, tmp_path, task=mo.tasks.multi_label(weights=[1, 2, 1]))
    assert run.predict(x).shape == (ROWS, 3)
    with pytest.raises(UserError, match="that are 0 or 1"):
        train(fed(x, x[:, :3]), tmp_path / "b", task="multi-label")


@pytest.mark.filterwarnings("ignore")
def test_next_tokens(tmp_path: Path) -> None:
    x = tokens()
    run = train(fed(x, x), tmp_path, model=Reader(WORDS, each=True), task="next-token")
    assert run.summary.main == "perplexity"
    assert run.score > 1


def test_auto_takes_numbers_and_classes_and_says_so(tmp_path: Path) -> None:
    x = tokens()
    with pytest.raises(UserError, match="auto needs records that are one array of numbers"):
        train(fed(x, x[:, 0] % 2), tmp_path, method="auto")
    with pytest.raises(UserError, match="auto needs one class for each record"):
        train(fed(numbers(), numbers()[:, 0]), tmp_path, method="auto", task="regression")
    with pytest.raises(UserError, match="has a loss of its own"):
        train(fed(numbers(), numbers()[:, 0]), tmp_path, method="acdp-pfsd", task="regression")


class Named(Dataset[Any]):
    """Records of two tensors."""

    def __init__(self, ids: Tensor, masks: Tensor) -> None:
        self.ids, self.masks = ids, masks

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": self.ids[i], "attention_mask": self.masks[i]}, int(self.ids[i, 0] > 9)


class NamedReader(Reader):
    def forward(self, x: Any) -> Tensor:  # type: ignore[override]
        return super().forward(torch.where(x["attention_mask"], x["input_ids"], 0))


@pytest.mark.filterwarnings("ignore")
def test_records_of_several_tensors(tmp_path: Path) -> None:
    ids, masks = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    masks[::3, 4:] = False
    data = federate(from_torch([Named(ids[:60], masks[:60]), Named(ids[60:], masks[60:])]), test=0.2)
    with pytest.raises(UserError, match="these records have input_ids, attention_mask"):
        train(data, tmp_path)
    run = train(data, tmp_path, model=NamedReader())
    x = {"input_ids": ids, "attention_mask": masks}
    again = mo.load(tmp_path / "run", model=NamedReader())
    assert torch.equal(again.predict(x), run.predict(x))
    with pytest.raises(UserError, match="input_ids, attention_mask"):
        again.predict({"input_ids": ids})


def frozen(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model


def test_a_model_that_is_frozen_in_part_can_be_used(tmp_path: Path) -> None:
    x = numbers()
    data = fed(x, (x[:, 0] > 0.5).long())
    run = train(data, tmp_path, model=frozen())
    assert set(run.parameters) == {"2.weight", "2.bias"}
    assert torch.equal(run.model[0].weight, frozen()[0].weight)
    again = mo.load(tmp_path / "run", model=frozen())
    assert torch.equal(again.predict(x), run.predict(x))


def test_another_base_is_refused(tmp_path: Path) -> None:
    """The negative control: without the digest, the same shapes of another base would answer nonsense."""
    x = numbers()
    run = train(fed(x, (x[:, 0] > 0.5).long()), tmp_path, model=frozen())
    other = mo.load(tmp_path / "run", model=frozen(seed=1))
    with pytest.raises(UserError, match="frozen parameters of this model are not those"):
        other.predict(x)
    assert not torch.equal(frozen(1)[0].weight, run.model[0].weight)


def test_a_frozen_model_resumes(tmp_path: Path) -> None:
    x = numbers()
    data = fed(x, (x[:, 0] > 0.5).long())
    whole = train(data, tmp_path, model=frozen(), rounds=3)

    def stop(_: Any, record: Any) -> None:
        if record.round == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "again", model=frozen(), rounds=3, watch=stop)
    run = train(data, tmp_path / "again", model=frozen(), rounds=3, resume=True)
    assert torch.equal(run.parameters["2.weight"], whole.parameters["2.weight"])


@pytest.mark.parametrize(
    ("task", "metric", "y"),
    [
        ("regression", "error", lambda x: x[:, 0]),
        ("multi-label", "accuracy", lambda x: (x[:, :2] > 0.5).long()),
        (None, "accuracy", lambda x: (x[:, 0] > 0.5).long()),
    ],
)
def test_clients_release_the_tasks_own_metrics(task: str | None, metric: str, y: Any, tmp_path: Path) -> None:
    x = numbers()
    data = fed(x, y(x), validation=0.3)
    run = train(data, tmp_path, task=task or "classification", metrics=(Metric(metric, 1, 20.0),))
    assert metric in run.summary.released
    lines = run.certificate.clients.values()
    assert {line.releases_made for line in lines} == {4}  # two rounds, two releases each
    assert max(line.epsilon for line in lines) <= 8
    with pytest.raises(UserError, match=f"clients can release {metric}"):
        train(data, tmp_path / "b", task=task or "classification", metrics=(Metric("f1", 1, 20.0),))


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    def pinball(outputs: Tensor, y: Tensor) -> Tensor:
        off = y - outputs[:, 0]
        return torch.maximum(0.9 * off, -0.1 * off)

    own = mo.Task(
        loss=pinball, outputs=1, metrics={"covered": lambda o, y: (y <= o[:, 0]).float().mean().item()}, name="p90"
    )
    x = numbers()
    run = train(fed(x, x[:, 0]), tmp_path, task=own, rounds=3)
    assert run.summary.task == "p90"
    assert 0 <= run.metrics["covered"] <= 1
    assert "pinball" in (tmp_path / "run" / "certificate.json").read_text()  # whose word it is
    assert mo.load(tmp_path / "run").predict(x).shape == (ROWS, 1)


def test_a_task_is_part_of_a_runs_name(tmp_path: Path) -> None:
    x = numbers()
    data = fed(x, (x[:, 0] > 0.5).long())
    runs = [train(data, tmp_path / str(i), task=t) for i, t in enumerate(("classification", "regression"))]
    assert runs[0].certificate.run != runs[1].certificate.run


def test_dirichlet_needs_classes() -> None:
    x = numbers()
    dataset = from_torch([TensorDataset(x, x[:, 0])])
    with pytest.raises(UserError, match="these have none"):
        federate(dataset, clients=2, partition="dirichlet:0.5")
    assert sum(federate(dataset, clients=3, partition="size-skew:3").sizes) == ROWS


def test_bytes_are_what_they_are(tmp_path: Path) -> None:
    """Ages in bytes, or a text's: divided by 255 they are something else."""
    x = torch.randint(0, 90, (ROWS, 3), dtype=torch.uint8)
    data = fed(x, (x[:, 0] > 40).long())
    assert np.array_equal(data.clients[0].train.scaled(), data.clients[0].train.x)
    assert data.clients[0].train.x.max() > 1
    run = train(data, tmp_path)
    assert torch.equal(run.predict(x), run.predict(x.float()))
