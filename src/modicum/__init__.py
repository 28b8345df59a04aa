"""Modicum: adaptive, personalised, provable differentially private federated learning.

import modicum as mo

fed = mo.Federation.from_dataset("digits", clients=20, partition=mo.Dirichlet(0.5), budgets=[0.5, 1.0, 8.0])
run = mo.train(fed, model="logistic", method=mo.methods.DpSgd(), rounds=30, seed=0)
run.accuracy, run.certificate.epsilon("client-07"), run.plot()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modicum import methods, models, tasks
    from modicum.comparing import Comparison, compare
    from modicum.core.facts import Metric
    from modicum.data import (
        Dirichlet,
        Iid,
        Natural,
        Shards,
        SizeSkew,
        assign_budgets,
        federate,
        from_csv,
        from_frame,
        from_npz_folder,
        from_parquet,
        from_population,
        from_torch,
        in_persons,
    )
    from modicum.data import load as load_dataset
    from modicum.errors import PrivacyWarning, UnsoundError, UserError
    from modicum.federation.control import EarlyStop, PublicRound
    from modicum.federation.experiment import Federation
    from modicum.federation.interference import Checked, check
    from modicum.federation.lifetime import Account
    from modicum.federation.settings import Cohorts, Engine, Noise, Server, Watching
    from modicum.federation.transcript_file import load_transcript
    from modicum.loops.pytorch import privately
    from modicum.preparing.look import look
    from modicum.preparing.tune import tune
    from modicum.privacy.certificate import Certificate
    from modicum.privacy.verify import verify
    from modicum.report.track import MLflow, TensorBoard, Tracker
    from modicum.runs import Run, load, train
    from modicum.tasks import Task

__version__ = "0.1.0"

_DATA = (
    *("Dirichlet", "Iid", "Natural", "Shards", "SizeSkew"),
    *("assign_budgets", "federate", "from_csv", "from_frame", "from_npz_folder"),
    *("from_parquet", "from_population", "from_torch", "in_persons"),
)
_WHERE = {
    **dict.fromkeys(_DATA, "modicum.data"),
    **dict.fromkeys(("PrivacyWarning", "UnsoundError", "UserError"), "modicum.errors"),
    **dict.fromkeys(("MLflow", "TensorBoard", "Tracker"), "modicum.report.track"),
    **dict.fromkeys(("Cohorts", "Engine", "Noise", "Server", "Watching"), "modicum.federation.settings"),
    "Certificate": "modicum.privacy.certificate",
    "Checked": "modicum.federation.interference",
    **dict.fromkeys(("EarlyStop", "PublicRound"), "modicum.federation.control"),
    "Account": "modicum.federation.lifetime",
    "Federation": "modicum.federation.experiment",
    "Metric": "modicum.core.parts",
    "Run": "modicum.runs",
    "Task": "modicum.tasks",
    "Comparison": "modicum.comparing",
    "check": "modicum.federation.interference",
    "compare": "modicum.comparing",
    "load": "modicum.runs",
    "load_dataset": "modicum.data:load",
    "look": "modicum.preparing.look",
    "load_transcript": "modicum.federation.transcript_file",
    "privately": "modicum.loops.pytorch",
    "train": "modicum.runs",
    "tune": "modicum.preparing.tune",
    "verify": "modicum.privacy.verify",
}
_MODULES = ("methods", "models", "tasks")

__all__ = [
    "Account",
    "Certificate",
    "Checked",
    "Cohorts",
    "Comparison",
    "Dirichlet",
    "EarlyStop",
    "Engine",
    "Federation",
    "Iid",
    "MLflow",
    "Metric",
    "Natural",
    "Noise",
    "PrivacyWarning",
    "PublicRound",
    "Run",
    "Server",
    "Shards",
    "SizeSkew",
    "Task",
    "TensorBoard",
    "Tracker",
    "UnsoundError",
    "UserError",
    "Watching",
    "assign_budgets",
    "check",
    "compare",
    "federate",
    "from_csv",
    "from_frame",
    "from_npz_folder",
    "from_parquet",
    "from_population",
    "from_torch",
    "in_persons",
    "load",
    "load_dataset",
    "load_transcript",
    "look",
    "methods",
    "models",
    "privately",
    "tasks",
    "train",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Each name is imported when it is first used: `import modicum` alone loads neither torch nor numpy."""
    if name in _MODULES:
        return import_module(f"modicum.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'modicum' has no attribute {name!r}")
    module, _, there = _WHERE[name].partition(":")
    value = getattr(import_module(module), there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
