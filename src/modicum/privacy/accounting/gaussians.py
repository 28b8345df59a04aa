"""The normal form of all that an accountant prices: Gaussians with a noise multiplier, hidden rate and count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modicum.errors import UnsoundError, UserError
from modicum.privacy.events import Cyclic, NoSampling, Origin, Poisson, Release, Sampler, Shuffled
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec


@dataclass(frozen=True, order=True)
class Gaussians:
    """`count` releases with noise of `noise_multiplier`·bound as the adversary sees it, and coins it cannot."""

    noise_multiplier: float
    rate: float = 1.0
    count: int = 1

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise UserError(f"the noise multiplier must be positive, got {self.noise_multiplier}")
        if not 0 < self.rate <= 1:
            raise UserError(f"the sampling rate must lie in (0, 1], got {self.rate}")
        if self.count < 1:
            raise UserError(f"the number of steps must be at least 1, got {self.count}")


def hidden_rate(sampler: Sampler, spec: PrivacySpec) -> float:
    """The sampling rate that amplifies in this view: 1 where the adversary can see the coins (R4, R5)."""
    match sampler:
        case Poisson(rate, known_to) if known_to in spec.view.hides:
            return rate
        case Shuffled() | Cyclic() if spec.adjacency is Adjacency.ADD_REMOVE:
            raise UnsoundError(
                "passes over batches under add-remove break rule R4 (the batches shift with the missing unit): "
                "use Poisson sampling, or zero-out"
            )
        case Poisson() | Shuffled() | Cyclic() | NoSampling():
            return 1.0
    raise UserError(f"unknown sampler {sampler!r}")


def normal_form(releases: Iterable[Release | PlannedRelease], spec: PrivacySpec) -> tuple[Gaussians, ...]:
    """All releases of one client as Gaussians, equal ones merged; refuses what plain composition cannot price."""
    counts: dict[tuple[float, Sampler], int] = {}
    clients: set[str] = set()
    for r in releases:
        if isinstance(r, Release):
            clients.add(r.client)
            _refuse_foreign(r, spec)
        key = (spec.seen(r.noise_multiplier), r.sampler)
        counts[key] = counts.get(key, 0) + r.count
    if len(clients) > 1:
        raise UserError(f"a guarantee is one client's, got releases of {len(clients)}: compute each on its own")
    merged: dict[tuple[float, float], int] = {}
    for (z, sampler), count in counts.items():
        kind = (z, hidden_rate(sampler, spec))
        merged[kind] = merged.get(kind, 0) + sampler.participations(count)
    return tuple(Gaussians(z, q, count) for (z, q), count in sorted(merged.items()))


def _refuse_foreign(release: Release, spec: PrivacySpec) -> None:
    if release.noise_origin is Origin.RELEASED:
        raise UnsoundError(
            f"round {release.round} took its noise from earlier releases: by rules R2 and R3 only a filter's cap "
            "certifies that (guard gdp-filter or rdp-filter), not plain composition"
        )
    if release.noise_origin is Origin.PLANNED:
        raise UnsoundError(
            f"round {release.round} took one of its plan's kinds of noise by earlier releases: by rules R3 and "
            "R11 the whole plan's ε holds for it, not that of the releases made"
        )
    if release.spec != spec:
        raise UserError(f"round {release.round} was released under another spec: {release.spec.to_dict()}")
