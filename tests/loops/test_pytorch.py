"""A loop of one's own: the federation's mechanism, one ledger, and refusals of what no noise would cover."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import modicum as mo
from modicum.compute import Clipper
from modicum.core.clips import Flat
from modicum.core.layout import Layout
from modicum.core.release_gate import ReservedGate, rows_of
from modicum.errors import PrivacyWarning, UntrainedWarning, UserError
from modicum.loops import private as own_loop
from modicum.loops import pytorch
from modicum.loops.private import OwnBatch, Private
from modicum.loops.pytorch import privately
from modicum.loops.rehearsal import Rehearsal
from modicum.mechanisms.passes import laid_out
from modicum.mechanisms.record_local import GRADIENT
from modicum.privacy.factors import IDENTITY
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import NoiseKey, SimulatedNoise
from modicum.privacy.noise.one_place import OnePlace
from modicum.privacy.verify import verify

N, WIDTH, CLASSES = 120, 6, 3
Losses = Callable[[nn.Module, OwnBatch], Tensor]


def records() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    return torch.randn(N, WIDTH, generator=drawn), torch.randint(CLASSES, (N,), generator=drawn)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, CLASSES))


def usual(model: nn.Module, batch: OwnBatch) -> Tensor:
    return functional.cross_entropy(model(batch.x), batch.y, reduction="none")


def prepared(where: Path, model: nn.Module | None = None, **changes: Any) -> Private:
    model = network() if model is None else model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    settings: dict[str, Any] = {"epsilon": 3.0, "epochs": 2, "batch": 24, "folder": where / "run", **changes}
    return privately(model, optimiser, records(), **settings)


def play(private: Private, losses: Losses = usual, until: int | None = None) -> int:
    """Steps that changed the model; `until`: the program is cut off after so many."""
    changed = 0
    for batch in private:
        changed += private.step(losses(private.model, batch))
        if changed == until:
            private.close()
            raise KeyboardInterrupt
    return changed


def weights(private: Private) -> Tensor:
    return Layout.of(private.model).read(private.model)


def test_a_loop_is_certified_and_verified_like_a_federation(tmp_path: Path) -> None:
    private = prepared(tmp_path)
    assert play(private) == private.steps == private.done == 10
    assert 2.9 < private.certificate.epsilon("records") <= 3.0
    found = verify(tmp_path / "run")
    assert found.matches
    (line,) = found.clients
    assert "sees the models" in line.spec.view.sentence()
    assert any("prints" in said and "stops by" in said for said in private.certificate.assumptions)
    assert not (tmp_path / "run" / "noise.key").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()


def dropping(model: nn.Module, batch: OwnBatch) -> Tensor:
    return usual(nn.Sequential(nn.Dropout(0.1), model), batch)


def rarely(model: nn.Module, batch: OwnBatch) -> Tensor:
    """What no rehearsal sees happen."""
    return usual(model, batch) * (0.0 if random.random() < 1e-12 else 1.0)


@pytest.mark.parametrize("losses", [dropping, rarely])
@pytest.mark.parametrize("physical", [None, 16])
def test_a_loop_that_draws_is_not_in_lanes(
    physical: int | None, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws that are no layer's of the model are found out in the rehearsal."""

    real = pytorch._shapes
    monkeypatch.setattr(pytorch, "_shapes", lambda m, kind: real(m, "lanes" if kind == "auto" else kind))
    private = prepared(tmp_path, nn.Linear(WIDTH, CLASSES), physical_batch=physical, epochs=1)
    with pytest.raises(UserError, match="give physical_batch") if physical is None else nullcontext():
        play(private, losses)


