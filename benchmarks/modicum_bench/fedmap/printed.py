"""FedMAP as printed: Table 3 (λ and β) and Fig. 3 (curves beside other defences). ε as claimed and as it is.

In faithful mode C and σ come from raw gradients and σ is sent, so that the true ε is ∞. Beside it stand the
paper's own figure (Eqs. 6–9) and what the noise on gradients would be worth were σ not sent: z = Bσ/C, every step
charged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from modicum.comparing.workers import Play, Progress
from modicum.core.setting import MethodSpec
from modicum.data.federate import federate
from modicum.data.partition import Dirichlet
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.figures import blank_figure
from modicum.methods import Censor, DpSgd, FedAvg, FedMap, Soteria
from modicum.papers.fedmap.accounting import fedmap_at_noise, fedmap_claimed
from modicum.report.colours import PALETTE
from modicum_bench.fedmap.cells import ALPHA, DELTA
from modicum_bench.fedmap.play import Workspace
from modicum_bench.fedmap.report import interval, markdown

GRADIENT = "gradient"
WEIGHTS = (0.01, 0.05, 0.1, 0.5, 1.0)  # of λ and of β
USUAL = 0.1
DIVERGED = 1e9  # JSON has no infinite loss


@dataclass(frozen=True)
class Size:
    """A federation trained as the paper trains: minibatches of SGD, whole local epochs."""

    task: str
    model: str
    clients: int
    per_round: int
    rounds: int
    batch: int
    epochs: float
    lr: float
    budget: float  # of the rows that keep one
    seeds: int  # of the curves
    table_seeds: int


SIZES = {
    "quick": Size("digits", "mlp", 10, 3, 15, 10, 0.5, 0.1, 2.0, 2, 1),
    "paper": Size("fashion-mnist", "lenet", 100, 10, 100, 64, 3, 0.01, 1.04, 3, 3),
}


def rows(size: Size) -> dict[str, MethodSpec]:
    """Fig. 3's curves; FedMAP twice, as printed and with a guarantee."""
    plain: dict[str, Any] = {"batch": size.batch, "epochs": size.epochs, "lr": size.lr}
    kept: dict[str, Any] = {"steps": 1, "delta": DELTA, "lr": 1.0}
    return {
        "none": FedAvg(**plain),
        "dp-sgd": DpSgd(rule="auto", **kept),
        "soteria": Soteria(**plain),
        "censor": Censor(**plain),
        "fedmap, as printed": printed(size, USUAL, USUAL),
        "fedmap, sound": FedMap(clipping="auto", kinds=(), **kept),
    }


def printed(size: Size, privacy: float, overall: float) -> FedMap:
    """Faithful mode with λ and β."""
    return FedMap(
        mode="faithful",
        batch=size.batch,
        epochs=size.epochs,
        lr=size.lr,
        delta=DELTA,
        privacy_weight=privacy,
        global_weight=overall,
    )


@dataclass(frozen=True)
class Curve:
    """One run, and the name under which it is kept."""

    name: str
    size: Size
    spec: MethodSpec
    seed: int


class Printed:
    """Plays what is missing in a folder, the runs of a table or figure side by side."""

    def __init__(self, place: Workspace, preset: str, play: Play, progress: Progress | None = None) -> None:
        self.place, self.size, self.play, self.progress = place, SIZES[preset], play, progress

    def table(self) -> str:
        """Table 3: accuracy and ε, as claimed and at the noise, over λ and over β."""
        pairs = dict.fromkeys([*((w, USUAL) for w in WEIGHTS), *((USUAL, w) for w in WEIGHTS)])
        specs = {f"printed λ={p:g} β={o:g}": printed(self.size, p, o) for p, o in pairs}
        found = self._played(specs, self.size.table_seeds)
        lines = [[f"{p:g}", f"{o:g}", *table_row(own)] for (p, o), own in zip(pairs, found.values(), strict=True)]
        return markdown(["λ", "β", "accuracy", "ε claimed", "ε at z = Bσ/C", "ε as sent"], lines)

    def figure(self, path: Path) -> str:
        """Fig. 3 as a picture, and its last points as a table."""
        specs = {f"curve {name}": spec for name, spec in rows(self.size).items()}
        found = self._played(specs, self.size.seeds)
        runs = {name.removeprefix("curve "): own for name, own in found.items()}
        curves = {name: [f["curve"] for f in own] for name, own in runs.items()}
        draw_curves(
            {"test accuracy": curves, "test loss": {n: [f["loss"] for f in own] for n, own in runs.items()}}, path
        )
        private = {"dp-sgd", "fedmap, sound"}
        shown = [
            [name, _mean([100 * c[-1] for c in own]), f"{self.size.budget:g}" if name in private else "∞"]
            for name, own in curves.items()
        ]
        return markdown(["", "accuracy at the end", "true ε"], shown)

    def _played(self, specs: Mapping[str, MethodSpec], seeds: int) -> dict[str, list[dict[str, Any]]]:
        todo = [Curve(name, self.size, spec, seed) for name, spec in specs.items() for seed in range(seeds)]
        found = list(self.play(partial(kept, self.place), todo, progress=self.progress))
        return {name: found[i * seeds : (i + 1) * seeds] for i, name in enumerate(specs)}


