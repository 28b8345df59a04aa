"""`modicum fit-agent`: ACDP-pFSD's clipping agent, taught on public records before a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.papers.acdp_pfsd.pretrain import Lesson


def fit_agent(
    file: Path = typer.Argument(..., help="An experiment in TOML with method acdp-pfsd and a public proxy."),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    episodes: int = typer.Option(4, "--episodes", min=1, help="Whole runs on public records that teach it."),
    held_out: int = typer.Option(4, "--held-out", min=1, help="Others, on which it stands beside a fixed bound."),
    out: Path | None = typer.Option(None, "--out", help="The agent's file [default: FILE with .agent.json]."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Folder of dataset files (default: MODICUM_DATA, else the cache)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Nothing but the outcome in JSON."),
) -> None:
    """Teach ACDP-pFSD's agent on simulations of public records; writes it, and what it wins there."""
    if data_dir is not None:
        options = [*options, f"data.dir={json.dumps(str(data_dir.absolute()), ensure_ascii=False)}"]
    from modicum.cli.target import refuse_unwritable
    from modicum.config import experiment, read
    from modicum.methods import AcdpPfsd
    from modicum.papers.acdp_pfsd.pretrain import teach

    built, target = experiment(read(file, options)), out or file.with_suffix(".agent.json")
    method = built.method
    if not isinstance(method, AcdpPfsd) or method.mode != "sound" or method.clipping != "ppo":
        raise UserError(
            'only an agent is taught: use [method] name = "acdp-pfsd", clipping = "ppo", in sound mode'
        )
    refuse_unwritable(target)
    found = teach(replace(built, method=replace(method, agent=None)), episodes, held_out, target)
    facts = _facts(found, target)
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2) if as_json else _text(facts))


def _facts(found: Lesson, target: Path) -> dict[str, Any]:
    mean, error = found.gain
    return {
        "agent": str(target),
        "accuracies": list(found.accuracies),
        "gain": mean,
        "standard_error": error,
        "pays": error is not None and mean > 2 * error,
        "gains": list(found.gains),
    }


def _text(facts: dict[str, Any]) -> str:
    spread = facts["standard_error"]
    error = "" if spread is None else f" ± {100 * spread:.2f} (standard error of {len(facts['gains'])})"
    return "\n".join(
        [
            "taught   public accuracy after each run: " + ", ".join(f"{a:.3f}" for a in facts["accuracies"]),
            f"gain     {100 * facts['gain']:+.2f} points{error} over a fixed bound, on other public runs",
            f"agent    {facts['agent']}",
            f'use it   [method] name = "acdp-pfsd", agent = "{facts["agent"]}"'
            if facts["pays"]
            else 'no gain  is clear of chance: use [method] name = "acdp-pfsd", clipping = "fixed"',
        ]
    )
