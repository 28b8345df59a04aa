"""What layers draw hangs on all of a secret, not on the 32 bits of a seed that torch's generator keeps."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch.nn.functional import dropout

from modicum.core.layer_draws import WORDS, layers_draw_from
from modicum.privacy.noise import NoiseKey, SimulatedNoise

CPU = torch.device("cpu")


def numbers(bits: bytes) -> torch.Tensor:
    left = iter([bits[:8], bits[8:]])
    with layers_draw_from(lambda _: next(left), CPU):
        return torch.rand(WORDS)


def test_all_of_the_state_is_the_sources() -> None:
    words = np.frombuffer(Random(1).randbytes(4 * WORDS), dtype="<u4")
    twister = np.random.RandomState()
    twister.set_state({"bit_generator": "MT19937", "state": {"key": words, "pos": WORDS}})
    left = iter([bytes(8), words.tobytes()])
    with layers_draw_from(lambda _: next(left), CPU):
        drawn = torch.randint(2**20, (2000,)).numpy()
    assert (drawn == twister.randint(0, 2**32, 2000, dtype=np.uint32) % 2**20).all()


def test_any_word_of_it_makes_other_draws() -> None:
    bits = Random(1).randbytes(8 + 4 * WORDS)
    assert torch.equal(numbers(bits), numbers(bits))
    for byte in range(8 + 4, len(bits), 4 * 16):
        other = bits[:byte] + bytes([bits[byte] ^ 255]) + bits[byte + 1 :]
        assert not torch.equal(numbers(bits), numbers(other))


def test_a_seed_is_not_enough() -> None:
    """Negative control: seeds that differ by more than torch keeps."""
    masks = []
    for seed in (5, 5 + 2**32):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            masks.append(dropout(torch.ones(256)))
    assert torch.equal(*masks)


def test_the_programs_generator_is_put_back() -> None:
    before = torch.get_rng_state()
    with layers_draw_from(SimulatedNoise(0).bits(NoiseKey("a", 0, 0, "layers")), CPU):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
