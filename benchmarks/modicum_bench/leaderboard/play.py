"""Runs of one federation: a method tried on public records, or all methods of a cell on its test records."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modicum.data.arrays import Arrays, FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.public.head import decay_path, logistic_head
from modicum_bench.leaderboard.grid import CHOICES, MESSAGES, ROWS, SAME_AS, TASKS, Cell, Choice, alike, made
from modicum_bench.leaderboard.tasks import StandIn, judged, private, records, stand_in

Found = dict[str, Any]
NO_PRIVACY, PUBLIC_ALONE = "no privacy", "public alone"
AS_CLIENTS = "as_clients"  # accuracy on test records weighted so that classes have their shares at clients
LIGHT = (1e-4, 1e-5, 1e-6)  # decays of a head on everything


@dataclass(frozen=True)
class Try:
    """All choices of one method on a stand-in."""

    folder: Path
    stand_in: StandIn
    noise: float
    hot: bool
    method: str
    choices: tuple[Choice, ...] = CHOICES


@dataclass(frozen=True)
class Draw:
    """Methods of a cell, with their settings, on one draw of clients, public records and noise.

    Each result is added to `kept` at once: the processes that share the draws may be ended at any time.
    """

    folder: Path
    cell: Cell
    seed: int
    methods: tuple[tuple[str, Choice], ...]
    kept: Path
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Judge:
    """What is kept of a draw's judgements: accuracy, and where it matters who was judged wrongly."""

    patients: npt.NDArray[np.int64] | None = None  # the test's records, where draws judge different ones
    weights: npt.NDArray[np.float64] | None = None  # of test records, where classes have other shares at clients

    def of(self, wrong: npt.NDArray[np.bool_]) -> Found:
        found: Found = {"accuracy": float((~wrong).mean())}
        if self.patients is not None:
            found["wrong"] = self.patients[wrong].tolist()
        if self.weights is not None:
            found[AS_CLIENTS] = float(self.weights[~wrong].sum())
        return found


def judge_of(draw: Draw, data: FederatedData) -> Judge:
    task = TASKS[draw.cell.task]
    if draw.cell.dealt:
        return Judge(patients=judged(records(task, draw.folder)[0], draw.seed))
    if not task.shifted:
        return Judge()
    held = np.concatenate([c.train.y for c in data.clients])
    here, there = (np.bincount(y, minlength=data.classes) / len(y) for y in (held, data.test.y))
    return Judge(weights=(here / there)[data.test.y] / len(data.test.y))


def tried(one: Try) -> list[Found]:
    """Accuracy of each choice on the stand-in's own held-out records."""
    federation = stand_in(one.stand_in, one.folder, one.noise, one.hot, 0)
    about = {"stand_in": one.stand_in.name, "noise": one.noise, "hot": one.hot, "method": one.method}
    model, _ = _start(_Key(federation), one.hot)
    found = []
    for choice in one.choices:
        result: Found = {**about, "rate": choice[0], "clip": choice[1]}
        found.append({**result, **_outcome(federation, one.method, choice, MESSAGES, 0, model)})
    return found


def played(draw: Draw) -> list[Found]:
    """What each method came to on test records, beside the public head."""
    cell, found = draw.cell, list[Found]()
    federation = private(cell, draw.folder, draw.seed)
    model, wrong = _start(_Key(federation), cell.hot)
    about: Found = {"cell": cell.name, "seed": draw.seed}
    public_only = None if wrong is None else float((~wrong).mean())
    judge = judge_of(draw, federation.data)
    if wrong is not None and len(more := judge.of(wrong)) > 1:
        _keep(draw, {**about, "method": PUBLIC_ALONE, **more})
    for name, choice in draw.methods:
        result: Found = {**about, "method": name, "public_only": public_only}
        if name == NO_PRIVACY:
            fast = "cuda" if torch.cuda.is_available() else draw.device
            result |= judge.of(no_privacy(federation.data, cell.hot, fast))
        else:
            result |= {"rate": choice[0], "clip": choice[1]}
            result |= _as_before(name, choice, federation, cell.view, found) or _outcome(
                federation, name, choice, cell.view, draw.seed, model, draw.device, judge
            )
        _keep(draw, result)
        found.append(result)
    return found


