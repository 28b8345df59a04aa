"""Your own PyTorch loop, made private: one party, its records, and whoever sees the models."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from modicum.compute.clipping.any_module import draws
from modicum.core.clips import Clip, Flat
from modicum.core.facts import ClientFacts
from modicum.core.layout import Layout
from modicum.errors import UserError, counted
from modicum.federation.run_folder import RunFolder
from modicum.federation.settings import Noise
from modicum.loops.keeping import Keeping
from modicum.loops.private import Private
from modicum.loops.records import records_of
from modicum.loops.steps import PARTY, OwnSteps, PlannedSteps
from modicum.mechanisms.fixed_shapes import FixedShapes, Kind
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.checks import positive, whole
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.noise.keyed import ReplayableNoise, open_key
from modicum.privacy.noise.one_place import OnePlace
from modicum.privacy.noise.schedule import Schedule
from modicum.privacy.spec import LARGEST_BUDGET, Adjacency


def privately(
    model: nn.Module,
    optimiser: Optimizer,
    dataset: Any,
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    epochs: float = 1.0,
    batch: int | None = 256,
    max_grad_norm: float = 1.0,
    noise_multiplier: float | None = None,
    physical_batch: int | None = None,
    adjacency: str = "zero-out",
    noise: Schedule | Noise | None = None,
    clip: Clip | None = None,
    seed: int | None = None,
    folder: str | PathLike[str] = "private",
    resume: bool = False,
    parts: int | None = None,
    also: Mapping[str, Any] | None = None,
) -> Private:
    """Make a training loop of your own private: it draws batches here and gives the losses back.

    Args:
        model: Trained in place. It must keep records apart: GroupNorm in place of BatchNorm.
        optimiser: Of the model's parameters; any but LBFGS.
        dataset: A map-style dataset, or a pair (x, y) of tensors; all of it is held in memory.
        epsilon: What the whole loop may cost. Leave it out where you give the noise yourself.
        delta: Of that ε.
        epochs: Passes over the records, as an expectation.
        batch: Expected number of records in a step, each drawn by a coin of its own; None: all records.
        max_grad_norm: The bound that each record's gradient is clipped to.
        noise_multiplier: Noise over bound, in place of the one that ε asks for.
        physical_batch: Rows of a batch at most, where a step does not fit into memory.
        adjacency: zero-out or replace-one.
        noise: `mo.Noise("correlated")` takes back in later steps what it added in earlier ones, and batches come
            in turn in place of being drawn (docs/correlated.md); or a schedule of noise of your own.
        clip: How a record is clipped, in place of one bound for the whole gradient; it is scaled to the bound.
        seed: Simulates: noise and coins from this seed, so that the certificate protects nobody. None: real noise.
        folder: For ledger, certificate, checkpoint and model; a new one, unless `resume`.
        resume: Continue what was interrupted in the folder, with the same program.
        parts: Of the plan, after each of which the state is kept [default: one an epoch].
        also: What else to keep, by name, if it has `state_dict`: a scheduler.

    Returns:
        An iterable of batches with a `step`.

    Raises:
        UserError: For what cannot be, in one line that says what to change.

    Example:
        >>> private = mo.privately(model, optimiser, (x, y), epsilon=3, epochs=5)  # doctest: +SKIP
        >>> for batch in private:  # doctest: +SKIP
        ...     loss = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
        ...     private.step(loss)
        >>> private.certificate.epsilon("records")  # doctest: +SKIP
    """
    _check_optimiser(model, optimiser)
    for name, value in (("epsilon", epsilon), ("noise_multiplier", noise_multiplier)):
        if value is not None:
            positive(name, value)
    positive("max_grad_norm", max_grad_norm)
    for name, size, least in (("batch", batch, 1), ("physical_batch", physical_batch, 2), ("parts", parts, 1)):
        if size is not None:
            whole(name, size, least)
    _check_parts(noise, clip, also)
    if epsilon is None and noise_multiplier is None and noise is None:
        raise UserError("say what the loop may cost: epsilon=3, or noise_multiplier=1.1")
    records = records_of(dataset)
    count = parts or max(1, math.ceil(positive("epochs", epochs)))
    drawn = batch is not None and batch < len(records)
    mechanism = _with_noise(
        OwnSteps(
            batch=batch,
            epochs=epochs / count,
            adjacency=Adjacency.named(adjacency),
            delta=delta,
            rule=clip or Flat(),
            noise_multiplier=noise_multiplier,
            shapes=_shapes(model, "auto" if physical_batch is None else "capacity") if drawn else None,
        ),
        noise,
        optimiser,
    )
    mechanism.spec.refuse_true_sizes()
    facts = ClientFacts(PARTY, len(records), epsilon or LARGEST_BUDGET, count)
    if epsilon is None:
        found = plan_guarantee(mechanism.plan(facts, ())).epsilon
        facts = replace(facts, budget=found * (1 + 1e-9))
    planned = sum(r.count for r in mechanism.plan(facts, ()).releases)
    if planned < mechanism.total_steps(facts):
        raise UserError(
            f"ε = {facts.budget:g} with noise {noise_multiplier} allows {counted(planned, 'step')} of "
            f"{mechanism.total_steps(facts)}: more noise, fewer epochs, or leave noise_multiplier out"
        )
    files = RunFolder(Path(folder))
    files.make(fresh=not resume)
    if files.certificate.exists():
        raise UserError(f"the run in {folder} has ended: for more steps begin a new one, at its own price")
    source, place = _source(files, seed)
    keeping = Keeping(files, model, optimiser, also, place)
    steps = PlannedSteps(mechanism, facts, max_grad_norm, physical_batch)
    identity = _identity(model, mechanism, facts, max_grad_norm, physical_batch, seed)
    return Private(model, optimiser, records, steps, source, files, keeping, identity)


def _check_parts(noise: object, clip: object, also: object) -> None:
    if noise is not None and not isinstance(noise, Schedule | Noise):
        raise UserError(f'noise is mo.Noise("correlated") or a schedule of your own, got {noise!r}')
    if clip is not None and not isinstance(clip, Clip):
        raise UserError(f"clip is a rule such as PerLayer(…), got {clip!r}: for one bound give max_grad_norm")
    kept = also.values() if isinstance(also, Mapping) else () if also is None else (also,)
    if not all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in kept):
        raise UserError(f'also is what to keep by name, e.g. {{"scheduler": scheduler}}, got {also!r}')


def _with_noise(mechanism: OwnSteps, noise: Schedule | Noise | None, optimiser: Optimizer) -> OwnSteps:
    if noise is None or isinstance(noise, Schedule):
        return replace(mechanism, noise=noise)
    if noise.kind == "correlated":
        return replace(mechanism.correlate_steps(noise.bands, noise.factor, _momentum(optimiser)), shapes=None)
    if noise.kind == "integer":
        raise UserError('noise in a loop of your own is "float" or "correlated": integers are for deployments')
    return mechanism


def _momentum(optimiser: Optimizer) -> float:
    """What the factor is made for; optimisers of other kinds, or with several, count as plain sums."""
    found = {float(group.get("momentum", 0.0)) for group in optimiser.param_groups}
    return found.pop() if len(found) == 1 else 0.0


def _source(files: RunFolder, seed: int | None) -> tuple[NoiseSource, OnePlace | None]:
    if seed is not None:
        return SimulatedNoise(seed), None
    begun = files.ledger.exists()
    noise = ReplayableNoise(open_key(files.noise_key, begun=begun))
    return noise, OnePlace(files.noise_key, begun=begun)


def _shapes(model: nn.Module, kind: Kind) -> FixedShapes:
    """Work is guessed from parameters: only the loop knows how its model is called."""
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    return FixedShapes(kind, len(sizes), sum(p.numel() for p in model.parameters()), draws(model))


def _check_optimiser(model: nn.Module, optimiser: Optimizer) -> None:
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    every = {id(p) for p in model.parameters()}
    given = [p for group in optimiser.param_groups for p in group["params"]]
    if isinstance(optimiser, LBFGS):
        raise UserError("LBFGS evaluates its loss several times a step: use another optimiser")
    if not trained:
        raise UserError("the model has no parameter that requires a gradient")
    if any(id(p) not in every for p in given):
        raise UserError("the optimiser has a parameter that is not the model's: only the model's are made private")
    missing = [name for key, name in trained.items() if key not in {id(p) for p in given}]
    if missing:
        raise UserError(
            f"{missing[0]!r} is not given to the optimiser: give it, or freeze it with requires_grad_(False)"
        )


def _identity(model: nn.Module, *settings: object) -> str:
    """Names the run: a function of public values alone."""
    layout = Layout.of(model)
    said = repr((settings, layout.names, layout.shapes))
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
