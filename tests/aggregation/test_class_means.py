"""The head from noised class sums: a discriminant without noise, a posterior mean with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modicum.aggregation import Mean
from modicum.aggregation.class_means import ClassMeans
from modicum.core.facts import ClientFacts, FeatureFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released, ReleasedSum
from modicum.core.parts import CLASS_COUNTS
from modicum.errors import UserError
from modicum.mechanisms.class_sums import class_sums

CLASSES, SIZE, EACH = 5, 8, 400
RULE = ClassMeans(1, Mean())
SPREAD = 0.013  # variance of a record about its class's mean, in each feature


def records(seed: int, names: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    means = 0.12 * torch.randn(CLASSES, SIZE, generator=g, dtype=torch.double)
    y = torch.arange(names * EACH) % CLASSES
    return means, means[y] + SPREAD**0.5 * torch.randn(len(y), SIZE, generator=g, dtype=torch.double), y


def facts(features: FeatureFacts, names: int = 4) -> PublicFacts:
    clients = tuple(ClientFacts(f"c{i}", EACH, 1.0, 1) for i in range(names))
    return PublicFacts(clients, 1, CLASSES * (SIZE + 1), {}, features=features)


KNOWN = FeatureFacts(CLASSES, torch.full((SIZE,), 0.12**2), torch.full((SIZE,), SPREAD))


def message(i: int, x: Tensor, y: Tensor, std: float, seed: int = 0) -> Released:
    g = torch.Generator().manual_seed(1000 * seed + i)
    sums, counts = class_sums(x, y, (CLASSES, SIZE))
    clean = torch.cat([sums.flatten(), counts])
    noisy = clean + std * torch.randn(clean.shape, generator=g, dtype=torch.double)
    return Released(f"c{i}", 0, noisy, {}, NoiseFacts(std**2, 1.0, {CLASS_COUNTS: std**2}))


def parts(x: Tensor, y: Tensor, stds: tuple[float, ...], seed: int = 0) -> tuple[Released, ...]:
    rows = torch.arange(len(y)) // EACH
    return tuple(message(i, x[rows == i], y[rows == i], std, seed) for i, std in enumerate(stds))


def solved(opened: tuple[Released, ...], known: FeatureFacts = KNOWN) -> tuple[Tensor, Tensor]:
    model = torch.zeros(CLASSES * (SIZE + 1), dtype=torch.double)
    flat, _ = RULE.combine(RULE.init(facts(known)), model, opened)
    return flat[: CLASSES * SIZE].view(CLASSES, SIZE), flat[CLASSES * SIZE :]


def accuracy(opened: tuple[Released, ...], means: Tensor, known: FeatureFacts = KNOWN) -> float:
    g = torch.Generator().manual_seed(77)
    y = torch.arange(5000) % CLASSES
    x = means[y] + SPREAD**0.5 * torch.randn(5000, SIZE, generator=g, dtype=torch.double)
    weights, biases = solved(opened, known)
    return float(((x @ weights.T + biases).argmax(1) == y).double().mean())


def test_without_noise_it_is_the_linear_discriminant() -> None:
    _, x, y = records(0)
    weights, biases = solved(parts(x, y, (0.0,) * 4))
    means = torch.stack([x[y == c].mean(0) for c in range(CLASSES)])
    lengths = x.norm(dim=1)
    assert lengths.max() < 1  # nothing was cut
    logits = x @ weights.T + biases
    expected = x @ (means / SPREAD).T - (means.square() / SPREAD).sum(1) / 2
    apart = (logits - logits.mean(1, keepdim=True)) - (expected - expected.mean(1, keepdim=True))
    assert apart.abs().max() < 0.05 * expected.std()  # sampling alone shrinks a little
    assert (logits.argmax(1) == expected.argmax(1)).double().mean() > 0.995


def test_a_noisier_client_counts_less() -> None:
    """R7: precision-weighted, so a client that is nearly all noise spoils nothing; equal weights would."""
    means, x, y = records(1)
    honest = parts(x, y, (5.0, 5.0, 5.0, 3000.0))
    without = accuracy(honest[:3], means)
    assert accuracy(honest, means) > without - 0.01
    equal = tuple(replace(r, facts=honest[0].facts) for r in honest)
    assert accuracy(equal, means) < without - 0.1


def test_noise_shrinks_what_it_hides() -> None:
    _, x, y = records(2)
    clear, _ = solved(parts(x, y, (0.0,) * 4))
    hidden, biases = solved(parts(x, y, (1e5,) * 4))
    assert hidden.norm() < 0.3 * clear.norm()
    assert torch.isfinite(biases).all()


def test_the_public_spectrum_tells_where_classes_differ() -> None:
    """Classes differ in two of eight features: knowing this beats believing in all alike."""
    g = torch.Generator().manual_seed(3)
    means = torch.zeros(CLASSES, SIZE, dtype=torch.double)
    means[:, :2] = 0.25 * torch.randn(CLASSES, 2, generator=g, dtype=torch.double)
    y = torch.arange(4 * EACH) % CLASSES
    x = means[y] + SPREAD**0.5 * torch.randn(len(y), SIZE, generator=g, dtype=torch.double)
    spectrum = torch.tensor([0.06, 0.06] + [1e-6] * 6)
    known = replace(KNOWN, between=spectrum)
    found = [
        (accuracy(parts(x, y, (20.0,) * 4, s), means, known), accuracy(parts(x, y, (20.0,) * 4, s), means))
        for s in range(5)
    ]
    assert sum(a for a, _ in found) / 5 > sum(b for _, b in found) / 5 + 0.02


def test_many_releases_of_a_budget_are_worth_one() -> None:
    _, x, y = records(4)
    rule = ClassMeans(4, Mean())
    state = rule.init(facts(KNOWN))
    for round in range(4):  # noise of twice the std, four times
        again = tuple(replace(r, round=round) for r in parts(x, y, (20.0,) * 4, seed=round))
        _, state = rule.combine(state, torch.zeros(CLASSES * (SIZE + 1)), again)
    _, once = RULE.combine(RULE.init(facts(KNOWN)), torch.zeros(CLASSES * (SIZE + 1)), parts(x, y, (10.0,) * 4))

    def relative(s: dict[str, object]) -> float:
        total = sum(s["weights"].values()) * EACH  # type: ignore[attr-defined]
        return float(s["noise"]) / total**2  # type: ignore[arg-type]

    assert relative(state) == pytest.approx(relative(once), rel=1e-6)


def test_public_records_are_a_client_without_noise() -> None:
    means, x, y = records(5, names=5)
    sums, counts = class_sums(x[-EACH:], y[-EACH:], (CLASSES, SIZE))
    hot = replace(KNOWN, sums=sums, counts=counts)
    noisy = parts(x[:-EACH], y[:-EACH], (3000.0,) * 4)
    public_only = accuracy((message(0, x[-EACH:], y[-EACH:], 0.0),), means)
    assert accuracy(noisy, means) < public_only - 0.1
    assert accuracy(noisy, means, hot) > public_only - 0.02


def test_uneven_classes_are_seen_in_the_counts() -> None:
    _, x, y = records(6)
    rare = y == 0
    rows = torch.cat([torch.nonzero(rare)[:10, 0], torch.nonzero(~rare)[: EACH - 10, 0]])
    x, y = x[rows], y[rows]
    weights, biases = solved((message(0, x, y, 0.0),))
    priors = biases + (weights * (x.mean(0) + weights * SPREAD / 2)).sum(1)
    torch.testing.assert_close(priors.exp(), torch.bincount(y).double() / EACH, atol=1e-3, rtol=0)


def test_a_sum_is_refused_and_nobody_changes_nothing() -> None:
    state, model = RULE.init(facts(KNOWN)), torch.randn(CLASSES * (SIZE + 1))
    assert torch.equal(RULE.combine(state, model, ())[0], model)
    with pytest.raises(UserError, match="server-sees-messages"):
        RULE.combine(state, model, ReleasedSum(0, model, {}, NoiseFacts(1.0, 1.0), 4.0))
    with pytest.raises(UserError, match="classes and features"):
        RULE.init(PublicFacts((), 1, 1, {}))


def test_later_rounds_are_steps() -> None:
    _, x, y = records(7)
    state, model = RULE.init(facts(KNOWN)), torch.zeros(CLASSES * (SIZE + 1), dtype=torch.double)
    model, state = RULE.combine(state, model, parts(x, y, (1.0,) * 4))
    steps = tuple(replace(r, round=1, update=torch.ones_like(model)) for r in parts(x, y, (1.0,) * 4))
    moved, _ = RULE.combine(state, model, steps)
    torch.testing.assert_close(moved, model + 1)
