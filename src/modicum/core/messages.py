"""What travels between server and clients, typed by who may look inside.

A client sends `Noised`, which went through the gate with noise and which anyone may see, `Sealed` for a trusted
server, or `Share` or, on a lattice, `Summand` for secure aggregation: only the server half of the mechanism that
made them opens them.
Policies and aggregation get `Released` and `ReleasedSum`, whose facts about noise the server has derived: a client
reports none (R14).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modicum.core.clips import Clip, PerLayer
from modicum.core.optimisers import Optimiser
from modicum.errors import UserError

DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
LARGEST_HEADER = 1 << 20  # bytes of JSON in a message: parsed they take thirty times as much memory


@dataclass(frozen=True)
class Decision:
    """Public numbers that a policy chooses for one client and one round (or step)."""

    bound: float
    noise_multiplier: float | None = None  # None: the frozen multiplier of the client's plan (R1)
    signal_multiplier: float | None = None  # at least this noise on signals, where clients' signals are summed
    layers: tuple[tuple[str, float], ...] = ()  # shares of the bound by layer; none: the mechanism's own rule
    kind: int | None = None  # of the noise, where plans hold several (R11); None: in the plan's own order
    told: float | None = None  # a public number that the policy tells its clients beside the bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found: dict[str, Any] = {
            "bound": self.bound,
            "noise_multiplier": self.noise_multiplier,
            "signal_multiplier": self.signal_multiplier,
            "kind": self.kind,
        }
        found |= {"layers": dict(self.layers)} if self.layers else {}
        return found if self.told is None else found | {"told": self.told}

    def rule(self, own: Clip) -> Clip:
        """How a record's gradient is clipped: by the mechanism's own rule, or by the layers, to the bound."""
        return (PerLayer(dict(self.layers)) if self.layers else own).scaled_to(self.bound)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Decision:
        """Back from `to_dict`; a missing signal multiplier or kind is None."""
        z, shared, kind, told = d["noise_multiplier"], d.get("signal_multiplier"), d.get("kind"), d.get("told")
        layers = tuple((str(name), float(share)) for name, share in dict(d.get("layers", {})).items())
        return cls(
            float(d["bound"]),
            None if z is None else float(z),
            None if shared is None else float(shared),
            layers,
            None if kind is None else _count(kind),
            None if told is None else _number(told),
        )


@dataclass(frozen=True)
class Broadcast:
    """The server's proposal to one client. The client checks it against its own plan before anything else."""

    run: str
    round: int
    client: str
    decision: Decision
    model: Tensor = field(repr=False)  # shared parameters, flat
    metrics: tuple[str, ...] = ()  # declared metrics that are due this round


@dataclass(frozen=True)
class NoiseFacts:
    """Public facts about the noise in a message: computable from plan and decision, never from data."""

    variance: float  # of each coordinate of the update
    gain: float  # norm of the update per unit of the clipped quantity (lr·steps for local SGD, 1 for updates)
    signal_variance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """Batches whose clipped values are divided by their expected size. Poisson batches may be larger than that."""

    records: int
    rate: float | None  # None: all records
    over: float
    batches: int = 1


@dataclass(frozen=True)
class ClippedUpdate:
    """An update as a mechanism makes it: in each of `steps` a clipped part and Gaussian noise."""

    clipped: float  # norm of a step's clipped part, before it is scaled by the records drawn
    noise_std: float  # of each coordinate of a step
    steps: int = 1
    optimiser: Optimiser | None = None  # what makes an update of the steps; None: the one step is the update
    sampled: Sampled | None = None


@dataclass(frozen=True)
class NoisedNumber:
    """A number within `reach` of `middle`, plus Gaussian noise."""

    middle: float
    reach: float
    noise_std: float = 0.0
    sampled: Sampled | None = None  # scales `reach` as it does an update's clipped part


@dataclass(frozen=True)
class Expected:
    """What an answer to a proposal is made of, from plan, decision and agreed terms alone (R14).

    The server derives from it how far an honest answer can reach (`federation.plausible`). Names that are not
    listed, and listed ones that are missing, do not occur in an honest answer.
    """

    facts: NoiseFacts
    update: ClippedUpdate | None = None  # None: any finite update
    signals: Mapping[str, NoisedNumber] = field(default_factory=dict)
    metrics: Mapping[str, NoisedNumber] = field(default_factory=dict)


@dataclass(frozen=True)
class Noised:
    """One client's noised update and signals, as it sends them."""

    client: str
    round: int
    update: Tensor = field(repr=False)
    signals: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)

    kind = "noised"

    def known(self, facts: NoiseFacts) -> Released:
        """Opened, with what the server knows of its noise."""
        return Released(self.client, self.round, self.update, self.signals, facts, self.metrics)


@dataclass(frozen=True)
class Released:
    """One client's noised update and signals, with the server's own knowledge of the noise in them."""

    client: str
    round: int
    update: Tensor = field(repr=False)
    signals: Mapping[str, float]
    facts: NoiseFacts
    metrics: Mapping[str, float] = field(default_factory=dict)

    kind = "released"


@dataclass(frozen=True)
class Sealed:
    """A clipped update without noise, for the trusted server's half of the mechanism."""

    client: str
    round: int
    update: Tensor = field(repr=False)
    signals: Mapping[str, float] = field(repr=False)

    kind = "sealed"


@dataclass(frozen=True)
class Share:
    """A clipped update with one client's noise share; only the sum over the cohort may be seen."""

    client: str
    round: int
    update: Tensor = field(repr=False)
    signals: Mapping[str, float] = field(repr=False)

    kind = "share"


