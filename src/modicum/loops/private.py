"""Somebody's own PyTorch loop at work: batches go out, losses come back, and only noised steps reach the model.

A part of the plan (an epoch, unless said otherwise) is reserved in the ledger before its first batch is drawn, and
settled after its last step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modicum.compute.clipping.open_pass import Fingerprint, OpenPass, fingerprint, graph_of, new_anchor
from modicum.compute.clipping.problem import Parts
from modicum.compute.clipping.synthetic import own_weights
from modicum.compute.clipping.tracing import looking_modules
from modicum.core.layer_draws import Bits
from modicum.core.layout import Layout
from modicum.core.parts import Batch
from modicum.core.records import each
from modicum.core.unchanged import name_unchanged
from modicum.errors import PrivacyWarning, UserError, counted
from modicum.federation.foreign import foreign_modules
from modicum.federation.run_folder import RunFolder
from modicum.loops.keeping import Keeping
from modicum.loops.records import LABEL, mark_of
from modicum.loops.rehearsal import Rehearsal
from modicum.loops.steps import Part, PlannedSteps, Step
from modicum.mechanisms.passes import laid_out
from modicum.privacy.certificate import Certificate
from modicum.privacy.ledger.grammar import Settlement
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseSource
from modicum.privacy.noise.keyed import destroy_key


@dataclass(frozen=True)
class OwnBatch:
    """What the loop is given: rows of records, in the same shape every time.

    Padding rows are zeros and count for nothing, whatever their loss is.
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
        steps: PlannedSteps,
        noise: NoiseSource,
        files: RunFolder,
        keeping: Keeping,
        identity: str,
    ) -> None:
        self.model, self.optimiser = model, optimiser
        self._records, self._steps = records, steps
        self._noise, self._files, self._keeping = noise, files, keeping
        self._rows = steps.own_rows(noise)
        self._parts, self._layout = Parts(model), Layout.of(model)
        self._looking, self._anchor = looking_modules(model), new_anchor()
        self._held = ExitStack()
        self._held.enter_context(files.alone())
        mark = mark_of(records)
        self._warn_of_others(mark)
        self.ledger = files.open_ledger(identity, noise, mark, foreign_modules(model))
        self._held.callback(self.ledger.close)
        self.ledger.declare([steps.plan])
        keeping.restore()
        self._settle_kept()
        self._pass: OpenPass | None = None
        self._rehearsal: Rehearsal | None = None
        self._modes: tuple[bool, ...] | None = None
        self._graphs: set[int] = set()  # ways in which losses were computed
        self._looked = False  # which parameters the first step changed
        self._written: Fingerprint | None = None  # the model as it was left by the last step
        self._current: Step | None = None
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
        return self._steps.total

    @property
    def done(self) -> int:
        """Steps that were taken so far, those before a resume included."""
        return sum(map(self._steps.in_part, range(self._keeping.done))) + self._steps_of_part

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the bound; of one row where noise is correlated."""
        return self._steps.noise_multiplier

    @property
    def sample_rate(self) -> float:
        """How likely a record is in a step; what share of them is, where batches come in turn."""
        return self._steps.share

    @property
    def epsilon(self) -> float:
        """The ε of the whole plan, which is what holds however early the loop ends."""
        return self._steps.epsilon

    @property
    def certificate(self) -> Certificate:
        """What holds for the finished run.

        Raises:
            UserError: where the loop has not come to its end and `finish` was not called.
        """
        if self._certificate is None:
            raise UserError("the loop has not ended: play it to its end, or call finish() to end it here")
        return self._certificate

    def __iter__(self) -> Iterator[OwnBatch]:
        if self._running or self._certificate is not None:
            raise UserError(
                "the plan is played once: make a new loop with mo.privately for more, at its own price"
            )
        self._running = True
        try:
            yield from self._rehearse()
            while self._keeping.done < self._steps.parts:
                yield from self._play_part(self._keeping.done)
            self.finish()
        finally:
            self._running = False
            self._abandon()

    def _rehearse(self) -> Iterator[OwnBatch]:
        blank = laid_out(self._records, self._steps.blank())
        rehearsal = Rehearsal(self.model, blank, self._steps.clip)
        for number, batch in enumerate(rehearsal.batches()):
            with own_weights(self.model, torch.Generator().manual_seed(0)):
                self._rehearsal = rehearsal
                self._pass = self._open(len(batch), Random(0).randbytes, probe=number == 0)
                yield self._given(batch, rehearsal=True)
                self._refuse_unused()
                self._rehearsal = None
        self._written = fingerprint(self.model)

    def _play_part(self, number: int) -> Iterator[OwnBatch]:
        part = Part(self._steps, number, self.ledger, self._noise, self._rows)
        self._steps_of_part = 0
        for step in part.steps(self._layout.dimension):
            self._current = step
            if not step.batches:  # nobody was drawn: noise alone
                self._write(step)
            for i, numbers in enumerate(step.batches):
                batch = laid_out(self._records, numbers)
                self._pass = self._open(len(batch), part.bits(step.number, i))
                step.present = batch.present
                yield self._given(batch)
                self._refuse_unused()
        self._end_part(part)

    def _open(self, rows: int, bits: Bits, *, probe: bool = False) -> OpenPass:
        return OpenPass(self.model, self._parts, rows, bits, self._looking, anchor=self._anchor, probe=probe)

    def _given(self, batch: Batch, *, rehearsal: bool = False) -> OwnBatch:
        assert batch.present is not None
        device = next(self.model.parameters()).device
        x = each(lambda t: t.to(device), batch.x)
        y = batch.targets[LABEL].to(device) if LABEL in batch.targets else None
        return OwnBatch(x, y, batch.present, rehearsal)

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
            raise UserError("call step once after each batch: no batch is waiting for it")
        try:
            if self._rehearsal is not None:
                if opened.drew and self._steps.in_lanes:
                    raise UserError(
                        "this loop draws random numbers, as dropout does, and one more record in a step would "
                        "change what others draw: give physical_batch, which fixes every row, or draw nothing"
                    )
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
            clipped = opened.settle(losses, self._steps.clip, weights, len(self._records))
            if graph_of(losses) not in self._graphs:
                raise UserError(
                    "these losses are computed in another way than in the rehearsal, which checked that they do "
                    "not mix records: compute them alike for every batch"
                )
            step.add(self._layout.flatten(clipped.total))
        finally:
            opened.close()
        if step.left:
            return False
        self._write(step)
        return True

    def _write(self, step: Step) -> None:
        """Noise, and the optimiser's step; on disk that it was taken, before it is."""
        trained = self._parts.trained
        gradient = step.gradient(next(iter(trained.values())).device)
        self._keeping.admit(step.part.number, step.number, gradient)
        for name, own in self._layout.named(gradient).items():
            trained[name].grad = own.to(trained[name].dtype)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        before, self._written = self._written, fingerprint(self.model)
        if before is not None and not self._looked:
            self._name_unchanged(step, before, self._written)
        self._steps_of_part = step.number + 1
        self._current = None

    def _name_unchanged(self, step: Step, before: Fingerprint, after: Fingerprint) -> None:
        """Noise reaches every parameter, so what is as it was after a step, the optimiser does not train. Where
        all is, its rate may still be rising from zero."""
        parameters = zip(self.model.named_parameters(), before, after, strict=False)  # buffers come behind them
        trained = [(name, old == new) for (name, p), old, new in parameters if p.requires_grad]
        same = [name for name, alike in trained if alike]
        last = step.number + 1 == self._steps.in_part(step.part.number)
        self._looked = len(same) < len(trained) or last
        if self._looked:
            reason = "the optimiser's rate, or the precision of the model, leaves them there"
            name_unchanged(same, f"after step {step.number + 1}", reason)

    def _end_part(self, part: Part) -> None:
        self._keeping.keep(part.number + 1)
        self._steps_of_part = 0
        self._settle(part.token)

    def _settle(self, token: Token) -> None:
        self.ledger.settle_digests([(token, Settlement.of(self._keeping.digest.encode()))])

    def _settle_kept(self) -> None:
        """A crash came between the state of a part and its settlement."""
        for token in self.ledger.unsettled():
            if token.release.round == self._keeping.done - 1:
                self._settle(token)

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
            self._keeping.end()
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
