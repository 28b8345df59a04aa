"""Train a backbone on a public feature proxy.

    python -m modicum.public.pretrain --proxy cifar-100 --out cifar-100.npz --device cuda

The proxy has other labels than the private task, so its classes are only a means: beside the cross-entropy, two
views of an image must be told apart from all other images (NT-Xent, Chen et al. 2020), which keeps what the
proxy's own classes would let the network forget.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.data.arrays import Arrays
from modicum.data.catalogue import load
from modicum.errors import UserError
from modicum.models.backbone import Backbone, BackboneShape, save_backbone, settled, with_statistics
from modicum.public.augment import LETTER_STRONG, LETTER_WEAK, PHOTO_STRONG, PHOTO_WEAK, random_view


@dataclass(frozen=True)
class Pretraining:
    """How long and with what."""

    epochs: float = 120
    seconds: float = math.inf  # the schedule ends here at the latest
    batch: int = 1024
    learning_rate: float = 0.4
    weight_decay: float = 5e-4
    contrast: float = 1.0  # weight of NT-Xent against the cross-entropy
    temperature: float = 0.3
    projection: int = 128
    held_out: int = 1000
    average: float = 0.999  # of the weights over steps (Polyak)
    seed: int = 0


def default_shape(channels: int) -> BackboneShape:
    """Small enough to compute 60,000 images' features on two cores in minutes."""
    if channels == 1:
        return BackboneShape(1, (32, 64, 128), blocks=1)
    return BackboneShape(channels, (64, 128, 256, 384), blocks=2, mirror=True, norm="affine")


def pretrain(
    proxy: Arrays, classes: int, shape: BackboneShape, how: Pretraining, device: str = "cpu"
) -> tuple[Backbone, dict[str, Any]]:
    """The trained backbone (its averaged weights) and what a table has to say about it."""
    torch.manual_seed(how.seed)
    run = _Run(proxy, classes, shape, how, torch.device(device))
    start, step = time.monotonic(), 0
    while True:
        progress = max(step / run.steps, (time.monotonic() - start) / how.seconds)
        if progress >= 1:
            break
        loss = run.step(progress)
        step += 1
        if step % 200 == 0 or step == 1:
            print(f"step {step}/{run.steps} {time.monotonic() - start:.0f} s loss {loss.item():.3f}", flush=True)
    accuracy = run.accuracy()
    print(
        f"{step} steps in {time.monotonic() - start:.0f} s; held-out accuracy on the proxy {accuracy:.3f}",
        flush=True,
    )
    about = {"classes": classes, "records": len(proxy), "steps": step, "held_out_accuracy": accuracy}
    return settled(run.averaged.to("cpu")), {
        **about,
        "pretraining": {k: v for k, v in asdict(how).items() if v != math.inf},
    }


