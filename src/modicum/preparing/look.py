"""A look taken: one paid round over the clients of an experiment file, and its figures beside the certificate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from modicum.aggregation.totals import noise_in
from modicum.config import Config, experiment, experiment_over, read, to_toml
from modicum.config.build import account_in, federation_over
from modicum.config.looks import planning
from modicum.config.schema import ModelConfig, TaskConfig
from modicum.core.statistics import CLASSES, Questions
from modicum.core.store import load_state
from modicum.data.asked import asked_columns
from modicum.data.look import Look, figures, paid
from modicum.errors import UserError
from modicum.federation.model_file import label_names
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import plans_of
from modicum.methods import Look as LookMethod
from modicum.privacy.accounting.choose import epsilon as epsilon_of
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.plan import PrivacyPlan
from modicum.report.look import write_look_page
from modicum.runs import carry_out, new_folder

PLANNED = "planned.json"  # which training stood in the file when the look was taken


def look(
    file: str | Path,
    epsilon: float,
    *,
    of: Sequence[str] = (),
    statistics: Sequence[str] = (),
    bins: int | None = None,
    options: Sequence[str] = (),
    seed: int | None = None,
    folder: str | Path | None = None,
) -> Look:
    """Take a look at the data of an experiment file, at this price to each client.

    Args:
        file: The experiment in TOML, as it is to be trained afterwards.
        epsilon: What each client pays.
        of: Columns [default: all with a declared range, categories or dates].
        statistics: What is asked: classes, missing, moments, histograms, correlations [default: all but the last].
        bins: Bars of each histogram [default: 16].
        options: `table.key=value` on top of the file.
        seed: In place of the file's.
        folder: A new one for the look's certificate and figures [default: one under ./runs].

    Returns:
        The figures with their errors.

    Raises:
        UserError: Where a column has no public range, or the price cannot be met.
    """
    config = read(file, options, seed, looks=False)
    asked = look_config(config, epsilon, of, statistics, bins)
    files = RunFolder(Path(folder) if folder is not None else new_folder(f"look-{Path(file).stem}"))
    shown = f"modicum look {files.path} shows a look that is in it, or says how to go on with one"
    files.refuse_occupied(f"{shown}; for a new one choose another folder")
    built, account = experiment(asked), account_in(asked)
    if account is not None:
        training = experiment_over(config, federation_over(config, built.federation.data))
        account = replace(account, opened_for=tuple(plans_of(training, SimulatedNoise(0)).values()))
    files.make(fresh=True)
    files.write(files.path / PLANNED, json.dumps(planning(config), ensure_ascii=False).encode())
    try:
        carry_out(built, files, to_toml(asked), simulation=asked.run.simulation, account=account)
    except UserError:
        if not files.ledger.exists():
            (files.path / PLANNED).unlink(missing_ok=True)
            files.leave_if_empty()
        raise
    return finish(files.path)


def look_config(
    config: Config, epsilon: float, of: Sequence[str], statistics: Sequence[str], bins: int | None
) -> Config:
    """The look that belongs to a training: the same clients, adjacency and view, one round, a price of its own."""
    if config.data.table is None:
        raise UserError(
            "a look is taken at the columns of a table: give [data] csv or parquet, with [data.columns]"
        )
    shared = ("view", "colluding", "dropouts", "delta", "adjacency")
    known = {f.name for f in fields(config.method)} & set(shared)
    settings: dict[str, Any] = {name: getattr(config.method, name) for name in known}
    classes = config.task.name == "classification"
    usual = LookMethod().statistics
    settings |= {"of": tuple(of), "statistics": tuple(statistics) or (usual if classes else usual[1:])}
    method = LookMethod(**settings) if bins is None else LookMethod(**settings, bins=bins)
    run = replace(
        config.run, rounds=1, per_round=None, max_participations=None, metrics=(), hot_start=0, average=0.0,
        evaluate_every=1, early_stop=None, audit=None,
    )  # fmt: skip
    noise = None if config.privacy.noise == "correlated" else config.privacy.noise
    privacy = replace(
        config.privacy, budgets=epsilon, delta=method.delta, adjacency=method.adjacency, noise=noise,
        fixed_shapes=None, bands=None, factor=None, looks=[],
    )  # fmt: skip
    data = replace(config.data, features=None, features_from=None, backbone=None)
    return replace(
        config,
        data=replace(data, ranges=None, impute=None, standardise=None),
        privacy=privacy,
        method_name="look",
        method=method,
        model=ModelConfig(),
        run=run,
        task=TaskConfig(),
    )


def finish(folder: str | Path) -> Look:
    """The figures of a look whose round is over, from its folder alone: simulated or deployed. Safe to repeat."""
    files = RunFolder(Path(folder))
    if not files.checkpoint.exists() and files.ledger.exists():
        raise UserError(
            f"the look in {folder} was cut off after it was paid for: go on with modicum run --resume "
            f"{folder}, then modicum look {folder}"
        )
    if not files.checkpoint.exists():
        raise UserError(f"there is no finished look in {folder}: take one with modicum look FILE --out {folder}")
    config = read(files.config, looks=False)
    method = config.method
    if not isinstance(method, LookMethod):
        raise UserError(f"{folder} holds a training, not a look: open its report.html")
    state = load_state(files.checkpoint)
    answers, totals = state["model"], state["aggregation"]
    if not totals["over"]:
        raise UserError(f"nobody answered in the look of {folder}: what it cost stays charged")
    columns = asked_columns(config.data.columns, method.of, method.bins)
    plain = Questions(method.statistics, method.bins, 0, len(columns))
    questions = replace(plain, classes=answers.numel() - plain.size if CLASSES in method.statistics else 0)
    with Ledger.open(files.ledger, read_only=True) as ledger:
        plans, run = dict(ledger.plans), ledger.run_id
    found = figures(
        answers.double().numpy(), noise_in(totals), questions, columns, sum(totals["records"].values())
    )
    planned = files.path / PLANNED
    taken = Look(
        run=run,
        sizes=totals["records"],
        spec=next(iter(plans.values())).spec,
        releases={name: paid(plan, run) for name, plan in plans.items()},
        labels=label_names(files.path) if files.model.exists() else (),
        costs=_costs(next(iter(plans.values())), questions),
        planned=json.loads(planned.read_text(encoding="utf-8")) if planned.exists() else None,
        folder=files.path,
        **found,
    )
    text = json.dumps(taken.to_dict(), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    files.write(files.look, text.encode())
    write_look_page(files, taken)
    return taken


def _costs(plan: PrivacyPlan, questions: Questions) -> dict[str, float]:
    """ε of each block had it been asked alone with its noise: μ² adds up, so that all cost less than the sum."""
    blocks = questions.blocks
    if not plan.releases:
        return {}
    each = replace(plan.releases[0], integers=None)
    each = replace(each, noise_multiplier=each.noise_multiplier * len(blocks) ** 0.5)
    return dict.fromkeys(blocks, epsilon_of([each], plan.spec).epsilon)
