"""What attacks found before, in a folder: a campaign that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from modicum.attacks.adversary_view import AdversaryView
from modicum.attacks.bounds import FloatArray
from modicum.attacks.inversion.objective import Guess
from modicum.attacks.order import Found, Order
from modicum.core.store import create_alone


@dataclass(frozen=True)
class StoredOutcomes:
    """Files named after everything that decides what is found."""

    folder: Path
    order: Order
    view: AdversaryView

    def path(self, name: str, kind: str) -> Path:
        """Of what `name` found."""
        first = self.view.observed[0]
        told = [
            name,
            asdict(replace(self.order, attacks=("dlg",))),
            self.view.public.method.name,
            len(self.view.observed),
        ]
        text = json.dumps([*told, float(first.update.double().sum()), float(first.update.double().abs().max())])
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{name}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}.{kind}"

    def guesses(self, name: str, search: Callable[[], Found]) -> Found:
        """What an inversion found, searched for where it is not there."""
        path = self.path(name, "npz")
        if not path.exists():
            found = search()
            x, y = (torch.stack([getattr(g, part) for g in found]).cpu().numpy() for part in ("x", "y"))
            with create_alone(path.with_suffix(".part")) as file:
                np.savez(file, x=x, y=y, loss=np.array([g.loss for g in found]))
            path.with_suffix(".part").replace(path)
        with np.load(path) as kept:
            rows = zip(kept["x"], kept["y"], kept["loss"], strict=True)
            return [Guess(torch.from_numpy(x), torch.from_numpy(y), float(loss)) for x, y, loss in rows]

    def numbers(self, name: str, compute: Callable[[], FloatArray]) -> FloatArray:
        """Scores, or what a shadow answered, computed where they are not there."""
        path = self.path(name, "npy")
        if not path.exists():
            with create_alone(path.with_suffix(".part")) as file:
                np.save(file, compute())
            path.with_suffix(".part").replace(path)
        return np.asarray(np.load(path))
