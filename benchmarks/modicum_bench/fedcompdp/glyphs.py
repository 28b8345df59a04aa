"""Masks of digits from fonts and from MNIST: what public house numbers are rendered from.

    python -m modicum_bench.fedcompdp.glyphs --fonts /usr/share/fonts --data-dir DIR --out glyphs.npz

Each mask is 40×40, the digit 36 high (or 36 wide where it is wider) and in the middle.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.data.catalogue import load
from modicum.errors import UserError

SIDE, TALL = 40, 36
RECORDS = 4000  # of MNIST
DIGITS = "0123456789"
Masks = npt.NDArray[np.uint8]


def centred(image: Any) -> Masks | None:
    """The inked part, brought to the common height and put in the middle; None where there is no ink."""
    box = image.getbbox()
    if box is None:
        return None
    cut = image.crop(box)
    scale = TALL / max(cut.size)
    cut = cut.resize([max(1, round(s * scale)) for s in cut.size])
    mask = np.zeros((SIDE, SIDE), np.uint8)
    top, left = (SIDE - cut.size[1]) // 2, (SIDE - cut.size[0]) // 2
    mask[top : top + cut.size[1], left : left + cut.size[0]] = np.asarray(cut)
    return mask // 17 * 17  # 16 shades are enough, and pack well


def of_fonts(folders: list[str], characters: str = DIGITS) -> Masks:
    """(fonts, characters, 40, 40), one row for each different set; characters begin with the digits."""
    from PIL import Image, ImageDraw, ImageFont

    found: dict[bytes, Masks] = {}
    paths = sorted(p for f in folders for p in Path(f).rglob("*") if p.suffix in (".ttf", ".otf", ".t1"))
    for path in paths:
        try:
            font = ImageFont.truetype(str(path), 96)
        except OSError:
            continue
        masks = []
        for character in characters:
            image = Image.new("L", (200, 200))
            ImageDraw.Draw(image).text((40, 30), character, font=font, fill=255)
            masks.append(centred(image))
        if all(m is not None for m in masks) and _are_digits(masks[: len(DIGITS)]):
            rows = np.stack([m for m in masks if m is not None])
            found.setdefault(rows.tobytes(), rows)
    if not found:
        raise UserError(
            f"there is no font with digits in {', '.join(folders)}: install some, or name other folders"
        )
    return np.stack(list(found.values()))


def _are_digits(masks: list[Masks | None]) -> bool:
    """Fonts of symbols draw one box for all digits, or something as wide as high."""
    ink = [m for m in masks if m is not None]
    wide = np.mean([(m.max(0) > 0).sum() / (m.max(1) > 0).sum() for m in ink])
    return len({m.tobytes() for m in ink}) == 10 and 0.25 < wide < 0.95


def of_mnist(records: int, data_dir: str | None, seed: int = 0) -> tuple[Masks, npt.NDArray[np.int64]]:
    """Handwritten digits as masks, with their labels."""
    from PIL import Image

    train = load("mnist", data_dir).train
    rows = np.random.default_rng(seed).permutation(len(train))[:records]
    masks = [centred(Image.fromarray(train.x[i].squeeze())) for i in rows]
    return np.stack([m for m in masks if m is not None]), train.y[rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.fedcompdp.glyphs")
    parser.add_argument("--fonts", nargs="+", required=True, help="folders with fonts")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--records", type=int, default=RECORDS, help="of MNIST")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    print(write(given.fonts, given.out, given.records, given.data_dir))
    return 0


def write(fonts: list[str], out: str, records: int = RECORDS, data_dir: str | None = None) -> str:
    """All masks in one file, and how many there are in words."""
    printed = of_fonts(fonts)
    written, labels = of_mnist(records, data_dir)
    np.savez_compressed(out, fonts=printed, written=written, labels=labels)
    return f"{len(printed)} fonts, {len(written)} handwritten digits"


if __name__ == "__main__":
    sys.exit(main())
