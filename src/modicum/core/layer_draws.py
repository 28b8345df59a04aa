"""What layers draw for themselves, such as dropout: as much secret as torch's generator can hold."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from modicum.privacy.noise.skellam import Bits

if TYPE_CHECKING:
    import torch

__all__ = ["Bits", "drawn_so_far", "layers_draw_from"]

WORDS, HEAD = 624, 24
"""Of the state of torch's generator on a processor, a Mersenne Twister: its words, and the bytes before them."""


def drawn_so_far(device: torch.device) -> Hashable:
    """Changes with every draw that layers make there, or by Python's or numpy's own generator."""
    import torch

    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    other = np.random.get_state(legacy=False)
    words, place = other["state"]["key"].tobytes(), other["state"]["pos"]
    return state.numpy().tobytes(), random.getstate(), words, place, other["has_gauss"]


@contextmanager
def layers_draw_from(bits: Bits, device: torch.device) -> Iterator[None]:
    """Layers draw from these bits inside; the program's own generators are put back.

    A processor's generator keeps 32 bits of a seed, which can be tried one by one, so its whole state is filled; a
    GPU's takes 63. What libraries make of it is not cryptographic: nobody's draws may depend on who else is there
    (`mechanisms.fixed_shapes`).
    """
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed = int.from_bytes(bits(8), "little") >> 1
        if device.type == "cuda":
            torch.manual_seed(seed)
        else:  # which would note where it was called, for GPUs to come
            torch.default_generator.manual_seed(seed)
        state = torch.get_rng_state()
        words = np.frombuffer(bits(4 * WORDS), dtype="<u4").astype("<u8")
        state[HEAD : HEAD + 8 * WORDS] = torch.from_numpy(words.view(np.uint8))
        torch.set_rng_state(state)
        yield
