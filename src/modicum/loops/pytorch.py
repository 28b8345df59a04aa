"""Your own PyTorch loop, made private: one party, its records, and whoever sees the models.

Batches, clipping, noise, charges and certificate are those of a federation with one client. A part of the plan
(an epoch, unless said otherwise) is reserved in the ledger before its first batch is drawn, and settled after its
last step.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from modicum.compute.clipping.open_pass import Fingerprint, OpenPass, fingerprint, graph_of, new_anchor
from modicum.compute.clipping.problem import Parts
from modicum.compute.clipping.synthetic import own_weights
from modicum.compute.clipping.tracing import looking_modules
from modicum.core.clips import Clip, Flat
from modicum.core.facts import ClientFacts
from modicum.core.layout import Layout
from modicum.core.messages import Decision
from modicum.core.parts import Batch
from modicum.core.records import each
from modicum.core.release_gate import ReservedGate
from modicum.core.unchanged import name_unchanged
from modicum.errors import PrivacyWarning, UserError, counted
from modicum.federation.foreign import foreign_modules
from modicum.federation.run_folder import RunFolder
from modicum.loops.keeping import Keeping, refuse_copy
from modicum.loops.records import LABEL, mark_of, records_of
from modicum.loops.rehearsal import Rehearsal
from modicum.mechanisms.common import Asked
from modicum.mechanisms.fixed_shapes import FixedShapes, Kind
from modicum.mechanisms.passes import laid_out
from modicum.mechanisms.record_local import GRADIENT, RecordLocal
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Poisson, Release
from modicum.privacy.fixed_shapes import BLANK
from modicum.privacy.ledger.grammar import Settlement
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseKey, NoiseSource, SimulatedNoise
from modicum.privacy.noise.keyed import ReplayableNoise, destroy_key, open_key
from modicum.privacy.noise.schedule import Schedule
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import LARGEST_BUDGET, Adjacency, ModelsSeen, PrivacySpec, Unit

PARTY = "records"
"""The one client's name in ledger and certificate."""


@dataclass(frozen=True, kw_only=True)
class OwnSteps(RecordLocal):
    """DP-SGD in somebody's own loop: what is seen is every model on the way."""

    @property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=Unit.RECORD, adjacency=self.adjacency, view=ModelsSeen(), delta=self.delta)


@dataclass(frozen=True)
class OwnBatch:
    """What the loop is given: rows of records, in the same shape every time.

    Rows that nobody was drawn for are zeros and count for nothing, whatever their loss is.
    """

    x: Any
    y: Any  # None where the dataset has no labels
    present: Tensor  # which rows are records; private like the records
    rehearsal: bool  # synthetic rows, before the first record: nothing is trained

    def __len__(self) -> int:
        return len(self.present)


