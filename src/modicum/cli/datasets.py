"""`modicum datasets`: what there is, and what a partition of it looks like."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import counted

if TYPE_CHECKING:
    from modicum.data import FederatedData

app = typer.Typer(
    help="The datasets that have a name, and how they divide among clients.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

DATA_DIR = typer.Option(
    None, "--data-dir", help="Folder of dataset files (default: MODICUM_DATA, else the cache)."
)
AS_JSON = typer.Option(False, "--json", help="Machine-readable output.")


@app.callback()
def list_datasets(context: typer.Context, data_dir: Path | None = DATA_DIR, as_json: bool = AS_JSON) -> None:
    """List the datasets, one line each, and whether their files are found."""
    if context.invoked_subcommand is not None:
        return
    from modicum.data import catalogue
    from modicum.data.fetch import data_folder

    folder = data_folder(data_dir)
    rows = [
        (e.name, "embedded" if not e.files else "found" if e.found(data_dir) else "missing", e)
        for e in catalogue()
    ]
    if as_json:
        listing = [
            {"name": n, "status": s, "description": e.line, "folder": str(folder / e.folder) if e.files else None}
            for n, s, e in rows
        ]
        typer.echo(json.dumps({"data_folder": str(folder), "datasets": listing}, ensure_ascii=False, indent=2))
        return
    for name, status, entry in rows:
        typer.echo(f"{name:<16} {status:<9} {entry.line}")
    typer.echo(f"\nFiles are looked for in {folder} (change it with --data-dir or MODICUM_DATA).")


@app.command()
def show(
    name: str = typer.Argument(
        help="A dataset, e.g. digits, mnist or emnist-balanced:10-46 (a range of classes)."
    ),
    clients: int | None = typer.Option(
        None, "--clients", help="How many clients [default: natural ones, else 20]."
    ),
    partition: str | None = typer.Option(
        None,
        "--partition",
        help="iid, dirichlet:α, shards:s, size-skew:r or natural [default: natural, else iid].",
    ),
    budgets: str | None = typer.Option(
        None, "--budgets", help="ε: 1 for all, 0.5,1,8 dealt in turn, or 0.05:0.6,0.1:0.3,1:0.1 by weight."
    ),
    validation: float = typer.Option(0.0, "--validation", help="Share that each client holds out for validation."),
    test: float = typer.Option(0.0, "--test", help="Share that each client holds out for its own test."),
    proxy: float = typer.Option(
        0.0, "--proxy", help="Share of the training data made public and kept from clients."
    ),
    seed: int = typer.Option(0, "--seed", help="Decides the division; the same seed gives the same one."),
    out: Path | None = typer.Option(None, "--out", help="Write a picture (.png, .svg or .pdf)."),
    data_dir: Path | None = DATA_DIR,
    as_json: bool = AS_JSON,
) -> None:
    """Divide a dataset among clients, and show the sizes and classes that each gets."""
    from modicum.data import assign_budgets, check, federate, load, parse_budgets

    dataset = load(name, data_dir)
    natural = dataset.clients is not None and partition in (None, "natural")
    data = federate(
        dataset,
        clients=clients if clients is not None or natural else 20,
        partition=partition,
        seed=seed,
        validation=validation,
        test=test,
        proxy=proxy,
    )
    eps = assign_budgets(parse_budgets(budgets), len(data.clients), seed) if budgets else None
    check(data, eps)
    how = partition or ("natural" if natural else "iid")
    if out is not None:
        from modicum.data.picture import draw_partition

        draw_partition(data, out, title=f"{name}, {len(data.clients)} clients, {how}", budgets=eps)
    facts = _facts(data, how, seed, eps)
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2) if as_json else _table(facts))
    if out is not None and not as_json:
        typer.echo(f"picture: {out}")


def _facts(data: FederatedData, how: str, seed: int, budgets: tuple[float, ...] | None) -> dict[str, Any]:
    from modicum.data.picture import label_counts

    rows = []
    for i, (client, counts) in enumerate(zip(data.clients, label_counts(data), strict=True)):
        row: dict[str, Any] = {
            "name": client.name,
            "train": len(client.train),
            "validation": len(client.validation),
            "test": len(client.test),
            "labels": counts.tolist(),
        }
        if budgets is not None:
            row["budget"] = None if math.isinf(budgets[i]) else budgets[i]  # JSON has no infinity
        rows.append(row)
    return {
        "dataset": data.dataset,
        "note": data.note,
        "partition": how,
        "seed": seed,
        "classes": data.classes,
        "input_shape": list(data.input_shape),
        "test": len(data.test),
        "proxy": len(data.proxy) + len(data.proxy_validation),
        "clients": rows,
    }


def _table(facts: dict[str, Any]) -> str:
    rows = facts["clients"]
    width = max(6, *(len(row["name"]) for row in rows))
    head = f"{facts['dataset']}: {counted(len(rows), 'client')}, {facts['partition']}, seed {facts['seed']}"
    lines = [head, *([facts["note"]] if facts["note"] else [])]
    title = f"{'client':<{width}} {'train':>7} {'valid.':>7} {'test':>7} {'classes':>8} {'largest class':>14}"
    lines += ["", title + ("        ε" if "budget" in rows[0] else "")]
    for row in rows:
        n, top = row["train"], max(row["labels"])
        most = f"{row['labels'].index(top)} ({top / n:.0%})"
        held = sum(count > 0 for count in row["labels"])
        line = f"{row['name']:<{width}} {n:>7,} {row['validation']:>7,} {row['test']:>7,} {held:>8} {most:>14}"
        if "budget" in row:
            line += f" {'∞' if row['budget'] is None else format(row['budget'], 'g'):>8}"
        lines.append(line)
    total = sum(row["train"] for row in rows)
    return "\n".join(
        [*lines, "", f"{total:,} training, {facts['test']:,} test and {facts['proxy']:,} public proxy records"]
    )
