"""Models of one's own by name: `package.module:factory` in simulations; entry points `modicum.models`, and folders
of transformers, `hf:FOLDER`, everywhere.

A factory is a function of options that returns an `nn.Module`. Parameters that it calls `input_shape`, `inputs` or
`outputs` are filled in: the shape of a record's one tensor, what its tensors are, and how many outputs are needed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, entry_points
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.files import files_digest
from modicum.core.records import Field, Fields
from modicum.errors import UserError
from modicum.models.catalogue import CATALOGUE, names

if TYPE_CHECKING:
    from torch import nn

GROUP = "modicum.models"
FILLED = ("input_shape", "inputs", "outputs", "classes")
HF = "hf:"


def is_shipped(name: object) -> bool:
    """Whether this is a model of the catalogue."""
    return isinstance(name, str) and name in CATALOGUE


def is_import_path(name: str) -> bool:
    """Whether a name says where a factory is: `package.module:factory`."""
    return ":" in name and not is_pretrained(name)


def is_pretrained(name: object) -> bool:
    """Whether a name says where a model of transformers lies: `hf:FOLDER`."""
    return isinstance(name, str) and name.startswith(HF)


def absolute(name: str, folder: Path) -> str:
    """The name with its folder, if it has one, taken from `folder`."""
    return f"{HF}{(folder / folder_of(name)).resolve()}" if is_pretrained(name) else name


def folder_of(name: str) -> Path:
    """Where a model of transformers lies."""
    return Path(name.removeprefix(HF)).expanduser()


def agreed_name(name: str) -> str:
    """What parties call a model: of a folder its content, wherever each keeps its own."""
    if not is_pretrained(name):
        return name
    return HF + files_digest(folder_of(name), "config.json", "*.safetensors", "*.safetensors.index.json")


def has_factory(name: str) -> bool:
    """Whether a name can be made a model without being given one."""
    return is_import_path(name) or is_pretrained(name) or bool(_entries(name))


def build_named(
    name: str, inputs: Fields, outputs: int | None, seed: int, options: Mapping[str, Any]
) -> nn.Module:
    """The model that a factory makes; its first weights are a function of the seed.

    Args:
        name: `package.module:factory`, `hf:FOLDER`, or the name of an entry point.
        inputs: What a record is made of.
        outputs: How many the task needs; None where it does not say.
        seed: Of the first weights.
        options: Of the factory.

    Returns:
        The module.

    Raises:
        UserError: Where there is no such factory, or it does not take the options.
    """
    import torch
    from torch import nn

    make = _factory(name)
    takes = signature(make).parameters
    loose = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    for key in options:
        if key not in takes and not loose:
            known = ", ".join(p for p in takes if p not in FILLED) or "none"
            raise UserError(f"model {name!r} has no option {key!r}: it takes {known}")
    shape = inputs.shape if isinstance(inputs, Field) else None
    filled = {"input_shape": shape, "inputs": inputs, "outputs": outputs, "classes": outputs}
    given = {key: value for key, value in filled.items() if key in takes} | dict(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = make(**given)
        except UserError:
            raise
        except Exception as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"model {name!r} cannot be made with these options: {said}") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r} makes {type(model).__name__}: a factory returns an nn.Module")
    return model


def package_of(name: str, group: str = GROUP) -> str:
    """Package, version and digest of its files, for what all parties agree on; empty where no package has it."""
    found = _entries(name, group)
    if not found or found[0].dist is None:
        return ""
    dist = found[0].dist
    return f"{dist.name} {dist.version} {_digest(dist)}"


def _digest(dist: Distribution) -> str:
    """Of the code that is installed: two silos with other files of one version do not agree."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(dist.files or (), key=str):
        path = Path(str(file.locate()))
        if path.suffix == ".py" and path.is_file():
            digest.update(str(file).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _factory(name: str) -> Any:
    if is_pretrained(name):
        from modicum.models.pretrained import pretrained

        return partial(pretrained, folder_of(name))
    return _imported(name) if is_import_path(name) else _loaded(name)


def _imported(name: str) -> Any:
    module, _, factory = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # a file beside the experiment, as `python -m` would find it
    try:
        return getattr(import_module(module), factory)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"there is no model {name!r} ({error}): write package.module:factory") from None
    finally:
        sys.path.remove(here)


def _loaded(name: str) -> Any:
    found = _entries(name)
    if not found:
        own = ", ".join(sorted({e.name for e in entry_points(group=GROUP)}))
        more = f", of packages {own}," if own else ""
        raise UserError(
            f"unknown model {name!r}: use one of {', '.join(names())},{more} write package.module:factory, "
            "hf:FOLDER, or pass your own nn.Module"
        )
    if len(found) > 1:
        raise UserError(f"two packages have a model {name!r}: uninstall one of them")
    try:
        return found[0].load()
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise UserError(f"model {name!r} cannot be imported ({type(error).__name__}: {said}): repair it") from None


def _entries(name: str, group: str = GROUP) -> list[EntryPoint]:
    return [entry for entry in entry_points(group=group) if entry.name == name]
