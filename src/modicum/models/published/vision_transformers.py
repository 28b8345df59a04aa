"""Vision transformers (Dosovitskiy et al. 2021; DINOv2's scaled branches) from state dicts, whoever wrote them.

Names of torchvision and Hugging Face are brought to timm's. How many heads there are is not among the arrays.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.errors import UserError
from modicum.models.published.weights import State

HEAD, HUGE, HUGE_HEADS = 64, 1280, 16  # a head's features, but for the one width where they are 80
EPSILON = 1e-6  # of norms; Hugging Face's 1e-12 differs from it by less than rounding
NAMES = (  # torchvision's and Hugging Face's, in this order, and timm's
    (r"^(?:vit|deit|dinov2)\.", ""),
    (r"^(?:embeddings\.cls|class)_token$", "cls_token"),
    (r"^(?:embeddings\.position_embeddings|encoder\.pos_embedding)$", "pos_embed"),
    (r"^(?:embeddings\.patch_embeddings\.projection|conv_proj)\.", "patch_embed.proj."),
    (r"^encoder\.(?:layers\.encoder_layer_|layer\.)(\d+)\.", r"blocks.\1."),
    (r"^(?:encoder\.ln|layernorm)\.", "norm."),
    (r"\.(?:ln_1|layernorm_before)\.", ".norm1."),
    (r"\.(?:ln_2|layernorm_after)\.", ".norm2."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
    (r"\.(?:self_attention\.out_proj|attention\.output\.dense)\.", ".attn.proj."),
    (r"\.(?:mlp\.0|mlp\.linear_1|intermediate\.dense)\.", ".mlp.fc1."),
    (r"\.(?:mlp\.3|mlp\.linear_2|output\.dense)\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
)
AFTER = r"(?:head|heads|classifier|cls_classifier|pooler|fc)\.|embeddings\.mask_token$|mask_token$"
PARTS = ("query", "key", "value")
LAYOUT = "vision transformer (torchvision, timm, Hugging Face)"


def renamed(state: State) -> State:
    """The arrays by timm's names, a network's last layers left out."""
    found = {}
    for name, value in state.items():
        for pattern, other in NAMES:
            name = re.sub(pattern, other, name)
        if not re.match(AFTER, name):
            found[name] = value
    return found


def is_one(state: State) -> bool:
    """Whether arrays by timm's names are a vision transformer's."""
    return "patch_embed.proj.weight" in state and "blocks.0.norm1.weight" in state


class _Arrays(nn.Module):
    """What is stored is read once, and never trained."""

    def __init__(self, state: State, prefix: str, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.register_buffer(name.replace(".", "_"), state.pop(f"{prefix}{name}").float())

    def linear(self, name: str, x: Tensor) -> Tensor:
        """One of its layers."""
        return functional.linear(x, getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """One of its norms."""
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        return functional.layer_norm(x, weight.shape, weight, bias, EPSILON)


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for name in names for part in ("weight", "bias"))


class Block(_Arrays):
    """Attention, then a perceptron, each beside a short cut and behind a norm."""

    def __init__(self, state: State, prefix: str, heads: int) -> None:
        if f"{prefix}attn.query.weight" in state:
            for part in ("weight", "bias"):
                joined = [state.pop(f"{prefix}attn.{name}.{part}") for name in PARTS]
                state[f"{prefix}attn.qkv.{part}"] = torch.cat(joined)
        scaled = tuple(name for name in ("ls1.gamma", "ls2.gamma") if f"{prefix}{name}" in state)
        names = _both("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        super().__init__(state, prefix, (*names, *scaled))
        self.heads, self.scaled = heads, bool(scaled)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of each image."""
        shape = (*x.shape[:2], 3, self.heads, -1)
        q, k, v = self.linear("attn_qkv", self.norm("norm1", x)).reshape(shape).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self._scale("ls1_gamma", self.linear("attn_proj", seen))
        inner = functional.gelu(self.linear("mlp_fc1", self.norm("norm2", x)))
        return x + self._scale("ls2_gamma", self.linear("mlp_fc2", inner))

    def _scale(self, name: str, x: Tensor) -> Tensor:
        return x * getattr(self, name) if self.scaled else x


class Tokens(_Arrays):
    """Images to the class's token after the last `taps` blocks, each behind the last norm."""

    cls_token: Tensor
    pos_embed: Tensor
    patch_embed_proj_weight: Tensor
    patch_embed_proj_bias: Tensor
    stride: int
    size: int

    def __init__(self, state: State, heads: int | None) -> None:
        state = dict(state)
        super().__init__(state, "", ("cls_token", "pos_embed", *_both("patch_embed.proj", "norm")))
        depth = 1 + max(int(m[1]) for name in state if (m := re.match(r"blocks\.(\d+)\.", name)))
        width = self.cls_token.shape[-1]
        heads = heads or (HUGE_HEADS if width == HUGE else max(1, width // HEAD))
        if width % heads:
            raise UserError(f"a vision transformer of width {width} has no {heads} heads")
        self.blocks = nn.ModuleList(Block(state, f"blocks.{i}.", heads) for i in range(depth))
        if state:
            raise UserError(
                f"a vision transformer with {', '.join(sorted(state)[:3])} is of a kind that is not known"
            )
        self.widths = [width] * depth
        side = math.isqrt(self.pos_embed.shape[1] - 1)
        if side * side != self.pos_embed.shape[1] - 1:
            raise UserError("a vision transformer's positions are not those of a square of patches and one token")
        self.stride = self.patch_embed_proj_weight.shape[-1]
        self.size = side * self.stride  # of images: positions are of these patches and no others

    def forward(self, x: Tensor, taps: int = 1) -> Tensor:
        """One feature for each of the width, of each block that is tapped."""
        patches = functional.conv2d(x, self.patch_embed_proj_weight, self.patch_embed_proj_bias, self.stride)
        y = patches.flatten(2).transpose(1, 2)
        y = torch.cat([self.cls_token.expand(len(y), -1, -1), y], 1) + self.pos_embed
        found = []
        for i, block in enumerate(self.blocks):
            y = block(y)
            if i >= len(self.blocks) - taps:
                found.append(self.norm("norm", y[:, 0]))
        return torch.cat(found, 1)