def _keep(draw: Draw, result: Found) -> None:
    with draw.kept.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def _as_before(name: str, choice: Choice, federation: Federation, view: str, found: list[Found]) -> Found | None:
    """The outcome of a method that is the same one here, if it was played with the same settings."""
    same_as = SAME_AS.get(name)
    if same_as is None or not alike(federation) or view != MESSAGES:
        return None
    same = (one for one in found if one["method"] == same_as and (one["rate"], one["clip"]) == tuple(choice))
    one = next((one for one in same if "accuracy" in one), None)
    return one and {k: one[k] for k in ("accuracy", AS_CLIENTS) if k in one} | {"same_as": same_as}


def _outcome(
    federation: Federation,
    name: str,
    choice: Choice,
    view: str,
    seed: int,
    model: nn.Module,
    device: str = "cpu",
    judge: Judge = Judge(),  # noqa: B008
) -> Found:
    """What the judge keeps, and seconds; a method that refuses is said to."""
    begun = time.monotonic()
    try:
        spec = made(name, choice, federation, view)
        rounds = ROWS[name].rounds
        run = Rehearsal(
            Experiment(
                federation=federation,
                method=spec,
                model=model,
                rounds=rounds,
                seed=seed,
                evaluate_every=rounds,
                device=device,
            )
        )
        list(run.rounds())
    except UserError as error:
        return {"refused": str(error)}
    test = run.data.test
    told = run.backend.outputs(run.server.full_model(run.data.first), test.x).argmax(-1)
    wrong = (told != test.targets["y"]).cpu().numpy()
    return {**judge.of(wrong), "seconds": round(time.monotonic() - begun, 1)}


def no_privacy(data: FederatedData, hot: bool, device: str = "cpu") -> npt.NDArray[np.bool_]:
    """Errors of a logistic head on everybody's records together, its decay chosen on a tenth of them."""
    whole = Arrays.concatenate([c.train for c in data.clients] + ([data.proxy] if hot else []))
    order = np.random.default_rng(0x11717).permutation(len(whole))
    x, y = torch.from_numpy(whole.x[order]).double().to(device), torch.from_numpy(whole.y[order]).to(device)
    held = len(order) // 10
    tries = decay_path(x[held:], y[held:], data.classes, LIGHT)
    right = [float(((x[:held] @ w.T + b).argmax(1) == y[:held]).double().mean()) for w, b in tries]
    return _wrong(decay_path(x, y, data.classes, LIGHT)[int(np.argmax(right))], data)


@dataclass(frozen=True, eq=False)
class _Key:
    """A federation, told from others by its identity."""

    federation: Federation

    def __hash__(self) -> int:
        return id(self.federation)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.federation is self.federation


@lru_cache(maxsize=1)
def _start(key: _Key, hot: bool) -> tuple[nn.Module, npt.NDArray[np.bool_] | None]:
    """Zero, or the logistic head on public records and what it gets wrong of the test."""
    data = key.federation.data
    linear = nn.Linear(data.test.x.shape[1], data.classes)
    head = (torch.zeros_like(linear.weight), torch.zeros_like(linear.bias))
    if hot:
        head = logistic_head(torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y), data.classes)
    with torch.no_grad():
        linear.weight.copy_(head[0])
        linear.bias.copy_(head[1])
    return nn.Sequential(nn.Flatten(), linear), _wrong(head, data) if hot else None


def _wrong(head: tuple[Tensor, Tensor], data: FederatedData) -> npt.NDArray[np.bool_]:
    weight, bias = (part.detach().cpu().double() for part in head)
    logits = torch.from_numpy(data.test.x).double() @ weight.T + bias
    return np.asarray(logits.argmax(1).numpy() != data.test.y)
