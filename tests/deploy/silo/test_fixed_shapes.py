"""A silo computes drawn records in passes of one shape, and says so: plan, ledger, certificate, verify (R16)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.core.release_gate import ReservedGate
from modicum.deploy.silo.wire import Code
from modicum.federation.experiment import Experiment
from modicum.federation.simulation import Simulation
from modicum.privacy.events import Poisson, Release
from modicum.privacy.fixed_shapes import Capacity, FixedShape, Lanes
from modicum.privacy.verify import verify
from tests.deploy.silo.helpers import EXPERIMENT, ledger_of, opened, own_records, write_silo

TABLE = EXPERIMENT.replace("batch = 32", "batch = 16")


def with_shapes(kind: str | None) -> str:
    return TABLE if kind is None else TABLE + f'\n[privacy]\nfixed_shapes = "{kind}"\n'


def played(folder: Path, kind: str | None, grant: str = "") -> Path:
    path = write_silo(
        folder,
        "ward",
        experiment=with_shapes(kind),
        data=own_records(folder, "ward"),
        grant=f"bounds = [0.01, 10.0]\n{grant}",
    )
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.join().refused is None
        for round in range(4):
            assert server.propose(round).refused is None
    assert {message.update.dtype for message in server.messages().values()} == {torch.float32}
    return path


def shape_in(path: Path) -> FixedShape | None:
    with ledger_of(path) as ledger:
        (planned,) = ledger.plans["ward"].releases
        assert {r.sampler for r in ledger.spent("ward")} == {planned.sampler}
    assert isinstance(planned.sampler, Poisson)
    return planned.sampler.shape


@pytest.mark.parametrize(("kind", "found"), [(None, Capacity), ("lanes", Lanes), ("capacity", Capacity)])
def test_plan_ledger_certificate_and_verify_say_which_was_used(
    tmp_path: Path, kind: str | None, found: type
) -> None:
    path = played(tmp_path, kind)
    shape = shape_in(path)
    assert type(shape) is found
    assert shape is not None
    outcome = verify(tmp_path / "state-ward")
    assert outcome.matches
    assert shape.sentence() in outcome.clients[0].shapes[0]
    certificate = json.loads((tmp_path / "state-ward" / "certificate.json").read_text())
    assert any(shape.sentence() in said for said in certificate["assumptions"])
    assert ("overflow" in certificate["terms"][0]) == (found is Capacity)
    said = CliRunner().invoke(app, ["verify", str(tmp_path / "state-ward")]).output
    assert shape.sentence() in " ".join(said.split())


def test_a_certificate_that_forgets_what_a_capacity_takes_is_found_out(tmp_path: Path) -> None:
    path = played(tmp_path, "capacity")
    file = path.parent / "state-ward" / "certificate.json"
    value = json.loads(file.read_text())
    del value["terms"][0]["overflow"]
    file.write_text(json.dumps(value))
    outcome = verify(file.parent)
    assert not outcome.matches
    assert any("overflow" in problem for problem in outcome.clients[0].problems)


@pytest.mark.parametrize("kind", ["lanes", "capacity"])
def test_all_that_a_step_looks_at_has_one_shape(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modicum.compute.clipping.loop import LoopBackend

    looked: set[int] = set()
    real = LoopBackend.clipped_sums

    def watched(self, theta, batches, losses, clips):  # type: ignore[no-untyped-def]
        looked.update(len(batch) for batch in batches)
        return real(self, theta, batches, losses, clips)

    monkeypatch.setattr(LoopBackend, "clipped_sums", watched)
    shape = shape_in(played(tmp_path, kind))
    assert shape is not None
    assert looked == {shape.rows}


def test_replace_one_takes_them_too(tmp_path: Path) -> None:
    text = with_shapes("lanes") + 'adjacency = "replace-one"\n'
    path = write_silo(
        tmp_path, "ward", experiment=text, data=own_records(tmp_path, "ward"), grant='adjacency = "replace-one"'
    )
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.join().refused is None
        assert server.propose(0).refused is None
    assert isinstance(shape_in(path), Lanes)


def test_a_server_with_other_shapes_is_refused(tmp_path: Path) -> None:
    """The shape is agreed with everything else: it stands in the digest of the experiment."""
    path = write_silo(tmp_path, "ward", experiment=with_shapes("lanes"), data=own_records(tmp_path, "ward"))
    with opened(path) as server:
        server.names = ("clinic", "ward")
        asked = server.invitation()
        (tmp_path / "experiment.toml").write_text(with_shapes("capacity"))
        other = server.invitation()
        assert asked.digest != other.digest
        assert server.join().refused is Code.EXPERIMENT_DIFFERS


def test_check_says_how_batches_are_computed(tmp_path: Path) -> None:
    text = with_shapes("lanes") + "\n[run.silos]\nward = { records = 120, budget = 2.0 }\n"
    path = write_silo(tmp_path, "ward", experiment=text, data=own_records(tmp_path, "ward"))
    said = CliRunner().invoke(app, ["silo", "check", str(path)])
    assert said.exit_code == 0, said.output
    assert "Poisson batches in passes of" in " ".join(said.output.split())


def test_a_simulation_has_ragged_batches_unless_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import modicum as mo

    fed = mo.Federation.from_dataset("digits", clients=3, budgets=8.0)
    seen: list[Release] = []
    real = ReservedGate.sample

    def watched(self, release, *rest):  # type: ignore[no-untyped-def]
        seen.append(release)
        return real(self, release, *rest)

    monkeypatch.setattr(ReservedGate, "sample", watched)
    models = {}
    for kind in (None, "lanes", "capacity"):
        seen.clear()
        method = mo.methods.DpSgd(batch=32, steps=2)
        sim = Simulation(
            Experiment(federation=fed, method=method, rounds=2, fixed_shapes=kind),  # type: ignore[arg-type]
            tmp_path / str(kind),
        )
        assert len(list(sim.rounds())) == 2
        models[kind] = sim.model
        sim.close()
        shapes = {type(r.sampler.shape) for r in seen if isinstance(r.sampler, Poisson)}
        assert shapes == {{None: type(None), "lanes": Lanes, "capacity": Capacity}[kind]}
        assert verify(tmp_path / str(kind) / "ledger.sqlite").matches
    for kind in ("lanes", "capacity"):  # the same coins; the noise of float64 sums is another stream
        assert not torch.equal(models[kind], models[None])
        assert (models[kind] - models[None]).norm() < 3 * models[None].norm()