@dataclass(frozen=True)
class Summand:
    """Integers with one client's share of noise, all queries of a round one after another; only their sum modulo
    2^32 or 2^64 over the cohort may be seen."""

    client: str
    round: int
    update: Tensor = field(repr=False)  # int64
    signals: Mapping[str, float] = field(default_factory=dict)  # none: they are coordinates like the others

    kind = "summand"


@dataclass(frozen=True)
class ReleasedSum:
    """The noised mean over a cohort with a fixed public denominator (R7)."""

    round: int
    update: Tensor = field(repr=False)
    signals: Mapping[str, float]
    facts: NoiseFacts
    denominator: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    kind = "sum"


Message = Noised | Sealed | Share | Summand
Anything = Message | Broadcast | Released | ReleasedSum
Opened = tuple[Released, ...] | ReleasedSum


def mean_metrics(opened: Opened | None) -> dict[str, float]:
    """Declared metrics as released: of the sum, or the mean over clients."""
    if opened is None:
        return {}
    if isinstance(opened, ReleasedSum):
        return dict(opened.metrics)
    names = {name for released in opened for name in released.metrics}
    return {n: statistics.fmean(r.metrics[n] for r in opened if n in r.metrics) for n in sorted(names)}


def encode(message: Anything) -> bytes:
    """The bytes on the wire: tensors in safetensors format, everything else as JSON in its header."""
    return b"".join(encoded_parts(message))


def encoded_parts(message: Anything) -> tuple[bytes, memoryview]:
    """The same, header and numbers apart: who needs but a digest copies nothing."""
    meta: dict[str, Any]
    if isinstance(message, Broadcast):
        meta = {
            "kind": "broadcast",
            "run": message.run,
            "round": message.round,
            "client": message.client,
            "decision": message.decision.to_dict(),
            "metrics": list(message.metrics),
        }
        tensor = message.model
    else:
        meta = {"kind": message.kind, "round": message.round, "signals": dict(message.signals)}
        if not isinstance(message, ReleasedSum):
            meta["client"] = message.client
        else:
            meta["denominator"] = message.denominator
        if isinstance(message, Released | ReleasedSum):
            facts = message.facts
            meta["facts"] = {
                "variance": facts.variance,
                "gain": facts.gain,
                "signal_variance": dict(facts.signal_variance),
            }
        if isinstance(message, Noised | Released | ReleasedSum):
            meta["metrics"] = dict(message.metrics)
        tensor = message.update
    values = tensor.detach().cpu().contiguous()
    return _header(json.dumps(meta), values), values.view(torch.uint8).numpy().data


def _header(meta: str, values: Tensor) -> bytes:
    """As safetensors writes it for one vector: its length in 8 bytes, JSON, blanks up to a multiple of 8."""
    about = {"dtype": DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [0, values.nbytes]}
    said = {"__metadata__": {"modicum": meta}, "values": about}
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode(blob: bytes) -> Anything:
    """The inverse of `encode`, bit for bit. Unknown or damaged bytes are refused."""
    from safetensors.torch import load

    try:
        length = int.from_bytes(blob[:8], "little")
        if length > LARGEST_HEADER:
            raise ValueError
        meta = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["modicum"])
        tensors = load(blob)
        if (
            set(tensors) != {"values"}
            or tensors["values"].ndim != 1
            or not _right_numbers(meta, tensors["values"])
        ):
            raise ValueError
        return _build(meta, tensors["values"])
    except Exception:  # whatever hostile bytes provoke, nothing of it is repeated
        raise UserError("these bytes are not a message of this version") from None


def _right_numbers(meta: Mapping[str, Any], values: Tensor) -> bool:
    return values.dtype == torch.int64 if meta["kind"] == Summand.kind else values.is_floating_point()


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value


def _numbers(d: Mapping[str, Any]) -> dict[str, float]:
    return {_text(name): _number(value) for name, value in d.items()}


def _facts(d: Mapping[str, Any]) -> NoiseFacts:
    return NoiseFacts(_number(d["variance"]), _number(d["gain"]), _numbers(d["signal_variance"]))


def _build(meta: dict[str, Any], tensor: Tensor) -> Anything:
    kind, round = meta["kind"], _count(meta["round"])
    if kind == "broadcast":
        decision = Decision.from_dict(meta["decision"])
        due = tuple(_text(name) for name in meta["metrics"])
        return Broadcast(_text(meta["run"]), round, _text(meta["client"]), decision, tensor, due)
    signals = _numbers(meta["signals"])
    match kind:
        case "noised":
            return Noised(_text(meta["client"]), round, tensor, signals, _numbers(meta["metrics"]))
        case "released":
            facts, metrics = _facts(meta["facts"]), _numbers(meta["metrics"])
            return Released(_text(meta["client"]), round, tensor, signals, facts, metrics)
        case "sealed":
            return Sealed(_text(meta["client"]), round, tensor, signals)
        case "share":
            return Share(_text(meta["client"]), round, tensor, signals)
        case "summand" if not signals:
            return Summand(_text(meta["client"]), round, tensor)
        case "sum":
            facts, metrics = _facts(meta["facts"]), _numbers(meta["metrics"])
            return ReleasedSum(round, tensor, signals, facts, _number(meta["denominator"]), metrics)
    raise ValueError


def finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither infinities nor NaN."""
    return bool(torch.isfinite(tensor).all())
