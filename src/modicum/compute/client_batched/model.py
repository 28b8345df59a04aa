"""A client-batched model: many clients at once: rows of all clients in one batch, weights of its own for each.

Known layers are replaced by stacked ones, which take their weights from the client's row of the parameter matrix.
All else (activations, pooling, shortcuts) treats each row alone and so needs no change. The batched model holds no
trained parameter: a forward function that reaches for one behind its layer's back fails.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute.client_batched.patches import PatchConvolution, patch_pieces
from modicum.compute.clipping.pieces import Dense, Kept
from modicum.compute.clipping.rules import known, pieces


class CannotStackError(Exception):
    """This model has to run client by client; the message says why."""


class StackedPass:
    """One pass over a stack of `clients` batches of `size` rows: weights, and what the backward pass found.

    The gradient of each layer's output is measured as it passes by; see `modicum.compute.clipping.bookkeeping`.
    """

    def __init__(self, weights: dict[str, Tensor], clients: int, size: int, *, measure: bool) -> None:
        self.weights, self.clients, self.size, self.measure = weights, clients, size, measure
        self.squares: dict[str, Tensor] = {}
        self.kept: dict[str, Kept] = {}
        self.uses: dict[str, int] = {}
        any_weight = next(iter(weights.values()))
        # No weight requires a gradient; the anchor makes each layer's output require one.
        self.anchor = any_weight.new_zeros((), requires_grad=True)

    @property
    def rows(self) -> int:
        """Rows of all clients together."""
        return self.clients * self.size

    def with_gradient(self, losses: Tensor) -> Tensor:
        """The losses, for a backward pass to start from them also where they reach no layer of this pass."""
        return losses if losses.requires_grad else losses + self.anchor

    def receive(self, names: dict[str, str], found: dict[str, Any]) -> None:
        """Measure what a layer's backward pass found, or keep it; `names` are the parameters that count."""
        for local, piece in found.items():
            name = names.get(local)
            if name is None:
                continue
            if self.uses[name] > 1:  # a layer that is used several times: gradients add up by example
                before = self.kept.get(name)
                now = piece.dense()
                piece = Dense(before.gradients + now if isinstance(before, Dense) else now)
            if self.measure:
                self.squares[name], self.kept[name] = piece.measure()
            else:
                self.kept[name] = piece if hasattr(piece, "weighted_sum") else piece.measure()[1]

    def leave_out(self, finite: Tensor) -> None:
        """Zeros in place of the rows that are not finite, whether or not there are any."""
        self.kept = {name: kept.only(finite) for name, kept in self.kept.items()}


class _Layer(torch.autograd.Function):
    """A stacked layer. Its backward pass gives the input's gradient only, and shows the output's to the run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, layer: StackedLayer, run: StackedPass) -> Tensor:
        ctx.layer, ctx.run, ctx.version = layer, run, x._version
        ctx.save_for_backward(x)
        output, ctx.extra = layer.compute(x, run)
        return _no_view(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        layer, run = ctx.layer, ctx.run
        with torch.autocast(gradient.device.type, enabled=False):
            run.receive(layer.names, layer.pieces(x, gradient, ctx.extra))
        back = layer.back(x, gradient, run, ctx.extra) if ctx.needs_input_grad[0] else None
        return back, None, None, None


def _no_view(output: Tensor) -> Tensor:
    """The same numbers; autograd would not let the layer's users work in place on a view."""
    if not output._is_view():
        return output
    fresh = output.new_empty(0)
    return fresh.set_(output.untyped_storage(), output.storage_offset(), output.size(), output.stride())


