"""A look at four hospitals behind secure sums, true values beside it, and the standardised training after it.

Run: MODICUM_DATA=… python benchmarks/look_heart.py OUT [--seeds 10]. Needs the UCI Heart Disease files.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
from pathlib import Path

import numpy as np

from modicum.config import experiment, federation, read, to_toml
from modicum.config.schema import Config
from modicum.data.heart import FEATURES, HOSPITALS
from modicum.data.look import Look
from modicum.federation.run_folder import RunFolder
from modicum.preparing.look import look, look_config
from modicum.privacy.verify import verify
from modicum.runs import Run, carry_out

TOTAL, PRICE = 1.0, 0.3
ASKED = ("classes", "moments")
CATEGORIES = {
    "sex": "01",
    "cp": "1234",
    "fbs": "01",
    "restecg": "012",
    "exang": "01",
    "slope": "123",
    "thal": "367",
}
NUMBERS = tuple(name for name in FEATURES if name not in CATEGORIES)
MISSING = ("?", "-9", "-9.0", "")
WAYS = {
    "declared ranges and fills, nothing spent on a look": "",
    "the same, steps twice as long": "",
    "the same, steps four times as long": "",
    "standardised and imputed by the look": 'standardise = "look"\nimpute = "look"',
    "standardised and imputed, with class weights": 'standardise = "look"\nimpute = "look"',
}
TEXT = """
[data]
csv = "heart.csv"
client_column = "hospital"
label_column = "disease"
classes = 2
test = 0.2
seed = 0
{use}
[data.columns]
{columns}
[task]
{task}
[privacy]
budgets = {budget}
[method]
name = "dp-sgd"
view = "secure-aggregation"
clip = 0.5
lr = {lr}
[run]
rounds = 30
seed = {seed}
secure_aggregation = "{masks}"
evaluate_every = 30
"""


def write_table(source: Path, out: Path) -> None:
    """The publisher's four files as one table with a column of hospitals; what was not noted is empty."""

    def cell(text: str, zero_is_missing: bool) -> str:
        missing = text.strip() in MISSING or (zero_is_missing and float(text) == 0)
        return "" if missing else f"{float(text):g}"

    with (out / "heart.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", *FEATURES, "disease"])
        for hospital in HOSPITALS:
            for line in (source / f"processed.{hospital}.data").read_text(errors="replace").splitlines():
                *cells, label = line.split(",")
                own = [cell(c, zero) for c, (*_, zero) in zip(cells, FEATURES.values(), strict=True)]
                table.writerow([hospital, *own, int(float(label) > 0)])


def write_experiment(path: Path, way: str, seed: int, masks: str) -> Path:
    """One step a round on all hospitals' records behind secure aggregation."""
    ranges = (
        f"{name} = {{ categories = {json.dumps(list(CATEGORIES[name]))} }}"
        if name in CATEGORIES
        else f"{name} = {{ range = [{low}, {high}], fill = {fill} }}"
        for name, (low, high, fill, _) in FEATURES.items()
    )
    lr = 4.0 if "twice" in way else 8.0 if "four times" in way else 2.0
    task = 'weights = "look"' if "weights" in way else ""
    text = TEXT.format(
        use=WAYS[way], columns="\n".join(ranges), task=task, budget=TOTAL, seed=seed, masks=masks, lr=lr
    )
    path.write_text(text)
    return path


def truth(config: Config) -> tuple[list[float], dict[str, tuple[float, float, float]]]:
    """Of the records that are trained on: records by class; missing share, mean and deviation of each number."""
    own = federation(look_config(config, PRICE, NUMBERS, ASKED, None)).data.clients
    x, y = np.concatenate([c.train.x for c in own]), np.concatenate([c.train.y for c in own])
    found = {}
    for name, share in zip(NUMBERS, x.T, strict=True):
        low, high, *_ = FEATURES[name]
        there = share[share >= 0] * (high - low) + low
        found[name] = (float((share < 0).mean()), float(there.mean()), float(there.std()))
    return [float(n) for n in np.bincount(y, minlength=2)], found


def play(file: Path, folder: Path) -> Run:
    """The training in a folder, with verified certificates."""
    config, files = read(file), RunFolder(folder)
    files.make(fresh=True)
    run = carry_out(experiment(config), files, to_toml(config))
    assert verify(folder).matches
    return run


def compare(found: Look, config: Config) -> list[str]:
    """What was told beside what is true."""
    counts, columns = truth(config)
    lines = ["| figure | told ± 2σ of the noise | true |", "|---|---|---|"]
    for one, label, true in zip(found.classes, ("no disease", "disease"), counts, strict=True):
        lines.append(f"| {label} | {one.value:.0f} ± {2 * one.error:.0f} | {true:.0f} |")
    for column in found.columns:
        missing, mean, deviation = columns[column.column.name]
        assert column.mean is not None
        assert column.deviation is not None
        lines += [
            f"| {column.column.name} missing | {column.missing.value:.1%} ± {2 * column.missing.error:.1%} "
            f"| {missing:.1%} |",
            f"| {column.column.name} mean | {column.mean.value:.4g} ± {2 * column.mean.error:.2g} | {mean:.4g} |",
            f"| {column.column.name} deviation | {column.deviation.value:.4g} ± {2 * column.deviation.error:.2g} "
            f"| {deviation:.4g} |",
        ]
    return lines


def main() -> None:
    """Looks and trainings, a line each as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    write_table(Path(os.environ["MODICUM_DATA"]) / "heart-disease", asked.out)
    scores: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(asked.seeds):
        masks = "protocol" if seed == 0 else "ideal"  # the same integers; once with all its masks
        for i, way in enumerate(WAYS):
            place = asked.out / f"seed-{seed}"
            place.mkdir(exist_ok=True)
            (place / "heart.csv").write_bytes((asked.out / "heart.csv").read_bytes())
            file = write_experiment(place / f"way-{i}.toml", way, seed, masks)
            if way.startswith("standardised and imputed by"):
                found = look(file, PRICE, of=NUMBERS, statistics=ASKED, folder=place / "look")
                if seed == 0:
                    print("\n".join(compare(found, read(file, looks=False))), flush=True)
            run = play(file, place / f"run-{i}")
            line = run.certificate.clients["cleveland"]
            scores[way].append(run.accuracy)
            print(
                f"seed {seed}: {way}: {run.accuracy:.1%}, total ε = {line.epsilon:.4f}, before {line.before}",
                flush=True,
            )
    print("\n| preprocessing | accuracy over seeds |\n|---|---|")
    for way, values in scores.items():
        print(f"| {way} | {statistics.fmean(values):.1%} ± {statistics.stdev(values):.1%} |")


if __name__ == "__main__":
    main()