def test_a_step_is_the_engines_own(tmp_path: Path) -> None:
    """The same coins, clipped sum, noise and division as inside a federation, from the shared parts."""
    model = nn.Linear(WIDTH, CLASSES)
    first = Layout.of(model).read(model).clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = records()
    private = privately(model, optimiser, (x, y), epsilon=3, batch=24, seed=3, folder=tmp_path / "run")
    moved = None
    for batch in private:
        if private.step(usual(model, batch)) and moved is None:
            moved = first - Layout.of(model).read(model)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        release = next(iter(ledger.charges()))
    gate = ReservedGate(SimulatedNoise(3), [])
    gate._tokens = {release: None}  # type: ignore[dict-item]
    drawn = gate.sample(release, 0, N)
    rows = laid_out(pytorch.records_of((x, y)), drawn.view(-1, drawn.shape[-1])[0])
    with torch.no_grad():
        Layout.of(model).load(model, first)
    assert rows.present is not None
    total = Clipper(model)(
        lambda out, t: functional.cross_entropy(out, t["y"], reduction="none"),
        rows.x,
        dict(rows.targets),
        Flat(1.0),
        weights=rows.present.float(),
    ).total
    summed = Layout.of(model).flatten(total).double()
    noise = SimulatedNoise(3).normal(
        NoiseKey("records", 0, 0, f"noise:{GRADIENT}"), len(summed), release.blocks[0].noise_std
    )
    assert moved is not None
    torch.testing.assert_close(moved, ((summed + torch.from_numpy(noise)) / 24).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 5, 7])
def test_a_cut_loop_resumes_to_the_same_bits_and_pays_once(
    tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is real here: the key makes it the same again, and is gone in the end."""
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path), until=cut)
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    monkeypatch.setattr(pytorch, "OnePlace", lambda *_, **__: None)
    results = []
    for folder in (tmp_path, tmp_path / "copy"):
        private = prepared(folder, resume=True)
        play(private)
        results.append(weights(private))
        with Ledger.open(folder / "run" / "ledger.sqlite", read_only=True) as ledger:
            assert sum(release.count for release in ledger.charges()) == private.steps
        assert verify(folder / "run").matches
    assert torch.equal(*results)


def test_an_uncut_simulated_loop_has_the_bits_of_a_resumed_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = prepared(tmp_path / "a", seed=2)
    play(whole)
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path / "b", seed=2), until=7)
    resumed = prepared(tmp_path / "b", seed=2, resume=True)
    play(resumed)
    assert torch.equal(weights(whole), weights(resumed))


def test_another_loop_may_not_take_a_released_step_again(tmp_path: Path) -> None:
    """The same noise under another gradient would show the difference of the two."""
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path), until=2)
    private = prepared(tmp_path, resume=True)
    before = weights(private).clone()
    with pytest.raises(UserError, match="not the one that was taken before"):
        play(private, lambda model, batch: 0.1 * usual(model, batch))
    assert torch.equal(before, weights(private))


def test_negative_control_without_digests_the_same_noise_serves_two_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modicum.loops.keeping.Keeping.admit", lambda *_: None)
    monkeypatch.setattr("modicum.loops.keeping.Keeping.keep", lambda self, done: setattr(self, "done", done))
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path), until=2)
    play(prepared(tmp_path, resume=True), lambda model, batch: 0.1 * usual(model, batch))


def test_an_ended_run_is_not_continued(tmp_path: Path) -> None:
    private = prepared(tmp_path)
    for batch in private:
        if private.step(usual(private.model, batch)):
            break
    with pytest.raises(UserError, match="has not ended"):
        _ = private.certificate
    assert private.finish().epsilon("records") > 2.9  # of the whole plan, however early it ends
    assert verify(tmp_path / "run").matches
    with pytest.raises(UserError, match="played once"):
        next(iter(private))
    with pytest.raises(UserError, match="has ended"):
        prepared(tmp_path, resume=True)


def test_physical_batches_come_to_the_same_step(tmp_path: Path) -> None:
    found = []
    for name, physical in (("a", None), ("b", 7)):
        (tmp_path / name).mkdir()
        model = nn.Linear(WIDTH, CLASSES)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        private = prepared(tmp_path / name, model, seed=1, physical_batch=physical, batch=None, epochs=3)
        assert play(private) == 3
        found.append(weights(private))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_given_noise_multiplier_is_priced(tmp_path: Path) -> None:
    private = prepared(tmp_path, epsilon=None, noise_multiplier=1.3)
    assert private.noise_multiplier == pytest.approx(1.3)
    play(private)
    assert private.certificate.epsilon("records") == pytest.approx(private.epsilon)
    assert verify(tmp_path / "run").matches


def test_the_same_records_again_warn(tmp_path: Path) -> None:
    play(prepared(tmp_path))
    with pytest.warns(PrivacyWarning, match="used the same records"):
        prepared(tmp_path, folder=tmp_path / "second").close()


class Centred(nn.Module):
    """Takes the batch's mean from each record."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x - x.mean(0))
        return found


class Counting(nn.Module):
    """Writes into a buffer what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        found: Tensor = self.head(x)
        return found


class Looking(nn.Module):
    """Goes another way by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x if float(x.sum()) > 0 else -x)
        return found


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


