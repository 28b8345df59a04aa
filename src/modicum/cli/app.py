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


app.command("demo")(demo.demo)
app.command("run")(experiment.run)
app.command("look")(look.look)
app.command("tune")(tune.tune)
app.command("compare")(compare.compare)
app.command("fit-clipping")(fit.fit_clipping)
app.command("fit-agent")(fit_agent.fit_agent)
app.command("fit-metanet")(fit_metanet.fit_metanet)
app.add_typer(account_plan.app, name="account")
app.add_typer(datasets.app, name="datasets")
app.command("methods")(methods.methods)
app.command("check")(check.check)
app.command("studio")(studio.studio)
app.command("verify")(verify.verify)
app.command("export")(export.export)
app.add_typer(certificate.app, name="certificate")
app.command("attack")(attack.attack)
app.command("backbones")(backbones.backbones)
app.command("doctor")(doctor.doctor)
app.command("audit")(audit.audit)
app.command("paper")(paper.paper)
app.add_typer(theory.app, name="theory")
app.add_typer(bench.app, name="bench")
app.add_typer(silo.app, name="silo")
app.add_typer(flower.app, name="flower")
