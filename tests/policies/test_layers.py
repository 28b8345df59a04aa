"""Bounds layer by layer, from a method's settings or a policy's decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Flat, PerLayer
from modicum.core.facts import PublicFacts
from modicum.core.messages import Broadcast, Decision
from modicum.core.needs import Need
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError
from modicum.federation.clients import Clients
from modicum.federation.simulation import Simulation
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed, DpSgd
from modicum.models import build
from modicum.privacy.ledger.budgets import Reason, Refusal
from tests.compute.stacks import losses, stack
from tests.rows import ROUNDS, simulate

LAYERS = {"1.weight": 0.8, "1.bias": 0.6}


@dataclass(frozen=True)
class ByReleasedNorms:
    """Shares of one bound by the norms of what was released of each layer."""

    scope, place = Scope.ROUND, Place.SERVER
    signals: tuple[Signal, ...] = ()
    needs = (Need.LAYERS,)

    def init(self, public: PublicFacts) -> State:
        return {"sizes": dict(public.tensors), "shares": {name: float(n) ** 0.5 for name, n in public.tensors}}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(0.5, layers=tuple(state["shares"].items())))

    def observe(self, state: State, seen: Observation) -> State:
        if not isinstance(seen.opened, tuple) or not seen.opened:
            return state
        parts = torch.split(seen.opened[0].update, list(state["sizes"].values()))
        return {**state, "shares": {n: float(p.norm()) for n, p in zip(state["sizes"], parts, strict=True)}}


def test_a_policy_decides_over_layers(tmp_path: Path) -> None:
    sim = simulate(Composed(ByReleasedNorms(), RecordLocal()), tmp_path / "layers")
    seen = []
    for _ in range(ROUNDS):
        seen.append(sim.server.propose().decisions["client-00"])
        sim.step()
    assert dict(seen[0].layers) == {"1.weight": 15**0.5, "1.bias": 3**0.5}  # square roots of their sizes
    assert seen[1].layers != seen[0].layers  # it has seen what was released
    assert [d.rule(Flat()).bound for d in seen] == pytest.approx([0.5] * ROUNDS)
    sim.close()


def test_one_record_moves_each_layer_by_its_own_bound() -> None:
    model = build("mlp", (6,), 3, seed=0)
    theta, batches = stack(model, (6,), (5,), 3)
    rule = PerLayer({"1": 1.0, "3": 2.0}).scaled_to(1e-3)
    backend = LoopBackend(model)
    (whole,), _ = backend.clipped_sums(theta, batches, losses, [rule])
    (rest,), _ = backend.clipped_sums(theta, [batches[0].take(torch.arange(4))], losses, [rule])
    moved = backend.layout.named((whole - rest).double())
    first, second = (torch.cat([moved[f"{k}.weight"].flatten(), moved[f"{k}.bias"]]).norm() for k in (1, 3))
    assert [float(first), float(second)] == pytest.approx([rule.bounds["1"], rule.bounds["3"]], rel=1e-3)
    assert rule.bound == pytest.approx(1e-3)


def test_a_table_of_bounds_is_a_setting_of_dp_sgd(tmp_path: Path) -> None:
    sim = simulate(DpSgd(clip=LAYERS), tmp_path / "run")
    assert sim.method.mechanism.rule == PerLayer(LAYERS)
    assert sim.server.propose().decisions["client-00"].bound == pytest.approx(1.0)
    sim.step()
    sim.close()


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (DpSgd(clip={"1.weight": 1.0}), "no bound for parameter '1.bias'"),
        (DpSgd(clip={**LAYERS, "2": 1.0}), "'2', which is no layer"),
        (DpSgd(clip=LAYERS, rule="auto"), "one bound for all layers"),
        (Composed(ByReleasedNorms(), ClientLevel()), "ByReleasedNorms needs each record clipped layer by layer"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_run(method: object, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        simulate(method, tmp_path / "run")  # type: ignore[arg-type]
    assert not list(tmp_path.glob("run/*.sqlite"))


HOSTILE = {
    "a layer is missing": (("1.weight", 1.0),),
    "a layer that is not there": (("1.weight", 1.0), ("1.bias", 1.0), ("9", 1.0)),
    "no number": (("1.weight", float("nan")), ("1.bias", 1.0)),
    "a share of nothing": (("1.weight", 0.0), ("1.bias", 1.0)),
    "a share that vanishes": (("1.weight", 1e-320), ("1.bias", 1e300)),
}


def hostile(sim: Simulation, name: str) -> Broadcast:
    return replace(sim.server.propose().broadcasts[0], decision=Decision(1.0, layers=HOSTILE[name]))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_cannot_propose_bounds_that_do_not_fit(name: str, tmp_path: Path) -> None:
    sim = simulate(DpSgd(), tmp_path / "run")
    answer = sim.clients.answer([hostile(sim, name)])["client-00"]
    assert isinstance(answer, Refusal)
    assert answer.reason is Reason.BAD_BOUND
    assert not sim.clients.clients["client-00"].rounds
    sim.close()


def test_a_client_that_does_not_look_pays_before_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the last test."""
    monkeypatch.setattr(Clients, "_covers", lambda *_: True)
    sim = simulate(DpSgd(), tmp_path / "run")
    with pytest.raises(UserError, match="no bound for parameter"):
        sim.clients.answer([hostile(sim, "a layer is missing")])
    assert sim.clients.clients["client-00"].rounds == {0}
    sim.close()


def test_decisions_with_layers_travel() -> None:
    one, plain = Decision(0.5, layers=(("a", 1.0), ("b", 0.25))), Decision(0.5)
    assert Decision.from_dict(one.to_dict()) == one
    assert "layers" not in plain.to_dict()


def test_shares_survive_any_scale() -> None:
    for scale in (1e-150, 1.0, 1e150):
        rule = PerLayer({"a": 3 * scale, "b": 4 * scale}).scaled_to(10.0)
        assert rule.bounds == pytest.approx({"a": 6.0, "b": 8.0})
