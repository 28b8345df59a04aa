"""Tasks: losses of any shape, metrics against scikit-learn, options in one line, entry points."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor
from torch.nn import functional

from modicum.errors import UserError
from modicum.tasks import (
    NO_TOKEN,
    Labels,
    Task,
    catalogue,
    classification,
    multi_label,
    next_token,
    regression,
    task_of,
)
from modicum.tasks import metrics as m

GENERATOR = np.random.default_rng(0)


def rand(*shape: int) -> Tensor:
    return torch.from_numpy(GENERATOR.normal(size=shape)).float()


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y) ** 2


def test_classification_is_cross_entropy_and_weights_multiply_it() -> None:
    outputs, y = rand(7, 3), torch.arange(7) % 3
    plain = functional.cross_entropy(outputs, y, reduction="none")
    assert torch.equal(classification().losses(outputs, y), plain)
    weighted = classification(weights=[1, 2, 13]).losses(outputs, y)
    assert torch.allclose(weighted, plain * torch.tensor([1.0, 2.0, 13.0])[y] / 13)  # the largest is 1


def test_losses_of_any_shape_become_one_a_record() -> None:
    task = Task(loss=lambda outputs, y: (outputs - y).abs())
    outputs, y = rand(4, 5, 2), rand(4, 5, 2)
    assert torch.allclose(task.losses(outputs, y), (outputs - y).abs().mean((1, 2)))


@pytest.mark.parametrize("loss", ["squared", "absolute", "huber"])
def test_a_regression_takes_numbers_with_or_without_a_last_dimension(loss: str) -> None:
    task, outputs, y = regression(loss=loss), rand(6, 1), rand(6)
    truth = {"squared": functional.mse_loss, "absolute": functional.l1_loss, "huber": functional.huber_loss}[loss]
    assert torch.allclose(task.losses(outputs, y), truth(outputs[:, 0], y, reduction="none"), atol=1e-6)


def test_multi_label_is_binary_cross_entropy() -> None:
    outputs, y, weights = rand(5, 3), (rand(5, 3) > 0).float(), [1.0, 9.0, 2.0]
    truth = functional.binary_cross_entropy_with_logits(
        outputs, y, pos_weight=torch.tensor(weights), reduction="none"
    ).mean(1)
    assert torch.allclose(multi_label(weights=weights).losses(outputs, y), truth / 9, atol=1e-6)


def test_next_tokens_count_where_there_are_some() -> None:
    outputs, y = rand(2, 4, 5), torch.tensor([[1, 2, 3, 4], [1, 2, NO_TOKEN, NO_TOKEN]])
    found = next_token().losses(outputs, y)
    assert torch.allclose(found[0], functional.cross_entropy(outputs[0, :3], y[0, 1:]))
    assert torch.allclose(found[1], functional.cross_entropy(outputs[1, :1], y[1, 1:2]))
    blank = torch.full((1, 4), NO_TOKEN)
    assert next_token().losses(outputs[:1], blank).tolist() == [0.0]
    both = torch.cat([outputs[0, :3], outputs[1, :1]]), torch.tensor([2, 3, 4, 2])
    assert m.perplexity(outputs, y) == pytest.approx(math.exp(functional.cross_entropy(*both).item()), rel=1e-5)


def test_metrics_are_those_of_scikit_learn() -> None:
    outputs, y = rand(200, 2), (rand(200) > 1).long()
    scores, told = outputs.softmax(-1)[:, 1], outputs.argmax(-1)
    assert m.auc(outputs, y) == pytest.approx(sk.roc_auc_score(y, scores), abs=1e-6)
    assert m.f1(outputs, y) == pytest.approx(sk.f1_score(y, told))
    assert m.macro_f1(outputs, y) == pytest.approx(sk.f1_score(y, told, average="macro"))
    several, wanted = rand(60, 4), rand(60, 4)
    assert m.r2(several, wanted) == pytest.approx(sk.r2_score(wanted, several), rel=1e-5)
    assert m.rmse(several, wanted) == pytest.approx(math.sqrt(sk.mean_squared_error(wanted, several)), rel=1e-5)
    assert m.mae(several, wanted) == pytest.approx(sk.mean_absolute_error(wanted, several), rel=1e-5)
    bits, logits = (rand(90, 3) > 0).float(), rand(90, 3)
    assert m.label_auc(logits, bits) == pytest.approx(sk.roc_auc_score(bits, logits), abs=1e-6)
    assert m.label_macro_f1(logits, bits) == pytest.approx(sk.f1_score(bits, logits > 0, average="macro"))
    assert m.label_f1(logits, bits) == pytest.approx(sk.f1_score(bits, logits > 0, average="micro"))
    three = torch.randint(0, 3, (90,))
    assert m.auc(logits, three) == pytest.approx(
        sk.roc_auc_score(three, logits.softmax(-1), multi_class="ovr"), abs=1e-6
    )


def test_calibration_is_the_distance_of_confidence_and_accuracy() -> None:
    sure = torch.tensor([[10.0, -10.0]] * 4)
    assert m.calibration(sure, torch.zeros(4, dtype=torch.long)) == pytest.approx(0.0, abs=1e-6)
    assert m.calibration(sure, torch.tensor([0, 0, 0, 1])) == pytest.approx(0.25, abs=1e-6)
    assert math.isnan(m.auc(sure, torch.zeros(4, dtype=torch.long)))


def test_the_main_metric_comes_first() -> None:
    outputs, y = rand(50, 2), torch.arange(50) % 2
    assert list(classification().evaluate(outputs, y)) == ["accuracy", "loss", "macro_f1"]
    asked = classification(metrics=["auc", "calibration"])
    assert list(asked.evaluate(outputs, y)) == ["auc", "accuracy", "loss", "macro_f1", "calibration"]
    assert next(iter(regression().evaluate(rand(9, 1), rand(9)))) == "r2"
    assert Task(loss=squared, metrics={"worst": lambda *_: 1.0}).main == "worst"


def test_a_records_share_of_a_released_metric_is_at_most_one() -> None:
    """Whatever the function of one's own gives; without the cut, one record would move the sum by a thousand."""
    wild = Task(loss=squared, shares={"wild": lambda *_: torch.tensor([1000.0, -5.0, math.nan, 0.5])})
    y = torch.zeros(4)
    assert wild.share("wild", y, y).tolist() == [1.0, 0.0, 0.0, 0.5]
    assert float(wild.shares["wild"](y, y).nan_to_num().abs().max()) > 1  # the negative control: not cut
    with pytest.raises(UserError, match="one value per record"):
        Task(loss=squared, shares={"one": lambda o, _: o.mean()}).share("one", y, y)


