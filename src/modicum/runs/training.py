"""`mo.train`: settings of Python become an experiment, and that a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from modicum.config.read import DEFAULT_METHOD
from modicum.config.write import describe_experiment
from modicum.core.setting import MethodSpec
from modicum.data.arrays import FederatedData
from modicum.data.budgets import Budgets, assign_budgets
from modicum.data.look import Look
from modicum.errors import UserError
from modicum.federation.control import EarlyStop
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.lifetime import Account
from modicum.federation.records import RoundRecord
from modicum.federation.run_folder import RunFolder
from modicum.federation.settings import Cohorts, Engine, Noise, Server, Watching, check_group, regrouped
from modicum.federation.simulation import Simulation
from modicum.federation.transcript_file import transcript_in
from modicum.methods import method_of
from modicum.models.low_rank import OPTION, Adapters
from modicum.report.progress import watching as progress_of
from modicum.runs.finished import Run
from modicum.runs.playing import Watch, carry_out, new_folder
from modicum.tasks import DEFAULT as DEFAULT_TASK
from modicum.tasks import Task, task_of

if TYPE_CHECKING:
    from modicum.core.facts import Metric


def train(
    federation: Federation | FederatedData,
    *,
    method: MethodSpec | str = DEFAULT_METHOD,
    budgets: Budgets | None = None,
    model: str | nn.Module = "logistic",
    model_options: Mapping[str, Any] | None = None,
    adapters: Mapping[str, Any] | Adapters | None = None,
    task: Task | str = DEFAULT_TASK,
    rounds: int = 30,
    seed: int = 0,
    metrics: tuple[Metric, ...] = (),
    simulation: bool = True,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    cohorts: Cohorts = Cohorts(),
    server: Server = Server(),
    noise: Noise = Noise(),
    engine: Engine = Engine(),
    watching: Watching = Watching(),
    account: Account | None = None,
    looks: Sequence[Look | str | PathLike[str]] = (),
    **old: Any,
) -> Run:
    """Train, and write a run folder.

    Args:
        federation: records and budgets; where it holds records alone (`mo.federate`), give `budgets` too.
        method: a settings object (`mo.methods.DpSgd(lr=4)`) or a name (`"dp-sgd"`: its defaults) [default: auto].
        budgets: ε that the clients grant.
        model: a name of the catalogue, a folder of transformers (`"hf:FOLDER"`), or a module of your own.
        model_options: settings of a model that is named.
        adapters: trained beside a model that is otherwise frozen: `{"rank": 8, "targets": ["query", "value"]}`.
        task: what is learned: `"classification"`, `"regression"`, `"multi-label"`, `"next-token"`, one with
            options (`mo.tasks.classification(weights=[1, 13])`), or your own `mo.Task`.
        rounds: rounds of training.
        seed: of everything that is drawn, but for cryptographic noise.
        metrics: what clients tell of their validation records, paid for like everything else.
        simulation: false draws noise from the operating system's cryptographic generator instead of the seed, and
            looks at no test record.
        folder: where to write [default: a new folder under ./runs].
        resume: continues a run of the same experiment that was interrupted.
        cohorts: who takes part.
        noise: how noise is drawn: of floats, on a lattice, or correlated over rounds.
        server: hot start, averages, limits of bounds, how often to evaluate.
        engine: device, compilation, worker processes: speed alone.
        watching: progress, callbacks, early stop, trackers, transcript, audit.
        account: one lifetime grant for this and all other runs on the same records; a run that does not fit is
            refused before anything is computed.
        looks: at the same records, taken before (`mo.look`, or their folders), whose price is within the budgets.
        **old: settings of the four groups by their own names, as before; each warns.

    Returns:
        The finished run.

    Raises:
        UserError: for what cannot be, in one line that says what to change.
    """
    cohorts, server, engine, watching = regrouped(old, cohorts, server, engine, watching)
    check_group("noise", noise)
    if account is not None and not isinstance(account, Account):
        raise UserError(f"account is a lifetime grant, mo.Account(…), got {account!r}")
    if isinstance(looks, str | PathLike):
        raise UserError(f"looks are several: looks=[{str(looks)!r}]")
    method = method_of(method)
    experiment = Experiment(
        federation=_with_budgets(federation, budgets, seed),
        method=method,
        model=model,
        task=task_of(task),
        rounds=rounds,
        per_round=cohorts.per_round,
        max_participations=cohorts.max_participations,
        metrics=metrics,
        seed=seed,
        start=server.start,
        hot_start=server.hot_start,
        average=server.average,
        bounds=server.bounds,
        noise=noise.kind,
        bands=noise.bands,
        factor=noise.factor,
        evaluate_every=server.evaluate_every,
        device=engine.device,
        compile=engine.compile,
        workers=engine.workers,
        ray=engine.ray,
        model_options={**(model_options or {}), **({} if adapters is None else {OPTION: adapters})},
        looks=tuple(_taken(look) for look in looks),
    )
    if resume and folder is None:
        raise UserError("say which run to resume: give its folder")
    path = new_folder(f"{type(method).__name__.lower()}-seed{seed}") if folder is None else Path(folder)
    files = RunFolder(path)
    files.make(fresh=not resume)
    stops = () if watching.early_stop is None else (EarlyStop.read(watching.early_stop),)
    with progress_of(path.name, quiet=watching.progress is False, lines=watching.progress is True) as shown:
        return carry_out(
            experiment,
            files,
            describe_experiment(experiment, simulation, watching.transcript, watching.audit),
            simulation=simulation,
            watch=_both(shown, watching.watch),
            callbacks=(*stops, *watching.callbacks),
            track=watching.track,
            transcript=transcript_in(files, watching.transcript),
            audit=watching.audit,
            until=watching.until,
            account=account,
        )


def _taken(look: Look | str | PathLike[str]) -> Look:
    """No file says what was planned before it: a training from Python may have followed from its figures (R2)."""
    return replace(look if isinstance(look, Look) else Look.read(look), planned_before=False)


def _both(*watches: Watch | None) -> Watch:
    def watch(run: Simulation, record: RoundRecord) -> None:
        for one in watches:
            if one is not None:
                one(run, record)

    return watch


def _with_budgets(federation: Federation | FederatedData, budgets: Budgets | None, seed: int) -> Federation:
    if isinstance(federation, Federation):
        if budgets is not None:
            raise UserError("the federation has budgets already: leave budgets out, or give records alone")
        return federation
    if not isinstance(federation, FederatedData):
        raise UserError(
            f"train takes a federation, got {type(federation).__name__}: make one with mo.Federation.from_dataset "
            "or mo.federate"
        )
    if budgets is None:
        raise UserError("say which ε the clients grant: mo.train(…, budgets=[0.5, 1, 8])")
    return Federation(federation, assign_budgets(budgets, len(federation.clients), seed))
