"""Hot start: the first model is trained on the public proxy, before any client is asked. It costs no privacy."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from modicum.core.layout import Layout
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.public.head import logistic_head
from modicum.tasks import CLASSIFICATION, Task
from modicum.training.small_bias import SmallBiasHead

BATCH = 256
LEARNING_RATE = 0.02
DECAYS = (1e-4, 1e-3, 1e-2)


def hot_start(
    model: nn.Module, public: Batch, held_out: Batch, epochs: int, seed: int = 0, task: Task = CLASSIFICATION
) -> Tensor:
    """Parameters after `epochs` of AdamW on public records.

    Weight decay and the epoch to stop at are those with the smallest loss on the public records held out; where
    none are, the last epoch of the middle decay is taken.
    """
    if epochs < 1:
        raise UserError(f"a hot start takes at least 1 epoch, got {epochs}")
    if not len(public):
        raise UserError("a hot start needs public records with the task's labels: set a proxy")
    decays = DECAYS if len(held_out) else DECAYS[1:2]
    best: tuple[float, Tensor] | None = None
    for decay in decays:
        for loss, theta in _epochs(copy.deepcopy(model), public, held_out, epochs, decay, seed, task):
            if best is None or loss < best[0] or not len(held_out):
                best = (loss, theta)
    assert best is not None
    return best[1]


def public_start(model: nn.Module, public: Batch, classes: int) -> Tensor:
    """Parameters of a linear head after logistic regression on public records, its decay by cross-validation."""
    if not isinstance(model, SmallBiasHead):
        raise UserError("only a linear head can begin with a logistic regression: use hot_start for other models")
    model = copy.deepcopy(model)
    model.load(*logistic_head(public.x.cpu(), public.targets["y"].cpu(), classes))
    return Layout.of(model).read(model).detach().to(public.x.device)


def _epochs(
    model: nn.Module, public: Batch, held_out: Batch, epochs: int, decay: float, seed: int, task: Task
) -> list[tuple[float, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=decay / LEARNING_RATE)
    total = epochs * -(-len(public) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, total)
    layout, found = Layout.of(model), []
    with torch.random.fork_rng(devices=[]):  # dropout must not move anyone else's numbers
        torch.manual_seed(seed)
        for _ in range(epochs):
            model.train()
            for rows in torch.split(torch.randperm(len(public), generator=generator), BATCH):
                batch = public.take(rows)
                optimiser.zero_grad()
                task.mean_loss(model(batch.x), batch.targets["y"]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
            model.eval()
            with torch.no_grad():
                loss = task.mean_loss(model(held_out.x), held_out.targets["y"]).item() if len(held_out) else 0.0
            found.append((loss, layout.read(model).detach().clone()))
    return found
