"""The `modicum` command and its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.core

from modicum import __version__
from modicum.cli import (
    account_plan,
    attack,
    audit,
    backbones,
    bench,
    certificate,
    check,
    compare,
    datasets,
    demo,
    doctor,
    experiment,
    export,
    fit,
    fit_agent,
    fit_metanet,
    flower,
    look,
    methods,
    paper,
    silo,
    studio,
    theory,
    tune,
    verify,
)

# Where rich is installed, typer escapes "[default: …]" for it even in help that rich does not show.
typer.core.HAS_RICH = False


def _keep_help(init: Callable[..., None]) -> Callable[..., None]:
    """click 8.5 gives arguments a help of its own, empty, in place of the one that typer < 0.21 has just set."""

    def kept(self: typer.core.TyperArgument, **settings: Any) -> None:
        init(self, **settings)
        self.help = settings.get("help")

    return kept


def _said_already(self: Any, ctx: Any, formatter: Any) -> None:
    """click 8.5 lists arguments by itself, beside the list that typer puts before the options."""


typer.core.TyperArgument.__init__ = _keep_help(typer.core.TyperArgument.__init__)  # type: ignore[method-assign]
typer.core.TyperCommand.format_arguments = _said_already  # type: ignore[method-assign]

app = typer.Typer(
    name="modicum",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"modicum {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", help="Show the version and stop.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Differentially private federated learning with a budget of its own for every client."""


app.command("demo", short_help="Several methods on embedded data, side by side.")(demo.demo)
app.command("run", short_help="Run an experiment, or several.")(experiment.run)
app.command("look", short_help="Paid statistics of the clients' columns, before a training.")(look.look)
app.command("tune", short_help="Choose settings on private records, at a stated price.")(tune.tune)
app.command("compare", short_help="Several methods with several seeds, in one table.")(compare.compare)
app.command("fit-clipping", short_help="PAC-DP's F(ε), learned on public records.")(fit.fit_clipping)
app.command("fit-agent", short_help="ACDP-pFSD's agent, taught on public records.")(fit_agent.fit_agent)
app.command("fit-metanet", short_help="FedMAP's network, trained on public records.")(fit_metanet.fit_metanet)
app.add_typer(account_plan.app, name="account", short_help="Plan privacy: ε of noise, noise for ε, accounts.")
app.add_typer(datasets.app, name="datasets", short_help="Datasets by name, and how they divide.")
app.command("methods", short_help="The methods, or one method's settings.")(methods.methods)
app.command("check", short_help="Does anything private leak past the release gate?")(check.check)
app.command("studio", short_help="A page that watches, compares, plans and audits runs.")(studio.studio)
app.command("verify", short_help="Recompute every ε from the ledger, by two accountants.")(verify.verify)
app.command("export", short_help="A run's model for other programs.")(export.export)
app.add_typer(certificate.app, name="certificate")
app.command("attack", short_help="Attack a recorded run.")(attack.attack)
app.command("backbones", short_help="Public networks to stand on, and whether they are public here.")(
    backbones.backbones
)
app.command("doctor", short_help="What this installation has.")(doctor.doctor)
app.command("audit", short_help="Measure what a run leaks, with canaries.")(audit.audit)
app.command("paper", short_help="A paper's tables and figures, from stored results.")(paper.paper)
app.add_typer(theory.app, name="theory")
app.add_typer(bench.app, name="bench")
app.add_typer(silo.app, name="silo", short_help="One client of a deployment.")
app.add_typer(flower.app, name="flower", short_help="The server of a deployment, on Flower.")