@pytest.mark.parametrize(
    ("model", "reason"),
    [(normalised, "BatchNorm"), (Centred, "mixed|depends on the other"), (Counting, "'seen'"), (Looking, "reads")],
)
def test_models_that_mix_look_or_remember_are_refused_before_a_record(
    tmp_path: Path, model: Callable[[], nn.Module], reason: str
) -> None:
    private = prepared(tmp_path, model())
    with pytest.raises(UserError, match=reason):
        play(private)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert not list(ledger.charges())


def centred(model: nn.Module, batch: OwnBatch) -> Tensor:
    losses = usual(model, batch)
    return losses - losses.mean()


def balanced(model: nn.Module, batch: OwnBatch) -> Tensor:
    """Weights from the batch's labels: no gradient shows them."""
    counts = torch.bincount(batch.y, minlength=CLASSES).float()
    return usual(model, batch) / counts[batch.y]


def decayed(model: nn.Module, batch: OwnBatch) -> Tensor:
    return usual(model, batch) + sum(p.square().sum() for p in model.parameters())


def averaged(model: nn.Module, batch: OwnBatch) -> Tensor:
    """How many were drawn is in every loss: one coin would move everybody, and sampling amplify nothing."""
    return usual(model, batch) / batch.present.sum()


MIXING = [centred, balanced, decayed, averaged]


@pytest.mark.parametrize("losses", MIXING)
def test_losses_that_mix_records_are_refused_before_a_record(tmp_path: Path, losses: Losses) -> None:
    private = prepared(tmp_path)
    with pytest.raises(UserError, match="cannot be clipped record by record"):
        play(private, losses)


@pytest.mark.parametrize("losses", MIXING)
def test_negative_control_without_the_rehearsal_they_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: Losses
) -> None:
    monkeypatch.setattr(Rehearsal, "judge", lambda *_: None)
    assert play(prepared(tmp_path), losses) == 10


