"""Layers without a rule, weights that several calls use, rows that are everybody's: all on the fast path."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.compute import Flat, clipped_sum
from modicum.compute.clipping import gathered, shared_weights
from modicum.compute.clipping.clipped_sum import SlowClippingWarning
from modicum.compute.clipping.reference import reference_clipped_sum

engine = import_module("modicum.compute.clipping.clipped_sum")  # the package has a function of that name
WORDS, WIDTH, LENGTH = 40, 16, 6


def losses(out: Tensor, y: Tensor) -> Tensor:
    if out.dim() == 2:
        return cross_entropy(out, y, reduction="none")
    return cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


class TiedOutput(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(torch.tanh(self.inner(self.words(x)))))
        return found


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.inner(torch.tanh(self.inner(self.words(x))))).mean(1))
        return found


class Scaled(nn.Module):
    """A bare parameter beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * self.scale
        return found


class Encoder(nn.Module):
    """Torch's own layer, whose attention has a packed weight, and positions of shape (1, length)."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.middle, self.out = middle, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.words(x) + self.places(torch.arange(LENGTH)[None]))
        found: Tensor = self.out(y.mean(1))
        return found


def torch_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)


CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "tied output": (TiedOutput, True),
    "called twice": (CalledTwice, False),
    "bare parameter": (lambda: Encoder(Scaled()), False),
    "torch's encoder": (lambda: Encoder(torch_layer()), False),
}


@pytest.mark.parametrize("bound", [0.05, 100.0])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_the_reference_and_nothing_is_slow(name: str, bound: float) -> None:
    torch.manual_seed(0)
    make, every = CASES[name]
    model = make().double()
    x = torch.randint(WORDS, (7, LENGTH))
    x[0] = x[0, 0]  # one word all over
    y = torch.randint(WORDS if every else 3, (7, LENGTH) if every else (7,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowClippingWarning)
        found = clipped_sum(model, losses, x, y, Flat(bound))
    truth = reference_clipped_sum(model, losses, x, y, Flat(bound))
    torch.testing.assert_close(found.norms, truth.norms, rtol=1e-9, atol=1e-12)
    for key, total in truth.total.items():
        torch.testing.assert_close(found.total[key], total, rtol=1e-8, atol=1e-11)


def test_parts_of_a_tied_weight_measured_apart_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: norms of the two uses by themselves are not those of their sum."""
    torch.manual_seed(0)
    model = TiedOutput().double()
    x, y = torch.randint(WORDS, (5, LENGTH)), torch.randint(WORDS, (5, LENGTH))
    truth = reference_clipped_sum(model, losses, x, y, Flat(1.0)).norms

    def apart(self: shared_weights.TiedWeight) -> object:
        squares, rows = self.lookups.measure_with(None)
        more, others = self.linear.measure()
        return squares + more, shared_weights.TiedRows(rows, others)

    monkeypatch.setattr(shared_weights.TiedWeight, "measure", apart)
    found = clipped_sum(model, losses, x, y, Flat(1.0)).norms
    assert float((found / truth - 1).abs().max()) > 1e-5


class Causal(nn.Module):
    """A mask between places, made by the model, and a module of somebody's own to which it is given."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.words, self.middle, self.out = nn.Embedding(WORDS, WIDTH), middle, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.middle(self.words(x), torch.ones(LENGTH, LENGTH).tril())[:, -2])
        return found


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x, attn_mask=earlier == 0, need_weights=False)[0]
        return found


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) + earlier.to(x).mean(1)[:, None] * self.scale


@pytest.mark.parametrize("examples", [LENGTH - 1, LENGTH])
@pytest.mark.parametrize("middle", [Attends, Weighs])
def test_a_mask_is_everybodys_even_where_there_are_as_many_examples_as_places(
    middle: Callable[[], nn.Module], examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Causal(middle()).double()
    x, y = torch.randint(WORDS, (examples, LENGTH)), torch.arange(examples) % 3
    truth = reference_clipped_sum(model, losses, x, y, Flat(0.1))

    def off() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowClippingWarning)
            found = clipped_sum(model, losses, x, y, Flat(0.1))
        return max(float((found.total[name] - total).abs().max()) for name, total in truth.total.items())

    assert off() < 1e-12
    monkeypatch.setattr(engine, "shared_inputs", lambda *_: ())  # negative control: by the number of rows alone
    if examples == LENGTH:
        try:
            assert off() > 1e-4
        except SlowClippingWarning:
            assert middle is Attends


def test_a_module_that_draws_or_cannot_be_run_for_each_example_goes_the_slow_way() -> None:
    torch.manual_seed(0)
    dropping = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
    x, y = torch.randint(WORDS, (4, LENGTH)), torch.randint(3, (4,))
    with pytest.warns(SlowClippingWarning):
        clipped_sum(Encoder(dropping), losses, x, y, Flat(1.0))


def test_hugging_face_models_take_the_fast_path_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2Config(
        **small, n_embd=16, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    llama = transformers.LlamaConfig(
        **small, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, tie_word_embeddings=True,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(input_ids=x, attention_mask=torch.ones_like(x)).logits
            return found

    x, y = torch.randint(3, WORDS, (4, LENGTH)), torch.randint(WORDS, (4, LENGTH))
    for model in (transformers.GPT2LMHeadModel(gpt2), transformers.LlamaForCausalLM(llama)):
        wrapped = Logits(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error", SlowClippingWarning)
            found = clipped_sum(wrapped, losses, x, y, Flat(0.1))
        truth = reference_clipped_sum(wrapped, losses, x, y, Flat(0.1))
        torch.testing.assert_close(found.norms, truth.norms, rtol=1e-3, atol=1e-6)


class Stacked(nn.Module):
    """Several parameters of one shape, one that is alone with its own, and one that two calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.again = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for layer in self.layers:
            y = torch.relu_(self.again(layer(y)))  # in place on what a linear layer gives
        found: Tensor = self.out(y.mean(1))
        return found


@pytest.mark.parametrize("together", [False, True])
def test_small_gradients_may_be_measured_together(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are on a GPU: the same norms and sums, one record not finite, one of weight 0."""
    torch.manual_seed(0)
    model, x, y = Stacked(), torch.randint(WORDS, (6, LENGTH)), torch.arange(6) % 3
    x[2, 1] = WORDS  # no such row: this record counts as zero
    weights = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 1.0])
    seen: list[str] = []

    def on_gpu(_: Tensor) -> bool:
        seen.append("asked")
        return together

    monkeypatch.setattr(gathered, "on_gpu", on_gpu)
    found = clipped_sum(model, losses, x, y, Flat(0.3), weights=weights)
    keep = torch.tensor([0, 1, 3, 4, 5])
    truth = reference_clipped_sum(model, losses, x[keep], y[keep], Flat(0.3), weights=weights[keep])
    assert seen
    assert found.norms[2] == 0.0
    torch.testing.assert_close(found.norms[keep], truth.norms)
    assert list(found.total) == list(truth.total)
    for name, total in truth.total.items():
        torch.testing.assert_close(found.total[name], total)
