"""The measurement of more than a head: its sums are those of whole batches, and its stand-in is what it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Flat
from modicum.core.layout import Layout
from modicum.core.parts import Batch
from modicum.training.plain import Supervised
from modicum_bench.leaderboard import stage_data
from modicum_bench.leaderboard.stage_data import SUPERCLASS, InPieces
from tests.models.test_last_stage import made, moved


def test_pieces_of_a_table_give_the_sum_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_data, "PIECE", 8)  # two views each: pieces of at most 4 records
    model = moved(made(tmp_path, whole=1, reach=0.1, views=2))
    images, y = torch.rand(9, 3, 8, 8, generator=torch.Generator().manual_seed(5)), torch.arange(9) % 3
    table = model.features(images).detach()
    theta, losses, clip = Layout.of(model.head).read(model.head)[None], Supervised().losses, [Flat(0.5)]
    order = torch.tensor([7, 2, 0, 8, 1, 5, 3])
    whole = LoopBackend(model.head).clipped_sums(theta, [Batch(table[order], {"y": y[order]})], losses, clip)
    parts = InPieces(model.head, table).clipped_sums(theta, [Batch(order, {"y": y[order]})], losses, clip)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[1][0], whole[1][0], rtol=1e-5, atol=1e-6)


def test_superclasses_have_five_classes_each() -> None:
    assert Counter(SUPERCLASS) == dict.fromkeys(range(20), 5)
