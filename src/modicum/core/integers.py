"""A release on a lattice: blocks become one vector of norm at most 1 a unit, integers, and blocks again (R12).

A block is divided by its bound and weighed by z/z_b, z the multiplier of the whole query and z_b the block's own:
Σ (z/z_b)² = 1, so a unit's whole vector has norm at most 1, and one lattice noise is right for every block. The
rotation is public and a function of round, step and query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.integer_noise import IntegerNoise
from modicum.privacy.noise import NoiseKey, NoiseSource
from modicum.privacy.noise.integer_terms import IntegerTerms
from modicum.privacy.noise.lattice import Integers, dequantise, quantise

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Agreed:
    """Integer noise behind a sum, as all parties of a run agreed on it: for each client and query, by purpose.

    Fixed before the run, from public facts: what a server says during a run changes none of it (R13).
    """

    clients: Mapping[str, Mapping[str, IntegerNoise]]
    units: Mapping[str, Mapping[str, float]]  # of norm 1 in each client's part of a query: itself, or its records

    def of(self, client: str, purpose: str) -> IntegerNoise:
        """The lattice and noise that this client's releases of a purpose have."""
        return self.clients[client][purpose]

    def terms(self, purpose: str) -> IntegerTerms:
        """The terms of one query, which all clients share that ever take part in it."""
        return IntegerTerms.of(next(own[purpose] for own in self.clients.values() if purpose in own))

    def scale(self, client: str, purpose: str) -> float:
        """What a client's normalised vector is multiplied by: 1, or less where its budget asks for more noise."""
        terms = self.terms(purpose)
        return terms.lattice.scale(self.of(client, purpose).square) / terms.lattice.steps


def noised(release: Release, step: int, sums: Mapping[str, Tensor], source: NoiseSource) -> Integers:
    """The blocks' sums on the lattice of the reservation, with this client's own share of noise."""
    agreed = on_lattice(release)
    terms, names = IntegerTerms.of(agreed), query_name(release)
    keys = [NoiseKey(release.client, release.round, step, f"{kind}:{names}") for kind in ("rounding", "integers")]
    rounding, draws = (source.bits(key) for key in keys)
    seed = rotation(release.round, step, names)
    found = quantise(_vector(release, sums), terms.lattice, agreed.square, seed, rounding)
    return found + terms.table.draw(len(found), draws)


def on_lattice(release: Release) -> IntegerNoise:
    """The integer noise that was reserved; a release with noise of floats is refused."""
    if release.integers is None:
        raise UserError(f"client {release.client!r}: {query_name(release)!r} is reserved with noise of floats")
    return release.integers


def query_name(release: Release) -> str:
    """The blocks of a release in one word, as error messages and keys name them."""
    return "+".join(b.name for b in release.blocks)


def rotation(round: int, step: int, names: str) -> bytes:
    """The public seed by which all clients of one sum turn their vectors alike."""
    return f"{round}/{step}/{names}".encode()


def _vector(release: Release, sums: Mapping[str, Tensor]) -> Floats:
    z = release.noise_multiplier
    parts = [
        sums[b.name].detach().cpu().double().flatten() * (z / b.noise_multiplier / b.bound) for b in release.blocks
    ]
    return torch.cat(parts).numpy()


def block_weights(release: Release) -> dict[str, float]:
    """z/z_b of each block: what its normalised values were multiplied by."""
    return {b.name: release.noise_multiplier / b.noise_multiplier for b in release.blocks}


def split(total: Integers, release: Release, step: int, sizes: Mapping[str, int]) -> dict[str, Floats]:
    """A sum of such releases as blocks, in units where a unit's whole vector is one lattice scale (`steps`)."""
    terms, names = IntegerTerms.of(on_lattice(release)), query_name(release)
    vector = dequantise(total, terms.lattice, rotation(release.round, step, names))
    parts, start, weights = {}, 0, block_weights(release)
    for block in release.blocks:
        parts[block.name] = vector[start : start + sizes[block.name]] / weights[block.name]
        start += sizes[block.name]
    return parts


def released_alone(
    release: Release, step: int, sums: Mapping[str, Tensor], source: NoiseSource
) -> dict[str, Tensor]:
    """As `noised`, and back at once as numbers on the blocks' own scales: a message that stands alone."""
    total = noised(release, step, sums, source)
    agreed = on_lattice(release)
    own = IntegerTerms.of(agreed).lattice.scale(agreed.square) / agreed.steps
    parts = split(total, release, step, {name: value.numel() for name, value in sums.items()})
    return {
        b.name: torch.from_numpy(parts[b.name] * (b.bound / own)).to(sums[b.name]).view(sums[b.name].shape)
        for b in release.blocks
    }
