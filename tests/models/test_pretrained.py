"""Models of transformers from a folder: the head that a task needs, digests, and adapters that peft loads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import modicum as mo
from modicum.compute.client_batched import fixed_shape
from modicum.compute.client_batched.choose import choose
from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping.loop import LoopBackend
from modicum.config import read
from modicum.core.parts import Batch
from modicum.core.records import Field
from modicum.core.stack import Pool
from modicum.data import Arrays, Dataset, federate, from_torch
from modicum.deploy.silo.terms import agreed_parts
from modicum.errors import UserError
from modicum.federation import evaluation
from modicum.federation.experiment import Experiment, make_model
from modicum.federation.identity import run_id
from modicum.models.adapter import adapted
from modicum.models.features import compute, extractor, featured
from modicum.models.low_rank import from_options, with_adapters
from modicum.models.named import agreed_name, build_named
from modicum.tasks import next_token
from tests.compute.stacks import error
from tests.federation.test_learning import LENGTH, ROWS, WORDS, Named, tokens

TOKENS = {"input_ids": Field((LENGTH,), "int", WORDS), "attention_mask": Field((LENGTH,), "bool")}
SMALL = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def bert(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with random weights, as if it had been pretrained."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SMALL, hidden_size=8, intermediate_size=16, max_position_embeddings=LENGTH, attn_implementation="eager"
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's configuration without weights."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2)
    config.save_pretrained(folder)
    return folder


def offices() -> Any:
    ids, masks = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return federate(from_torch([Named(ids[:60], masks[:60]), Named(ids[60:], masks[60:])], values=WORDS), test=0.2)


def test_the_head_is_the_tasks(bert: Path, gpt2: Path) -> None:
    classes = build_named(f"hf:{bert}", TOKENS, 3, 0, {})
    assert type(classes).__name__ == "BertForSequenceClassification"
    assert set(classes.fresh_layers) == {"classifier", "bert.pooler.dense"}  # type: ignore[arg-type]
    assert all(p == 0.0 for name, p in vars(classes.config).items() if "dropout" in name and p is not None)
    assert type(build_named(f"hf:{gpt2}", TOKENS, WORDS, 0, {})).__name__ == "GPT2LMHeadModel"
    assert type(build_named(f"hf:{gpt2}", TOKENS, 3, 0, {})).__name__ == "GPT2ForSequenceClassification"
    mean = build_named(f"hf:{bert}", TOKENS, 3, 0, {"head": "mean"})
    ids, mask = torch.ones(2, LENGTH, dtype=torch.long), torch.ones(2, LENGTH, dtype=torch.bool)
    assert torch.equal(mean(ids, mask), torch.zeros(2, 3))  # a head that starts at zero


def test_its_first_weights_are_the_seeds(gpt2: Path) -> None:
    one, same, other = (build_named(f"hf:{gpt2}", TOKENS, 3, seed, {}).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"head": "tail"}, "unknown head 'tail'"), ({"depth": 2}, "no option 'depth': it takes head, dropout")],
)
def test_bad_options_are_one_line(bert: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_named(f"hf:{bert}", TOKENS, 3, 0, options)


def test_a_folder_without_a_model_is_one_line(transformers: Any, tmp_path: Path) -> None:
    assert transformers
    with pytest.raises(UserError, match=r"no config.json in .*save_pretrained"):
        build_named(f"hf:{tmp_path}", TOKENS, 3, 0, {})
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(UserError, match="holds no model that transformers knows") as error:
        build_named(f"hf:{tmp_path}", TOKENS, 3, 0, {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("head", "outputs"), [("classes", 3), ("mean", 3)])
def test_weights_that_are_not_all_read_are_no_pretrained_model(
    bert: Path, tmp_path: Path, head: str, outputs: int
) -> None:
    """Else layers would be drawn at random and stay so, under adapters or as a frozen encoder."""

    def made(folder: Path) -> torch.nn.Module:
        return build_named(f"hf:{folder}", TOKENS, outputs, 0, {"head": head})

    arrays = load_file(bert / "model.safetensors")
    for name, kept in {
        "renamed": {f"x.{name}": value for name, value in arrays.items()},
        "short": {name: value for name, value in arrays.items() if "layer.1" not in name},
        "whole": arrays,
    }.items():
        shutil.copytree(bert, tmp_path / name)
        save_file(kept, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    for name in ("renamed", "short"):
        with pytest.raises(UserError, match=r"leave out .* which would be random"):
            made(tmp_path / name)
    made(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "whole" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"as pytorch_model\.bin, which is not read: save them as safetensors"):
        made(tmp_path / "whole")


def test_an_encoder_that_nobody_trained_is_refused(gpt2: Path) -> None:
    with pytest.raises(UserError, match="a frozen encoder needs trained ones"):
        extractor(f"hf:{gpt2}", (LENGTH,))


def test_a_network_of_images_has_no_padding(transformers: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    model = build_named(f"hf:{tmp_path}", Field((3, 8, 8)), 5, 0, {})
    assert model.fresh_layers == ("classifier",)
    assert model(torch.rand(2, 3, 8, 8)).logits.shape == (2, 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("head", ["classes", "mean"])
def test_a_model_that_saw_the_private_records_is_refused(bert: Path, tmp_path: Path, head: str) -> None:
    """Its weights tell of them already, before any noise."""
    folder = Path(shutil.copytree(bert, tmp_path / "tuned"))
    card = "---\ndatasets:\n- someone/{}\n---\n"
    data = mo.Federation(offices(), (8.0, 8.0))
    wanted = Experiment(
        federation=data, method=mo.methods.DpSgd(), model=f"hf:{folder}", model_options={"head": head}
    )
    (folder / "README.md").write_text(card.format("others"))
    make_model(wanted)
    (folder / "README.md").write_text(card.format(data.data.dataset))
    with pytest.raises(UserError, match="shares records"):
        make_model(wanted)


def test_parties_agree_on_its_content_wherever_it_lies(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    here, there = (agreed_name(f"hf:{tmp_path / name}") for name in ("a", "b"))
    assert here == there
    (tmp_path / "b" / "model.safetensors").write_bytes(b"other weights")
    assert agreed_name(f"hf:{tmp_path / 'b'}") != here
    with pytest.raises(UserError, match=r"no config.json"):
        agreed_name(f"hf:{tmp_path}")


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_the_same_wherever_the_folder_lies(bert: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(bert, tmp_path / "moved"))
    data = mo.Federation(offices(), (8.0, 8.0))
    one, other = (
        run_id(Experiment(federation=data, method=mo.methods.DpSgd(), model=f"hf:{folder}"))
        for folder in (bert, moved)
    )
    assert one == other


def peft_model(transformers: Any, base: Path, adapter: Path) -> Any:
    """As somebody would load it who has never heard of Modicum."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    kind = transformers.AutoModelForSequenceClassification
    return peft.PeftModel.from_pretrained(kind.from_pretrained(base, num_labels=2), adapter).eval()


