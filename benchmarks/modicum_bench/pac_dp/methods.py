"""The rows of the tables: each method with the settings that it is tuned over, on the same public records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modicum.core.setting import MethodSpec
from modicum.methods import Aqc, CgmMedian, DpSgd, FedAvg, NbAfl, PacDp, RpdpFl
from modicum_bench.pac_dp.settings import FIXED, Task

Make = Callable[[float, Any], MethodSpec]
COLD = ("fixed C=1", "fixed C=5", "AQC", "CGM_Median", "rPDP-FL", "NbAFL")  # beside PAC-DP, from a cold start
ADAM = ", Adam"


@dataclass(frozen=True)
class Row:
    """`make(lr, option)`; `options` are the values of its own setting, tried with every learning rate."""

    name: str
    make: Make
    options: tuple[Any, ...]
    private: bool = True


def rows(task: Task, bounds: Sequence[float]) -> tuple[Row, ...]:
    """Every method but PAC-DP, whose own setting is the fitted curve."""
    tried = _tried(bounds)
    most = max(task.personal)
    fixed = tuple(Row(f"fixed C={c:g}", lambda lr, o: DpSgd(clip=o, lr=lr), (c,)) for c in FIXED)
    return (
        *fixed,
        Row("AUTO-S", lambda lr, o: DpSgd(rule="auto", clip=o, lr=lr), (1.0,)),
        Row("AQC", lambda lr, o: Aqc(clip=0.5, quantile=o, lr=lr), (0.3, 0.7)),
        Row("CGM_Median", lambda lr, o: CgmMedian(clip=o, lr=lr), tried),
        Row("rPDP-FL", lambda lr, o: RpdpFl(clip=o, lr=lr, full_budget=most, aggregation="noise-aware"), tried),
        Row(
            "NbAFL",
            lambda lr, o: NbAfl(clip=o, lr=lr / 10, batch=64, steps=5, aggregation="noise-aware"),
            tried,
        ),
        Row("FedAvg (no privacy)", lambda lr, o: FedAvg(lr=lr / 10, batch=64, steps=o), (10,), private=False),
    )


def adam_rows(bounds: Sequence[float], curve: str) -> tuple[Row, ...]:
    """The paper's Fig. 12, from a cold start: rates count a hundredth, for Adam's steps have the rate's length."""
    tried, steps = _tried(bounds), (1, 5)
    return (
        Row(f"PAC-DP{ADAM}", lambda lr, o: PacDp(optimiser="adam", curve=curve, lr=lr / 100, steps=o), steps),
        Row(f"fixed C=1{ADAM}", lambda lr, o: DpSgd(optimiser="adam", lr=lr / 100, steps=o), steps),
        Row(
            f"NbAFL{ADAM}",
            lambda lr, o: NbAfl(
                optimiser="adam", clip=o, lr=lr / 100, batch=64, steps=5, aggregation="noise-aware"
            ),
            tried,
        ),
    )


def _tried(bounds: Sequence[float]) -> tuple[float, float]:
    return bounds[len(bounds) // 3], bounds[-2]


def pac_dp(lr: float, curve: str | None, *, clip: float = 1.0, weights: str | None = None) -> PacDp:
    return PacDp(lr=lr, curve=curve, clip=clip, aggregation=weights)  # type: ignore[arg-type]