class Private:
    """A loop's batches and its one way to the model. Made by `modicum.privately`.

    Iterate over it once; give each batch's losses to `step`. Afterwards `certificate` says what holds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: Optimizer,
        records: Batch,
        mechanism: OwnSteps,
        facts: ClientFacts,
        bound: float,
        physical: int | None,
        noise: NoiseSource,
        files: RunFolder,
        keeping: Keeping,
        identity: str,
    ) -> None:
        self.model, self.optimiser = model, optimiser
        self._records, self._mechanism, self._facts = records, mechanism, facts
        self._decision, self._physical = Decision(bound), physical
        self._noise, self._files, self._keeping = noise, files, keeping
        self._plan: PrivacyPlan = mechanism.plan(facts, ())
        self._parts, self._layout = Parts(model), Layout.of(model)
        self._looking, self._anchor = looking_modules(model), new_anchor()
        self._held = ExitStack()
        self._held.enter_context(files.alone())
        mark = mark_of(records)
        self._warn_of_others(mark)
        self.ledger = files.open_ledger(identity, noise, mark, foreign_modules(model))
        self._held.callback(self.ledger.close)
        self.ledger.declare([self._plan])
        keeping.restore()
        self._settle_kept()
        self._pass: OpenPass | None = None
        self._rehearsal: Rehearsal | None = None
        self._modes: tuple[bool, ...] | None = None
        self._graphs: set[int] = set()  # ways in which losses were computed
        self._looked = False  # which parameters the first step changed
        self._written: Fingerprint | None = None  # the model as it was left by the last step
        self._current: _Step | None = None
        self._steps_of_part = 0
        self._running = False
        self._certificate: Certificate | None = None

    def _warn_of_others(self, mark: str) -> None:
        others = self._files.others_with(mark)
        if others:
            warnings.warn(
                f"{counted(len(others), 'run')} beside this one ({', '.join(others[:3])}) used the same records; "
                "each certificate speaks of its own run, and what they tell together is more",
                PrivacyWarning,
                stacklevel=4,
            )

    @property
    def steps(self) -> int:
        """Steps of the whole plan."""
        return self._mechanism.total_steps(self._facts)

    @property
    def done(self) -> int:
        """Steps that were taken so far, those before a resume included."""
        return sum(self._in_part(part) for part in range(self._keeping.done)) + self._steps_of_part

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the bound."""
        return self._plan.multiplier(GRADIENT)

    @property
    def sample_rate(self) -> float:
        """How likely a record is in a step."""
        sampler = self._mechanism.sampler(self._facts)
        return sampler.rate if isinstance(sampler, Poisson) else 1.0

    @property
    def epsilon(self) -> float:
        """The ε of the whole plan, which is what holds however early the loop ends."""
        return plan_guarantee(self._plan).epsilon

    @property
    def certificate(self) -> Certificate:
        """What holds for the finished run.

        Raises:
            UserError: where the loop has not come to its end and `finish` was not called.
        """
        if self._certificate is None:
            raise UserError("the loop has not ended: play it to its end, or call finish() to end it here")
        return self._certificate

    def _in_part(self, part: int) -> int:
        return self._mechanism.steps_in(self._facts, part)

    def __iter__(self) -> Iterator[OwnBatch]:
        if self._running or self._certificate is not None:
            raise UserError(
                "the plan is played once: make a new loop with mo.privately for more, at its own price"
            )
        self._running = True
        try:
            yield from self._rehearse()
            while self._keeping.done < self._facts.participations:
                yield from self._play_part(self._keeping.done)
            self.finish()
        finally:
            self._running = False
            self._abandon()

    def _rehearse(self) -> Iterator[OwnBatch]:
        blank = next(iter(self._passes(torch.full((self._rows_of_a_step(),), BLANK))))
        rehearsal = Rehearsal(self.model, laid_out(self._records, blank), self._clip)
        for number, batch in enumerate(rehearsal.batches()):
            with own_weights(self.model, torch.Generator().manual_seed(0)):
                self._rehearsal = rehearsal
                self._pass = self._open(len(batch), 0, probe=number == 0)
                yield self._given(batch, torch.ones(len(batch), dtype=torch.bool), rehearsal=True)
                self._refuse_unused()
                self._rehearsal = None
        self._written = fingerprint(self.model)

    def _rows_of_a_step(self) -> int:
        sampler = self._mechanism.sampler(self._facts)
        shape = sampler.shape if isinstance(sampler, Poisson) else None
        return len(self._records) if shape is None else shape.rows

    def _passes(self, rows: Tensor) -> Iterator[Tensor]:
        """Numbers of records, pass by pass; each pass is cut into physical batches of one size."""
        for numbers in rows if rows.dim() == 2 else rows[None]:
            size = min(self._physical or len(numbers), len(numbers))
            full = torch.full((-(-len(numbers) // size) * size,), BLANK)
            full[: len(numbers)] = numbers
            yield from full.view(-1, size)

    def _play_part(self, part: int) -> Iterator[OwnBatch]:
        asked = Asked(self._facts, self._plan, part, part, self._decision)
        release = self._mechanism.release(asked, (), 0, self._in_part(part))
        (token,) = self.ledger.reserve([release])
        gate = ReservedGate(self._noise, [token])
        self._steps_of_part = 0
        for number in range(self._in_part(part)):
            rows = gate.sample(release, number, len(self._records))
            passes = list(self._passes(rows))
            step = self._current = _Step(gate, release, part, number, len(passes), self._layout.dimension)
            if not passes:  # nobody was drawn: noise alone
                self._write(step)
            for i, numbers in enumerate(passes):
                batch = laid_out(self._records, numbers)
                seed = self._seed(part, number, i)
                self._pass = self._open(len(batch), seed)
                assert batch.present is not None
                step.present = batch.present
                yield self._given(batch, batch.present)
                self._refuse_unused()
        self._end_part(part, token)

    def _seed(self, part: int, step: int, number: int) -> int:
        """Of layers that draw: in secret, since who gets which draw depends on who else is there."""
        key = NoiseKey(PARTY, part, step, f"layers:{number}")
        return int(self._noise.uniform(key, 1)[0] * 2**53)

    def _open(self, rows: int, seed: int, *, probe: bool = False) -> OpenPass:
        return OpenPass(self.model, self._parts, rows, seed, self._looking, anchor=self._anchor, probe=probe)

    def _given(self, batch: Batch, present: Tensor, *, rehearsal: bool = False) -> OwnBatch:
        device = next(self.model.parameters()).device
        x = each(lambda t: t.to(device), batch.x)
        y = batch.targets[LABEL].to(device) if LABEL in batch.targets else None
        return OwnBatch(x, y, present, rehearsal)

    def _refuse_unused(self) -> None:
        if self._pass is not None:
            raise UserError(
                "this batch had no private.step(losses): every batch has one, since leaving some out by what they "
                "hold is a choice that no noise covers"
            )

    def _refuse_written(self) -> None:
        if self._written is not None and fingerprint(self.model) != self._written:
            raise UserError(
                "the model was written to outside of private.step(), and no noise covers that: leave its "
                "parameters and buffers alone until private.finish()"
            )

    @property
    def _clip(self) -> Clip:
        return self._decision.rule(self._mechanism.rule)

    def step(self, losses: Tensor) -> bool:
        """Clip this batch's gradients, and with the step's last batch add noise and let the optimiser go by it.

        Args:
            losses: One for each row of the batch, from this batch's forward pass.

        Returns:
            Whether the model was changed: False for a rehearsal, and while more batches of the same step follow.

        Raises:
            UserError: where these are not the losses of the batch that was given last.
        """
        opened, self._pass = self._pass, None
        if opened is None:
            raise UserError("step comes once after each batch: there is none that waits for it")
        try:
            if self._rehearsal is not None:
                self._modes = opened.modes
                self._rehearsal.judge(opened, losses)
                self._graphs.add(graph_of(losses))
                return False
            if opened.modes != self._modes:
                raise UserError("the model's parts are in another mode (train, eval) than in the rehearsal")
            step = self._current
            assert step is not None
            assert step.present is not None
            losses = opened.check(losses)
            self._refuse_written()
            weights = step.present.to(losses.device, torch.float32)
            clipped = opened.settle(losses, self._clip, weights, len(self._records))
            if graph_of(losses) not in self._graphs:
                raise UserError(
                    "these losses are computed in another way than in the rehearsal, so that nobody has looked "
                    "whether they mix records: compute them alike for every batch"
                )
            step.add(self._layout.flatten(clipped.total))
        finally:
            opened.close()
        if step.left:
            return False
        self._write(step)
        return True

    def _write(self, step: _Step) -> None:
        """Noise, and the optimiser's step; on disk that it was taken, before it is."""
        device = next(iter(self._parts.trained.values())).device
        total = step.total.to(device)
        noised = step.gate.release(step.release, step.number, {GRADIENT: total})[GRADIENT]
        gradient = noised / self._mechanism.expected_batch(self._facts)
        self._keeping.admit(step.part, step.number, gradient)
        trained = self._parts.trained
        for name, own in self._layout.named(gradient).items():
            trained[name].grad = own.to(trained[name].dtype)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        before, self._written = self._written, fingerprint(self.model)
        if before is not None and not self._looked:
            self._name_unchanged(before, self._written)
        self._steps_of_part = step.number + 1
        self._current = None

    def _name_unchanged(self, before: Fingerprint, after: Fingerprint) -> None:
        """Noise reaches every parameter, so what is as it was after a step, the optimiser does not train. Where
        all is, its rate may still be rising from zero."""
        parameters = zip(self.model.named_parameters(), before, after, strict=False)  # buffers come behind them
        trained = [(name, old == new) for (name, p), old, new in parameters if p.requires_grad]
        same = [name for name, alike in trained if alike]
        self._looked = len(same) < len(trained)
        if self._looked or self._steps_of_part + 1 == self._in_part(0):
            self._looked = True
            reason = "the optimiser's rate, or the precision of the model, leaves them there"
            name_unchanged(same, f"after step {self._steps_of_part + 1}", reason)

    def _end_part(self, part: int, token: Token) -> None:
        self._keeping.keep(part + 1)
        self._steps_of_part = 0
        self.ledger.settle_digests([(token, Settlement.of(self._keeping.digest.encode()))])

    def _settle_kept(self) -> None:
        """A crash came between the state of a part and its settlement."""
        for token in self.ledger.unsettled():
            if token.release.round == self._keeping.done - 1:
                self.ledger.settle_digests([(token, Settlement.of(self._keeping.digest.encode()))])

    def finish(self) -> Certificate:
        """End the run here: certificate and model are written, and no step is taken any more.

        The certificate is of the whole plan, however early this is: when a loop ends may depend on its records.
        """
        if self._certificate is None:
            self._abandon()
            self._refuse_written()
            certificate = Certificate.from_ledger(self.ledger)
            certificate.write(self._files.certificate)
            self._write_model()
            destroy_key(self._files.noise_key)
            self._certificate = certificate
            self.close()
        return self._certificate

    def _write_model(self) -> None:
        from safetensors.torch import save

        state = {name: t.detach().cpu().contiguous().clone() for name, t in self.model.state_dict().items()}
        self._files.write(self._files.model, bytes(save(state)))

    def _abandon(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def close(self) -> None:
        """Let go of the folder without ending the run: it can be resumed."""
        self._abandon()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self.close()


class _Step:
    """One step on its way: what its batches have come to so far."""

    def __init__(
        self, gate: ReservedGate, release: Release, part: int, number: int, batches: int, dimension: int
    ) -> None:
        self.gate, self.release, self.part, self.number = gate, release, part, number
        self.left = batches
        self.total = torch.zeros(dimension, dtype=torch.float64)
        self.present: Tensor | None = None

    def add(self, total: Tensor) -> None:
        self.total = self.total.to(total.device)
        self.total += total
        self.left -= 1


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
    noise: Schedule | None = None,
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
        noise: A schedule of noise of your own.
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
    records = records_of(dataset)
    count = parts or max(1, math.ceil(epochs))
    if physical_batch is not None and physical_batch < 2:
        raise UserError(f"physical_batch must be at least 2, got {physical_batch}")
    if epsilon is None and noise_multiplier is None and noise is None:
        raise UserError("say what the loop may cost: epsilon=3, or noise_multiplier=1.1")
    drawn = batch is not None and batch < len(records)
    mechanism = OwnSteps(
        batch=batch,
        epochs=epochs / count,
        adjacency=Adjacency.named(adjacency),
        delta=delta,
        rule=clip or Flat(),
        noise_multiplier=noise_multiplier,
        shapes=_shapes(model, "auto" if physical_batch is None else "capacity") if drawn else None,
        noise=noise,
    )
    facts = ClientFacts(PARTY, len(records), epsilon or LARGEST_BUDGET, count)
    if epsilon is None:
        found = plan_guarantee(mechanism.plan(facts, ())).epsilon
        facts = replace(facts, budget=found * (1 + 1e-9))
    planned = sum(r.count for r in mechanism.plan(facts, ()).releases)
    if planned < mechanism.total_steps(facts):
        raise UserError(
            f"ε = {epsilon:g} with noise {noise_multiplier} allows {counted(planned, 'step')} of "
            f"{mechanism.total_steps(facts)}: more noise, fewer epochs, or leave noise_multiplier out"
        )
    files = RunFolder(Path(folder))
    files.make(fresh=not resume)
    if files.certificate.exists():
        raise UserError(f"the run in {folder} has ended: for more steps begin a new one, at its own price")
    keeping = Keeping(files, model, optimiser, also)
    identity = _identity(model, mechanism, facts, max_grad_norm, physical_batch, seed)
    settings = (mechanism, facts, max_grad_norm, physical_batch)
    return Private(model, optimiser, records, *settings, _source(files, seed), files, keeping, identity)


def _source(files: RunFolder, seed: int | None) -> NoiseSource:
    if seed is not None:
        return SimulatedNoise(seed)
    begun = files.ledger.exists()
    noise = ReplayableNoise(open_key(files.noise_key, begun=begun))
    refuse_copy(files.noise_key, begun=begun)
    return noise


def _shapes(model: nn.Module, kind: Kind) -> FixedShapes:
    """Work is guessed from parameters: only the loop knows how its model is called."""
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    return FixedShapes(kind, len(sizes), sum(p.numel() for p in model.parameters()))


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


__all__ = ["OwnBatch", "Private", "privately"]