@pytest.mark.filterwarnings("ignore")
def test_adapters_from_the_first_round_to_peft(transformers: Any, bert: Path, tmp_path: Path) -> None:
    adapters = {"rank": 2, "targets": ["query", "value"], "alpha": 4.0}
    run = mo.train(
        offices(),
        model=f"hf:{bert}",
        adapters=adapters,
        method=mo.methods.DpSgd(lr=1.0),
        rounds=2,
        budgets=8.0,
        folder=tmp_path / "r",
    )
    assert all("lora" in name or "classifier" in name or "pooler" in name for name in run.parameters)
    x = {"input_ids": tokens()[:4], "attention_mask": torch.ones(4, LENGTH, dtype=torch.bool)}
    again = mo.load(tmp_path / "r")
    assert torch.equal(again.predict(x), run.predict(x))
    with torch.no_grad():
        expected = run.model(x)
        loaded = peft_model(transformers, bert, run.export(tmp_path / "adapter", "peft"))
        assert torch.allclose(loaded(**x).logits, expected, atol=1e-6)
        untrained = transformers.AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2).eval()
        assert not torch.allclose(untrained(**x).logits, expected, atol=1e-3)
        whole = run.export(tmp_path / "whole", "hugging-face")
        merged = transformers.AutoModelForSequenceClassification.from_pretrained(whole).eval()
        assert torch.allclose(merged(**x).logits, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_language_models_turned_layers(transformers: Any, gpt2: Path, tmp_path: Path) -> None:
    """GPT-2 keeps a row for each input; its output layer is its embedding, and stays as it is."""
    data = federate(from_torch([[(row,) for row in part] for part in tokens().chunk(2)], values=WORDS), test=0.2)
    assert transformers
    run = mo.train(
        data,
        model=f"hf:{gpt2}",
        adapters={"rank": 2, "targets": ["c_attn"]},
        task="next-token",
        method=mo.methods.DpSgd(lr=1.0),
        rounds=2,
        budgets=8.0,
        folder=tmp_path / "r",
    )
    assert set(run.parameters) == {f"transformer.h.0.attn.c_attn.lora_{x}.weight" for x in "AB"}
    merged = build_named(f"hf:{gpt2}", TOKENS, WORDS, 0, {})
    merged.load_state_dict(torch.load(run.export(tmp_path / "m.pt", "state-dict"), weights_only=True))
    ids = tokens()[:3]
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, run.model(ids), atol=1e-5)


