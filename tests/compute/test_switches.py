"""Switches under which a silo computes: set for a while, and refused where they are not known to be safe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat
from modicum.compute.clipping.switches import refuse_half, refuse_switches, refuse_undetermined, repeatable
from modicum.errors import UserError
from tests.compute.helpers import cross_entropy

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMP_DYNAMIC": "TRUE"}, "OMP_DYNAMIC"),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"}, "full precision"),
        ({"ONEDNN_DEFAULT_FPMATH_MODE": "any"}, "full precision"),
    ],
)
def test_what_was_switched_on_outside_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        refuse_switches(CPU, environ)


class Puts(nn.Module):
    """Writes into places that may be the same, in whatever order threads come."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.out(x)
        return h.put(torch.zeros(2, dtype=torch.long), h.flatten()[:2])


def test_an_operation_without_a_deterministic_form_is_named_before_a_record() -> None:
    records = torch.full((3, 4), torch.nan)
    refuse_undetermined(Puts(), records)  # where nothing is asked to repeat itself
    torch.use_deterministic_algorithms(True)
    try:
        refuse_undetermined(nn.Linear(4, 3), records)
        with pytest.raises(UserError, match="cannot be trained here: put"):
            refuse_undetermined(Puts(), records)
    finally:
        torch.use_deterministic_algorithms(False)


def test_half_precision_on_a_processor_is_refused() -> None:
    refuse_switches(CPU, {"OMP_DYNAMIC": "false", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"})
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="full precision"):
        refuse_switches(CPU, {})
    refuse_half(nn.Linear(2, 2).double().parameters())
    with pytest.raises(UserError, match="half precision"):
        refuse_half(nn.Linear(2, 2).bfloat16().parameters())


def test_reduced_products_on_a_processor_are_refused() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(UserError, match="full precision"):
            refuse_switches(CPU, {})
    finally:
        torch.set_float32_matmul_precision(before)


def test_switches_are_put_back() -> None:
    def state() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        return (
            *(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
            *(cudnn.benchmark, cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory),
        )

    before = state()
    with repeatable(torch.device("cuda"), 3):
        assert state() == (3, True, False, True, False)
    with repeatable(CPU, 2):
        assert state() == (2, *before[1:])
    assert state() == before


def test_an_operation_without_a_deterministic_form_is_named() -> None:
    class Undetermined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            where = torch.arange(x.numel(), device=x.device)
            found: torch.Tensor = self.head(torch.zeros_like(x).put_(where, x.flatten()))
            return found

    x, y = torch.rand(8, 4), torch.arange(8) % 3
    Clipper(Undetermined())(cross_entropy, x, y, Flat(1.0))
    with repeatable(torch.device("cuda"), 1), pytest.raises(UserError, match="put_"):
        Clipper(Undetermined())(cross_entropy, x, y, Flat(1.0))