class Misuse:
    """Ways of a loop that no noise would cover, each in a few words."""

    @staticmethod
    def twice(private: Private, batch: OwnBatch) -> None:
        losses = usual(private.model, batch)
        private.step(losses)
        private.step(losses)

    @staticmethod
    def averaged(private: Private, batch: OwnBatch) -> None:
        private.step(usual(private.model, batch).mean())

    @staticmethod
    def detached(private: Private, batch: OwnBatch) -> None:
        private.step(usual(private.model, batch).detach())

    @staticmethod
    def backward(private: Private, batch: OwnBatch) -> None:
        losses = usual(private.model, batch)
        losses.sum().backward()
        private.step(losses)

    @staticmethod
    def own_step(private: Private, batch: OwnBatch) -> None:
        with torch.no_grad():
            for p in private.model.parameters():
                p.sub_(0.1)
        private.step(usual(private.model, batch))

    @staticmethod
    def no_tensor(private: Private, batch: OwnBatch) -> None:
        private.step(float(usual(private.model, batch).mean()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("misuse", "reason"),
    [
        (Misuse.twice, "once after each batch"),
        (Misuse.averaged, "one loss for each row"),
        (Misuse.detached, "not of this batch"),
        (Misuse.backward, "not of this batch|second time|leave loss.backward"),
        (Misuse.own_step, "written to between"),
        (Misuse.no_tensor, "takes a tensor of losses"),
    ],
)
@pytest.mark.parametrize("when", ["rehearsal", "training"])
def test_a_misused_step_is_refused(
    tmp_path: Path, misuse: Callable[[Private, OwnBatch], None], reason: str, when: str
) -> None:
    private = prepared(tmp_path)

    def loop() -> None:
        for batch in private:
            if when == "rehearsal" or not batch.rehearsal:
                misuse(private, batch)
            else:
                private.step(usual(private.model, batch))

    with pytest.raises(UserError, match=reason):
        loop()


def alone(before: Tensor, _losses: Tensor) -> Tensor:
    return before


@pytest.mark.parametrize(
    ("kept", "combined"),
    [("during", alone), ("during", torch.add), ("during", torch.mul), ("after", alone)],
)
def test_losses_of_an_earlier_batch_are_refused(
    tmp_path: Path, kept: str, combined: Callable[[Tensor, Tensor], Tensor]
) -> None:
    private = prepared(tmp_path)

    def loop() -> None:
        before = None
        for batch in private:
            losses = usual(private.model, batch)
            if batch.rehearsal or before is not None:
                private.step(losses if before is None else combined(before, losses))
                continue
            before = usual(private.model, batch)
            private.step(losses)
            before = before if kept == "during" else usual(private.model, batch)

    with pytest.raises(UserError, match="not of this batch"):
        loop()


def test_a_step_without_a_batch_and_a_batch_without_a_step_are_refused(tmp_path: Path) -> None:
    private = prepared(tmp_path)
    with pytest.raises(UserError, match="no batch is waiting"):
        private.step(torch.zeros(3))
    with pytest.raises(UserError, match="had no private"):
        for _ in private:
            pass


def test_a_change_of_mode_is_refused(tmp_path: Path) -> None:
    private = prepared(tmp_path)

    def evaluating(model: nn.Module, batch: OwnBatch) -> Tensor:
        model.train(batch.rehearsal)
        return usual(model, batch)

    with pytest.raises(UserError, match=r"another mode|another way"):
        play(private, evaluating)


class Ragged(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.zeros(3 + i), 0


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Ragged(), "one public length"),
        (DataLoader(TensorDataset(*records())), "loader.dataset"),
        ((torch.zeros(3, 2), torch.zeros(4)), "rows"),
        ([], "no records"),
    ],
)
def test_bad_datasets_have_a_line_that_helps(tmp_path: Path, dataset: Any, reason: str) -> None:
    model = network()
    with pytest.raises(UserError, match=reason):
        privately(model, torch.optim.SGD(model.parameters(), lr=1), dataset, epsilon=1, folder=tmp_path / "run")


def test_bad_optimisers_have_a_line_that_helps(tmp_path: Path) -> None:
    model, other = network(), nn.Linear(2, 2)
    some = [p for p in model.parameters() if p.dim() > 1]
    for optimiser, reason in (
        (torch.optim.SGD(some, lr=1), "not given to the optimiser"),
        (torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1), "not the model's"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
    ):
        with pytest.raises(UserError, match=reason):
            privately(model, optimiser, records(), epsilon=1, folder=tmp_path / "run")
    with pytest.raises(UserError, match="say what the loop may cost"):
        privately(model, torch.optim.SGD(model.parameters(), lr=1), records(), folder=tmp_path / "run")


