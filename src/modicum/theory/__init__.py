"""What theory says about a clipping bound: convergence bounds, and the bias–variance surrogate J(C; ε)."""

from modicum.theory.bounds import Bound, Objective, Terms, bound
from modicum.theory.surrogate import Surrogate, surrogate

__all__ = ["Bound", "Objective", "Surrogate", "Terms", "bound", "surrogate"]
