"""How far one or two liars of ten move a model that is aggregated robustly: `python benchmarks/hostile.py`.

Scripted silos over the real coordinator (tests/hostile/stage.py): honest ones clip a fixed update and add the
noise of their plans, liars send the longest update that passes for possible, always in one direction. All draws
are keyed, so that the figures of docs/hostile.md come out again.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.hostile import stage

from modicum.core.messages import Broadcast, decode, encode
from modicum.deploy.flower.coordinator import Coordinator
from modicum.deploy.silo.wire import Answer, Kind

SILOS, ROUNDS, NEARLY = 10, 6, 0.999


class Ten(stage.Scripted):
    """Ten silos, of which the last `liars` lie."""

    liars = 0
    server: Coordinator | None = None

    def one(self, kind: Kind, name: str, body: bytes) -> Answer | None:
        if kind != Kind.ROUND:
            return super().one(kind, name, body)
        asked = decode(body)
        assert isinstance(asked, Broadcast)
        message = self.honest(asked)
        if int(name[1:]) >= SILOS - self.liars:
            assert self.server is not None
            most = NEARLY * self.server.silos._expected(asked).norm
            message = replace(message, update=stage.unit(message.update) * most)
        return Answer(encode(message))


def end(epsilon: float, aggregation: str, liars: int) -> tuple[Tensor, Tensor]:
    """The first and the last model of a run."""
    text = stage.text(aggregation, rounds=ROUNDS, method="dp-fedavg")
    text = text.replace("clients = 4", f"clients = {SILOS}").replace("= 8.0", f"= {epsilon}")
    with tempfile.TemporaryDirectory() as folder:
        carrier = Ten(stage.prepare(Path(folder), text))
        carrier.liars = liars
        carrier.server = made = stage.coordinator(carrier)
        first = made.server.state.model.clone()
        for _ in made.rounds():
            pass
        made.close()
        return first, made.model.clone()


def main() -> None:
    """One line for each ε and aggregation."""
    stage.NAMES = tuple(f"c{i}" for i in range(SILOS))
    stage.HONEST, stage.HOSTILE = stage.NAMES[:-1], stage.NAMES[-1]
    for epsilon in (8.0, 400.0):
        for aggregation in ("mean", "norm-bounded", "trimmed-mean", "median"):
            first, honest = end(epsilon, aggregation, 0)
            moved = [float((end(epsilon, aggregation, k)[1] - honest).norm()) for k in (1, 2)]
            print(
                f"ε = {epsilon:g}  {aggregation:13} an honest run moves {float((honest - first).norm()):.2f}; "
                f"one liar shifts its end by {moved[0]:.2f}, two by {moved[1]:.2f}"
            )


if __name__ == "__main__":
    main()