class Words(nn.Module):
    """Tokens and a mask by name, a frozen embedding, called with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, CLASSES)
        self.embedding.weight.requires_grad_(False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = self.embedding(ids) * mask[..., None]
        found: Tensor = self.head(kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return found


def test_records_of_several_tensors_and_a_scheduler(tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(0)
    x = {"ids": torch.randint(11, (N, 5), generator=drawn), "mask": torch.ones(N, 5)}
    model = Words()
    optimiser = torch.optim.Adam(model.head.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 1, gamma=0.5)
    private = mo.privately(
        model, optimiser, (x, records()[1]), epsilon=2, batch=30, folder=tmp_path / "run", also={"lr": scheduler}
    )
    for batch in private:
        if private.step(functional.cross_entropy(model(**batch.x), batch.y, reduction="none")):
            scheduler.step()
    assert scheduler.last_epoch == private.steps == 4
    assert verify(tmp_path / "run").matches


class Between:
    """Writes into the model that no noise covers, outside of a batch and its step."""

    @staticmethod
    def in_place(model: nn.Module, batch: OwnBatch) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(float(batch.x.sum()))

    @staticmethod
    def data(model: nn.Module, batch: OwnBatch) -> None:
        next(model.parameters()).data.add_(float(batch.x.sum()))

    @staticmethod
    def moved(model: nn.Module, batch: OwnBatch) -> None:
        first = next(model.parameters()).data
        first.copy_(first.roll(1 if float(batch.x.sum()) else 0, 1))

    @staticmethod
    def replaced(model: nn.Module, batch: OwnBatch) -> None:
        first = model[0]  # type: ignore[index]
        first.weight = nn.Parameter(first.weight.detach() + float(batch.x.sum()))

    @staticmethod
    def loaded(model: nn.Module, batch: OwnBatch) -> None:
        model.load_state_dict({name: t + float(batch.x.sum()) for name, t in model.state_dict().items()})


@pytest.mark.parametrize("write", [getattr(Between, name) for name in vars(Between) if name[0] != "_"])
@pytest.mark.parametrize("when", ["before the step", "after the step", "after the last step"])
def test_a_model_that_was_written_to_outside_of_a_step_is_refused(
    tmp_path: Path, write: Callable[[nn.Module, OwnBatch], None], when: str
) -> None:
    private = prepared(tmp_path)

    def loop() -> None:
        for batch in private:
            losses = usual(private.model, batch)
            if when == "before the step" and not batch.rehearsal:
                write(private.model, batch)
            private.step(losses)
            if not batch.rehearsal and (when == "after the step" or private.done == private.steps):
                write(private.model, batch)

    with pytest.raises(UserError, match="written to"):
        loop()


def centred_later(model: nn.Module, batch: OwnBatch) -> Tensor:
    """Looks at the others from the third step on."""
    losses = usual(model, batch)
    model.called = getattr(model, "called", 0) + 1  # type: ignore[assignment]
    return losses - losses.mean() if model.called > 6 else losses


def test_losses_that_begin_to_mix_records_after_the_rehearsal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another way than in the rehearsal"):
        play(prepared(tmp_path), centred_later)


def test_a_copied_folder_is_not_continued_beside_its_original(tmp_path: Path) -> None:
    """Both would have the same noise: the difference of their models would be that of two bare gradients."""
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path), until=7)
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "copy")
    with pytest.raises(UserError, match="copy"):
        prepared(tmp_path, folder=tmp_path / "elsewhere" / "copy", resume=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert play(prepared(tmp_path, folder=tmp_path / "moved", resume=True)) == 10 - 5


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "negative control"])
@pytest.mark.parametrize("way", ["written over", "changed files alone", "after the end"])
def test_an_older_state_that_was_put_back_is_refused(
    tmp_path: Path, way: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another rate the steps after it would have other gradients under the noise that was seen already."""
    if not noted:
        monkeypatch.setattr(OnePlace, "note", lambda *_: None)
    run, backup = tmp_path / "run", tmp_path / "elsewhere" / "backup"
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path), until=3)
    shutil.copytree(run, backup)
    if way == "after the end":
        play(prepared(tmp_path, resume=True))
        (run / "certificate.json").unlink()
        number = str((backup / "noise.key").stat().st_ino)  # as the freed one may be given out again
        (backup / "noise.home").write_text(number)
        shutil.rmtree(run)
        backup.rename(run)
    else:
        with pytest.raises(KeyboardInterrupt):
            play(prepared(tmp_path, resume=True), until=7)
        for path in [p for p in backup.rglob("*") if p.is_file()]:
            own = run / path.relative_to(backup)
            if way == "written over" or own.read_bytes() != path.read_bytes():
                own.write_bytes(path.read_bytes())
    if not noted:
        play(prepared(tmp_path, resume=True))
        return
    with pytest.raises(UserError, match="put back from a backup"):
        prepared(tmp_path, resume=True)