def test_what_clients_release_adds_up_to_the_metrics() -> None:
    """F1, squared error, perplexity from means of records' parts; what is no number is the worst there is."""

    def told(task: Task, name: str) -> float:
        return task.share(name, outputs, y).mean().item()

    def f1_of(task: Task) -> float:
        right = 2 * told(task, "true_positives")
        return right / (right + told(task, "false_positives") + told(task, "false_negatives"))

    outputs, y = rand(60, 2) / 9, torch.arange(60) % 2  # where nothing is cut
    assert f1_of(classification()) == pytest.approx(m.f1(outputs, y))
    assert 4 * told(classification(), "bounded_loss") == pytest.approx(m.mean_cross_entropy(outputs, y))
    outputs, y = rand(20, 6, 11) / 9, torch.randint(0, 11, (20, 6))
    assert math.exp(4 * told(next_token(), "bounded_loss")) == pytest.approx(m.perplexity(outputs, y))
    outputs, y = rand(60, 1), rand(60)
    assert 20 * math.sqrt(told(regression(scale=20), "squared_error")) == pytest.approx(m.rmse(outputs, y))
    assert told(regression(scale=20), "error") * 20 == pytest.approx(m.mae(outputs, y))
    outputs, y = rand(60, 3) / 9, (rand(60, 3) > 0).float()
    assert f1_of(multi_label()) == pytest.approx(m.label_f1(outputs, y))
    outputs = torch.full((60, 3), math.nan)
    assert told(multi_label(), "bounded_loss") == told(regression(), "squared_error") == 1


