"""Which models run without a look at a number.

Shapes and groups that come from values (a gather of experts, packed sequences, boolean indices) would make what is
computed of one record depend on the others, and so would code that reads a number and goes another way by it. So a
model is watched while it runs on synthetic rows: what a tensor without values could not do is refused, as
torch's `FakeTensorMode` would. (That one needs torch's compiler, two seconds of every process; a test compares.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modicum.compute.clipping.bookkeeping import requiring_grad
from modicum.compute.clipping.problem import Loss, batch_size, check_losses
from modicum.errors import UserError

FAILS = "may fail on what a record holds"
REFUSED = {
    "linalg_matrix_exp": "groups matrices by their norms",
    **dict.fromkeys(("linalg_lstsq", "_linalg_check_errors", "_linalg_svd", "_linalg_eigh", "linalg_eig"), FAILS),
    **dict.fromkeys(("binary_cross_entropy", "bernoulli", "multinomial"), FAILS),
    **dict.fromkeys(("prod", "cumprod"), "goes back another way where one of all records has a zero"),
}
"""Operations that need no value for a shape, and whose way of computing depends on values all the same."""

BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

READS = ("tolist", "numpy", "item", "__array__", "__dlpack__", "__bool__", "__int__", "__float__", "__index__")
"""What Python reads numbers by."""

KERNELS = (
    "Meta",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
"""Where torch keeps what an operation does to shapes."""


class LooksAtValuesError(UserError):
    """This model goes by what its records hold; the message says where."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose results' shapes, or ways of computing, come from values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler at the first operation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        reason = REFUSED.get(name) or _by_values(func)
        if name in ("index", "_unsafe_index"):  # the one operation that is of either kind
            chosen = [t for t in args[1] if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
            reason = "takes as many rows as values say" if chosen else ""
        if reason:
            self.refused = f"the operation {name}, which {reason}"
            raise LooksAtValuesError(self.refused)
        return func(*args, **(kwargs or {}))


@cache
def _by_values(func: Any) -> str:
    if BY_VALUES & set(func.tags):
        return "reads values"
    known = any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in KERNELS)
    return "" if known else "does not say what it does to shapes"


class _Reads(TorchFunctionMode):
    """Refuses Python a number."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.refused = f"a number that it reads ({name.strip('_')}) and may go another way by"
            raise LooksAtValuesError(self.refused)
        return func(*args, **(kwargs or {}))


def refuse_looking(model: nn.Module, trained: dict[str, nn.Parameter], loss: Loss, x: Any, y: Any) -> list[str]:
    """Watch forward pass, loss and backward pass of synthetic rows.

    Returns:
        Names of parameters that the loss does not reach.

    Raises:
        LooksAtValuesError: where a value would be asked for.
    """

    def run() -> list[str]:
        losses = check_losses(loss(model(x), y), batch_size(x))
        if not losses.requires_grad:
            return list(trained)
        # torch.autograd.grad itself is one function to a watch, which would not see what is called inside of it.
        found = _engine_run_backward(
            (losses,), (torch.ones_like(losses),), False, False, tuple(trained.values()),
            allow_unreachable=True, accumulate_grad=False,
        )  # fmt: skip
        return [name for name, g in zip(trained, found, strict=True) if g is None]

    with requiring_grad(model.parameters(), trained), torch.enable_grad():
        watches = _Reads(), _Operations()
        try:
            with watches[0], watches[1]:
                unreached = run()
        except RuntimeError:
            if not _refused(watches):
                raise
        if _refused(watches):  # TorchScript makes an error of its own of it, and a model may catch it
            raise LooksAtValuesError(_refused(watches))
        _refuse_unseen(run)
    return unreached


def _refused(watches: Iterable[_Reads | _Operations]) -> str:
    """What some of them refused, whoever caught it."""
    return next((watch.refused for watch in watches if watch.refused), "")


def _refuse_unseen(run: Callable[[], object]) -> None:
    """Some of torch's own code goes another way while it is watched, which no record's pass does: so what it does
    unwatched is read from a profile. (Where `index` goes by values, it calls `nonzero`.)"""
    with profiler_legacy.profile() as seen:  # type: ignore[no-untyped-call]
        run()
    for name in sorted({event.name for event in seen.function_events if event.name.startswith("aten::")}):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if packet not in (None, torch.ops.aten.index) and any(
            BY_VALUES & set(getattr(packet, o).tags) for o in packet.overloads()
        ):
            raise LooksAtValuesError(f"the operation {packet.__name__}, which reads values")


@contextmanager
def refusing_looks(model: nn.Module) -> Iterator[None]:
    """Calls of the model inside, whoever makes them, are watched as by `refuse_looking`; what is computed of its
    outputs is not."""
    open_modes: list[Any] = []

    def begin(*_: Any) -> None:
        for mode in (_Reads(), _Operations()):
            mode.__enter__()  # type: ignore[no-untyped-call]
            open_modes.append(mode)

    def end(*called: Any) -> None:
        modes = tuple(open_modes)
        while open_modes:
            open_modes.pop().__exit__(None, None, None)
        if called and called[-1] is not None and _refused(modes):  # the model caught it and went on
            raise LooksAtValuesError(_refused(modes))

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        end()
        for hook in hooks:
            hook.remove()


def looking_modules(model: nn.Module) -> list[ModuleType]:
    """The modules of `transformers` that look, if the model is one of theirs.

    They read whether an attention mask is all ones and take another kernel then, so that one record with padding
    would change everybody's."""
    if not any(type(part).__module__.startswith("transformers.") for part in model.modules()):
        return []
    return [m for name, m in sys.modules.items() if name.startswith("transformers.") and "is_tracing" in vars(m)]


@contextmanager
def as_traced(modules: Sequence[Any]) -> Iterator[None]:
    """These do as when they are traced, and look at no number."""
    before = [module.is_tracing for module in modules]
    for module in modules:
        module.is_tracing = lambda *_, **__: True
    try:
        yield
    finally:
        for module, real in zip(modules, before, strict=True):
            module.is_tracing = real
