"""The agreed terms of integer noise behind a sum: lattice, modulus, each client's share, each budget's scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from modicum.errors import UserError
from modicum.privacy.accounting import skellam
from modicum.privacy.accounting.skellam_tables import chernoff
from modicum.privacy.checks import positive, probability, steps
from modicum.privacy.integer_noise import IntegerNoise, Rounding
from modicum.privacy.noise.lattice import Integers, Lattice, finest_needed
from modicum.privacy.noise.skellam import LARGEST_VARIANCE, SkellamTable, skellam_table
from modicum.privacy.spec import PrivacySpec, Unit

MODULI = (32, 64)  # bits of a word
WRAP = 1e-9  # chance that some coordinate of one sum wraps around: a matter of correctness, not of privacy


@dataclass(frozen=True, kw_only=True)
class IntegerTerms:
    """Noise fixed once, in lattice steps (R13). Every client adds Skellam(`share`); `honest` of them count.

    `honest` is t − c behind secure aggregation, and 1 where a message stands alone. `units` is the largest number
    of vectors of norm 1 in one sum (clients, or all their records).
    """

    lattice: Lattice
    share: float
    honest: int
    clients: int
    units: int
    bits: int

    @property
    def variance(self) -> float:
        """Of the noise that is certain to be in a sum, rounded down."""
        return _down(self.honest * Fraction(self.share))

    @property
    def table(self) -> SkellamTable:
        """The sampler of one client's share of noise."""
        return skellam_table(self.share)

    def square(self, multiplier: float) -> int:
        """S for a client whose releases must be worth a Gaussian of this multiplier z_i."""
        wanted = positive("the noise multiplier", multiplier)
        square = math.floor((1 / (skellam.largest_step(self.variance) * wanted)) ** 2)
        square = min(square, self.lattice.square(self.lattice.steps))
        while square > 0 and skellam.gaussian_multiplier(self.variance, square) < wanted:
            square -= 1
        if self.lattice.norm(square) <= 0:
            raise UserError(
                f"a noise multiplier of {wanted:g} leaves nothing on this lattice: agree on a finer one"
            )
        return square

    def multiplier(self, square: int) -> float:
        """The Gaussian's z that a release with this S is worth: what an event or a plan records."""
        return skellam.gaussian_multiplier(self.variance, square)

    def noise(self, square: int) -> IntegerNoise:
        """What a plan and its events record, for a client that keeps to this S."""
        lattice = self.lattice
        return IntegerNoise(
            dimension=lattice.dimension,
            steps=lattice.steps,
            rounding=lattice.rounding,
            share=self.share,
            honest=self.honest,
            clients=self.clients,
            units=self.units,
            bits=self.bits,
            square=square,
        )

    @classmethod
    def of(cls, noise: IntegerNoise) -> IntegerTerms:
        """The terms that a plan or an event was made under."""
        return cls(
            lattice=Lattice(noise.dimension, noise.steps, noise.rounding),
            share=noise.share,
            honest=noise.honest,
            clients=noise.clients,
            units=noise.units,
            bits=noise.bits,
        )

    @property
    def wrap(self) -> float:
        """At most this is the chance that some coordinate of a sum leaves the modulus's range."""
        return wrap_probability(self._largest, self.lattice.dimension, self.clients * self.share, self.bits)

    @property
    def _largest(self) -> float:
        return self.units * math.sqrt(self.lattice.square(self.lattice.steps))

    def largest_norm(self, false_alarm: float = 1e-9) -> float:
        """The norm, in lattice steps, that a sum of honest inputs exceeds with at most this probability.

        All |X_j| stay under b but for half of it (Chernoff); then Bernstein for the X_j², which have mean at most
        v and second moment at most 3v² + v.
        """
        alarm, v, d = (
            probability("the false alarm", false_alarm),
            self.clients * self.share,
            self.lattice.dimension,
        )
        b2 = _tail(v, math.log(4 * d / alarm)) ** 2
        need = math.log(2 / alarm)
        excess = b2 * need / 3 + math.sqrt((b2 * need / 3) ** 2 + 2 * need * d * (3 * v * v + v))
        return self._largest + math.sqrt(d * v + excess)

    def check_sum(self, total: Integers, false_alarm: float = 1e-9) -> None:
        """Refuse a sum that clipping and noise cannot have made: somebody put something else into it."""
        if total.shape != (self.lattice.dimension,):
            raise UserError(f"a sum has {self.lattice.dimension} coordinates, got an array of shape {total.shape}")
        norm = math.sqrt(float(np.sum(np.square(total, dtype=np.float64))))
        if norm > self.largest_norm(false_alarm):
            raise UserError(
                f"a sum of norm {norm:.3g} is beyond what clipping and noise can make: the round is void"
            )


