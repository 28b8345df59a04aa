"""Under which switches of torch a silo computes: those for which other rows' bits do not depend on a row's values.

(c′) of docs/floating-point.md is about one device, one number of threads and one set of switches. Half precision
on a processor is refused: Intel's matrix units let a NaN reach the next row. A GPU's algorithms are deterministic.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping.problem import without_drawing
from modicum.compute.clipping.rounding import product_rounding
from modicum.core.records import each
from modicum.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
HALF = (torch.bfloat16, torch.float16)
OFF = ("", "0", "false", "strict")


def refuse_switches(device: torch.device, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what was switched on outside and is not known to leave other rows alone.

    Raises:
        UserError: with what to switch off.
    """
    if environ.get("OMP_DYNAMIC", "").lower() not in OFF:
        raise UserError("OMP_DYNAMIC lets the number of threads change from step to step: unset it for a silo")
    if device.type != "cpu":
        return
    coarse = environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "").lower() not in OFF
    if coarse or product_rounding(device, torch.float32) > 0 or torch.is_autocast_enabled("cpu"):
        raise UserError(
            "a silo computes in full precision, since in half precision one record's NaN can reach another's row: "
            "unset ONEDNN_DEFAULT_FPMATH_MODE, autocast and float32 precisions of torch"
        )


def refuse_half(parameters: Iterable[Tensor]) -> None:
    """Refuse models in half precision on a processor.

    Raises:
        UserError: if there is such a parameter.
    """
    if any(p.dtype in HALF and p.device.type == "cpu" for p in parameters):
        raise UserError(
            "a silo's processor computes in float32 or float64, not in half precision: convert the model"
        )


def refuse_undetermined(model: nn.Module, records: Any) -> None:
    """Refuse a model with an operation that has no form that is `repeatable`, by name; it is tried on blanks.

    Raises:
        UserError: with the operation.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return
    blanks = each(lambda t: t.new_zeros((2, *t.shape[1:])).to(trained[0].device), records)
    with without_drawing(trained[0].device), torch.enable_grad():
        try:
            torch.autograd.grad(model(blanks).float().sum(), trained, allow_unused=True)
        except Exception as failed:  # whatever else is wrong with a model is said where it is used
            name_undetermined(failed)


def name_undetermined(failed: Exception) -> None:
    """A silo's passes repeat themselves bit by bit; an operation that cannot is named."""
    if torch.are_deterministic_algorithms_enabled() and "deterministic" in str(failed):
        raise UserError(f"this model cannot be trained here: {' '.join(str(failed).split())}") from failed


@contextmanager
def repeatable(device: torch.device, threads: int) -> Iterator[None]:
    """So many threads; on a GPU deterministic algorithms, chosen without trying them on records."""
    cudnn: Any = torch.backends.cudnn
    fill: Any = torch.utils.deterministic
    before: list[tuple[Any, str, Any]] = [
        (cudnn, "benchmark", cudnn.benchmark),
        (cudnn, "deterministic", cudnn.deterministic),
        (fill, "fill_uninitialized_memory", fill.fill_uninitialized_memory),
    ]
    number, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    if device.type == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")  # read at the first product
        cudnn.benchmark, cudnn.deterministic, fill.fill_uninitialized_memory = False, True, False
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(number)
        torch.use_deterministic_algorithms(strict)
        for place, name, value in before:
            setattr(place, name, value)
