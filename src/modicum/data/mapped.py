"""Records, and whole federations, seen through a public geometry."""

from __future__ import annotations

import math
from dataclasses import replace

from modicum.data.arrays import Arrays, FederatedData
from modicum.data.geometry import Geometry


def mapped(geometry: Geometry, arrays: Arrays) -> Arrays:
    """Records as features of length 1 (or 0)."""
    return Arrays(geometry.features(arrays.scaled().reshape(len(arrays), math.prod(arrays.shape))), arrays.y)


def federation_behind(geometry: Geometry, data: FederatedData) -> FederatedData:
    """A federation whose records, public ones included, are these features."""

    def seen(arrays: Arrays) -> Arrays:
        return mapped(geometry, arrays)

    clients = tuple(
        replace(c, train=seen(c.train), validation=seen(c.validation), test=seen(c.test)) for c in data.clients
    )
    return replace(
        data,
        clients=clients,
        test=seen(data.test),
        proxy=seen(data.proxy),
        proxy_validation=seen(data.proxy_validation),
        geometry=geometry,
    )
