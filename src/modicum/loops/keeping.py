"""What a loop keeps in its folder: the state after each part of its plan, and the digest of each step since.

Noise and coins are functions of a key, so a part that was cut off is played again as it was. A step that came out
otherwise would be a second release under the same noise: it is refused before it reaches the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from modicum.core.store import load_state, save_state, write_durably
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.privacy.noise.one_place import OnePlace

STEPS = "steps.log"
CHANGED = (
    "this step is not the one that was taken before the loop was cut off: continue with the same program, "
    "packages, device and number of threads, or begin a new run; the model was left as it was"
)


class Keeping:
    """A loop's checkpoints and digests.

    Args:
        files: The run's folder.
        model: Saved and restored whole.
        optimiser: The same.
        also: Whatever else has `state_dict` and `load_state_dict`, by name, such as a scheduler.
        place: Where the noise is drawn; None: it follows from a seed.
    """

    def __init__(
        self,
        files: RunFolder,
        model: nn.Module,
        optimiser: Optimizer,
        also: Mapping[str, Any] | None = None,
        place: OnePlace | None = None,
    ) -> None:
        self._files, self._model, self._place = files, model, place
        self._others = {"optimiser": optimiser, **(also or {})}
        self._path: Path = files.path / STEPS
        self.done, self.digest = 0, ""
        self._known: dict[tuple[int, int], str] = {}

    def restore(self) -> None:
        """The state after the last finished part, where there is one."""
        if self._files.checkpoint.exists():
            state = load_state(self._files.checkpoint)
            self._model.load_state_dict(state["model"])
            for name, other in self._others.items():
                if name not in state["others"]:
                    raise UserError(f"the checkpoint has no {name!r}: give the same `also` as before")
                other.load_state_dict(state["others"][name])
            self.done, self.digest = int(state["done"]), str(state["digest"])
        if self._path.exists():
            whole = self._path.read_text(encoding="ascii", errors="replace").rpartition("\n")[0]
            for line in whole.splitlines():
                part, step, digest = line.split()
                self._known[int(part), int(step)] = digest
        if self._place is not None:
            self._place.check(self._has)
            if self._known:
                self._place.note(_line(*max(self._known.items())))

    def _has(self, line: str) -> bool:
        """Whether a step that was noted is in this state."""
        part, step, digest = line.split()
        return int(part) < self.done or self._known.get((int(part), int(step))) == digest

    def admit(self, part: int, step: int, released: Tensor) -> None:
        """Note a step on disk before it is written into the model; one that was noted must be the same."""
        digest = hashlib.blake2b(released.detach().cpu().numpy().tobytes(), digest_size=16).hexdigest()
        known = self._known.get((part, step))
        if known is not None:
            if known != digest:
                raise UserError(CHANGED)
            return
        self._known[part, step] = digest
        with open(self._path, "ab") as file:
            file.write(f"{_line((part, step), digest)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        if self._place is not None:
            self._place.note(_line((part, step), digest))

    def keep(self, done: int) -> None:
        """The state after so many parts; digests of their steps are needed no more."""
        self.digest = hashlib.blake2b(
            "".join(self._known[key] for key in sorted(self._known)).encode(), digest_size=16
        ).hexdigest()
        self.done = done
        others = {name: other.state_dict() for name, other in self._others.items()}
        state = {"model": self._model.state_dict(), "others": others, "done": done, "digest": self.digest}
        save_state(self._files.checkpoint, state)
        self._known = {}
        write_durably(self._path, b"")

    def end(self) -> None:
        """No step is taken any more, wherever the key is put back from."""
        if self._place is not None:
            self._place.end()


def _line(which: tuple[int, int], digest: str) -> str:
    return f"{which[0]} {which[1]} {digest}"
