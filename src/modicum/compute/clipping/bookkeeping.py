"""One forward and one backward pass that keep each layer's input and output gradient ("book-keeping").

Bu et al., Differentially private optimization on large model at small cost, ICML 2023 (arXiv 2210.00038). The
backward pass computes no weight gradients: the parameters are frozen, and every known layer's output carries a tap
that sees the gradient flowing through it. A layer is measured at that moment, while its gradient is in the cache,
and only what its weighted sum will need is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from modicum.compute.clipping import any_module, group_norm
from modicum.compute.clipping.any_module import Inputs
from modicum.compute.clipping.gathered import Group, grouped, waiting
from modicum.compute.clipping.linear import fits, is_turned, multiplied_in, shown_linear
from modicum.compute.clipping.pieces import Dense, Kept, Piece
from modicum.compute.clipping.problem import (
    Loss,
    Parts,
    batch_size,
    check_losses,
    example_factors,
    nothing,
    sum_dtype,
    without_autocast,
    zero_like,
)
from modicum.compute.clipping.rules import known, pieces, takes_positions
from modicum.compute.clipping.shared_weights import joined
from modicum.core.clips import Clip
from modicum.core.persons import rows_of_example


class BookKeepingUnsupportedError(Exception):
    """This model needs the fall-back; the message says why."""


@dataclass
class Call:
    """One call of a layer. The gradient of its output is kept on request only."""

    layer: nn.Module
    input: Tensor | Inputs | None
    version: int
    gradient: Tensor | None = None

    @property
    def changed(self) -> bool:
        """Whether its input is no longer what it was."""
        return self.input is None or self.input._version != self.version


class _Tap(torch.autograd.Function):
    """The identity. In place, so that the layer's users may in turn work in place on its output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _anchor: Tensor, recorder: PassRecorder, call: Call) -> Tensor:
        ctx.recorder, ctx.call = recorder, call
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        ctx.recorder.receive(ctx.call, gradient)
        return gradient if ctx.needs_input_grad[0] else None, None, None, None


