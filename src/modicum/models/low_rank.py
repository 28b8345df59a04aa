"""Adapters: a frozen model learns by two thin matrices beside each of some layers, and by its head.

y = W₀x + (α/r)·B·A·x with A of r rows and B of r columns (Hu et al. 2021, "LoRA", Eq. 3). B starts at zero, so the
first model is the frozen one, and in the first step A has no gradient: it moves from the second on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.errors import UserError

OPTION = "adapters"
Options = Mapping[str, Any]
LARGEST = 4096


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What is trained of a model that is otherwise frozen.

    Args:
        rank: Of each adapter; 0 for none, where `train` says what learns.
        targets: Layers that get one, by the ends of their names, e.g. query.
        alpha: An adapter's output is multiplied by alpha / rank [default: the rank].
        train: What is trained whole: layers or parameters by a part of their names, e.g. classifier, or bias
            [default: a new head of a pretrained model, or else the last linear layer that shares no weights].
    """

    rank: int = 8
    targets: tuple[str, ...] = ()
    alpha: float | None = None
    train: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank <= LARGEST:
            raise UserError(f"the rank of adapters is a whole number from 0 to {LARGEST}, got {self.rank!r}")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UserError(f"alpha of adapters is a positive number, got {self.alpha!r}")
        if self.rank == 0 and (self.targets or not self.train):
            raise UserError('adapters of rank 0 have no targets: say what is trained, e.g. train = ["bias"]')

    @property
    def scale(self) -> float:
        """Of an adapter's output."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def from_options(options: Options) -> tuple[Adapters | None, dict[str, Any]]:
    """The adapters that a model's options ask for, as a table, and the options of the model itself."""
    given = options.get(OPTION)
    own = {key: value for key, value in options.items() if key != OPTION}
    if isinstance(given, Adapters):
        return given, own
    if not isinstance(given, Mapping):
        return None, dict(options)  # a model of the catalogue has a number by that name
    known = list(Adapters.__dataclass_fields__)
    for key in given:
        if key not in known:
            raise UserError(f"adapters have no option {key!r}: use {', '.join(known)}")
    lists = {key: _names(key, given[key]) for key in ("targets", "train") if given.get(key) is not None}
    if isinstance(given.get("alpha"), str | bool | list):
        raise UserError(f"alpha of adapters is a positive number, got {given['alpha']!r}")
    return Adapters(**{**given, **lists}), own


def _names(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise UserError(f'{key} of adapters are names of layers, e.g. {key} = ["query", "value"], got {value!r}')
    return tuple(value)


class LowRank(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, base: nn.Module, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.rank, self.scale, self.turned = base, rank, scale, _turned(base)
        self.lora_A, self.lora_B = _pair(base, rank)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        plain: Tensor = self.base(x)
        added: Tensor = self.lora_B(self.lora_A(x))
        return plain + self.scale * added

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """One layer that does the same."""
        weight = self.base.get_parameter("weight")
        added = self.lora_B.weight.flatten(1) @ self.lora_A.weight.flatten(1)
        weight.add_((added.T if self.turned else added).reshape(weight.shape), alpha=self.scale)
        return self.base


def _pair(base: nn.Module, rank: int) -> tuple[Any, Any]:
    """A and B for this layer, on its device and in its precision."""
    weight = base.get_parameter("weight")
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "bias": False}
    if isinstance(base, nn.Conv2d):
        how: dict[str, Any] = {
            "kernel_size": base.kernel_size,
            "stride": base.stride,
            "padding": base.padding,
            "dilation": base.dilation,
            "padding_mode": base.padding_mode,
        }
        first = nn.Conv2d(base.in_channels, rank, **how, **like)
        return first, nn.Conv2d(rank, base.out_channels, 1, **like)
    outputs, inputs = weight.shape[::-1] if _turned(base) else weight.shape
    return nn.Linear(inputs, rank, **like), nn.Linear(rank, outputs, **like)


def _turned(layer: nn.Module) -> bool:
    """Whether its weight has a row for each input, as GPT-2's layers do."""
    return f"{type(layer).__module__}.{type(layer).__name__}" == "transformers.pytorch_utils.Conv1D"


def can_adapt(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can have an adapter, by name."""
    inside = {
        name
        for name, parent in model.named_modules()
        if isinstance(parent, nn.MultiheadAttention)  # it reads the weights of its layers without calling them
    }
    return {
        name: layer
        for name, layer in model.named_modules()
        if (isinstance(layer, nn.Linear) or _turned(layer) or (isinstance(layer, nn.Conv2d) and layer.groups == 1))
        and name.rpartition(".")[0] not in inside
        and name
    }


def with_adapters(model: nn.Module, adapters: Adapters, seed: int) -> nn.Module:
    """The model with all its parameters frozen but those of its adapters and of what is trained whole.

    Args:
        model: It is changed.
        adapters: What is trained.
        seed: Of the first weights of adapters.

    Returns:
        The model.

    Raises:
        UserError: Where a name is of no layer, with the names that there are.
    """
    if hasattr(model, "peft_config"):
        raise UserError("the model has adapters of peft already: leave adapters out")
    found = can_adapt(model)
    chosen = {name: layer for name, layer in found.items() if _ends_in(name, adapters.targets)}
    for target in adapters.targets:
        if not any(_ends_in(name, (target,)) for name in chosen):
            raise UserError(f"no layer that can have an adapter is called {target!r}: there are {_listed(found)}")
    if adapters.rank and not chosen:
        raise UserError(f"say which layers get adapters: targets, of {_listed(found)}")
    whole = _whole(model, adapters, chosen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in whole)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in chosen.items():
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LowRank(layer, adapters.rank, adapters.scale))
    return model


def _ends_in(name: str, targets: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets)


def _whole(model: nn.Module, adapters: Adapters, chosen: Mapping[str, nn.Module]) -> set[str]:
    """Names of the parameters that are trained as they are."""
    names = [name for name, _ in model.named_parameters()]
    wanted = _heads(model, chosen) if adapters.train is None else adapters.train
    for one in wanted:
        if not any(f".{one}." in f".{name}." for name in names):
            raise UserError(f"no parameter of the model has {one!r} in its name: it has {', '.join(names)}")
    inside = [f"{name}." for name in chosen]
    return {
        name
        for name in names
        if any(f".{one}." in f".{name}." for one in wanted) and not name.startswith(tuple(inside))
    }


def _heads(model: nn.Module, chosen: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """What has to be trained whole, since nobody has trained it: it is public which layers those are."""
    fresh = getattr(model, "fresh_layers", None)
    if fresh is not None:
        return tuple(fresh)
    tied = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    last = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and id(layer.weight) not in tied
    ]
    return () if not last or last[-1] in chosen else (last[-1],)


def _listed(found: Mapping[str, nn.Module]) -> str:
    """The ends of their names, each once: a model repeats its layers."""
    ends = Counter(name.rpartition(".")[2] for name in found)
    several = [f"{end} ({count})" if count > 1 else end for end, count in ends.items()]
    if all(end.isdecimal() for end in ends):  # a sequence numbers its layers
        several = list(found)
    return ", ".join(several) or "none"


def low_rank_layers(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Every adapter with the name of its layer."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LowRank))


def merge(model: nn.Module) -> nn.Module:
    """The model with its adapters added to the layers that they stand beside."""
    for name, layer in list(low_rank_layers(model)):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer.merged())
    return model