class StackedLayer(nn.Module):
    """One layer of the batched model; subclasses say how it computes."""

    def __init__(self, layer: Any, names: dict[str, str]) -> None:
        super().__init__()
        self.original = (layer,)  # in a tuple, so that its parameters are not the batched model's
        self.names = names
        self.run: StackedPass | None = None

    @property
    def layer(self) -> Any:
        """The layer whose place this one takes."""
        return self.original[0]

    def own(self, local: str, run: StackedPass) -> Tensor | None:
        """The (clients, *shape) values of a parameter; one that is frozen is the same for everyone."""
        if local in self.names:
            return run.weights[self.names[local]]
        frozen = getattr(self.layer, local)
        return None if frozen is None else frozen.detach().expand(run.clients, *frozen.shape)

    def forward(self, x: Tensor) -> Tensor:
        """All clients' rows at once, each client's with its own weights."""
        run = self.run
        assert run is not None
        if x.shape[0] != run.rows:
            raise CannotStackError(f"a {type(self.layer).__name__} whose input's first dimension is not the batch")
        for name in self.names.values():
            run.uses[name] = run.uses.get(name, 0) + 1
        output: Tensor = _Layer.apply(x, run.anchor, self, run)  # type: ignore[no-untyped-call]
        return output

    def compute(self, x: Tensor, run: StackedPass) -> tuple[Tensor, Any]:
        """The output, and whatever the backward pass would otherwise compute again."""
        raise NotImplementedError

    def back(self, x: Tensor, gradient: Tensor, run: StackedPass, extra: Any) -> Tensor:
        """The gradient of the input."""
        raise NotImplementedError

    def pieces(self, x: Tensor, gradient: Tensor, extra: Any) -> dict[str, Any]:
        """Per-example gradients by the names of the layer's parameters."""
        return dict(pieces(self.layer, x, gradient))


class StackedLinear(StackedLayer):
    """A linear layer as one batched product."""

    def compute(self, x: Tensor, run: StackedPass) -> tuple[Tensor, Any]:
        weight, bias = self.own("weight", run), self.own("bias", run)
        assert weight is not None
        flat = x.reshape(run.clients, -1, x.shape[-1])
        weight = weight.transpose(1, 2)
        output = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
        return output.view(*x.shape[:-1], output.shape[-1]), None

    def back(self, x: Tensor, gradient: Tensor, run: StackedPass, extra: Any) -> Tensor:
        weight = self.own("weight", run)
        assert weight is not None
        return torch.bmm(gradient.reshape(run.clients, -1, gradient.shape[-1]), weight).view(x.shape)


def use_patches(x: Tensor) -> bool:
    """Whether convolutions are computed as products of patches: on a GPU alone."""
    return x.is_cuda


class StackedConv(StackedLayer):
    """Client after client on a CPU, where each convolution is worth a call; as products of patches on a GPU."""

    def compute(self, x: Tensor, run: StackedPass) -> tuple[Tensor, Any]:
        weight, bias = self.own("weight", run), self.own("bias", run)
        assert weight is not None
        if use_patches(x) and PatchConvolution.fits(self.layer):
            convolution = PatchConvolution(self.layer, x, run.clients)
            return convolution.forward(weight, bias), convolution
        parts = x.view(run.clients, run.size, *x.shape[1:])
        outputs = [
            self.layer._conv_forward(parts[i], weight[i], None if bias is None else bias[i])
            for i in range(run.clients)
        ]
        return torch.cat(outputs), None

    def back(self, x: Tensor, gradient: Tensor, run: StackedPass, extra: Any) -> Tensor:
        weight = self.own("weight", run)
        assert weight is not None
        if isinstance(extra, PatchConvolution):
            return extra.back(weight, gradient)
        parts = gradient.view(run.clients, run.size, *gradient.shape[1:])
        shape = (run.size, *x.shape[1:])
        return torch.cat([_input_gradient(self.layer, shape, weight[i], parts[i]) for i in range(run.clients)])

    def pieces(self, x: Tensor, gradient: Tensor, extra: Any) -> dict[str, Any]:
        if isinstance(extra, PatchConvolution):
            return patch_pieces(extra, gradient, self.layer.bias is not None)
        return super().pieces(x, gradient, extra)


class StackedNorm(StackedLayer):
    """GroupNorm and LayerNorm: normalise each row alone, then scale with the client's own numbers."""

    def compute(self, x: Tensor, run: StackedPass) -> tuple[Tensor, Any]:
        weight, bias = self.own("weight", run), self.own("bias", run)
        with torch.enable_grad():  # the normalisation's own backward pass is torch's
            leaf = x.detach().requires_grad_(x.requires_grad)
            standard = self._standard(leaf)
        output = self._scaled(standard.detach(), weight, run)
        if bias is not None:
            output.view(run.clients, run.size, *x.shape[1:]).add_(self._spread(bias, x))
        return output, (leaf, standard)

    def back(self, x: Tensor, gradient: Tensor, run: StackedPass, extra: Any) -> Tensor:
        leaf, standard = extra
        scaled = self._scaled(gradient, self.own("weight", run), run)
        back: Tensor = torch.autograd.grad(standard, leaf, scaled)[0]
        return back

    def _standard(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.GroupNorm):
            return functional.group_norm(x, self.layer.num_groups, eps=self.layer.eps)
        return functional.layer_norm(x, self.layer.normalized_shape, eps=self.layer.eps)

    def _scaled(self, values: Tensor, weight: Tensor | None, run: StackedPass) -> Tensor:
        if weight is None:
            return values.clone()
        spread = self._spread(weight, values)
        return (values.reshape(run.clients, run.size, *values.shape[1:]) * spread).view(values.shape)

    def _spread(self, values: Tensor, like: Tensor) -> Tensor:
        """(clients, *shape) numbers, made to broadcast over (clients, size, …)."""
        shape = values.shape[1:]
        if isinstance(self.layer, nn.GroupNorm):
            return values.view(len(values), 1, *shape, *(1,) * (like.dim() - 2))
        return values.view(len(values), *(1,) * (like.dim() - len(shape)), *shape)