def test_an_old_checkpoint_that_is_put_back_releases_nothing_new(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path, epochs=3), until=6)
    old = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        play(prepared(tmp_path, epochs=3, resume=True), until=7)
    (tmp_path / "run" / "checkpoint.pt").write_bytes(old)

    def others(model: nn.Module, batch: OwnBatch) -> Tensor:
        return usual(model, batch) * 3

    with pytest.raises(UserError):
        play(prepared(tmp_path, epochs=3, resume=True), others)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"adjacency": "both"}, "unknown adjacency 'both'"),
        ({"adjacency": "add-remove"}, "tell[s]? their true number"),
        ({"epsilon": 0, "noise_multiplier": 1.1}, "epsilon must be"),
        ({"epsilon": "3"}, "epsilon must be"),
        ({"epochs": float("inf")}, "epochs must be"),
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"physical_batch": 1}, "physical_batch must be a whole number of at least 2"),
        ({"parts": 0}, "parts must be"),
        ({"max_grad_norm": None}, "max_grad_norm must be"),
        ({"clip": 1.0}, "give max_grad_norm"),
        ({"noise": "correlated"}, 'mo.Noise\\("correlated"\\)'),
        ({"also": {"lr": 3}}, "by name"),
    ],
)
def test_settings_that_cannot_be_are_one_line(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        prepared(tmp_path, **changes)
    assert not (tmp_path / "run").exists()


def mixed(where: Path, **changes: Any) -> Private:
    """Five batches in turn, each record in four of twenty steps."""
    return prepared(where, **{"noise": mo.Noise("correlated"), "epochs": 4, **changes})


def test_correlated_noise_is_one_gaussian_for_the_whole_loop(tmp_path: Path) -> None:
    private = mixed(tmp_path)
    assert play(private) == private.steps == 20
    assert private.sample_rate == 1 / 5
    found = verify(tmp_path / "run")
    assert found.matches
    line = private.certificate.clients["records"]
    assert line.correlated is not None
    said = line.correlated[GRADIENT]
    assert (said["separation"], said["participations"]) == (5, 4)
    assert 2.9 < line.epsilon <= 3.0
    assert not (tmp_path / "run" / "noise.key").exists()


@pytest.mark.parametrize("noise", [mo.Noise("correlated", bands=3), mo.Noise("correlated", factor="blt")])
def test_rows_of_a_loop_are_the_factor_s_inverse_times_fresh_ones(tmp_path: Path, noise: mo.Noise) -> None:
    """Gradients that are next to nothing leave the noise alone: C times what was written are independent rows."""
    model = nn.Linear(WIDTH, 1, bias=False)
    moved, before = [], Layout.of(model).read(model).clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    private = privately(
        model, optimiser, records(), epsilon=3, epochs=4, batch=24, noise=noise, seed=3, folder=tmp_path / "run"
    )
    for batch in private:
        if private.step((model(batch.x) * 1e-6).sum(1)):
            after = Layout.of(model).read(model).clone()
            moved.append(((before - after) * 24 / private.noise_multiplier).numpy())
            before = after
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        terms = ledger.plans["records"].correlation(GRADIENT)
    assert terms is not None
    assert max(terms.factor.column(20)[1:]) > 0.1
    fresh = np.tril(toeplitz(terms.factor.column(20))) @ np.stack(moved)
    drawn = rows_of(SimulatedNoise(3), "records", replace(terms, factor=IDENTITY))
    like = torch.zeros(WIDTH, dtype=torch.float64)
    assert fresh == pytest.approx(np.stack([drawn.row(GRADIENT, t, like).numpy() for t in range(20)]), abs=1e-4)


def test_batches_come_in_turn_and_have_one_shape(tmp_path: Path) -> None:
    x, y = torch.arange(53.0)[:, None], torch.zeros(53)
    model = nn.Linear(1, 1)
    private = privately(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        (x, y),
        epsilon=3,
        epochs=3,
        batch=10,
        noise=mo.Noise("correlated"),
        folder=tmp_path / "run",
    )
    seen = []
    for batch in private:
        assert batch.x.shape == (11, 1)
        private.step((model(batch.x) * 1e-6).sum(1))
        if not batch.rehearsal:
            seen.append(batch.x[batch.present, 0].int().tolist())
    assert seen[:5] == seen[5:10] == seen[10:]
    assert sorted(number for batch in seen[:5] for number in batch) == list(range(53))


@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.parametrize("cut", [1, 6, 13])
def test_a_cut_loop_has_the_same_correlated_rows(
    tmp_path: Path, cut: int, physical: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is real. New rows in place of the old ones would be another step, which digests refuse."""
    with pytest.raises(KeyboardInterrupt):
        play(mixed(tmp_path, physical_batch=physical), until=cut)
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    monkeypatch.setattr(pytorch, "OnePlace", lambda *_, **__: None)
    results = []
    for folder in (tmp_path, tmp_path / "copy"):
        private = mixed(folder, physical_batch=physical, resume=True)
        play(private)
        results.append(weights(private))
        assert verify(folder / "run").matches
        assert not (folder / "run" / "noise.key").exists()
    assert torch.equal(*results)


def test_negative_control_rows_of_another_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(mixed(tmp_path), until=3)
    (tmp_path / "run" / "noise.key").write_bytes(b"another key of thirty-two bytes.")
    with pytest.raises(UserError, match="not the one that was taken before"):
        play(mixed(tmp_path, resume=True))


def test_it_leaves_less_noise_than_poisson_batches(tmp_path: Path) -> None:
    """What is written by gradients next to nothing, summed over the loop, over six seeds."""
    ends = {}
    for name, noise in {"independent": None, "correlated": mo.Noise("correlated")}.items():
        ends[name] = []
        for seed in range(6):
            model = nn.Linear(40, 1, bias=False)
            nn.init.zeros_(model.weight)
            x, y = torch.randn(200, 40), torch.zeros(200)
            private = privately(
                model,
                torch.optim.SGD(model.parameters(), lr=1.0),
                (x, y),
                epsilon=8,
                epochs=8,
                batch=20,
                noise=noise,
                seed=seed,
                folder=tmp_path / f"{name}{seed}",
            )
            for batch in private:
                private.step((model(batch.x) * 1e-6).sum(1))
            ends[name].append(model.weight.detach().square().mean().item())
    assert sum(ends["correlated"]) < 0.8 * sum(ends["independent"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": None}, "every record is in every step"),
        ({"noise": mo.Noise("integer")}, "integers are for deployments"),
        ({"noise": mo.Noise("correlated", bands=9, factor="blt")}, "bands"),
    ],
)
def test_noise_that_cannot_be_is_refused_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        mixed(tmp_path, **changes)


def in_groups(where: Path, model: nn.Module, *rates: float) -> Private:
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(model, rates, strict=False)]  # type: ignore[call-overload]
    return privately(
        model, torch.optim.SGD(groups, lr=0.5), records(), epsilon=3, epochs=2, batch=24, folder=where / "run"
    )


def test_parameters_that_the_first_step_leaves_alone_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model alone, after its noise: nobody's gradient is asked."""

    def layers() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES))

    with pytest.warns(UntrainedWarning, match=r"after step 1, 1\.weight, 1\.bias of the model are what") as said:
        play(in_groups(tmp_path / "one", layers(), 0.5, 0.0))
    assert len(said) == 1
    with pytest.warns(UntrainedWarning, match=r"after step 5, 0\.weight, .* 1\.bias of the model"):
        play(in_groups(tmp_path / "none", layers(), 0.0, 0.0))  # the rate might have risen until then
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        play(in_groups(tmp_path / "all", layers(), 0.5, 0.5))
        monkeypatch.setattr(own_loop, "name_unchanged", lambda *_: None)  # negative control
        play(in_groups(tmp_path / "silent", layers(), 0.5, 0.0))


class Spare(nn.Module):
    """A layer that its outputs know nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


def test_parameters_that_no_loss_reaches_are_named_in_the_rehearsal(tmp_path: Path) -> None:
    private = prepared(tmp_path, Spare())
    with pytest.warns(UntrainedWarning, match=r"loss of Spare does not reach spare\.weight, spare\.bias: noise"):
        play(private)
