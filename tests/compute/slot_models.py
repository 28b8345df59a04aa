"""Models of all kinds for the search of (c′), and broken ones that it has to catch. A model is one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.models import build

ROWS = (2, 3, 8, 13, 31, 64)
HEAVY = 13
"""Rows of large models at most."""


class Through(nn.Module):
    """A function of parts that belong to it."""

    def __init__(self, run: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def numbers(size: int, *rest: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, *rest, generator=torch.Generator().manual_seed(size)))


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(),
        nn.Conv2d(32, 17, 1), nn.Conv2d(17, 17, 3, padding=1, groups=17), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(17, 3),
    )  # fmt: skip


class Attention(nn.Module):
    """Self-attention with a mask of the words that are there."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.all, self.out, self.norm = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide), nn.LayerNorm(wide)
        self.up, self.down, self.last = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide), nn.LayerNorm(wide)

    def forward(self, h: Tensor, there: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.all(h).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None, :])
        h = self.norm(h + self.out(seen.transpose(1, 2).flatten(2)))
        found: Tensor = self.last(h + self.down(functional.gelu(self.up(h))))
        return found


class SmallBert(nn.Module):
    """Words and their places, blocks of attention, and a head on the first word."""

    def __init__(self, words: int = 300, long: int = 16, wide: int = 32, heads: int = 4, deep: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, wide), nn.Embedding(long, wide)
        self.norm = nn.LayerNorm(wide)
        self.blocks = nn.ModuleList([Attention(wide, heads) for _ in range(deep)])
        self.head = nn.Linear(wide, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        h, there = self.norm(self.words(x) + self.places(places)), (x != 0) | (places == 0)
        for block in self.blocks:
            h = block(h, there)
        found: Tensor = self.head(h[:, 0])
        return found


@dataclass(frozen=True)
class Model:
    """How it is made, and what a row of it is: so many numbers, or words of so many."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    most: int = max(ROWS)

    def rows(self, number: int, seed: int) -> Tensor:
        drawn = torch.Generator().manual_seed(1000 * number + seed)
        if self.words:
            return torch.randint(self.words, (number, *self.shape), generator=drawn)
        return torch.randn(number, *self.shape, generator=drawn)


def shipped(name: str, *shape: int, most: int = max(ROWS)) -> Model:
    return Model(lambda: build(name, shape, 10, seed=0), shape, most=most)


def sequence(part: nn.Module, wide: int) -> nn.Module:
    return Through(lambda s, x: s.head(s.part(x)[0][:, -1]), part=part, head=nn.Linear(wide, 3))


MODELS: dict[str, Model] = {
    "linear 30-3": Model(lambda: nn.Linear(30, 3), (30,)),
    "uneven, sigmoid, gelu": Model(
        lambda: nn.Sequential(mlp(30, 37, 17, act=nn.Sigmoid), nn.GELU(), nn.Linear(17, 3)), (30,)
    ),
    "784-1-3": Model(lambda: mlp(784, 1, 3, act=nn.Identity), (784,)),
    "784-64-10": Model(lambda: mlp(784, 64, 10, act=nn.Softplus), (784,)),
    "part of a row": Model(lambda: Through(lambda s, x: s.a(x[:, 1:]), a=mlp(32, 31, 5, act=nn.Tanh)), (33,)),
    "distances": Model(
        lambda: Through(
            lambda s, x: s.o(torch.exp(-torch.cdist(s.a(x), s.c))),
            a=nn.Linear(30, 17),
            c=numbers(9, 17),
            o=nn.Linear(9, 3),
        ),
        (30,),
    ),
    "bilinear": Model(
        lambda: Through(
            lambda s, x: s.o(s.b(s.a(x), s.a(x))), a=nn.Linear(30, 7), b=nn.Bilinear(7, 7, 5), o=nn.Linear(5, 3)
        ),
        (30,),
    ),
    "records as columns": Model(
        lambda: Through(
            lambda s, x: s.o(torch.einsum("bd,kd->kb", x, s.w).t()), w=numbers(13, 30), o=nn.Linear(13, 3)
        ),
        (30,),
    ),
    "encoder": Model(
        lambda: Through(
            lambda s, x: s.o(s.e(x).mean(1)),
            e=nn.TransformerEncoderLayer(30, 5, 64, 0.0, batch_first=True),
            o=nn.Linear(30, 3),
        ),
        (11, 30),
    ),
    "multihead": Model(
        lambda: Through(
            lambda s, x: s.o(s.m(x, x, x)[0].mean(1)),
            m=nn.MultiheadAttention(30, 5, batch_first=True),
            o=nn.Linear(30, 3),
        ),
        (11, 30),
    ),
    "small bert": Model(SmallBert, (16,), words=300),
    "lstm": Model(lambda: sequence(nn.LSTM(30, 19, batch_first=True), 19), (7, 30)),
    "gru": Model(lambda: sequence(nn.GRU(30, 19, batch_first=True), 19), (7, 30)),
    "words, conv1d": Model(
        lambda: Through(
            lambda s, x: s.o(s.c(s.e(x).transpose(1, 2)).amax(-1)),
            e=nn.Embedding(50, 24),
            c=nn.Conv1d(24, 16, 3, padding=1),
            o=nn.Linear(16, 3),
        ),
        (21,),
        words=50,
    ),
    "bag of words": Model(lambda: nn.Sequential(nn.EmbeddingBag(50, 24), nn.Linear(24, 3)), (21,), words=50),
    "images": Model(images, (3, 16, 16)),
    "larger images": Model(images, (3, 32, 32)),
    "1×1 convolutions": Model(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.Hardswish(), nn.Conv2d(8, 5, 1), nn.Flatten(), nn.Linear(5 * 81, 3)
        ),
        (3, 9, 9),
    ),
    "conv3d": Model(
        lambda: nn.Sequential(
            nn.Conv3d(2, 5, 3), nn.Mish(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(5, 3)
        ),
        (2, 6, 6, 6),
    ),
    "transposed": Model(
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 6, 3, 2), nn.ELU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(24, 3)
        ),
        (3, 7, 7),
    ),
    "resampled": Model(
        lambda: Through(
            lambda s, x: s.o(functional.interpolate(x, (12, 12), mode="bicubic").flatten(1)), o=nn.Linear(432, 3)
        ),
        (3, 8, 8),
    ),
    "sorted, cumulated": Model(
        lambda: Through(
            lambda s, x: s.o(s.a(x).sort(1)[0].cumsum(1).logcumsumexp(1)), a=nn.Linear(30, 17), o=nn.Linear(17, 3)
        ),
        (30,),
    ),
    "spectrum": Model(
        lambda: Through(lambda s, x: s.o(torch.fft.rfft(s.a(x)).abs()), a=nn.Linear(30, 30), o=nn.Linear(16, 3)),
        (30,),
    ),
    "mlp": shipped("mlp", 1, 28, 28),
    "cnn-small": shipped("cnn-small", 1, 28, 28),
    "cnn8": shipped("cnn8", 1, 28, 28, most=HEAVY),
    "resnet18": shipped("resnet18", 3, 32, 32, most=3),
}
"""A model of the catalogue is one line."""


def experts(s: Any, x: Tensor) -> Tensor:
    chosen = s.gate(x)[:, 0] > 0
    h = x.new_zeros(len(x), 16)
    h[chosen], h[~chosen] = s.a(x[chosen]), s.b(x[~chosen])
    found: Tensor = s.o(h)
    return found


BROKEN: dict[str, Model] = {
    "batch mean": Model(
        lambda: Through(lambda s, x: s.o(s.a(x) - s.a(x).mean(0)), a=nn.Linear(30, 17), o=nn.Linear(17, 3)), (30,)
    ),
    "sum of rows before": Model(
        lambda: Through(lambda s, x: s.o(s.a(x).cumsum(0)), a=nn.Linear(30, 17), o=nn.Linear(17, 3)), (30,)
    ),
    "matrix exponential": Model(
        lambda: Through(lambda s, x: s.o(torch.matrix_exp(x / 3).flatten(1)), o=nn.Linear(81, 3)), (9, 9)
    ),
    "experts": Model(
        lambda: Through(
            experts, gate=nn.Linear(30, 1), a=nn.Linear(30, 16), b=nn.Linear(30, 16), o=nn.Linear(16, 3)
        ),
        (30,),
    ),
}
