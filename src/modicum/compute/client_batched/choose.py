"""Which engine runs a model: all clients of a stack together, or one after another. Results are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping.flat import Way
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.layout import Layout
from modicum.core.parts import Backend
from modicum.core.persons import rows_of_example

CPU_STACK = 5 << 19
"""Parameters of a stack on a CPU: with their gradients they stay in the last-level cache, step after step."""

GPU_STACK = 1 << 24
"""Parameters of a stack on a GPU, where what counts is launches; activations take the memory."""

GPU_ROWS = 64
"""Clients of a stack on a GPU at most."""

GPU_WHOLE = 1 << 33
"""Parameters of a stack on a GPU, frozen ones counted for each client: their activations take the memory."""

LARGE = 1 << 20
"""A model of more parameters fills the device by itself."""


@dataclass(frozen=True)
class Choice:
    """An engine, how many clients it is given at once, and why."""

    backend: Backend
    at_once: int
    reason: str


def choose(
    model: nn.Module, device: torch.device | str = "cpu", *, compiled: bool = False, several: bool = False
) -> Choice:
    """The fastest engine for this model on this device; or on request one client after another, compiled.

    `several`: records are several tensors, such as tokens and their mask; a CPU is kept busy by one client.
    """
    size, device = Layout.of(model).dimension, torch.device(device)
    if compiled:
        return Choice(LoopBackend(model, Way.COMPILED), 1, "compiled, as was asked for")
    single = several and device.type == "cpu"
    reason = "records of several tensors" if single else _needs_loop(model, size, device)
    if reason:
        return Choice(LoopBackend(model), 1, reason)
    at_once = CPU_STACK // size if device.type == "cpu" else min(GPU_ROWS, GPU_STACK // size)
    if several:
        at_once = min(at_once, GPU_WHOLE // sum(p.numel() for p in model.parameters()))
    return Choice(FusedBackend(model), max(2, at_once), f"{size:,} parameters")


def _needs_loop(model: nn.Module, size: int, device: torch.device) -> str:
    if size == 0 or size > LARGE:
        return f"{size:,} parameters"
    if rows_of_example(model) > 1:
        return "examples are persons of several rows"
    for module in model.modules():
        if _draws(module):
            return f"{type(module).__name__} draws random numbers client by client"
    convolves = any(isinstance(m, nn.Conv1d | nn.Conv2d) for m in model.modules())
    if device.type == "cpu" and convolves:
        return "convolutions keep a CPU busy one client at a time"
    return ""


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return float(getattr(module, "dropout", 0.0) or 0.0) > 0 if isinstance(module, nn.RNNBase) else False
