"""Four silos fine-tune adapters of a model of transformers, each from a folder of its own; two are killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modicum as mo
from modicum.deploy.flower.up import Deployment
from modicum.federation.records import read_records
from modicum.privacy.verify import verify
from tests.deploy.flower.helpers import alone, deployed_model, deployment, in_process, pid_of_server, silent

pytestmark = pytest.mark.heavy  # tests/models/test_low_rank.py has adapters over silos in process

SILOS, RECORDS, LENGTH = ("east", "north", "south", "west"), 24, 8
WORDS = ["[PAD]", "[UNK]", "fever", "cough", "pain", "rash", "rest", "walk", "sleep", "food", "well", "home"]
EXPERIMENT = """
[data]
csv = "notes.csv"
client_column = "clinic"
label_column = "ill"
id_column = "id"
classes = 2

[data.columns]
note = { text = 8, tokenizer = "base" }

[model]
name = "hf:base"
adapters = { rank = 2, targets = ["query", "value"], alpha = 4 }

[privacy]
budgets = 8.0

[method]
name = "dp-sgd"
lr = 1.0

[run]
rounds = 2
seed = 5
simulation = true
"""


@dataclass
class Played:
    """A deployment after its run, and the folder of its experiment."""

    made: Deployment
    folder: Path
    killed: list[str]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with random weights and a tokenizer of whole words, in the files of save_pretrained."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("public") / "base"
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=LENGTH, **small)
    transformers.BertModel(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]"}))
    return folder


def rows_of(silo: str) -> list[str]:
    """Notes of two kinds, of different lengths."""
    drawn = np.random.default_rng(SILOS.index(silo))
    rows = []
    for i in range(RECORDS):
        kind, words = i % 2, drawn.integers(2, LENGTH)
        note = " ".join(drawn.choice(WORDS[2:7] if kind else WORDS[7:], words))
        rows.append(f"{silo},{silo}-{i},{note},{kind}")
    return rows


def own_folder(made: Deployment, folder: Path, silo: str, base: Path) -> None:
    """A silo's records, its copy of the experiment and of the base, which lies elsewhere than anybody else's."""
    own = folder / silo
    shutil.copytree(base, own / f"{silo}-base")
    for path in own.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (own / "notes.csv").write_text("id,note,ill\n" + "\n".join(row.split(",", 1)[1] for row in rows_of(silo)))
    (own / "notes.csv").chmod(0o600)
    text = made.at.experiment.read_text().replace(str(folder / "base"), str(own / f"{silo}-base"))
    (own / "experiment.toml").write_text(text)
    said = made.at.silo(silo).read_text().replace(str(made.at.experiment), str(own / "experiment.toml"))
    table = '[data]\ncsv = "{}"\nlabel_column = "ill"\nid_column = "id"\nclasses = 2\n'
    made.at.silo(silo).write_text(said + table.format(own / "notes.csv"))


@pytest.fixture(scope="module")
def played(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """After the first round the server and a silo are killed; both are started again and go on."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(base, folder / "base")
    table = "clinic,id,note,ill\n" + "\n".join(row for silo in SILOS for row in rows_of(silo))
    (folder / "notes.csv").write_text(table)
    killed: list[str] = []

    def watch(found: Any) -> None:
        if found.round == 0:
            os.kill(pid_of_server(made), signal.SIGKILL)
            process = made.crew.members["silo-north"].process
            assert process is not None
            process.kill()
            killed.extend(("server", "north"))

    with alone():
        made = deployment(folder, EXPERIMENT)
        for silo in SILOS:
            own_folder(made, folder, silo, base)
        hidden = [re.sub(r",[a-z ]+,", ",,", line) for line in table.splitlines()[1:]]
        (folder / "notes.csv").write_text("clinic,id,note,ill\n" + "\n".join(hidden))  # the server has no text
        with made.running(silent):
            made.run(watch, silent)
    (folder / "notes.csv").write_text(table)
    return Played(made, folder, killed)


def test_it_ends_in_the_model_of_a_simulation_whoever_was_killed(played: Played) -> None:
    assert played.killed == ["server", "north"]
    assert [record.round for record in read_records(played.made.at.server / "metrics.jsonl")] == [0, 1]
    expected, _ = in_process(played.folder, EXPERIMENT)
    found = deployed_model(played.made)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    assert {name for name in found if "lora" not in name} == {"classifier.weight", "classifier.bias"}


def test_every_certificate_follows_from_its_ledger_and_names_the_base(played: Played) -> None:
    at = played.made.at
    for folder in (at.server, *(at.state(silo) for silo in SILOS)):
        assert verify(folder).matches
        certificate = mo.Certificate.read(folder / "certificate.json")
        assert "frozen weights " in " ".join(certificate.assumptions)
        assert max(line.epsilon for line in certificate.clients.values()) <= 8.0


def test_the_adapter_of_the_servers_folder_loads_in_transformers(
    played: Played, base: Path, tmp_path: Path
) -> None:
    """Merged into the base by transformers alone; and by peft, where it is installed."""
    import transformers

    run = mo.load(played.made.at.server)
    ids = torch.randint(2, len(WORDS), (5, LENGTH), generator=torch.Generator().manual_seed(0))
    x = {"input_ids": ids, "attention_mask": torch.ones(5, LENGTH, dtype=torch.bool)}
    kind = transformers.AutoModelForSequenceClassification
    with torch.no_grad():
        expected = run.model(x)
        merged = kind.from_pretrained(run.export(tmp_path / "whole", "hugging-face")).eval()
        assert torch.allclose(merged(**x).logits, expected, atol=1e-5)
        adapter = run.export(tmp_path / "adapter", "peft")
        peft = pytest.importorskip("peft", reason="peft is not installed")
        loaded = peft.PeftModel.from_pretrained(kind.from_pretrained(base, num_labels=2), adapter).eval()
        assert torch.allclose(loaded(**x).logits, expected, atol=1e-5)
        assert not torch.allclose(kind.from_pretrained(base, num_labels=2).eval()(**x).logits, expected, atol=1e-3)
