"""More than a head on CIFAR-10 at ε = 8: the last stage of a backbone learns with the head, or does not.

    python -m modicum_bench.leaderboard.stage --backbones DIR --out benchmarks/leaderboard --view sum --device cuda

10 clients, 30 releases of whole batches, hot and cold, as in the leaderboard. Step and reach are chosen on the
public stand-in at the task's own noise, with one view; each run is a line of stage.jsonl, written as it ends, and
what was chosen is written before the first run on CIFAR-10.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from modicum.compute.client_batched.choose import Choice
from modicum.core.facts import FeatureFacts
from modicum.core.layout import Layout
from modicum.core.parts import Batch
from modicum.core.setting import MethodSpec
from modicum.data import assign_budgets, federate
from modicum.data.arrays import Arrays
from modicum.data.geometry import Geometry
from modicum.data.mapped import federation_behind
from modicum.federation import setup
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation, Prepared
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import Auto, DpSgd
from modicum.models import build
from modicum.models.last_stage import CONSTANT, LastStage
from modicum.public.features import class_noise
from modicum.public.geometry import Public, fit_geometry
from modicum.public.head import logistic_head
from modicum_bench.leaderboard.grid import MESSAGES, MOMENTUM, PUBLIC, ROUNDS, SUM, noise_of, spec_of
from modicum_bench.leaderboard.stage_data import SHAPE, STAND_IN, TASK, VIEWS, Bed, InPieces, bed, numbers

CLIENTS, EPSILON, SEEDS = 10, 8.0, 3
AVERAGE = 0.5  # of iterates, as `auto` has it
CLIP = {True: 1.0, False: 0.3}  # hot, cold: what DP-SGD was given at this noise (settings.json)
HEAD = "head"
ARMS: dict[str, dict[str, float]] = {"whole": {"whole": 1}, "norms": {}, "adapters": {"adapters": 4}}
RATES = {MESSAGES: (0.1, 0.3), SUM: (0.1, 0.03)}  # noise that all steps leave in a logit
HEAD_RATES = (0.03, 0.1, 0.3)
REACHES = {  # a filter's weights are about .04, a norm's scales about 1
    "whole": (0.06, 0.03, 0.015),
    "norms": (0.1, 0.3, 0.03),
    "adapters": (0.03, 0.01),
}
View = str


@dataclass(frozen=True)
class Setting:
    """How far steps go: noise in a logit, and what of it reaches the stage."""

    rate: float
    reach: float


Chosen = dict[str, Setting]


@dataclass
class Place:
    """One bed, view and start, with what all of its runs share."""

    bed: Bed
    view: View
    hot: bool
    out: Path
    device: str
    noise: float | None = None  # of the mean over all records, one release; None: what the budget gives
    rounds: int = ROUNDS
    fitted: dict[int, Geometry] = field(default_factory=dict)  # by views; all draws have the same noise

    def divided(self, seed: int) -> Federation:
        """Clients of numbers; for a given noise, with the budget at which they have it."""
        data = federate(
            self.bed.records,
            clients=CLIENTS,
            proxy=PUBLIC if self.hot else False,
            proxy_validation=0.0,
            seed=seed,
        )
        found = Federation(data, assign_budgets(EPSILON, CLIENTS, seed))
        return found if self.noise is None else _at_noise(found, self.view, self.noise)

    def geometry(self, federation: Federation, views: int) -> Geometry:
        """Fitted to the public source, with as many dimensions as the noise bears."""
        if views not in self.fitted:
            data = federation.data
            noise = class_noise(spec_of(CLIENTS, self.view), federation.budgets, data.sizes, data.classes)
            public = Public(self.bed.source[views], "public", same_task=False)
            self.fitted[views] = fit_geometry(public, None, noise)
        return self.fitted[views]

    def wrote(self, seed: int, begun: float, **found: Any) -> dict[str, Any]:
        """One line of the results."""
        start = "hot" if self.hot else "cold"
        line = {"bed": self.bed.name, "view": self.view, "start": start, "seed": seed, **found}
        line["seconds"] = round(time.monotonic() - begun, 1)
        with (self.out / "stage.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        return line


def _at_noise(found: Federation, view: View, noise: float) -> Federation:
    low, high = 1.0, 4096.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        tried = replace(found, budgets=assign_budgets(middle, CLIENTS))
        low, high = (middle, high) if noise_of(tried, view) > noise else (low, middle)
    return replace(found, budgets=assign_budgets(high, CLIENTS))


def dp_sgd(federation: Federation, view: View, rate: float, clip: float, rounds: int) -> DpSgd:
    """Steps that together leave noise `rate` in a logit."""
    lr = rate * (1 - MOMENTUM) / (clip * noise_of(federation, view, rounds) * math.sqrt(rounds))
    return DpSgd(lr=lr, clip=clip, steps=1, server_momentum=MOMENTUM, view=view)  # type: ignore[arg-type]


@dataclass
class Draw:
    """Clients and public records of one seed, and the head that public records give."""

    place: Place
    seed: int
    views: int

    def __post_init__(self) -> None:
        self.rows = self.place.divided(self.seed)
        self.fitted = self.place.geometry(self.rows, self.views)
        data = federation_behind(self.fitted, self.place.bed.seen(self.rows.data, self.views))
        self.features = Federation(data, self.rows.budgets)
        self.head = torch.zeros(data.classes, self.fitted.size), torch.zeros(data.classes)
        if self.place.hot:
            x, y = torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y)
            self.head = logistic_head(x, y, data.classes)

    def public_alone(self) -> None:
        """The head before any private record."""
        begun, test = time.monotonic(), self.features.data.test
        logits = torch.from_numpy(test.x).double() @ self.head[0].double().T + self.head[1].double()
        right = float((logits.argmax(1).numpy() == test.y).mean())
        size = self.fitted.size
        self.place.wrote(self.seed, begun, arm="public alone", views=self.views, dimensions=size, average=right)

    def auto(self) -> None:
        """The default method."""
        self._linear("auto", Auto(view=self.place.view), 0.0)  # type: ignore[arg-type]

    def alone(self, rate: float) -> dict[str, Any]:
        """DP-SGD's steps on a head alone."""
        clip = CLIP[self.place.hot]
        spec = dp_sgd(self.features, self.place.view, rate, clip, self.place.rounds)
        return self._linear(HEAD, spec, AVERAGE, rate=rate, clip=clip)

    def _linear(self, arm: str, spec: MethodSpec, average: float, **about: float) -> dict[str, Any]:
        begun = time.monotonic()
        linear = nn.Linear(self.fitted.size, self.features.data.classes)
        with torch.no_grad():
            linear.weight.copy_(self.head[0])
            linear.bias.copy_(self.head[1])
        run = Rehearsal(self._experiment(self.features, spec, average, nn.Sequential(nn.Flatten(), linear)))
        return self._finished(run, begun, arm=arm, views=self.views, **about)

    def stage(self, arm: str, setting: Setting, *, noise: bool = True) -> dict[str, Any]:
        """The head with some of the last stage; the same steps without noise say what there is to be had."""
        begun, clip = time.monotonic(), CLIP[self.place.hot]
        spec = dp_sgd(self.rows, self.place.view, setting.rate, clip, self.place.rounds)
        rows = self.rows
        if not noise:  # a mean of messages is the sum's, and no sum takes clients without a budget
            rows = replace(rows, budgets=assign_budgets(math.inf, CLIENTS))
            spec = replace(spec, view=MESSAGES)  # type: ignore[arg-type]
        prepared = self._prepared(self._model(arm, setting.reach))
        assert not isinstance(prepared.model, LastStage)
        backend = InPieces(prepared.model, self.place.bed.table[:, : self.views])  # type: ignore[arg-type]
        with patch.object(setup, "choose", lambda *_, **__: Choice(backend, 1, "in pieces")):
            run = Rehearsal(self._experiment(rows, spec, AVERAGE, prepared.model), prepared)
        name = arm if noise else f"{arm}, no noise"
        size = prepared.first.numel()
        about = {"parameters": size, "clip": clip, "rounds": self.place.rounds, **asdict(setting)}
        return self._finished(run, begun, arm=name, views=self.views, **about)

    def _experiment(
        self, federation: Federation, spec: MethodSpec, average: float, model: nn.Module
    ) -> Experiment:
        return Experiment(
            federation=federation,
            method=spec,
            model=model,
            rounds=self.place.rounds,
            seed=self.seed,
            evaluate_every=self.place.rounds,
            average=average,
            device=self.place.device,
        )

    def _finished(self, run: Rehearsal, begun: float, **about: Any) -> dict[str, Any]:
        """Accuracy of the average over rounds, which is what is kept, and of the last model."""
        list(run.rounds())
        kept, last = run.server.full_model(run.data.first), run.server.state.model
        right = {
            name: float(evaluate(run.backend, theta, run.data.test)["accuracy"])
            for name, theta in (("average", kept), ("last", last))
        }
        return self.place.wrote(self.seed, begun, **about, **right)

    def _model(self, arm: str, reach: float) -> LastStage:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "geometry.npz"
            path.write_bytes(self.fitted.to_bytes())
            options = {"geometry": str(path), "backbone": str(self.place.bed.backbone), **ARMS[arm]}
            classes = self.rows.data.classes
            model = build("last-stage", SHAPE, classes, seed=self.seed, views=self.views, reach=reach, **options)
        assert isinstance(model, LastStage)
        with torch.no_grad():
            model.head.head.weight.copy_(torch.cat([self.head[0], self.head[1][:, None] / CONSTANT], 1))
        return model

    def _prepared(self, model: LastStage) -> Prepared:
        """What enters the last stage stays in the bed's table: records are numbers in it."""
        data, device = self.rows.data, torch.device(self.place.device)
        after = model.head.to(device)

        def batch(arrays: Arrays) -> Batch:
            return Batch(
                torch.from_numpy(numbers(arrays)).to(device), {"y": torch.from_numpy(arrays.y).to(device)}
            )

        first: Tensor = Layout.of(after).read(after)
        nobody = tuple(batch(Arrays.empty(data.test)) for _ in data.clients)
        own = tuple(batch(c.train) for c in data.clients)
        return Prepared(after, first, own, nobody, nobody, batch(data.test), None, FeatureFacts(data.classes))


