"""Settings at one total ε on two small datasets of one party: what each way of choosing reaches.

Run: MODICUM_DATA=… python benchmarks/tune_small.py OUT [--seeds 10] [--epsilon 3]. Test figures are looked at by
nobody but this table; the last line chooses by them, to show what an unpaid choice would claim.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from modicum.config import experiment, read, to_toml
from modicum.data import load
from modicum.federation.run_folder import RunFolder
from modicum.preparing.tune import tune
from modicum.privacy.verify import verify
from modicum.runs import Run, carry_out
from modicum.runs import load as load_run

GRID = ("method.lr=0.1,0.5,2,8", "method.clip=0.1,1")
ROUNDS = 11
TEXT = """
[data]
{data}
validation = {validation}
test = {test}
seed = 0
[privacy]
budgets = {epsilon}
[method]
name = "{method}"
[run]
rounds = {rounds}
evaluate_every = {rounds}
seed = {seed}
{metric}
"""
METRIC = '[[run.metrics]]\nname = "accuracy"\nevery = 10\nnoise_multiplier = 8.0'


def write_parties(out: Path) -> dict[str, tuple[str, str]]:
    """Each dataset as one party's records, and public stand-ins of the same number: (own, stand-ins)."""
    digits, mnist = load("digits"), load("mnist")
    size = len(digits.train)
    small = mnist.test.scaled()[:size, :, 2:26, 2:26].reshape(-1, 1, 8, 3, 8, 3).mean((3, 5))
    heart, cancer = load("heart-disease"), load("breast-cancer")
    own = {
        "digits": (digits.train.scaled(), digits.train.y, digits.test.scaled(), digits.test.y),
        "mnist-small": (small, mnist.test.y[:size], None, None),
        "heart": (heart.train.scaled(), heart.train.y, None, None),
        "cancer": (cancer.train.scaled(), cancer.train.y, None, None),
    }
    for name, (x, y, x_test, y_test) in own.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        arrays = {"x": np.asarray(x, np.float32), "y": y}
        if x_test is not None:
            arrays |= {"x_test": np.asarray(x_test, np.float32), "y_test": y_test}
        np.savez(out / name / "party.npz", **arrays)
    return {"digits": ("digits", "mnist-small"), "heart": ("heart", "cancer")}


def write(
    out: Path, name: str, epsilon: float, seed: int, *, tuned: bool, stand_in: bool = False, method: str = "dp-sgd"
) -> Path:
    """An experiment file; who tunes holds records out to judge by, who does not trains on all."""
    classes = 10 if name in ("digits", "mnist-small") else 2
    test = 0.0 if name == "digits" else 0.2
    text = TEXT.format(
        data=f'npz = "{name}"\nclasses = {classes}',
        validation=0.3 if tuned and not stand_in else 0.0,
        test=test,
        epsilon=epsilon,
        method=method,
        rounds=ROUNDS,
        seed=seed,
        metric=METRIC if tuned and not stand_in else "",
    )
    path = out / f"{name}-{method}-{tuned}-{stand_in}-{seed}.toml"
    path.write_text(text)
    return path


def trained(file: Path, folder: Path, options: list[str]) -> Run:
    """One training with these settings."""
    config, files = read(file, options), RunFolder(folder)
    files.make(fresh=True)
    return carry_out(experiment(config), files, to_toml(config))


def winner_of(folder: Path) -> Run:
    """The winner's own trial, which the curator has: for its accuracy on test records."""
    hidden = folder.with_name(folder.name + "-curator")
    seed = read(folder / "config.toml").run.seed
    trials = (hidden if hidden.is_dir() else folder).glob("trial-*")
    return next(load_run(t) for t in trials if read(t / "config.toml").run.seed == seed)


def ways(out: Path, name: str, stand_in: str, epsilon: float, seed: int) -> Iterator[tuple[str, float, float]]:
    """(way, accuracy on test records, ε of everything) of one seed."""
    place = out / f"{name}-{seed}"
    place.mkdir()
    for way in ("stopping", "threefold", "split"):
        found = tune(
            write(out, name, epsilon, seed, tuned=True), GRID, epsilon, way=way, seed=seed, folder=place / way
        )
        assert verify(place / way).matches
        yield way, winner_of(place / way).accuracy, found.epsilon
    public = write(out, stand_in, epsilon, seed, tuned=True, stand_in=True)
    plain = write(out, name, epsilon, seed, tuned=False)
    found = tune(plain, GRID, epsilon, way="public", public=public, seed=seed, folder=place / "public")
    yield "public stand-ins", load_run(found.folder).accuracy, found.epsilon
    for method in ("auto", "dp-sgd"):
        file = write(out, name, epsilon, seed, tuned=False, method=method)
        run = trained(file, place / method, [])
        yield f"{method}, nothing tuned", run.accuracy, max(c.epsilon for c in run.certificate.clients.values())
    options = [[f"method.lr={lr}", f"method.clip={clip}"] for lr in (0.1, 0.5, 2, 8) for clip in (0.1, 1)]
    runs = [trained(plain, place / f"truth-{i}", chosen) for i, chosen in enumerate(options)]
    yield "best by simulated truth (unpaid)", max(run.accuracy for run in runs), epsilon
    yield "a setting at random", statistics.fmean(run.accuracy for run in runs), epsilon


def main() -> None:
    """A line each as they come, then the tables."""
    warnings.simplefilter("ignore")
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # hundreds of pages without pictures
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epsilon", type=float, default=3.0)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, (own, stand_in) in write_parties(asked.out).items():
        scores: dict[str, list[float]] = {}
        for seed in range(asked.seeds):
            for way, accuracy, epsilon in ways(asked.out, own, stand_in, asked.epsilon, seed):
                scores.setdefault(way, []).append(accuracy)
                print(
                    json.dumps({"data": name, "seed": seed, "way": way, "accuracy": accuracy, "epsilon": epsilon})
                )
        print(f"\n| {name}, ε = {asked.epsilon:g} in all | accuracy | least and most |\n|---|---|---|")
        for way, values in scores.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(
                f"| {way} | {statistics.fmean(values):.1%} ± {spread:.1%} | {min(values):.1%}, {max(values):.1%} |"
            )
        print(flush=True)


if __name__ == "__main__":
    main()
