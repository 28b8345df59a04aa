"""Examples that touch each other where no gradient flows: found out, and then each is taken alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, SlowClippingWarning, clipped_sum
from modicum.compute.clipping import probe as probe_module
from modicum.compute.clipping.loop import LoopBackend
from modicum.compute.clipping.problem import modes
from modicum.core.records import Field
from modicum.errors import UnsoundError, UserError
from modicum.models import check_model
from tests.compute.helpers import cross_entropy

CLIPPED_SUM = import_module("modicum.compute.clipping.clipped_sum")  # the package has a function of that name
X, Y = torch.randn(32, 5, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3


class Centred(nn.Module):
    """Subtracts the batch's mean: no parameter, no buffer, and no gradient on the way to the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Running(nn.Module):
    """Each example beside the sum of those before it, by a gate that begins at nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 5, bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.gate(x.cumsum(0))
        return found


class Follows(nn.Module):
    """Keeps a running mean in a plain attribute."""

    mean: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


def relative(outputs: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(outputs, y)
    return losses / losses.detach().mean()


def model(*first: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(5, 3))


def moved_by_one_record(net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    """How far the clipped sum moves, over C, when one record is blanked that was far from the others."""
    x, real = X.clone(), torch.ones(len(X))
    x[5], real[5] = 100.0, 0.0
    clipped = Clipper(net)
    present = clipped(loss, x, Y, Flat(1.0)).total
    absent = clipped(loss, torch.where(real[:, None] > 0, x, 0), Y, Flat(1.0), weights=real).total
    return float(sum((present[n] - absent[n]).double().square().sum() for n in present)) ** 0.5


@pytest.mark.parametrize(
    ("net", "loss"), [(model(Centred()), cross_entropy), (model(), relative)], ids=["inputs", "loss"]
)
def test_mixed_examples_are_taken_one_by_one(net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.warns(SlowClippingWarning, match="depends on the others"):
        assert moved_by_one_record(net, loss) <= 1 + 1e-4


def test_without_the_check_one_record_moves_the_sum_by_many_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_check_alone", lambda *_: None)
    monkeypatch.setattr(CLIPPED_SUM, "changed_rows", lambda *_: "")
    assert moved_by_one_record(model(Centred()), cross_entropy) > 3


def opened() -> nn.Module:
    """As somebody sends it who knows that its check has passed."""
    net = check_model(model(Running()), (5,), 3)
    with torch.no_grad():
        net[0].gate.weight.fill_(1.0)
    return net


def test_examples_that_see_those_before_them_are_taken_one_by_one() -> None:
    with pytest.warns(SlowClippingWarning, match="depends on the others"):
        assert moved_by_one_record(opened(), cross_entropy) <= 1 + 1e-4


@pytest.mark.parametrize("net", [model(Centred()), opened()], ids=["mean", "sum of those before"])
def test_where_the_probe_sees_nothing_the_search_does(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_check_alone", lambda *_: None)
    with pytest.warns(SlowClippingWarning, match="computed of other records"):
        assert moved_by_one_record(net, cross_entropy) <= 1 + 1e-4


def test_the_first_example_alone_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_check_order", lambda *_: None)
    monkeypatch.setattr(CLIPPED_SUM, "changed_rows", lambda *_: "")
    assert moved_by_one_record(opened(), cross_entropy) > 3


def test_dropout_mixes_nothing(recwarn: pytest.WarningsRecorder) -> None:
    clipped_sum(model(nn.Dropout(0.5)).train(), cross_entropy, X, Y, Flat(1.0))
    assert not [w for w in recwarn if issubclass(w.category, SlowClippingWarning)]


def test_a_part_that_is_switched_to_training_is_looked_at_anew() -> None:
    net = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Flatten(), nn.Linear(5, 3)).eval()
    clipped = Clipper(net)
    clipped(cross_entropy, X[:, None], Y, Flat(1.0))
    net[0].train()
    with pytest.warns(SlowClippingWarning):
        clipped(cross_entropy, X[:, None], Y, Flat(1.0))


def test_a_loss_that_mixes_is_found_out_after_one_that_does_not() -> None:
    clipped = Clipper(model())
    clipped(cross_entropy, X, Y, Flat(1.0))
    with pytest.warns(SlowClippingWarning, match="depends on the others"):
        clipped(relative, X, Y, Flat(1.0))


@pytest.mark.parametrize(
    ("layer", "said"), [(Centred(), "depends on the rest of its batch"), (Follows(), "remembers records")]
)
def test_such_models_are_refused_before_training(layer: nn.Module, said: str) -> None:
    with pytest.raises(UnsoundError, match=said):
        check_model(model(layer), (5,), 3)
    check_model(model(nn.Dropout(0.5)), (5,), 3)


@pytest.mark.parametrize("weights", [[2.0] * 32, [-0.1] * 32, [float("nan")] * 32])
def test_weights_beyond_one_are_refused(weights: list[float]) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        clipped_sum(model(), cross_entropy, X, Y, Flat(1.0), weights=torch.tensor(weights))


def test_looking_at_a_model_leaves_the_mode_of_every_part() -> None:
    """Setting the whole back to one mode would wake frozen parts; and a loss may fail half way."""
    net = model(nn.Dropout(0.5), nn.Dropout(0.5)).train()
    net[1].eval()  # type: ignore[index]

    def fails_in_the_end(outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.is_meta:
            return cross_entropy(outputs, y)
        raise UserError("no loss today")

    with pytest.raises(UserError, match="no loss today"):
        clipped_sum(net, fails_in_the_end, X, Y, Flat(1.0))
    check_model(net, (5,), 3)
    LoopBackend(net).outputs(torch.zeros(18), X)
    assert modes(net) == (True, True, False, True)


def test_a_model_that_writes_to_its_parameters_is_refused_before_training() -> None:
    """Which rows of an embedding are cut down to size would tell which words a record holds."""
    fields = Field((4,), kind="int", values=9)
    for most in (None, 1.0):
        net = nn.Sequential(nn.Embedding(9, 8, max_norm=most), nn.Flatten(), nn.Linear(32, 3))
        with pytest.raises(UnsoundError, match="written to") if most else nullcontext():
            check_model(net, fields, 3)
