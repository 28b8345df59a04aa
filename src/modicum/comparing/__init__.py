"""Several methods, seeds and settings side by side: cells that are runs, a pool that plays them, one table."""

from modicum.comparing.cells import Cell, cells_of
from modicum.comparing.comparison import Comparison
from modicum.comparing.play import compare, resume

__all__ = ["Cell", "Comparison", "cells_of", "compare", "resume"]
