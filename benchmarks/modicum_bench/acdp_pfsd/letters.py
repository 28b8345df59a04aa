"""Train a backbone for EMNIST on rendered digits and letters: fonts and MNIST, no record of EMNIST.

    python -m modicum_bench.acdp_pfsd.letters glyphs --fonts /usr/share/fonts --out glyphs.npz
    python -m modicum_bench.acdp_pfsd.letters train --glyphs glyphs.npz --out FOLDER --device cuda

Characters fill the picture as EMNIST's do, lean, stretch and wobble, and have thin or thick strokes.
"""

from __future__ import annotations

import argparse
import string
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.models.backbone import BackboneShape, save_backbone
from modicum_bench.fedcompdp.glyphs import DIGITS, SIDE, TALL, of_fonts, of_mnist
from modicum_bench.fedcompdp.house_numbers import Pictures, train
from modicum_bench.fedcompdp.rendered import with_strokes

CHARACTERS = DIGITS + string.ascii_uppercase + string.ascii_lowercase
APART = "abdefghnqrt"  # small letters with a class of their own; the others share that of the capital
CLASSES = 47
PICTURE, FINE, BOX = 28, 56, 24  # pixels; drawn twice as fine and averaged; a character's longer side
SHAPE = BackboneShape(1, (32, 64, 128), blocks=1, norm="affine")
BACKBONE, RENDERED = "letters.npz", "letters-features.npz"  # what training leaves in its folder
DRAWN, DRAWN_SEED = 10_000, 7  # characters whose features are kept; training had other seeds
BY_HAND = 0.5  # how many digits come from MNIST


def label_of(character: str) -> int:
    """Its class in EMNIST's merged order."""
    if character in APART:
        return len(DIGITS) + 26 + APART.index(character)
    return (DIGITS + string.ascii_uppercase).index(character.upper())


@dataclass(frozen=True)
class Glyphs:
    """Masks on the device that renders, uint8."""

    fonts: Tensor  # (fonts, 62, 40, 40)
    written: Tensor  # (records, 40, 40)
    digits: Tensor  # their labels


