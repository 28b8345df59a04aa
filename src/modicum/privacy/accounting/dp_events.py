"""Our events in the words of `dp_accounting` and back, and its opinion on what they cost.

A DpEvent says what the adversary sees: the noise multiplier with all shares in it, and only sampling that is
hidden. Everything else about a release (who, round, blocks, bounds, origins) is kept by the release that serves as
template on the way back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modicum.errors import MissingExtraError, UserError
from modicum.privacy.accounting.gaussians import Gaussians, hidden_rate, normal_form
from modicum.privacy.events import Cyclic, Poisson, Release
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_SAME = 1e-12  # relative: below this a noise multiplier is the template's own


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise MissingExtraError("dp-accounting", None, "a second opinion on ε") from None
    return dp_accounting


def to_dp_event(release: Release | PlannedRelease, spec: PrivacySpec | None = None) -> DpEvent:
    """One release (or plan, with its spec) as the DpEvent that its adversary sees."""
    if isinstance(release, Release):
        spec = release.spec
    elif spec is None:
        raise UserError("a planned release needs its PrivacySpec to become an event")
    z = spec.seen(release.noise_multiplier)
    return _event(Gaussians(z, hidden_rate(release.sampler, spec), release.sampler.participations(release.count)))


def _event(group: Gaussians) -> DpEvent:
    dpa = _library()
    event = dpa.GaussianDpEvent(group.noise_multiplier)
    if group.rate < 1:
        event = dpa.PoissonSampledDpEvent(group.rate, event)
    return dpa.SelfComposedDpEvent(event, group.count) if group.count > 1 else event


def from_dp_event(event: DpEvent, template: Release) -> Release:
    """The release that `event` describes, with the metadata of `template`; its blocks keep their proportions."""
    dpa = _library()
    count, rate = 1, 1.0
    if isinstance(event, dpa.SelfComposedDpEvent):
        count, event = int(event.count), event.event
    if isinstance(event, dpa.PoissonSampledDpEvent):
        rate, event = float(event.sampling_probability), event.event
    if not isinstance(event, dpa.GaussianDpEvent):
        raise UserError(f"only Gaussian events, Poisson-sampled or not, become releases here, got {event!r}")
    seen = float(event.noise_multiplier)
    scale = seen / template.spec.seen(template.noise_multiplier)
    blocks = template.blocks
    if abs(scale - 1) > _SAME:
        blocks = tuple(replace(b, noise_multiplier=b.noise_multiplier * scale) for b in blocks)
    sampler = template.sampler
    hidden = hidden_rate(sampler, template.spec)
    if rate != hidden:
        if not isinstance(sampler, Poisson) or hidden == 1 == sampler.rate:
            raise UserError(f"the event samples with rate {rate} but its template has no hidden sampler")
        sampler = replace(sampler, rate=rate)
    if isinstance(sampler, Cyclic) and count == sampler.participations(template.count):
        count = template.count
    return replace(template, blocks=blocks, sampler=sampler, count=count)


def library_epsilon(
    releases: Iterable[Release | PlannedRelease],
    spec: PrivacySpec,
    *,
    accountant: str = "pld",
    interval: float = 1e-4,
) -> float:
    """ε by `dp_accounting`'s own PLD or RDP accountant: an opinion that shares no code with ours.

    Two traps are closed here. Its `RdpAccountant` under REPLACE_ONE does not double the sensitivity of a plain
    Gaussian (its `PLDAccountant` does), so RDP gets half the noise multiplier under add-or-remove instead, which
    is exact for plain Gaussians and looser for sampled ones (R6). Zero-out has the dominating pairs of
    add-or-remove and is passed as such.
    """
    dpa = _library()
    groups = normal_form(tuple(releases), spec)
    if not groups:
        return 0.0
    relations = dpa.NeighboringRelation
    replace_one = spec.adjacency is Adjacency.REPLACE_ONE
    match accountant:
        case "pld":
            relation = relations.REPLACE_ONE if replace_one else relations.ADD_OR_REMOVE_ONE
            judge = dpa.pld.PLDAccountant(relation, value_discretization_interval=interval)
        case "rdp":
            judge = dpa.rdp.RdpAccountant(neighboring_relation=relations.ADD_OR_REMOVE_ONE)
            if replace_one:
                groups = tuple(
                    replace(g, noise_multiplier=g.noise_multiplier / spec.adjacency.moves) for g in groups
                )
        case _:
            raise UserError(f"unknown accountant {accountant!r}: use pld or rdp")
    for group in groups:
        judge.compose(_event(group))
    return float(judge.get_epsilon(spec.delta))
