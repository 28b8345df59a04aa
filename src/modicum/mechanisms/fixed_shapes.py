"""Which passes of one shape drawn records are computed in: lanes or a capacity, by what a step costs (R16).

The choice follows from public facts alone (records, rate, the model's tensors and work), so that server and silo
make the same one. It stands in plan, ledger and certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modicum.core.layer_draws import drawn_so_far
from modicum.core.parts import Method
from modicum.core.records import each
from modicum.errors import UserError
from modicum.privacy.fixed_shapes import FixedShape, Lanes, smallest_capacity

Kind = Literal["auto", "lanes", "capacity"]
KINDS = ("auto", "lanes", "capacity")

WIDTHS = (4, 8, 16, 32, 64, 128)
"""Rows of a pass in lanes that are tried."""

FAILURE_PROBABILITY = 2.0**-50
"""How often a capacity may overflow, a step; less where a share of 1e-11 of δ would not pay for all steps."""

DRAWS = "set its rate to 0, or train without batch, on whole batches"

PASS, TENSOR, PRODUCT = 2e-4, 2.2e-4, 1e-10
"""Seconds of a pass: once, for the calls of each parameter tensor, and for each multiply-add of a row's forward
pass. Only their proportions matter. Measured by benchmarks/lanes.py."""


@dataclass(frozen=True)
class FixedShapes:
    """What is to be chosen from, for a model of so many parameter tensors and multiply-adds a record.

    A model with layers that draw, such as dropout, takes a capacity: in lanes one record more would give those
    behind it other draws."""

    kind: Kind = "auto"
    tensors: int = 0
    work: int = 0
    draws: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"unknown fixed_shapes {self.kind!r}: use {', '.join(KINDS)}")

    def choose(self, records: int, rate: float, delta: float, steps: int | None) -> FixedShape:
        """The cheapest for a client; `steps` is None where a filter guards it, which pays for no overflow."""
        return _chosen(self, records, rate, delta, steps)

    def seconds(self, shape: FixedShape, records: int, rate: float) -> float:
        """What a step is expected to take."""
        once = PASS + TENSOR * self.tensors + shape.rows * PRODUCT * self.work
        return shape.expected_passes(records, rate) * once


@lru_cache(maxsize=4096)
def _chosen(shapes: FixedShapes, records: int, rate: float, delta: float, steps: int | None) -> FixedShape:
    def cheapest(tried: Sequence[FixedShape]) -> FixedShape:
        return min(tried, key=lambda shape: shapes.seconds(shape, records, rate))

    if shapes.draws and (steps is None or shapes.kind == "lanes"):
        why = "which noise that adapts needs" if steps is None else 'set fixed_shapes = "capacity"'
        raise UserError(f"a model that draws, as dropout does, is not computed in lanes ({why}): {DRAWS}")
    lanes: list[FixedShape] = [Lanes(rows) for rows in WIDTHS if rows <= max(records, WIDTHS[0])]
    if steps is None:
        if shapes.kind == "capacity":
            raise UserError(
                "noise that adapts is guarded by a filter, which pays for no capacity's overflow: set "
                'fixed_shapes = "lanes"'
            )
        return cheapest(lanes)
    capacity = smallest_capacity(records, rate, min(FAILURE_PROBABILITY, 1e-11 * delta / steps))
    if shapes.kind == "lanes":
        return cheapest(lanes)
    return capacity if shapes.kind == "capacity" or shapes.draws else cheapest([*lanes, capacity])


def shapes_for(kind: Kind, model: nn.Module, records: Any) -> FixedShapes:
    """The choice for a model that is trained on records like these; none of their values is looked at."""
    tensors = sum(p.requires_grad for p in model.parameters())
    return FixedShapes(kind, tensors, work_of(model, records), draws_in_training(model, records))


def draws_in_training(model: nn.Module, records: Any) -> bool:
    """Whether layers draw for themselves in the modes that the model has now, tried on a blank."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        before = drawn_so_far(device)
        model(each(lambda t: t.new_zeros((1, *t.shape[1:])).to(device), records))
        return drawn_so_far(device) != before


def work_of(model: nn.Module, records: Any) -> int:
    """Multiply-adds of one record's forward pass, counted on a blank."""
    before = {module: module.training for module in model.modules()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(each(lambda t: t.new_zeros((1, *t.shape[1:])), records))
    for module, training in before.items():
        module.training = training
    return int(counter.get_total_flops()) // 2


def with_fixed_shapes(method: Method, shapes: FixedShapes | None) -> Method:
    """The method whose drawn records are computed in passes of one shape; None: as it is."""
    return method if shapes is None else replace(method, mechanism=_shaped(method.mechanism, shapes))


def _shaped(mechanism: Any, shapes: FixedShapes) -> Any:
    """Also where another mechanism, such as published noise, stands around the one that draws."""
    names = {f.name for f in fields(mechanism)} if is_dataclass(mechanism) else set()
    if "shapes" in names:
        return replace(mechanism, shapes=shapes)
    if "inner" in names:
        return replace(mechanism, inner=_shaped(mechanism.inner, shapes))
    return mechanism
