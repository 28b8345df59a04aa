"""Models of one's own: by name in files, frozen in part, called by the names of a record's tensors, exported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modicum as mo
from modicum.config import experiment, read
from modicum.core.records import Field
from modicum.data import federate, from_torch
from modicum.deploy.silo.terms import Terms, digest
from modicum.errors import UserError
from modicum.models import named
from modicum.models.adapter import adapted
from modicum.models.named import build_named
from tests.federation.test_learning import LENGTH, ROWS, WORDS, Named, tokens

CODE = """
from torch import nn

def wide(input_shape, outputs, hidden=8, act="tanh"):
    acts = {"tanh": nn.Tanh, "relu": nn.ReLU}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, int(hidden)), acts[act](), nn.Linear(int(hidden), outputs))

def broken(outputs):
    raise RuntimeError("no weights\\nhere")

def nothing():
    return 3
"""
FILE = """
[data]
name = "digits"
clients = 4
[model]
name = "ownmodels:wide"
hidden = 6
act = "relu"
[method]
name = "dp-sgd"
[run]
rounds = 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ownmodels.py").write_text(CODE)
    (tmp_path / "own.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ownmodels", raising=False)
    return tmp_path


def test_a_file_names_a_factory_and_its_run_is_used_without_the_module(here: Path) -> None:
    made = experiment(read("own.toml"))
    run = mo.train(
        made.federation, model="ownmodels:wide", model_options=dict(made.model_options), method="dp-sgd", rounds=2
    )
    x = made.federation.data.test.x
    again = mo.load(run.folder)
    assert again.model[1].out_features == 6
    assert torch.equal(again.predict(x), run.predict(x))
    assert here.exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ownmodels:narrow", {}, "there is no model 'ownmodels:narrow'"),
        ("nowhere:wide", {}, "No module named 'nowhere'"),
        ("ownmodels:wide", {"depth": 3}, "has no option 'depth': it takes hidden, act"),
        ("ownmodels:wide", {"act": "cubic"}, "cannot be made with these options: 'cubic'"),
        ("ownmodels:broken", {}, "no weights"),
        ("ownmodels:nothing", {}, "a factory returns an nn.Module"),
        ("resnet99", {}, "unknown model 'resnet99'"),
    ],
)
def test_what_cannot_be_made_is_one_line(here: Path, name: str, options: dict[str, Any], message: str) -> None:
    assert here
    with pytest.raises(UserError, match=message) as error:
        build_named(name, Field((1, 8, 8)), 10, 0, options)
    assert "\n" not in str(error.value)


def test_a_deployment_takes_entry_points_alone(here: Path) -> None:
    with pytest.raises(UserError, match="no code travels"):
        Terms(read(here / "own.toml"), ("a", "b"))


class File:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return "acme.py"

    def locate(self) -> Path:
        return self.folder / "acme.py"


def entry(folder: Path, version: str, code: str) -> Any:
    folder.mkdir()
    (folder / "acme.py").write_text(code)
    file = File(folder)
    dist = SimpleNamespace(name="acme-models", version=version, files=[file])
    return SimpleNamespace(name="acme", dist=dist, load=lambda: lambda outputs: nn.Linear(64, outputs))


def test_package_version_and_digest_are_part_of_the_terms(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "acme.toml").write_text(
        FILE.replace("ownmodels:wide", "acme").split("hidden")[0] + "[run]\nrounds = 2\n"
    )
    found = []
    for i, (version, code) in enumerate((("1.0", "a = 1"), ("1.0", "a = 1"), ("1.1", "a = 1"), ("1.0", "a = 2"))):
        made = entry(here / str(i), version, code)
        monkeypatch.setattr(named, "entry_points", lambda group, made=made: [made] if "models" in group else [])
        found.append(named.package_of("acme"))
        config = read(here / "acme.toml")
        found.append(digest(config))
        Terms(config, ("a", "b"))
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert len({found[1], found[5], found[7]}) == 3  # another version, other code: no agreement


class ByName(nn.Module):
    """As Hugging Face writes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask[..., None].float()
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1).clamp_min(1)
        return SimpleNamespace(logits=self.head(mean), loss=None)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_called_by_the_names_of_a_records_tensors(tmp_path: Path) -> None:
    ids, masks = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    data = federate(from_torch([Named(ids[:60], masks[:60]), Named(ids[60:], masks[60:])]), test=0.2)
    run = mo.train(data, model=ByName(), method="dp-sgd", rounds=2, budgets=8.0, folder=tmp_path / "r")
    assert set(run.parameters) == {"embedding.weight", "head.weight", "head.bias"}
    x = {"input_ids": ids, "attention_mask": masks}
    assert torch.equal(mo.load(tmp_path / "r", model=ByName()).predict(x), run.predict(x))
    model = adapted(ByName(), data.inputs)
    assert adapted(model, data.inputs)(x).shape == (ROWS, 2)


def trained(tmp_path: Path) -> mo.Run:
    fed = mo.Federation.from_dataset("digits", clients=3, budgets=8.0)
    return mo.train(fed, model="mlp", method="dp-sgd", rounds=1, folder=tmp_path / "run")


def test_weights_for_other_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = trained(tmp_path)
    state = torch.load(run.export(tmp_path / "m.pt", "state-dict"), weights_only=True)
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in state.items())
    assert load_file(run.export(tmp_path / "m.safetensors")).keys() == state.keys()
    with pytest.raises(UserError, match="there already"):
        run.export(tmp_path / "m.pt", "state-dict")
    with pytest.raises(UserError, match="unknown format 'pickle'"):
        run.export(tmp_path / "n", "pickle")
    for format in ("hugging-face", "peft"):
        with pytest.raises(UserError, match="use state-dict, safetensors or onnx"):
            run.export(tmp_path / "n", format)


def test_onnx_gives_the_same_answers(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    run = trained(tmp_path)
    path = run.export(tmp_path / "m.onnx", "onnx")
    x = torch.rand(5, 1, 8, 8)
    (found,) = reference.ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    assert np.array_equal(found.argmax(1), run.predict(x).numpy())


@pytest.mark.filterwarnings("ignore")
def test_lora_from_the_first_round_to_the_adapter(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def made() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(
            **sizes,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=LENGTH,
        )
        base = transformers.BertForSequenceClassification(config)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.0)
        return peft.get_peft_model(base, lora)

    ids, masks = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    data = federate(from_torch([Named(ids[:60], masks[:60]), Named(ids[60:], masks[60:])]), test=0.2)
    run = mo.train(data, model=made(), method="dp-sgd", rounds=1, budgets=8.0, folder=tmp_path / "r")
    assert all("lora" in name or "classifier" in name for name in run.parameters)
    x = {"input_ids": ids[:4], "attention_mask": masks[:4]}
    again = mo.load(tmp_path / "r", model=made())
    assert torch.equal(again.predict(x), run.predict(x))
    folder = run.export(tmp_path / "adapter", "peft")
    assert (folder / "adapter_config.json").is_file()
    assert (run.export(tmp_path / "whole", "hugging-face") / "config.json").is_file()
