"""What is learned from whole runs over public records: PAC-DP's curve F(ε), and clipping agents (`agent`)."""

from modicum.public.rehearsed.curves import Fit, fit_curve
from modicum.public.rehearsed.grid import Grid, Matrix, simulate
from modicum.public.rehearsed.proxy import bootstrap

__all__ = ["Fit", "Grid", "Matrix", "bootstrap", "fit_curve", "simulate"]