def choose(place: Place, rates: Sequence[float]) -> Chosen:
    """For a head and each arm the best of the stand-in's runs, by the average over rounds."""
    draw, found = Draw(place, 0, 1), dict[str, dict[Setting, float]]()
    found[HEAD] = {Setting(rate, 0.0): draw.alone(rate)["average"] for rate in HEAD_RATES}
    for arm, reaches in REACHES.items():
        settings = [Setting(rate, reach) for reach in reaches for rate in rates]
        found[arm] = {setting: draw.stage(arm, setting)["average"] for setting in settings}
    return {arm: max(tried, key=lambda s: tried[s]) for arm, tried in found.items()}


def heads(draw: Draw, chosen: Chosen) -> None:
    """What the stage has to be better than."""
    draw.public_alone()
    draw.auto()
    draw.alone(chosen[HEAD].rate)


def first(place: Place, chosen: Chosen) -> Iterator[None]:
    """Every draw with one view, what matters most first; a pause after each run."""
    for seed in range(SEEDS):
        heads(Draw(place, seed, VIEWS), chosen)
        draw = Draw(place, seed, 1)
        heads(draw, chosen)
        for arm in ("whole", "norms"):
            draw.stage(arm, chosen[arm])
            yield


def second(place: Place, chosen: Chosen) -> Iterator[None]:
    """Both views, adapters, and the same steps without noise."""
    for seed in range(SEEDS):
        both, single = Draw(place, seed, VIEWS), Draw(place, seed, 1)
        both.stage("whole", chosen["whole"])
        yield
        single.stage("adapters", chosen["adapters"])
        yield
        if seed == 0:
            single.stage("whole", chosen["whole"], noise=False)
            yield
        both.stage("norms", chosen["norms"])
        yield


