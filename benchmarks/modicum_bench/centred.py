"""Records less a public mean, cut to length 1: what a plain head is given where no geometry was fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from modicum.data.arrays import Arrays, FederatedData


def centred(data: FederatedData, mean: npt.NDArray[np.float32]) -> FederatedData:
    """Clients, test and public records, each by itself."""

    def seen(arrays: Arrays) -> Arrays:
        x = arrays.x - mean
        return Arrays(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-6)), arrays.y)

    clients = tuple(replace(c, train=seen(c.train)) for c in data.clients)
    fitting = data.proxy.shape == data.input_shape
    return replace(data, clients=clients, test=seen(data.test), proxy=seen(data.proxy) if fitting else data.proxy)