class Letters:
    """Draws batches of characters, all classes equally often; one seed draws the same ones on the same device."""

    def __init__(self, glyphs: Glyphs, seed: int) -> None:
        self.glyphs, self.device = glyphs, glyphs.fonts.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        labels = torch.tensor([label_of(c) for c in CHARACTERS], device=self.device)
        self._labels, self._chances = labels, 1.0 / labels.bincount()[labels]

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """(n, 1, 28, 28) pictures in [0, 1] and their classes."""
        character = torch.multinomial(self._chances, n, replacement=True, generator=self.generator)
        masks = self.glyphs.fonts[self._below(len(self.glyphs.fonts), n), character]
        y = self._labels[character]
        written = self._below(len(self.glyphs.written), n)
        by_hand = (y < len(DIGITS)) & (torch.rand(n, device=self.device, generator=self.generator) < BY_HAND)
        masks = torch.where(by_hand[:, None, None], self.glyphs.written[written], masks)
        y = torch.where(by_hand, self.glyphs.digits[written], y)
        bent = self._bent(masks[:, None].float() / 255)
        ink = with_strokes(bent, self._uniform(-1.0, 1.0, len(bent)))
        return self._blurred(functional.avg_pool2d(ink, FINE // PICTURE)), y

    def _below(self, count: int, n: int) -> Tensor:
        return torch.randint(count, (n,), device=self.device, generator=self.generator)

    def _uniform(self, low: float, high: float, n: int) -> Tensor:
        return low + (high - low) * torch.rand(n, device=self.device, generator=self.generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def _bent(self, masks: Tensor) -> Tensor:
        """Turned, leaning, stretched, and pulled here and there."""
        n = len(masks)
        turn, lean = 0.14 * self._normal(n), 0.22 * self._normal(n)
        size = BOX / PICTURE * SIDE / TALL * self._uniform(0.85, 1.08, n)  # of the mask, in pictures
        stretch = self._uniform(-0.25, 0.25, n).exp()
        wide, tall = size * stretch.clamp(max=1.0), size / stretch.clamp(min=1.0)
        a, b = turn.cos() / wide, turn.sin() / wide
        c, d = -turn.sin() / tall, turn.cos() / tall
        rows = [torch.stack([a + lean * c, b + lean * d, 0.05 * self._normal(n)], 1)]
        rows.append(torch.stack([c, d, 0.05 * self._normal(n)], 1))
        grid = functional.affine_grid(torch.stack(rows, 1), [n, 1, FINE, FINE], align_corners=False)
        pull = functional.interpolate(0.09 * self._normal(n, 2, 5, 5), (FINE, FINE), mode="bicubic")
        return functional.grid_sample(masks, grid + pull.permute(0, 2, 3, 1), align_corners=False)

    def _blurred(self, picture: Tensor) -> Tensor:
        """As scans that were scaled down are, then brought to full range as EMNIST's were (Cohen et al. 2017)."""
        taps = torch.arange(-2, 3, device=self.device)
        weights = torch.exp(-0.5 * (taps / self._uniform(0.2, 0.9, len(picture))[:, None]) ** 2)
        weights = (weights / weights.sum(1, keepdim=True)).view(-1, 5, 1, 1)
        for axis in (2, 3):
            padded = functional.pad(picture, (0, 0, 2, 2) if axis == 2 else (2, 2, 0, 0))
            parts = [weights[:, k, None] * padded.narrow(axis, k, PICTURE) for k in range(5)]
            picture = torch.stack(parts).sum(0)
        brightest = picture.amax((1, 2, 3)).clamp(min=0.1)
        return (picture * (self._uniform(0.9, 1.5, len(picture)) / brightest).view(-1, 1, 1, 1)).clamp(0, 1)


def glyphs_from(path: str, device: str) -> Glyphs:
    with np.load(path) as file:
        parts = (torch.from_numpy(file[name]).to(device) for name in ("fonts", "written", "labels"))
        return Glyphs(*parts)


@torch.no_grad()
def drawn(letters: Letters, model: nn.Module) -> dict[str, np.ndarray]:
    """Features, in half precision, and classes of characters that were not drawn before."""
    found = [(model(x).half().cpu(), y.cpu()) for x, y in (letters.batch(500) for _ in range(DRAWN // 500))]
    x, y = (torch.cat(part).numpy() for part in zip(*found, strict=True))
    return {"x": x, "y": y.astype(np.uint8)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.acdp_pfsd.letters")
    parser.add_argument("stage", choices=("glyphs", "train"))
    parser.add_argument("--fonts", nargs="+", default=["/usr/share/fonts"], help="folders with fonts")
    parser.add_argument("--records", type=int, default=6000, help="of MNIST")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--glyphs", help="what the first stage wrote")
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", required=True, help="a file of glyphs, or a folder of what is trained")
    given = parser.parse_args()
    if given.stage == "glyphs":
        fonts = of_fonts(given.fonts, CHARACTERS)
        written, labels = of_mnist(given.records, given.data_dir)
        np.savez_compressed(given.out, fonts=fonts, written=written, labels=labels)
        print(f"{len(fonts)} fonts, {len(written)} handwritten digits")
        return 0
    glyphs = glyphs_from(given.glyphs, given.device)
    pictures = Pictures("rendered characters", CLASSES, lambda seed: Letters(glyphs, seed))
    model, about = train(pictures, SHAPE, given.seconds, given.batch)
    folder = Path(given.out)
    save_backbone(model, folder / BACKBONE, {"proxy": "mnist digits and rendered characters", **about})
    np.savez(folder / RENDERED, **drawn(Letters(glyphs, DRAWN_SEED), model.to(given.device).eval()))  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