def texts(name: str = "texts") -> Any:
    """Records as a table with a text column has them."""
    masks = torch.arange(LENGTH) < torch.arange(ROWS)[:, None] % LENGTH + 1
    x = {"input_ids": tokens().numpy(), "attention_mask": masks.numpy()}
    arrays = Arrays(x, np.arange(ROWS) % 2)
    return Dataset(name, arrays, Arrays.empty(arrays), 2, values={"input_ids": WORDS})


def test_features_of_texts_are_computed_once(bert: Path, tmp_path: Path) -> None:
    made = extractor(f"hf:{bert}", texts().train.shape)
    first = featured(texts(), made, tmp_path)
    assert first.train.shape == (8,)
    assert first.made_by is not None
    assert "features from" in first.made_by.line
    assert np.allclose(np.linalg.norm(first.train.x, axis=1), 1, atol=1e-3)
    made.model.inner = None  # nothing is computed again
    assert np.array_equal(featured(texts(), made, tmp_path).train.x, first.train.x)


def test_features_see_their_text_and_no_padding(bert: Path) -> None:
    data, made = texts(), extractor(f"hf:{bert}", texts().train.shape)
    behind = data.train.x["attention_mask"] == 0
    other = {**data.train.x, "input_ids": np.where(behind, 3, data.train.x["input_ids"])}
    before, padded = (compute(made, Arrays(x, data.train.y)) for x in (data.train.x, other))
    assert np.allclose(before, padded, atol=1e-5)
    seen = {**data.train.x, "input_ids": (data.train.x["input_ids"] + 1) % WORDS}
    assert np.abs(compute(made, Arrays(seen, data.train.y)) - before).max(1).min() > 1e-3
    blind = {**data.train.x, "attention_mask": np.ones_like(behind)}  # the negative control: padding is read too
    assert not np.allclose(compute(made, Arrays(blind, data.train.y)), before, atol=1e-3)


def test_records_that_are_no_tokens_of_it_are_refused(bert: Path) -> None:
    made = extractor(f"hf:{bert}", texts().train.shape)
    with pytest.raises(UserError, match="different tokens"):
        featured(replace(texts(), values={"input_ids": WORDS + 1}), made, None)
    numbers = Arrays(np.zeros((4, 3), np.float32), np.zeros(4, np.int64))
    with pytest.raises(UserError, match="reads texts"):
        featured(Dataset("n", numbers, Arrays.empty(numbers), 2), made, None)