def bench(
    backbones: Path, out: Path, view: View, device: str, seconds: float, most: int | None, rounds: int
) -> None:
    """Choose on the stand-in, write that down, then test: hot, then cold, until the time is over."""
    ends = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    task, stand_in = bed(TASK, backbones, device, VIEWS, most), bed(STAND_IN, backbones, device, 1, most)
    hot, cold = (Place(task, view, start, out, device, rounds=rounds) for start in (True, False))
    by_start: dict[bool, Chosen] = {}
    for place in (hot, cold):  # the stand-in's clients send messages whose mean has the cell's own noise
        noise = noise_of(place.divided(0), view)
        aside = replace(place, bed=stand_in, view=MESSAGES, noise=noise, fitted={})
        by_start[place.hot] = choose(aside, RATES[view])
        said = {arm: asdict(setting) for arm, setting in by_start[place.hot].items()}
        with (out / "stage-chosen.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"view": view, "hot": place.hot, "noise": noise, **said}) + "\n")
    for part, place in ((first, hot), (first, cold), (second, hot), (second, cold)):
        for _ in part(place, by_start[place.hot]):
            if time.monotonic() > ends:
                return


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="More than a head on CIFAR-10.")
    parser.add_argument(
        "--backbones", type=Path, required=True, help="folder of cifar-100.npz and cifar-10-group.npz"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for stage.jsonl")
    parser.add_argument("--view", choices=("messages", "sum"), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, default=None, help="of a shared GPU that this may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run is begun after them")
    parser.add_argument("--most", type=int, default=None, help="records of each part, for a short look")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    if given.gigabytes is not None and given.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(given.gigabytes / whole)
    view = SUM if given.view == "sum" else MESSAGES
    bench(given.backbones, given.out, view, given.device, given.seconds, given.most, given.rounds)


if __name__ == "__main__":
    main()
