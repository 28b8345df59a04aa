"""Decoupled distillation: ordinary distillation taken apart, and put together again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.parts import PERSONALISED, Batch
from modicum.errors import UserError
from modicum.papers.acdp_pfsd.distilled import Distilled, decoupled

GENERATOR = torch.Generator().manual_seed(0)
STUDENT, TEACHER = torch.randn(2, 40, 7, generator=GENERATOR, dtype=torch.float64) * 3
Y = torch.randint(7, (40,), generator=GENERATOR)
BACKEND = LoopBackend(nn.Linear(2, 7))
RECORDS = Batch(torch.randn(5, 2, generator=GENERATOR), {"y": torch.tensor([1, 1, 1, 4, 4])})


def ordinary(temperature: float) -> torch.Tensor:
    """KL(teacher ‖ student) at a temperature, Eq. (5)."""
    student, teacher = (log_softmax(z / temperature, -1) for z in (STUDENT, TEACHER))
    return kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_parts_add_up_to_ordinary_distillation(temperature: float) -> None:
    whole = Distilled(non_target=None, temperature=temperature)
    found = whole.distillation(STUDENT, TEACHER, Y)
    torch.testing.assert_close(found, ordinary(temperature), rtol=1e-10, atol=1e-12)
    # A constant weight on the other classes is another loss: the test above could have failed.
    constant = Distilled(non_target=0.25, temperature=temperature)
    assert not torch.allclose(constant.distillation(STUDENT, TEACHER, Y), ordinary(temperature), rtol=1e-3)


def test_the_parts_by_hand() -> None:
    tkd, nckd, rest = decoupled(STUDENT, TEACHER, Y, 2.0)
    s, t = (torch.softmax(z / 2, -1) for z in (STUDENT, TEACHER))
    for i in range(5):
        y = int(Y[i])
        others = [c for c in range(7) if c != y]
        two = t[i, y] * torch.log(t[i, y] / s[i, y]) + (1 - t[i, y]) * torch.log((1 - t[i, y]) / (1 - s[i, y]))
        t_hat, s_hat = t[i, others] / (1 - t[i, y]), s[i, others] / (1 - s[i, y])
        torch.testing.assert_close(tkd[i], two)
        torch.testing.assert_close(nckd[i], (t_hat * torch.log(t_hat / s_hat)).sum())
        torch.testing.assert_close(rest[i], 1 - t[i, y])


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_certain_teachers_and_students_give_finite_losses(size: float) -> None:
    student = (size * STUDENT.float()).requires_grad_(True)
    loss = Distilled().distillation(student, -size * TEACHER.float(), Y)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


def test_without_a_teacher_only_the_labels_count() -> None:
    targets = {"y": Y, "teacher": TEACHER, "taught": torch.zeros(40)}
    plain = cross_entropy(STUDENT, Y, reduction="none")
    torch.testing.assert_close(Distilled(alpha=0.3).losses(STUDENT, targets), plain)
    torch.testing.assert_close(Distilled(alpha=1.0).losses(STUDENT, {"y": Y}), plain)
    taught = {**targets, "taught": torch.ones(40)}
    mixed = Distilled(alpha=0.3).losses(STUDENT, taught)
    torch.testing.assert_close(mixed, 0.3 * plain + 0.7 * Distilled(alpha=0.3).distillation(STUDENT, TEACHER, Y))


def test_the_trained_model_is_the_next_teacher() -> None:
    trained = torch.ones(BACKEND.layout.dimension)
    assert torch.equal(Distilled().finish(RECORDS, {"kept": 1}, trained, BACKEND)[PERSONALISED], trained)


def frequencies() -> torch.Tensor:
    """Three records of class 1, two of class 4, and one more of each."""
    return (torch.tensor([1, 4, 1, 1, 3, 1, 1.0]) / 12).log()


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("prior", [0.5, 1.0])
def test_a_clients_class_frequencies_count_in_its_loss(alpha: float, prior: float) -> None:
    training, plain = Distilled(alpha=alpha, prior=prior), Distilled(alpha=alpha)
    state = {PERSONALISED: torch.ones(BACKEND.layout.dimension)}
    targets = training.targets(RECORDS, state, BACKEND)
    outputs = STUDENT[:5].float()
    expected = plain.losses(outputs + prior * frequencies(), plain.targets(RECORDS, state, BACKEND))
    torch.testing.assert_close(training.losses(outputs, targets), expected)
    assert not torch.allclose(plain.losses(outputs, targets), expected, rtol=1e-2)


def test_a_clients_own_model_has_its_class_frequencies_as_a_bias() -> None:
    trained = torch.randn(BACKEND.layout.dimension, generator=GENERATOR)
    own = Distilled(prior=1.0).finish(RECORDS, {}, trained, BACKEND)[PERSONALISED]
    difference = BACKEND.outputs(own, RECORDS.x) - BACKEND.outputs(trained, RECORDS.x)
    torch.testing.assert_close(difference, frequencies().expand(5, -1), rtol=1e-5, atol=1e-5)


def test_a_model_without_a_bias_at_its_end_is_refused() -> None:
    bare = LoopBackend(nn.Linear(2, 7, bias=False))
    with pytest.raises(UserError, match="prior = 0"):
        Distilled(prior=1.0).targets(RECORDS, {}, bare)


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 1.5}, {"temperature": 0.0}, {"non_target": -1.0}, {"target": -0.1}, {"prior": -1.0}],
)
def test_bad_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Distilled(**wrong)  # type: ignore[arg-type]
