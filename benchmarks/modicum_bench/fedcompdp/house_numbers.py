"""Train SVHN's backbone on rendered house numbers: public data alone.

    python -m modicum_bench.fedcompdp.house_numbers --glyphs glyphs.npz --out house-numbers.npz --device cuda

Glyphs come from `modicum_bench.fedcompdp.glyphs`, patches from CIFAR-100. Four minutes on an H200.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.data.catalogue import load
from modicum.models.backbone import Backbone, BackboneShape, save_backbone, settled, with_statistics
from modicum_bench.fedcompdp.rendered import Renderer, Sources

SHAPE = BackboneShape(3, (64, 128, 256, 320), blocks=2, taps=2, norm="affine")
RATE, DECAY, SMOOTHING, AVERAGE = 0.4, 1e-4, 0.05, 0.999
HELD_OUT = 2000
SECONDS, BATCH = 220.0, 2048  # on an H200


class Draws(Protocol):
    """Draws labelled pictures on a device."""

    @property
    def device(self) -> torch.device: ...

    def batch(self, n: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Pictures:
    """What is rendered: with a seed, the pictures of that seed."""

    name: str
    classes: int
    drawn: Callable[[int], Draws]


def train(
    pictures: Pictures, shape: BackboneShape, seconds: float, batch: int, seed: int = 0
) -> tuple[Backbone, dict[str, Any]]:
    """The averaged backbone after this time, with its accuracy on rendered pictures that it has not seen."""
    torch.manual_seed(seed)
    renderer = pictures.drawn(seed)
    model, average = (_classifier(shape, pictures.classes).to(renderer.device) for _ in range(2))
    average.load_state_dict(model.state_dict())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)
    start, step = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        rate = RATE * min(1.0, progress / 0.05 + 0.02) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = _step(model, optimiser, *renderer.batch(batch))
        step += 1
        _towards(average, model, min(AVERAGE, (1 + step) / (10 + step)))
        if step % 200 == 1:
            print(f"step {step} {time.monotonic() - start:.0f} s loss {loss.item():.3f}", flush=True)
    accuracy = _accuracy(average, pictures.drawn(seed + 1), HELD_OUT)
    print(f"{step} steps; accuracy on rendered pictures {accuracy:.3f}", flush=True)
    about = {"proxy": pictures.name, "classes": pictures.classes, "records": step * batch, "steps": step}
    body = average[0].to("cpu")
    assert isinstance(body, Backbone)
    return settled(body), {**about, "held_out_accuracy": accuracy, "seed": seed}


def _classifier(shape: BackboneShape, classes: int) -> nn.Sequential:
    body = with_statistics(Backbone(shape))
    return nn.Sequential(body, nn.Linear(shape.features, classes)).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        outputs = model.train()(x.contiguous(memory_format=torch.channels_last))
    loss = functional.cross_entropy(outputs.float(), y, label_smoothing=SMOOTHING)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimiser.step()
    return loss.detach()


@torch.no_grad()
def _towards(average: nn.Module, model: nn.Module, keep: float) -> None:
    pairs = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
    mean, new = zip(*((a, b) for a, b in pairs if a.is_floating_point()), strict=True)
    torch._foreach_lerp_(list(mean), list(new), 1 - keep)


@torch.no_grad()
def _accuracy(model: nn.Module, renderer: Draws, records: int) -> float:
    x, y = renderer.batch(records)
    model.eval()
    parts = zip(torch.split(x, 500), torch.split(y, 500), strict=True)
    return torch.cat([(model(a).argmax(1) == b).float() for a, b in parts]).mean().item()


def sources_from(glyphs: str, patches: np.ndarray[Any, Any], device: str) -> Sources:
    with np.load(glyphs) as file:
        fonts, written, labels = (torch.from_numpy(file[name]) for name in ("fonts", "written", "labels"))
    return Sources.of(fonts, written, labels, torch.from_numpy(patches), device)


def write(glyphs: str, out: str, seconds: float, batch: int, device: str, data_dir: str | None = None) -> None:
    """Train on rendered house numbers, and write the weights."""
    sources = sources_from(glyphs, load("cifar-100", data_dir).train.x, device)
    pictures = Pictures("rendered house numbers", 10, lambda seed: Renderer(sources, seed))
    model, about = train(pictures, SHAPE, seconds, batch)
    save_backbone(model, out, {"proxy": "cifar-100 patches under rendered digits", **about})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.fedcompdp.house_numbers")
    parser.add_argument("--glyphs", required=True, help="from modicum_bench.fedcompdp.glyphs")
    parser.add_argument("--out", required=True, help="where the weights go (.npz)")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    given = parser.parse_args()
    write(given.glyphs, given.out, given.seconds, given.batch, given.device, given.data_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
