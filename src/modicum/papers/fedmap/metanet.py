"""FedMAP's policy, sound: one bound for all (or for each budget) and a kind of noise, from releases alone.

The network sees five rounds of figures, every one of them a function of what passed the release gate, of plans or
of public sizes: log C, the paid share of unclipped gradients and mean clipped square with their noise, the size of
the mean update without its noise, the drift of the noised models, the cosine of successive updates, noise over
signal, t/T, and what is left of each kind. It was trained on public simulations
before the run and learns nothing in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, ReleasedSum
from modicum.core.needs import Need
from modicum.core.parts import Observation, Place, Scope, Signal, SignalName, State
from modicum.errors import UserError
from modicum.papers.fedmap import kinds
from modicum.papers.fedmap.bert import Weights, fingerprint
from modicum.papers.fedmap.network import FIGURES, SEEN, Body, Network, load_network, padded, with_folder
from modicum.policies.releases import mean_update

REACH = 100.0  # C stays within [C₀/100, 100·C₀]
ALL = "all"


@dataclass(frozen=True)
class MetaNet:
    """log C ← log C + ln2·tanh(o₀), and the kind with the largest o_j of which somebody has a participation left.

    `network` is a file from `modicum fit-metanet`; without one the head is untrained: C stays, and kinds nearest
    to 1·z come first. `backbone` is a local folder of BERT weights for an untrained head.
    """

    initial: float = 1.0  # C₀
    network: str | None = None
    body: Body = "bert"
    backbone: str | None = None
    ratio: float = 10.0  # noise multiplier of each signal over that of the query
    by_budget: bool = False  # one bound for each budget instead of one for all
    feedback: bool = True  # False, for an ablation: the network is shown t/T and the stock alone
    seed: int = 0

    scope = Scope.ROUND
    place = Place.SERVER

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise UserError(f"the first clipping bound must be positive and finite, got {self.initial}")
        if not math.sqrt(2) < self.ratio < float("inf"):
            raise UserError(f"two signals need a noise ratio above √2, got {self.ratio}")
        if self.body not in ("bert", "mlp"):
            raise UserError(f"MetaNet's body is bert or mlp, got {self.body!r}")

    @property
    def needs(self) -> tuple[Need, ...]:
        """Bounds by budget group need clients' own signals."""
        return (Need.INDIVIDUALS,) if self.by_budget else ()

    @property
    def signals(self) -> tuple[Signal, ...]:
        return Signal(SignalName.CLIP_BIT, self.ratio), Signal(SignalName.SQUARE_NORM, self.ratio)

    def loaded(self, scales: Sequence[float]) -> tuple[Weights, Network]:
        """The weights for plans with these kinds, and their shape."""
        network, encoder = Network(len(scales), self.body), None
        if self.network is not None:
            weights, found, _ = load_network(self.network)
            if (found.kinds, found.body) != (network.kinds, network.body):
                raise UserError(
                    f"the network {self.network} is a {found.body} for {found.kinds} kinds of noise, these "
                    f"settings need {network.body} for {network.kinds}: fit one with them"
                )
            return weights, found
        if self.backbone is not None:
            network, encoder = with_folder(network, self.backbone)
        return network.first(self.seed, scales, encoder), network

    def digest(self, scales: Sequence[float]) -> str:
        """SHA-256 of the weights for plans with these kinds."""
        return fingerprint(self.loaded(scales)[0])

    def init(self, public: PublicFacts) -> State:
        weights, network = self.loaded(public.scales)
        groups: dict[str, list[str]] = {}
        for client in public.clients:
            groups.setdefault(f"{client.budget:g}" if self.by_budget else ALL, []).append(client.name)
        first = kinds.at_first(public)
        state: State = {
            "network": weights,
            "hidden": [network.shape.hidden, network.shape.layers, network.shape.heads],
            "sha256": fingerprint(weights),
            "scales": list(public.scales),
            "rounds": public.rounds,
            "first": first,
            "left": first,
            "members": groups,
            "groups": {key: {"bound": self.initial, "history": [], "last": None, "asked": 0} for key in groups},
        }
        for key in groups:
            state["groups"][key] = self._decided(state, key, state["groups"][key])
        return state

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        where = {name: key for key, names in state["members"].items() for name in names}
        chosen = {}
        for name in clients:
            group = state["groups"][where[name]] if name in where else next(iter(state["groups"].values()))
            kind = None
            if state["scales"]:
                kind = kinds.nearest(group["asked"], state["scales"], state["left"].get(name, ()))
            chosen[name] = Decision(group["bound"], kind=kind)
        return chosen

    def observe(self, state: State, observed: Observation) -> State:
        left = kinds.after(observed, state["first"]) if observed.left or observed.stock else state["left"]
        if not observed.opened:
            return state if left is state["left"] else {**state, "left": left}
        state = {**state, "left": left, "groups": dict(state["groups"])}
        for key, names in state["members"].items():
            seen = _of(observed, names)
            if seen.opened:
                group = self._seen(state, key, state["groups"][key], seen)
                state["groups"][key] = self._decided(state, key, group)
        return state

    def _seen(self, state: State, key: str, group: dict[str, Any], observed: Observation) -> dict[str, Any]:
        """The group's history with one more round."""
        assert observed.opened
        mean, variance = mean_update(observed.opened)
        bound = group["bound"]  # as decided: behind a sum clients are told shares of it
        gain = _gain(observed)
        square, noise = float(mean.double().square().sum()), mean.numel() * variance
        unit = bound * gain
        signals = [observed.signal(name) or (0.5, 1.0) for name in (SignalName.CLIP_BIT, SignalName.SQUARE_NORM)]
        last = group["last"]
        figures = [
            math.log(bound / self.initial) / math.log(REACH),
            *(f for value, spread in signals for f in (_within(value, -1, 2), _within(math.sqrt(spread), 0, 2))),
            _within(math.sqrt(max(0.0, square - noise)) / unit, 0, 2),
            _decades(math.sqrt(square) / unit),
            0.0 if last is None else _cosine(mean, last),
            _decades(math.sqrt(noise) / unit),
            (observed.round + 1) / state["rounds"],
            *_shares(state, key),
        ]
        if not self.feedback:
            figures = [0.0] * (FIGURES - 1) + figures[FIGURES - 1 :]
        return {**group, "history": [*group["history"], figures][-SEEN:], "last": mean.clone()}

    def _decided(self, state: State, key: str, group: dict[str, Any]) -> dict[str, Any]:
        """The next bound, and the kind asked for among those that anybody of the group has left."""
        body = Network(len(state["scales"]), self.body)
        h, layers, heads = state["hidden"]
        body = replace(body, shape=replace(body.shape, hidden=h, layers=layers, heads=heads))
        rows, mask = padded(group["history"], body.inputs)
        with torch.no_grad():
            step, *values = body(state["network"], rows, mask)[0].tolist()
        bound = group["bound"] * 2 ** math.tanh(step)
        bound = min(max(bound, self.initial / REACH), self.initial * REACH)
        able = {
            j for n in state["members"][key] for j, k in enumerate(state["left"].get(n, ())) if k >= kinds.WHOLE
        }
        asked = max(able, key=lambda j: values[j], default=0)
        return {**group, "bound": bound, "asked": asked}


