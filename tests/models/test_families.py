"""Models of Hugging Face take the fast path as they are; the table in docs/clipping.md lists those tried here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, reference_clipped_sum
from modicum.compute.clipping.clipped_sum import Route

PAGE = Path(__file__).parents[2] / "docs" / "clipping.md"
WORDS, LONG, BATCH = 60, 12, 6
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
STEADY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 40}

FAMILIES: dict[str, Callable[[Any], nn.Module]] = {
    "BERT": lambda t: t.BertForSequenceClassification(t.BertConfig(**SIZES, **STEADY, **TEXT, num_labels=3)),
    "RoBERTa": lambda t: t.RobertaForSequenceClassification(
        t.RobertaConfig(**SIZES, **STEADY, **TEXT, num_labels=3, pad_token_id=0)
    ),
    "DistilBERT": lambda t: t.DistilBertForSequenceClassification(
        t.DistilBertConfig(
            **TEXT, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        )
    ),
    "GPT-2": lambda t: t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "Llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=2)),
    "ViT": lambda t: t.ViTForImageClassification(
        t.ViTConfig(**SIZES, **STEADY, image_size=16, patch_size=4, num_labels=3)
    ),
}  # fmt: skip


class Logits(nn.Module):
    """Words with a mask, or images, to logits; of a language model those of the last place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            found: Tensor = self.inner(pixel_values=x).logits
        else:
            found = self.inner(input_ids=x, attention_mask=(x != 0).long()).logits
        return found if found.dim() == 2 else found[:, -1]


def each(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y, reduction="none")


@pytest.mark.parametrize("name", list(FAMILIES))
def test_models_of_hugging_face_take_the_fast_path_and_are_right(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = Logits(FAMILIES[name](transformers)).train()
    x = torch.rand(BATCH, 3, 16, 16) if name == "ViT" else torch.randint(1, WORDS, (BATCH, LONG))
    y, clipper = torch.arange(BATCH) % 3, Clipper(model)
    if name in ("BERT", "RoBERTa", "DistilBERT"):
        x[0, LONG // 2 :] = 0  # one record with padding
    found, truth = (run(each, x, y, Flat(0.5)) for run in (clipper, lambda *a: reference_clipped_sum(model, *a)))
    assert {route for known in clipper.routes.values() for route in known.values()} == {Route.BOOKS}
    torch.testing.assert_close(found.norms, truth.norms, rtol=1e-3, atol=1e-5)
    for key, total in truth.total.items():
        torch.testing.assert_close(found.total[key], total, rtol=1e-2, atol=1e-4)


def test_the_page_lists_them() -> None:
    (row,) = re.findall(r"^Tried by a test, from `transformers`: (.*)\.$", PAGE.read_text(encoding="utf-8"), re.M)
    assert row.split(", ") == list(FAMILIES)
