"""The schedule that a mechanism's settings ask for, by name of the setting; others are given to it as they are."""

from __future__ import annotations

from dataclasses import replace

from modicum.errors import UserError
from modicum.privacy.noise.filtered import Filtered
from modicum.privacy.noise.fixed import Fixed
from modicum.privacy.noise.planned import Planned
from modicum.privacy.noise.schedule import Schedule
from modicum.privacy.noise.stock import Stock

SMALLEST_NOISE, LARGEST_NOISE = 1e-100, 1e100  # multipliers whose squares accountants can add up


def schedule_for(
    multiplier: float | None = None,
    *,
    adaptive: bool = False,
    stock: Stock | None = None,
    integers: bool = False,
    given: Schedule | None = None,
) -> Schedule:
    """The schedule of these settings.

    Args:
        multiplier: noise over bound; none: calibrated to each client's budget.
        adaptive: a policy chooses the noise, under a filter.
        stock: kinds of noise to choose from.
        integers: noise on a lattice.
        given: a schedule that is none of these.

    Raises:
        UserError: where two of them contradict each other, or the multiplier cannot be computed with.
    """
    if multiplier is not None and not SMALLEST_NOISE <= multiplier <= LARGEST_NOISE:
        raise UserError(
            f"the noise multiplier lies between {SMALLEST_NOISE:g} and {LARGEST_NOISE:g}, got {multiplier:g}"
        )
    if stock is not None and multiplier is not None:
        raise UserError("noise comes from a stock or is set, not both: leave out one of them")
    if stock is not None and integers:
        raise UserError("noise on a lattice has one kind: leave out integers or the stock")
    if given is not None:
        if adaptive or stock is not None or multiplier is not None:
            raise UserError("noise has a schedule of its own here: set neither adaptive noise nor a multiplier")
        return replace(given, on_lattice=integers) if isinstance(given, Fixed) else given
    if adaptive:
        return Filtered(stock)
    if stock is not None:
        return Planned(stock)
    return Fixed(multiplier, on_lattice=integers)