def test_a_silo_with_another_base_agrees_to_something_else(tmp_path: Path) -> None:
    """Digests need no package; the folders lie in different places."""
    said = []
    for name, weights in (("a", b"weights"), ("b", b"weights"), ("c", b"other weights")):
        folder = tmp_path / name
        (folder / "base").mkdir(parents=True)
        (folder / "base" / "config.json").write_text("{}")
        (folder / "base" / "model.safetensors").write_bytes(weights)
        model = '[model]\nname = "hf:base"\nadapters = { rank = 2, targets = ["query"] }\n'
        (folder / "experiment.toml").write_text(f'[data]\nname = "digits"\nclients = 2\n{model}')
        said.append(agreed_parts(read(folder / "experiment.toml")))
    assert said[0] == said[1]
    assert {part for part in said[0] if said[0][part] != said[2][part]} == {"model"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapters", [{"rank": 2, "targets": ["v_proj"]}, {"rank": 0, "train": ["norm"]}])
def test_clients_with_texts_are_trained_side_by_side_as_one_after_another(
    transformers: Any, adapters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, that is; norms are none of the layers that the stacked engine knows, and are mapped."""
    config = transformers.LlamaConfig(**SMALL, hidden_size=8, intermediate_size=16, num_key_value_heads=1)
    torch.manual_seed(0)
    model = adapted(transformers.LlamaForCausalLM(config), TOKENS)
    with_adapters(model, from_options({"adapters": adapters})[0], 0)  # type: ignore[arg-type]
    choice = choose(model, "cuda", several=True)
    assert isinstance(choice.backend, FusedBackend)
    assert choice.at_once > 1
    assert isinstance(choose(model, "cpu", several=True).backend, LoopBackend)
    ids = tokens()
    masks = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1))
    batches = [
        Batch(
            {"input_ids": ids[rows], "attention_mask": masks[rows]},
            {"y": torch.where(masks, ids, -100)[rows]},
        )
        for rows in (slice(0, 5), slice(5, 10), slice(10, 15))
    ]
    layout = choice.backend.layout
    theta = layout.read(model) + 0.05 * torch.randn(3, layout.dimension)

    def losses(outputs: Any, targets: Any) -> Any:
        return next_token().losses(outputs, targets["y"])

    monkeypatch.setattr(fixed_shape, "use_graphs", lambda _: True)  # as on a GPU
    pooled = Pool(batches).batches([torch.arange(5)] * 3)
    found = choice.backend.gradients(theta, pooled, losses)
    truth = LoopBackend(model).gradients(theta, batches, losses)
    assert choice.backend._known("gradients")
    assert all(choice.backend._proven.values())
    assert error(found, truth) < 1e-4
    assert error(found[[1, 0, 2]], truth) > 1e-2  # the negative control: another client's gradient is seen


def test_perplexity_of_many_texts_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of all test texts together do not fit: 2,000 of 24 tokens among 50,000 are 10 GB."""
    outputs, ids = torch.randn(30, LENGTH, WORDS), tokens()[:30]
    y = torch.where(torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (30, 1)), ids, -100)
    most: list[int] = []

    class Told:
        def outputs(self, _theta: Any, x: Any) -> Any:
            most.append(len(x))
            return outputs[x[:, 0]]

    monkeypatch.setattr(evaluation, "NUMBERS", 10 * LENGTH * WORDS)
    records = Batch(torch.arange(30)[:, None], {"y": y})
    found = evaluation.evaluate(Told(), torch.zeros(1), records, next_token())  # type: ignore[arg-type]
    assert most == [8, 10, 10, 2]
    assert found == pytest.approx(next_token().evaluate(outputs, y), rel=1e-6)
    assert next(iter(found)) == next_token().main
