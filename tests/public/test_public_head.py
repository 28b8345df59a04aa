"""The first model from public records: features and head, with the decay that cross-validation chooses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modicum.models.frozen import UnitNorm, discriminant
from modicum.public.head import DECAYS, _folds, decay_path
from modicum_bench.pac_dp.data import public_head


def records(n: int, *, signal: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 4
    centres = torch.randn(4, 40, generator=torch.Generator().manual_seed(9))
    return signal * centres[y] + torch.randn(n, 40, generator=g), y


def test_it_knows_the_task() -> None:
    x, y = records(200, signal=1.0)
    new, labels = records(200, signal=1.0, seed=1)
    model = public_head(x, y, 4, lambda a, b: discriminant(a, b).cut(3))
    assert float((model(new).argmax(1) == labels).float().mean()) > 0.9
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]


def test_without_anything_to_learn_the_decay_is_large() -> None:
    """Features that are fitted to labels separate what they were fitted to; folds must not be fooled by that."""
    x, y = records(44, signal=0.0)

    def fit(a: Tensor, b: Tensor) -> nn.Module:
        return discriminant(a, b, shrink=0.01).cut(3)

    features = fit(x, y)
    norms = [float(weight.norm()) for weight, _ in decay_path(features(x).double(), y, 4)]
    chosen = public_head(x, y, 4, fit).head.weight.norm()
    assert torch.isclose(chosen.double(), torch.tensor(norms[0], dtype=torch.double), rtol=1e-4)
    fooled = [  # the negative control: features fitted once, to all records, before the folds
        sum(
            float(nn.functional.cross_entropy(features(x[h]).double() @ w.T + b, y[h], reduction="sum"))
            for h in _folds(y, 0)
            for w, b in [decay_path(features(x[_rest(y, h)]).double(), y[_rest(y, h)], 4)[i]]
        )
        for i in range(len(DECAYS))
    ]
    assert fooled.index(min(fooled)) > 0


def _rest(y: Tensor, held: Tensor) -> Tensor:
    kept = torch.ones(len(y), dtype=torch.bool)
    kept[held] = False
    return kept


def test_folds_hold_every_record_once_and_every_class_alike() -> None:
    y = torch.arange(40) % 4
    folds = _folds(y, 3)
    assert torch.equal(torch.cat(folds).sort().values, torch.arange(40))
    assert all(torch.equal(y[f].bincount(), torch.full((4,), 2)) for f in folds)


def test_a_smaller_decay_gives_a_larger_head() -> None:
    x, y = records(100, signal=0.5)
    norms = [float(w.norm()) for w, _ in decay_path(UnitNorm()(x).double(), y, 4)]
    assert norms == sorted(norms)
    assert norms[0] < norms[-1]