def _of(observed: Observation, names: Sequence[str]) -> Observation:
    """What a round shows of some clients."""
    if observed.opened is None or isinstance(observed.opened, ReleasedSum):
        return observed
    members = set(names)
    return replace(observed, opened=tuple(r for r in observed.opened if r.client in members))


def _gain(observed: Observation) -> float:
    assert observed.opened
    if isinstance(observed.opened, ReleasedSum):
        return observed.opened.facts.gain
    return sum(r.facts.gain for r in observed.opened) / len(observed.opened)


def _shares(state: State, key: str) -> list[float]:
    """What the group has left of each kind, as a share of what it had."""
    members = [n for n in state["members"][key] if state["first"].get(n)]
    found = []
    for j in range(len(state["scales"])):
        had = sum(state["first"][n][j] for n in members)
        found.append(sum(state["left"][n][j] for n in members) / had if had else 0.0)
    return found


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high) if math.isfinite(value) else high


def decades(ratio: torch.Tensor) -> torch.Tensor:
    """log₁₀ over 2, from 1e-4 to 1e4."""
    return ratio.nan_to_num(nan=1e4).clamp(1e-4, 1e4).log10() / 2


def _decades(ratio: float) -> float:
    return float(decades(torch.tensor(ratio, dtype=torch.double)))


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    over = float(a.norm() * b.norm())
    return _within(float(a @ b) / over, -1, 1) if over > 0 and math.isfinite(over) else 0.0