def kept(place: Workspace, curve: Curve) -> dict[str, Any]:
    """A run's figures, from its file where it was played before."""
    path = place.out / "printed" / f"{curve.name} {curve.seed}.json".replace(" ", "_").replace(",", "")
    if not path.exists():
        found = played(experiment(place, curve))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    known: dict[str, Any] = json.loads(path.read_text())
    return known


def experiment(place: Workspace, curve: Curve) -> Experiment:
    """The federation of the curve's size and seed."""
    size = curve.size
    data = federate(place.load(size.task), clients=size.clients, partition=Dirichlet(ALPHA), seed=curve.seed)
    return Experiment(
        federation=Federation(data, (size.budget,) * size.clients),
        method=curve.spec,
        model=size.model,
        rounds=size.rounds,
        per_round=size.per_round,
        seed=curve.seed,
        device=place.device,
    )


def played(experiment: Experiment) -> dict[str, Any]:
    """Accuracy after each round; in faithful mode both figures of ε, each the largest over clients (Eq. 9)."""
    run = Rehearsal(experiment)
    curve: list[float] = []
    loss: list[float] = []
    sigmas: dict[str, list[float]] = {}
    noise: dict[str, list[float]] = {}
    while not run.server.finished:
        state, jobs = run.begin()
        results = run.method.mechanism.run(jobs, run.kit)
        for job, (message, _) in zip(jobs, results, strict=True):
            if "sigma" in getattr(message, "metrics", {}):
                sigmas.setdefault(job.facts.name, []).append(message.metrics["sigma"])  # type: ignore[union-attr]
                steps = [
                    b.noise_multiplier for t in job.gate.tokens for b in t.release.blocks if b.name == GRADIENT
                ]
                noise.setdefault(job.facts.name, []).extend(steps)
        told = run.finish(state, jobs, results).simulated
        curve.append(float(told["test_accuracy"]))
        loss.append(min(float(told["test_loss"]), DIVERGED))
    if not sigmas:
        return {"curve": curve, "loss": loss}
    share = experiment.setting.per_round / experiment.setting.clients
    sizes = {c.name: len(c.train) for c in experiment.federation.data.clients}
    batch = getattr(experiment.method, "batch", None)
    rates = {name: min(1.0, (batch or n) / n) for name, n in sizes.items()}
    return {
        "curve": curve,
        "loss": loss,
        "claimed": max(fedmap_claimed(share, own, DELTA) for own in sigmas.values()),
        "at_noise": max(fedmap_at_noise(own, rates[name], DELTA) for name, own in noise.items()),
    }


def table_row(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracy, both figures of ε, and the true one."""
    accuracy = _mean([100 * f["curve"][-1] for f in found])
    return [accuracy, _mean([f["claimed"] for f in found]), _mean([f["at_noise"] for f in found]), "∞"]


def _mean(values: Sequence[float]) -> str:
    """With its 95% interval, which two values are too few for."""
    mean, half = interval(values)
    return f"{mean:.3g}" if len(values) < 3 else f"{mean:.3g} ± {half:.2g}"


def draw_curves(panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], path: Path) -> None:
    """Accuracy and loss over rounds: the mean of all seeds, and their range. Losses on a logarithmic axis."""
    figure = blank_figure(10, 3.8)
    for axes, (what, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for colour, (name, own) in zip(PALETTE, curves.items(), strict=False):
            columns = list(zip(*own, strict=True))
            rounds = range(1, len(columns) + 1)
            axes.plot(rounds, [sum(c) / len(c) for c in columns], color=colour, label=name)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15)
        axes.set(xlabel="round", ylabel=what, **({"ylim": (0, 1)} if "accuracy" in what else {"yscale": "log"}))
        axes.grid(alpha=0.25)
    figure.axes[0].legend(frameon=False, ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)