class StackedEmbedding(StackedLayer):
    """An embedding: one lookup in all clients' tables."""

    def compute(self, x: Tensor, run: StackedPass) -> tuple[Tensor, Any]:
        weight = self.own("weight", run)
        assert weight is not None
        clients = torch.arange(run.clients, device=x.device).repeat_interleave(run.size)
        return weight[clients.view(-1, *(1,) * (x.dim() - 1)), x], None


KINDS: dict[type[nn.Module], type[StackedLayer]] = {
    nn.Linear: StackedLinear,
    nn.Conv1d: StackedConv,
    nn.Conv2d: StackedConv,
    nn.GroupNorm: StackedNorm,
    nn.LayerNorm: StackedNorm,
    nn.Embedding: StackedEmbedding,
}


class ClientBatchedModel:
    """A model that runs many clients at once, and the stacked layers in it."""

    def __init__(self, model: nn.Module) -> None:
        self.original = model
        self.model = _batched(model)
        self.layers = [m for m in self.model.modules() if isinstance(m, StackedLayer)]

    def state(self) -> tuple[bool, tuple[int, ...]]:
        """What outputs depend on besides inputs and trained weights: the mode, and where frozen weights lie."""
        frozen = tuple(p.data_ptr() for p in self.original.parameters() if not p.requires_grad)
        return self.original.training, frozen

    def outputs(self, x: Tensor, run: StackedPass) -> Tensor:
        """Outputs of all clients' rows, recorded in `run`."""
        if self.model.training != self.original.training:
            self.model.train(self.original.training)
        for layer in self.layers:
            layer.run = run
        try:
            with torch.enable_grad():
                outputs: Tensor = self.model(x)
        finally:
            for layer in self.layers:
                layer.run = None
        if outputs.shape[0] != run.rows:
            raise CannotStackError("an output whose first dimension is not the batch")
        return outputs


def _batched(model: nn.Module) -> nn.Module:
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    stacked: dict[int, Any] = {id(p): p for p in model.parameters()}  # deepcopy keeps these as they are
    for layer_name, layer in model.named_modules():
        owned = {local: names[id(p)] for local, p in layer._parameters.items() if id(p) in names}
        if not owned:
            continue
        if type(layer) not in KINDS or not all(known(layer, local) for local in owned):
            raise CannotStackError(f"layer {layer_name or '(the model)'} ({type(layer).__name__})")
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            raise CannotStackError(f"the hooks of layer {layer_name or '(the model)'}")
        stacked[id(layer)] = KINDS[type(layer)](layer, owned)
    return copy.deepcopy(model, stacked)


def _input_gradient(layer: Any, shape: tuple[int, ...], weight: Tensor, gradient: Tensor) -> Tensor:
    before = tuple(layer._reversed_padding_repeated_twice) if layer.padding == "same" else ()
    padding = (0,) * len(layer.kernel_size) if isinstance(layer.padding, str) else layer.padding
    padded = list(shape)
    for axis in range(len(before) // 2):
        padded[-1 - axis] += before[2 * axis] + before[2 * axis + 1]
    like = gradient.new_empty(1).expand(padded)  # only its shape is read
    back: Tensor = torch.ops.aten.convolution_backward(
        gradient,
        like,
        weight,
        None,
        layer.stride,
        padding,
        layer.dilation,
        False,
        (0,) * len(layer.kernel_size),
        layer.groups,
        (True, False, False),
    )[0]
    return functional.pad(back, [-n for n in before]) if before else back