def agree(
    *,
    dimension: int,
    smallest_multiplier: float,
    largest_multiplier: float,
    clients: int,
    honest: int,
    units: int | None = None,
    rounding: Rounding = Rounding.EACH,
    loss: float = 0.01,
) -> IntegerTerms:
    """Terms for budgets between two noise multipliers. The smallest one is calibrated, the others scale down.

    `loss` is what rounding may cost the smallest scaled vector, as a share of noise variance.
    """
    if not positive("the smallest multiplier", smallest_multiplier) <= positive("the largest", largest_multiplier):
        raise UserError("the smallest noise multiplier is larger than the largest")
    if not 0 < honest <= steps(clients):
        raise UserError(f"between 1 and {clients} clients' noise can be counted, got {honest}")
    lattice = finest_needed(dimension, smallest_multiplier / largest_multiplier, loss, rounding)
    share = _share(lattice, smallest_multiplier, honest)
    while share > LARGEST_VARIANCE:  # too fine to draw: rounding costs more than was asked for, and is charged
        lattice = Lattice(dimension, lattice.steps // 2, rounding)
        share = _share(lattice, smallest_multiplier, honest)
    many = clients if units is None else steps(units)
    for bits in MODULI:
        terms = IntegerTerms(lattice=lattice, share=share, honest=honest, clients=clients, units=many, bits=bits)
        if terms.wrap <= WRAP:
            return terms
    raise UserError("no modulus up to 2^64 holds this sum: allow a larger loss by rounding")


def claim_problem(noise: IntegerNoise, multiplier: float, spec: PrivacySpec) -> str | None:
    """Why a release with this noise is not worth a Gaussian message of this multiplier, if it is not.

    The noise that counts is that of the clients that the view is certain of, itself included (R13). A record's
    part of a client's sum is bounded only where that sum is rounded as a whole, which δ pays for.
    """
    view = spec.view
    if noise.honest != view.noise_shares:
        return f"it counts {noise.honest} clients' noise, and its view is certain of {view.noise_shares}"
    if noise.clients != view.senders:
        return f"it is for sums of {noise.clients} clients, and its view has {view.senders}"
    if noise.rounding is not rounding_for(spec.unit):
        return f"it rounds {noise.rounding!s}, which bounds no {spec.unit}'s part"
    if noise.bits not in MODULI:
        return f"it has a modulus of {noise.bits} bits, and there are {' and '.join(map(str, MODULI))}"
    try:
        worth = spec.own(IntegerTerms.of(noise).multiplier(noise.square))
    except UserError as odd:
        return str(odd)
    if multiplier > worth * (1 + 1e-12):
        return f"it claims a noise multiplier of {multiplier:.6g}, and its integers are worth {worth:.6g}"
    return None


def rounding_for(unit: Unit) -> Rounding:
    """A client's vector is one unit's and rounded within its bound; a sum over records is rounded as a whole."""
    return Rounding.EACH if unit is Unit.CLIENT else Rounding.SUM


def _share(lattice: Lattice, multiplier: float, honest: int) -> float:
    variance = skellam.variance_for(multiplier, lattice.square(lattice.steps))
    return _up(Fraction(variance) / honest)


def wrap_probability(largest: float, dimension: int, variance: float, bits: int) -> float:
    """At most: each coordinate's inputs stay within `largest`, and its noise would have to reach the rest."""
    room = 2.0 ** (bits - 1) - largest
    return min(1.0, 2 * dimension * math.exp(chernoff(variance, room))) if room > 0 else 1.0


def _tail(variance: float, need: float) -> float:
    """x with P(X ≥ x) ≤ e^−need."""
    low, high = 0.0, need + 2 * math.sqrt(variance * need) + 1
    while chernoff(variance, high) > -need:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if chernoff(variance, middle) <= -need else (middle, high)
    return high


def _up(value: Fraction) -> float:
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)


def _down(value: Fraction) -> float:
    near = float(value)
    return near if Fraction(near) <= value else math.nextafter(near, 0.0)
