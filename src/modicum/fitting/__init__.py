"""PAC-DP's offline phase: simulate budgets × bounds on public data, then fit a curve F(ε)."""

from modicum.fitting.curves import Fit, fit_curve
from modicum.fitting.grid import Grid, Matrix, simulate
from modicum.fitting.proxy import bootstrap

__all__ = ["Fit", "Grid", "Matrix", "bootstrap", "fit_curve", "simulate"]