class _Aside(_Tap):
    """The same beside the output, for modules that may need it as it was in their own backward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _anchor: Tensor, recorder: PassRecorder, call: Call) -> Tensor:
        ctx.recorder, ctx.call = recorder, call
        return output.view_as(output)


class PassRecorder:
    """The calls of one forward pass over a batch, and what the backward pass found."""

    def __init__(
        self,
        model: nn.Module,
        trained: dict[str, nn.Parameter],
        examples: int,
        *,
        parts: Parts | None = None,
        only_gradients: bool = False,
        shared: Sequence[frozenset[int]] = (),
    ) -> None:
        self.model, self.trained, self.examples = model, trained, examples
        self.run_again = 0  # calls of modules without a rule
        self.shared_inputs = shared  # of each of them
        self.rows_each = rows_of_example(model)  # of a person; 1 of a record
        self.parts = parts or Parts(model)
        self.calls: list[Call] = []
        self.uses: Counter[str] = Counter()
        self.squares: dict[str, Tensor] = {}
        self.kept: dict[str, Kept] = {}
        self.shared: dict[str, list[Piece]] = {}
        self.waiting: dict[str, Dense] = {}
        self.groups: list[Group] = []
        self.cast: tuple[Tensor, int, Tensor] | None = None
        self.only_gradients = only_gradients  # the probe looks at raw gradients before anything is measured
        self.owned, self.whole = _owned(self.parts, trained)
        # With every parameter frozen nothing would require a gradient: the anchor makes each tap's output do so.
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, loss: Loss, x: Any, y: Any, state: dict[str, Tensor] | None = None) -> Tensor:
        """The losses; with `state`, of a model whose parameters and buffers are those."""
        with self.watched(), torch.enable_grad():
            outputs = self.model(x) if state is None else functional_call(self.model, state, (x,))
            self.cast = None
            return check_losses(loss(outputs, y), self.examples)

    @property
    def rows(self) -> int:
        """What layers get: records, or all rows of all persons."""
        return self.examples * self.rows_each

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every owned layer that is called inside is recorded; some have a pass of their own, unless torch's is to
        be probed."""
        own: dict[type[nn.Module], Callable[..., Tensor]] = {nn.Embedding: self._look_up}
        if not self.only_gradients:
            own |= {nn.GroupNorm: self._normalise, nn.Linear: self._multiply}
        replaced, handles = [], []
        for layer in self.owned:
            way = self._multiply if is_turned(layer) and not self.only_gradients else own.get(type(layer))
            if layer in self.whole:
                handles.append(layer.register_forward_hook(self._record_whole, with_kwargs=True))
            elif way is None or "forward" in vars(layer):  # somebody else's stays
                handles.append(layer.register_forward_hook(self._record, prepend=True))
            else:
                vars(layer)["forward"] = partial(way, layer)
                replaced.append(layer)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in replaced:
                del vars(layer)["forward"]

    def _record_whole(self, layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        """Of a module without a rule: it will be run again, with what it was called with."""
        shown = any_module.first_tensor(output)
        if shown is None:
            raise BookKeepingUnsupportedError(f"a {type(layer).__name__} whose output is no tensor")
        known = self.run_again < len(self.shared_inputs)
        shared = self.shared_inputs[self.run_again] if known else frozenset()
        self.run_again += 1
        inputs = Inputs.of(layer, args, keywords, shared)
        call = self._noted(Call(layer, inputs, inputs._version))
        tapped: Tensor = _Aside.apply(shown, self.anchor, self, call)  # type: ignore[no-untyped-call]
        return (tapped, *output[1:]) if isinstance(output, tuple) else tapped

    def _record(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if len(args) == 1 and len(args[0]) == 1 < self.rows and len(output) == 1:
            # One row for everybody, as of positions: each example gets its own, and so a gradient of its own.
            args = (args[0].expand(self.rows, *args[0].shape[1:]),)
            output = output.expand(self.rows, *output.shape[1:]).contiguous()
        call = self._called(layer, args)
        tapped: Tensor = _Tap.apply(output, self.anchor, self, call)  # type: ignore[no-untyped-call]
        return tapped

    def _multiply(self, layer: nn.Module, *args: Any, **keywords: Any) -> Tensor:
        if not fits(layer, args) or len(args[0]) == 1 < self.rows:
            return self._record(layer, args, type(layer).forward(layer, *args, **keywords))
        taken = self._taken(args[0])
        call = self._called(layer, (taken,))
        return shown_linear(layer, args[0], taken, self.anchor, partial(self.receive, call))

    def _taken(self, x: Tensor) -> Tensor:
        """Inputs as they are multiplied: one copy for all layers in a row that take the same."""
        dtype = multiplied_in(x)
        if x.dtype == dtype:
            return x.detach()
        before = self.cast
        if before is None or before[0] is not x or before[1] != x._version or before[2].dtype != dtype:
            self.cast = before = x, x._version, x.detach().to(dtype)
        return before[2]

    def _look_up(self, layer: nn.Embedding, *args: Any, **keywords: Any) -> Tensor:
        """Places that all examples share, (1, T), become each example's own: the sum over examples would be all
        that a gradient tells."""
        if len(args) == 1 and len(args[0]) == 1 < self.rows:
            args = (args[0].expand(self.rows, *args[0].shape[1:]),)
        return self._record(layer, args, nn.Embedding.forward(layer, *args, **keywords))

    def _normalise(self, layer: nn.GroupNorm, *args: Any, **keywords: Any) -> Tensor:
        if len(args) == 1 and args[0].is_cuda and torch.is_autocast_enabled("cuda"):
            args = (args[0].to(layer.weight.dtype),)  # as torch's own operator does there
        if not group_norm.fits(layer, args):
            return self._record(layer, args, nn.GroupNorm.forward(layer, *args, **keywords))
        call = self._called(layer, args)

        def show(gradient: Tensor, by_weight: Tensor, by_bias: Tensor) -> None:
            self.receive(call, gradient, {"weight": Dense(by_weight), "bias": Dense(by_bias)})

        return group_norm.normalise(args[0], layer, self.anchor, show)

    def _called(self, layer: nn.Module, args: tuple[Any, ...]) -> Call:
        if len(args) != 1:
            raise BookKeepingUnsupportedError(f"a {type(layer).__name__} called with keywords")
        return self._noted(Call(layer, args[0].detach(), args[0]._version))

    def _noted(self, call: Call) -> Call:
        self.calls.append(call)
        for name in self.owned[call.layer].values():
            self.uses[name] += 1
        return call

    def backward(self, losses: Tensor, seeds: Tensor | None = None, *, retain: bool = False) -> None:
        """Receive the output gradients of Σ seeds·losses."""
        if losses.requires_grad:
            ones = torch.ones_like(losses) if seeds is None else seeds
            torch.autograd.grad(losses, self.anchor, ones, retain_graph=retain, allow_unused=True)

    def receive(self, call: Call, gradient: Tensor, found: dict[str, Piece] | None = None) -> None:
        """`found` is what the layer's own backward pass gives of it, where it has one."""
        kind = type(call.layer).__name__
        if gradient.shape[0] != self.rows:
            raise BookKeepingUnsupportedError(f"a {kind} whose input's first dimension is not the batch")
        if call.changed:
            raise BookKeepingUnsupportedError(f"a {kind} whose input is later changed in place")
        if self.only_gradients:
            call.gradient = gradient
        else:
            self.measure(call, gradient, found)

    def measure(self, call: Call, gradient: Tensor, found: dict[str, Piece] | None = None) -> None:
        """Each parameter's squared norms, and what to keep of it; those of several calls wait for the last.

        Where nothing requires gradients, as in a backward pass."""
        assert call.input is not None
        with without_autocast(gradient.device):
            by_name = self._pieces(call, gradient) if found is None else self._of_examples(found)
            for local, piece in by_name.items():
                name = self.owned[call.layer].get(local)
                if name is None:
                    continue
                if self.uses[name] > 1:
                    self.shared.setdefault(name, []).append(piece)
                    continue
                small = None if self.only_gradients else waiting(piece)
                if small is not None:
                    self.waiting[name] = small
                else:
                    self.squares[name], self.kept[name] = piece.measure()
        call.input = call.gradient = None

    def _pieces(self, call: Call, gradient: Tensor) -> dict[str, Piece]:
        if isinstance(call.input, Tensor) and takes_positions(call.layer):
            # A person's rows are positions of one example, as those of a sequence are.
            by_person = (self._by_example(t) for t in (call.input, gradient))
            return pieces(call.layer, *by_person)
        if isinstance(call.input, Tensor):
            return self._of_examples(pieces(call.layer, call.input, gradient))
        assert call.input is not None
        try:
            by_name = any_module.gradients(call.layer, self.owned[call.layer], call.input, gradient)
        except Exception as failed:  # a module may do anything, and not everything can be done for each example
            raise BookKeepingUnsupportedError(f"a {type(call.layer).__name__} that has no rule") from failed
        return self._of_examples({local: Dense(found) for local, found in by_name.items()})

    def _by_example(self, t: Tensor) -> Tensor:
        return t if self.rows_each == 1 else t.reshape(self.examples, self.rows_each, *t.shape[1:])

    def _of_examples(self, by_row: dict[str, Piece]) -> dict[str, Piece]:
        """Gradients of a person's rows added up before any is measured; those of a record as they are."""
        if self.rows_each == 1:
            return by_row
        return {local: Dense(self._by_example(piece.dense()).sum(1)) for local, piece in by_row.items()}

    def measure_shared(self) -> None:
        """Weights that several calls use, once all calls are known."""
        for name, found in self.shared.items():
            self.squares[name], self.kept[name] = joined(found).measure()
        self.shared = {}

    def measure_waiting(self) -> None:
        """Small gradients, once all are known."""
        self.groups, alone = grouped(self.waiting)
        self.waiting = {}
        for name, (squares, kept) in alone.items():
            self.squares[name], self.kept[name] = squares, kept
        for group in self.groups:
            self.squares |= group.squares()

    def settle(self, clip: Clip, weights: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
        """The weighted sum, and the norms; an example that is not finite is zero in both.

        Zeros are put in its place always, without asking whether there is one."""
        self.measure_shared()
        self.measure_waiting()
        names = [name for name in self.trained if name in self.squares]
        if not names:
            none = nothing(self.trained, self.examples)
            return none.total, none.norms
        factors, norms, finite = self._factors(clip, names, weights)
        kept, self.kept = self.kept, {}
        return self._weighted(kept, names, factors, finite), norms

    def _factors(self, clip: Clip, names: list[str], weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        squares = torch.stack([self.squares[name] for name in names], dim=1)
        return example_factors(clip, names, squares, weights, sum_dtype(self.trained[names[0]]))

    def _weighted(
        self, kept: dict[str, Kept], names: list[str], factors: Tensor, finite: Tensor
    ) -> dict[str, Tensor]:
        columns = factors.t().contiguous() if factors.is_cuda else factors.t()  # one launch for all of them
        column = dict(zip(names, columns.unbind(), strict=True))
        groups, self.groups = self.groups, []
        sums: dict[str, Tensor] = {}
        for group in groups:
            sums |= group.weighted_sums(torch.stack([column[name] for name in group.names]), finite)
        for name in [name for name in self.trained if name in kept]:
            sums[name] = kept.pop(name).only(finite).weighted_sum(column[name])
        return {name: sums[name] if name in sums else zero_like(p) for name, p in self.trained.items()}


def _owned(
    parts: Parts, trained: dict[str, nn.Parameter]
) -> tuple[dict[nn.Module, dict[str, str]], set[nn.Module]]:
    """By layer, which of its parameters are trained and under which name; and the modules without a rule, to which
    all parameters below them belong."""
    names = {id(p): name for name, p in trained.items()}
    owned: dict[nn.Module, dict[str, str]] = {}
    whole: set[nn.Module] = set()
    inside: set[nn.Module] = set()
    for layer_name, layer in parts.named:
        own = {local: names[id(p)] for local, p in layer._parameters.items() if p is not None and id(p) in names}
        if layer in inside or not own:
            continue
        if all(known(layer, local) for local in own):
            owned[layer] = own
            continue
        if not layer_name or any_module.draws(layer):
            raise BookKeepingUnsupportedError(f"layer {layer_name or '(the model)'} ({type(layer).__name__})")
        inside.update(layer.modules())
        whole.add(layer)
        owned[layer] = {local: names[id(p)] for local, p in layer.named_parameters() if id(p) in names}
    return owned, whole


def shared_inputs(
    model: nn.Module, trained: dict[str, nn.Parameter], loss: Loss, batches: Iterable[tuple[Any, Any]]
) -> tuple[frozenset[int], ...]:
    """Of each call of a module without a rule, which inputs are everybody's: those that in one of some batches of
    different sizes have not a row for each example. A mask between places may have as many by chance."""
    found: list[list[frozenset[int]]] = []
    for x, y in batches:
        try:
            recorder = PassRecorder(model, trained, batch_size(x), only_gradients=True)
            if not recorder.whole:
                return ()
            with requiring_grad(model.parameters(), {}):
                recorder.forward(loss, x, y)
        except Exception:  # whatever is wrong with it is said where it is used
            return ()
        inputs = [call.input for call in recorder.calls if isinstance(call.input, Inputs)]
        found.append([frozenset(range(len(i.leaves))) - set(i.by_example(recorder.rows)) for i in inputs])
    return (
        tuple(frozenset().union(*each) for each in zip(*found, strict=True))
        if len(set(map(len, found))) == 1
        else ()
    )


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter], wanted: dict[str, nn.Parameter]) -> Iterator[None]:
    """Of all parameters of a model, only the wanted ones require gradients inside."""
    before = [(p, p.requires_grad) for p in parameters]
    chosen = {id(p) for p in wanted.values()}
    changed = [(p, flag) for p, flag in before if flag != (id(p) in chosen)]
    for p, flag in changed:
        p.requires_grad_(not flag)
    try:
        yield
    finally:
        for p, flag in changed:
            p.requires_grad_(flag)
