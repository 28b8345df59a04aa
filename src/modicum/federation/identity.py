"""One name for everything that decides a run's result, so that a folder is never continued as something else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from modicum.core.records import leaves
from modicum.data.arrays import Arrays, FederatedData
from modicum.federation.experiment import Experiment
from modicum.federation.start import model_digest
from modicum.models.named import agreed_name, is_shipped, package_of


def run_id(experiment: Experiment) -> str:
    """Names the run in every message, the ledger and the certificate, hence a function of public values alone.

    A digest of clients' records would tell two neighbouring datasets apart with certainty.
    """
    return _digest(_parts(experiment))


def records_id(experiment: Experiment) -> str:
    """Names the records of clients and of the test. Private: it stays with the clients' own states."""
    data = experiment.federation.data
    own = (arrays for c in data.clients for arrays in (c.train, c.validation, c.test))
    return _digest(part for arrays in (*own, data.test) for part in _arrays(arrays))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(e: Experiment) -> Iterator[bytes]:
    # An object without a repr of its own shows its address, which differs from process to process.
    yield re.sub(r" at 0x[0-9a-f]+", "", repr(e.method)).encode()
    settings = (e.setting, e.max_participations, e.metrics, e.seed, e.hot_start, e.average, e.federation.budgets)
    bounds = () if e.bounds is None else (e.bounds,)
    kind: tuple[object, ...] = ("integers", e.secure_aggregation) if e.integers else ()
    if e.noise == "correlated":
        kind = ("correlated", e.bands, e.factor)
    shapes = () if e.fixed_shapes is None else ("fixed shapes", e.fixed_shapes)
    yield repr((*settings, *bounds, *kind, *shapes)).encode()
    if not e.task.plain:
        yield re.sub(r" at 0x[0-9a-f]+", "", repr(e.task)).encode()
    if e.federation.data.slot is not None:
        yield repr(e.federation.data.slot).encode()
    if e.start is not None:
        yield model_digest(Path(e.start)).encode()
    for look in e.looks:
        yield repr((look.run, look.planned_before, sorted(look.releases.items()))).encode()
    yield from _model(e)
    yield from _data(e.federation.data)


def _model(e: Experiment) -> Iterator[bytes]:
    if not isinstance(e.model, nn.Module):
        yield repr((agreed_name(e.model), sorted(e.model_options.items()))).encode()
        if not is_shipped(e.model):
            yield package_of(e.model).encode()
            return
        yield from (Path(value).read_bytes() for value in e.model_options.values() if isinstance(value, str))
        return
    yield repr((e.model, sorted(e.model_options.items())) if e.model_options else e.model).encode()
    for name, value in e.model.state_dict().items():
        yield name.encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _data(data: FederatedData) -> Iterator[bytes]:
    """What is public about the data: who takes part, sizes and shapes, and the public records."""
    yield repr((data.dataset, data.names, data.sizes, data.input_shape, data.classes, data.proxy_classes)).encode()
    if data.made_by is not None:
        yield data.made_by.name.encode()
    if data.geometry is not None:
        yield data.geometry.digest.encode()
    for arrays in (data.proxy, data.proxy_validation):
        yield from _arrays(arrays)


def _arrays(arrays: Arrays) -> Iterator[bytes]:
    for name, leaf in leaves(arrays.x):
        yield repr((leaf.shape, leaf.dtype.str, name) if name else (leaf.shape, leaf.dtype.str)).encode()
        yield leaf.tobytes()
    yield arrays.y.tobytes()
