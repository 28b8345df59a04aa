"""Adapters of any model: what is trained, what is sent, what a run keeps, and what cannot be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modicum as mo
from modicum.config import experiment, read
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, make_model
from modicum.federation.simulation import Simulation
from modicum.models.low_rank import (
    Adapters,
    LowRank,
    can_adapt,
    from_options,
    low_rank_layers,
    merge,
    with_adapters,
)

FILE = """
[data]
name = "digits"
clients = 3
[privacy]
budgets = inf
[model]
name = "mlp"
adapters = { rank = 3, targets = ["0"] }
[method]
name = "dp-sgd"
lr = 1.0
[run]
rounds = 2
"""
KEPT = {"adapters": {"rank": 3, "targets": ["1"]}}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 16), nn.Linear(16, 10)
    )


def digits(budgets: float = float("inf")) -> mo.Federation:
    return mo.Federation.from_dataset("digits", clients=3, test=0.2, budgets=budgets)


def run_of(folder: Path, model: Any, adapters: Any, rounds: int = 1, **how: Any) -> mo.Run:
    method = mo.methods.DpSgd(lr=1.0)
    return mo.train(digits(), model=model, adapters=adapters, method=method, rounds=rounds, folder=folder, **how)


def moved(run: mo.Run, first: nn.Module) -> set[str]:
    before = dict(first.named_parameters())
    return {name for name, value in run.parameters.items() if not torch.equal(value, before[name])}


def test_the_first_model_is_the_frozen_one() -> None:
    x = torch.rand(5, 1, 8, 8)
    model = with_adapters(layers(), Adapters(rank=2, targets=("0", "3")), 0)
    assert torch.equal(model(x), layers()(x))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "0.lora_A.weight",
        "0.lora_B.weight",
        "3.lora_A.weight",
        "3.lora_B.weight",
        "4.weight",
        "4.bias",
    }
    again, other = (with_adapters(layers(), Adapters(rank=2, targets=("0",)), seed) for seed in (0, 1))
    assert torch.equal(dict(again.named_parameters())["0.lora_A.weight"], model.get_parameter("0.lora_A.weight"))
    assert not torch.equal(other.get_parameter("0.lora_A.weight"), model.get_parameter("0.lora_A.weight"))


@pytest.mark.parametrize("rounds", [1, 2])
def test_every_weight_that_has_a_gradient_has_changed(tmp_path: Path, rounds: int) -> None:
    """Without noise, which would move all of them. B is zero at first: A has no gradient in the first step."""
    run = run_of(tmp_path / "r", layers(), {"rank": 2, "targets": ["0", "3"]}, rounds)
    first = with_adapters(layers(), Adapters(rank=2, targets=("0", "3")), 0)
    still = {"0.lora_A.weight", "3.lora_A.weight"} if rounds == 1 else set()
    assert set(run.parameters) - moved(run, first) == still


def test_an_adapter_that_nothing_reaches_is_found(tmp_path: Path) -> None:
    """The negative control of the test above: one whose output is thrown away does not change."""

    class Severed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused = layers(), nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out + 0 * self.unused(out)

    torch.manual_seed(0)
    model = Severed()
    how = {"rank": 2, "targets": ["0", "unused"], "train": ["inner.4"]}
    run = run_of(tmp_path / "r", model, how, rounds=2)
    first = with_adapters(copy.deepcopy(model), from_options({"adapters": how})[0], 0)  # type: ignore[arg-type]
    assert set(run.parameters) - moved(run, first) == {"unused.lora_A.weight", "unused.lora_B.weight"}


def test_only_adapters_and_head_are_sent_and_a_folder_brings_them_back(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", "mlp", KEPT["adapters"])
    sizes = {name: tuple(value.shape) for name, value in run.parameters.items()}
    assert sizes == {"1.lora_A.weight": (3, 64), "1.lora_B.weight": (64, 3), "3.weight": (10, 64), "3.bias": (10,)}
    x = torch.rand(4, 1, 8, 8)
    again = mo.load(tmp_path / "r")
    assert isinstance(again.model[1], LowRank)
    assert torch.equal(again.predict(x), run.predict(x))


def test_another_base_is_refused_and_the_right_one_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", layers(), {"rank": 2, "targets": ["3"]})
    said = " ".join(run.certificate.assumptions)
    assert "frozen weights " in said
    other = layers()
    with torch.no_grad():
        other[0].weight[0] += 1e-3
    assert torch.equal(mo.load(tmp_path / "r", model=layers()).model[3].lora_A.weight, run.model[3].lora_A.weight)
    with pytest.raises(UserError, match="the same pretrained weights"):
        mo.load(tmp_path / "r", model=other).model  # noqa: B018
    different = run_of(tmp_path / "other", other, {"rank": 2, "targets": ["3"]})
    assert different.certificate.run != run.certificate.run


def test_a_file_says_the_same_as_python(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(FILE.replace('["0"]', '["1"]'))
    built = experiment(read(tmp_path / "a.toml"))
    named = make_model(built)
    assert [name for name, _ in low_rank_layers(named)] == ["1"]
    same = make_model(
        Experiment(federation=built.federation, method=built.method, model="mlp", model_options=KEPT)
    )
    assert all(torch.equal(a, b) for a, b in zip(named.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["messages", "sums"])
def test_behind_secure_aggregation_adapters_alone_are_summed(tmp_path: Path, kind: str) -> None:
    view = {"messages": "server-sees-messages", "sums": "secure-aggregation"}[kind]
    made = Experiment(
        federation=digits(8.0),
        method=mo.methods.DpSgd(lr=0.5, view=view),
        model="mlp",
        model_options=KEPT,
        rounds=1,
        secure_aggregation="protocol" if kind == "sums" else "ideal",
    )
    run = Simulation(made, tmp_path / kind)
    list(run.rounds())
    assert run.kit.public is not None
    assert run.kit.public.dimension == 2 * 3 * 64 + 650  # the length of every message
    run.close()


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"rank": 2, "targets": ["query"]}, "is called 'query': there are 0, 3, 4"),
        ({"rank": 2}, "say which layers get adapters: targets, of 0, 3, 4"),
        ({"rank": 2, "targets": "3"}, 'are names of layers, e.g. targets = ["query", "value"]'),
        ({"rank": -1, "targets": ["3"]}, "whole number from 0 to 4096, got -1"),
        ({"rank": 2.5, "targets": ["3"]}, "whole number from 0 to 4096, got 2.5"),
        ({"rank": 2, "alpha": 0.0, "targets": ["3"]}, "positive number, got 0.0"),
        ({"rank": 2, "alpha": "much", "targets": ["3"]}, "positive number, got 'much'"),
        ({"size": 2}, "no option 'size': use rank, targets, alpha, train"),
        ({"rank": 0}, "say what is trained"),
        ({"rank": 2, "targets": ["3"], "train": ["clasifier"]}, "has 'clasifier' in its name: it has 0.weight"),
    ],
)
def test_what_cannot_be_says_what_there_is(adapters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        with_adapters(layers(), from_options({"adapters": adapters})[0] or Adapters(), 0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_repeated_layers_are_listed_once() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(block, 3)
    assert not any(
        "out_proj" in name for name in can_adapt(model)
    )  # attention reads its weight without calling it
    with pytest.raises(UserError, match=r"there are linear1 \(3\), linear2 \(3\)"):
        with_adapters(model, Adapters(targets=("out_proj",)), 0)


def test_biases_alone() -> None:
    model = with_adapters(layers(), Adapters(rank=0, train=("bias",)), 0)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {"0.bias", "3.bias", "4.bias"}


def test_a_tied_output_layer_is_not_trained_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
            self.out.weight = self.words.weight

    model = with_adapters(Tied(), Adapters(rank=2, targets=("inner",)), 0)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "inner.lora_A.weight",
        "inner.lora_B.weight",
    }


def test_merged_is_the_same_function_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", layers(), {"rank": 2, "targets": ["0", "3"], "alpha": 3.0}, rounds=2)
    x = torch.rand(6, 1, 8, 8)
    plain = layers()
    plain.load_state_dict(torch.load(run.export(tmp_path / "m.pt", "state-dict"), weights_only=True))
    assert torch.allclose(plain(x), run.model(x), atol=1e-5)
    assert not torch.equal(plain[0].weight, layers()[0].weight)
    assert len(list(low_rank_layers(run.model))) == 2
    assert not list(low_rank_layers(merge(copy.deepcopy(run.model))))
    folder = run.export(tmp_path / "adapter", "peft")
    assert (folder / "adapter_config.json").is_file()
