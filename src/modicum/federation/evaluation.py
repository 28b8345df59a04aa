"""How good a model is on given records. On clients' records this is ground truth that only a simulator can see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from modicum.core.parts import PERSONALISED, Backend, Batch, State
from modicum.core.sockets import PublicEvaluator


def evaluate(backend: Backend, theta: Tensor, records: Batch) -> dict[str, float]:
    """Accuracy (0 to 1) and mean cross-entropy of one model on records."""
    outputs, y = backend.outputs(theta, records.x), records.targets["y"]
    told = outputs.argmax(-1)
    return {
        "accuracy": (told == y).double().mean().item(),
        "loss": cross_entropy(outputs.double(), y).item(),
        "macro_f1": macro_f1(told, y, outputs.shape[-1]),
    }


def macro_f1(told: Tensor, y: Tensor, classes: int) -> float:
    """Mean over classes of 2·TP/(2·TP + FP + FN); a class that neither occurs nor is told does not count."""
    right = torch.bincount(y[told == y], minlength=classes).double()
    either = torch.bincount(told, minlength=classes) + torch.bincount(y, minlength=classes)
    seen = either > 0
    return (2 * right[seen] / either[seen]).mean().item()


def public_evaluator(
    backend: Backend, first: Tensor, shared: Tensor, proxy: Batch | None
) -> PublicEvaluator | None:
    """Evaluation of shared parameters on public records; personal ones have their `first` values."""
    if proxy is None:
        return None

    def of(model: Tensor) -> dict[str, float]:
        theta = first.clone()
        theta[shared] = model
        return evaluate(backend, theta, proxy)

    return of


def accuracy_by_client(backend: Backend, models: Mapping[str, Tensor], tests: Sequence[Batch]) -> dict[str, float]:
    """Accuracy of each client's model on its own test records, where it has any."""
    with torch.no_grad():
        return {
            name: evaluate(backend, theta, test)["accuracy"]
            for (name, theta), test in zip(models.items(), tests, strict=True)
            if len(test)
        }


def own_model(model: Tensor, shared: Tensor, state: State) -> Tensor:
    """The model that a client uses: its personalised one, else the server's with its own personal parameters."""
    if PERSONALISED in state:
        whole: Tensor = state[PERSONALISED]
        return whole.to(model)
    own = model.clone()
    if "personal" in state:
        own[~shared] = state["personal"].to(model)
    return own