@pytest.mark.parametrize("name", catalogue.SHIPPED)
def test_a_task_goes_to_worker_processes(name: str) -> None:
    there = pickle.loads(pickle.dumps(task_of(name)))
    assert [*there.shares] == [*task_of(name).shares]
    assert there.main == task_of(name).main


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: task_of("ranking"), "unknown task 'ranking'"),
        (lambda: task_of("regression", {"los": "huber"}), "has no option 'los': it takes loss, scale, outputs"),
        (lambda: task_of("regression", {"loss": "cubed"}), "use squared, absolute or huber"),
        (lambda: task_of("regression", {"scale": 0}), "positive and finite"),
        (lambda: task_of("classification", {"weights": [1, -1]}), "positive numbers"),
        (lambda: task_of("classification", {"weights": "1,13"}), "positive numbers"),
        (lambda: task_of("classification", {"metrics": ["acu"]}), "unknown metric 'acu'"),
        (lambda: task_of(3), "a name or a modicum.Task"),
        (lambda: Task(loss=squared, main="f1"), "has no metric 'f1'"),
    ],
)
def test_bad_tasks_are_one_clear_line(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def survival(*, horizon: float = 1.0) -> Task:
    return Task(loss=lambda o, y: (o[:, 0] - y * horizon) ** 2, name="survival", options={"horizon": horizon})


def test_a_package_brings_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str, load: Any) -> Any:
        return SimpleNamespace(name=name, load=load)

    def odd() -> int:
        return 3

    def broken() -> Any:
        raise RuntimeError("no such library\nat all")

    entries = [entry("survival", lambda: survival), entry("odd", lambda: odd), entry("broken", broken)]
    monkeypatch.setattr(catalogue, "_entries", lambda: entries)
    assert catalogue.names()[-1] == "survival"
    assert task_of("survival", {"horizon": 3.0}).options == {"horizon": 3.0}
    with pytest.raises(UserError, match=r"is no modicum\.Task"):
        task_of("odd")
    with pytest.raises(UserError, match=r"cannot be imported \(RuntimeError: no such library\)"):
        task_of("broken")


def test_what_a_model_must_give() -> None:
    classes = classification()
    assert classes.width(5, (), None) == 5
    assert regression().width(0, (), None) == 1
    assert regression().width(0, (3,), None) == 3
    assert multi_label().width(0, (7,), None) == 7
    assert next_token().width(0, (12,), 256) == 256
    assert Task(loss=squared).width(3, (), None) is None
    regression().check_outputs(torch.zeros(4), 4, 1)
    next_token().check_outputs(torch.zeros(4, 12, 256), 4, 256)
    for task, outputs, width in (
        (classes, torch.zeros(4, 3), 5),
        (next_token(), torch.zeros(4, 256), 256),
        (multi_label(), torch.zeros(3, 7), 7),
    ):
        with pytest.raises(UserError, match="give the last layer"):
            task.check_outputs(outputs, 4, width)
    with pytest.raises(UserError, match="one tensor"):
        classes.check_outputs((torch.zeros(4, 5),), 4, 5)


def test_made_up_labels_are_in_range() -> None:
    drawn = torch.Generator().manual_seed(0)
    assert int(classification().made_up(99, (), 5, drawn).max()) < 5
    assert set(multi_label().made_up(99, (3,), 3, drawn).unique().tolist()) == {0.0, 1.0}
    assert Labels(next_token().labels) is Labels.TOKENS
