"""Rows of correlated noise of clients that add their own: each has the factor of its plan (R19)."""

from __future__ import annotations

from collections.abc import Iterable

from modicum.core.release_gate import rows_of
from modicum.core.rows import NoiseRows
from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.noise import NoiseSource
from modicum.privacy.plan import PrivacyPlan


class OwnRows:
    """Gives a client's gate its rows. What later rows follow from is kept in memory, and made again where it is
    lost: `noise` gives the same numbers for the same key. Without it no row is given."""

    def __init__(self, noise: NoiseSource | None, plans: Iterable[PrivacyPlan] = ()) -> None:
        self._noise = noise
        self._plans: dict[str, PrivacyPlan] = {}
        self._rows: dict[tuple[str, str], NoiseRows] = {}
        for plan in plans:
            self.learn(plan)

    def learn(self, plan: PrivacyPlan) -> None:
        """What a client agreed to."""
        self._plans[plan.client] = plan

    def __call__(self, release: Release) -> NoiseRows:
        key = (release.client, release.blocks[0].name)
        if key not in self._rows:
            terms = self._plans[release.client].correlation(release.blocks[0].name)
            if self._noise is None:
                raise UserError("correlated noise is drawn under a key that is kept, and there is none")
            if terms is None:
                raise UserError(f"client {release.client!r} has no plan for correlated noise")
            self._rows[key] = rows_of(self._noise, release.client, terms)
        return self._rows[key]