class _Run:
    def __init__(
        self, proxy: Arrays, classes: int, shape: BackboneShape, how: Pretraining, device: torch.device
    ) -> None:
        order = np.random.default_rng(how.seed).permutation(len(proxy))
        held = min(how.held_out, len(proxy) // 10)
        self.x, self.y = _on(proxy.take(order[held:]), device)
        self.test_x, self.test_y = _on(proxy.take(order[:held]), device)
        self.how, self.device = how, device
        self.batch = min(how.batch, len(self.x))
        self.steps = max(1, round(how.epochs * (len(self.x) // self.batch)))
        self.weak, self.strong = (
            (LETTER_WEAK, LETTER_STRONG) if shape.channels == 1 else (PHOTO_WEAK, PHOTO_STRONG)
        )
        self.backbone = with_statistics(Backbone(shape)).to(device)
        self.averaged = with_statistics(Backbone(shape)).to(device)
        self.averaged.load_state_dict(self.backbone.state_dict())
        self.head = nn.Linear(shape.features, classes).to(device)
        self.averaged_head = nn.Linear(shape.features, classes).to(device)
        self.projector = nn.Sequential(
            nn.Linear(shape.features, shape.features), nn.ReLU(), nn.Linear(shape.features, how.projection)
        ).to(device)
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            for part in (self.backbone, self.averaged):
                part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parts = (self.backbone, self.head, self.projector)
        decayed = [p for part in parts for p in part.parameters() if p.ndim > 1]
        plain = [p for part in parts for p in part.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": how.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimiser = torch.optim.SGD(groups, lr=how.learning_rate, momentum=0.9, nesterov=True)
        self.generator = torch.Generator(device).manual_seed(how.seed)
        self.order = torch.empty(0, dtype=torch.long, device=device)
        self.done = 0

    def step(self, progress: float) -> Tensor:
        warm = min(1.0, progress / 0.05 + 0.02)
        for group in self.optimiser.param_groups:
            group["lr"] = self.how.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress))
        rows = self._rows()
        x, y = self.x[rows].float() / 255 if self.x.dtype == torch.uint8 else self.x[rows], self.y[rows]
        views = torch.cat([random_view(x, self.weak, self.generator), random_view(x, self.strong, self.generator)])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            features = self.backbone.train()(views.contiguous(memory_format=torch.channels_last))
        features = features.float()
        loss = functional.cross_entropy(self.head(features), torch.cat([y, y]))
        if self.how.contrast:
            loss = loss + self.how.contrast * nt_xent(self.projector(features), self.how.temperature)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([p for g in self.optimiser.param_groups for p in g["params"]], 5.0)
        self.optimiser.step()
        self._average()
        return loss.detach()

    def _rows(self) -> Tensor:
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.x), device=self.device, generator=self.generator)
        rows, self.order = self.order[: self.batch], self.order[self.batch :]
        return rows

    @torch.no_grad()
    def _average(self) -> None:
        self.done += 1
        share = min(self.how.average, (1 + self.done) / (10 + self.done))
        pairs = ((self.averaged, self.backbone), (self.averaged_head, self.head))
        mean = [t for a, _ in pairs for t in a.state_dict().values() if t.is_floating_point()]
        new = [t for _, b in pairs for t in b.state_dict().values() if t.is_floating_point()]
        torch._foreach_lerp_(mean, new, 1 - share)

    @torch.no_grad()
    def accuracy(self) -> float:
        self.averaged.eval()
        right = 0
        for i in range(0, len(self.test_x), 500):
            x = self.test_x[i : i + 500].float() / 255
            right += int((self.averaged_head(self.averaged(x)).argmax(1) == self.test_y[i : i + 500]).sum())
        return right / max(1, len(self.test_x))


def nt_xent(projected: Tensor, temperature: float) -> Tensor:
    """Each view must find its partner among all other views; the first half's partners are the second half."""
    z = functional.normalize(projected, dim=1)
    n = len(z) // 2
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(-math.inf)
    partner = torch.arange(2 * n, device=z.device).roll(n)
    return functional.cross_entropy(similarity, partner)


def _on(arrays: Arrays, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(arrays.x).to(device), torch.from_numpy(arrays.y).to(device)


def main(arguments: list[str] | None = None) -> int:
    """The command line: train a backbone on public records and write it."""
    parser = argparse.ArgumentParser(prog="python -m modicum.public.pretrain", description="Train a backbone.")
    parser.add_argument("--proxy", required=True, help="a dataset's name, e.g. cifar-100 or emnist-merge47:10-46")
    parser.add_argument("--out", required=True, help="where the weights go (.npz)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    for name, kind in (("epochs", float), ("seconds", float), ("batch", int), ("contrast", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Pretraining, name))
    parser.add_argument("--learning-rate", type=float, default=Pretraining.learning_rate)
    parser.add_argument("--widths", type=int, nargs="+", default=None, help="channels of each stage")
    parser.add_argument("--blocks", type=int, default=None, help="blocks of a stage")
    given = parser.parse_args(arguments)
    try:
        dataset = load(given.proxy, given.data_dir)
        if dataset.train.x.dtype != np.uint8:
            raise UserError(f"a backbone is trained on images, and {given.proxy} has none")
        proxy = Arrays.concatenate([dataset.train, dataset.test])  # all of a proxy is public
        shape = default_shape(proxy.shape[0])
        shape = replace(shape, widths=tuple(given.widths or shape.widths), blocks=given.blocks or shape.blocks)
        how = Pretraining(
            given.epochs, given.seconds, given.batch, given.learning_rate, contrast=given.contrast, seed=given.seed
        )
        model, about = pretrain(proxy, dataset.classes, shape, how, given.device)
        save_backbone(model, given.out, {"proxy": given.proxy, "note": dataset.note, **about})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
