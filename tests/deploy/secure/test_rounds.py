"""Secure aggregation over silos: the model of `modicum run`, with nobody's own message at the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.config import read
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import SECURE, Answer, Code, Kind
from modicum.errors import UserError
from modicum.federation.records import read_records
from modicum.privacy.verify import verify
from modicum.secure_aggregation import terms as secure_terms
from modicum.secure_aggregation.masks import SEALED
from modicum.secure_aggregation.shape import Shape
from modicum.secure_aggregation.wire import HEADER, SIGNATURE
from tests.deploy.secure.helpers import (
    NAMES,
    RECORDS_TEXT,
    TEXT,
    Direct,
    assert_same,
    coordinator,
    files,
    finish,
    in_process,
    key_of,
    silos,
)
from tests.deploy.silo.helpers import ask_silo, charged_rounds


def test_the_same_model_as_in_process(tmp_path: Path) -> None:
    with silos(tmp_path) as held:
        carrier = Direct(held)
        deployed = finish(coordinator(tmp_path, carrier))
    assert_same(deployed, in_process(tmp_path))
    assert all(len(versions) == 1 for versions in carrier.left.values())
    for folder in ("server", *(f"state-{name}" for name in NAMES)):
        assert verify(tmp_path / folder).matches
    for name in NAMES:
        assert charged_rounds(tmp_path / f"{name}.toml") == {0, 1}
    assert [r.answered for r in read_records(tmp_path / "server" / "metrics.jsonl")] == [4, 4]


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace('"protocol"', '"honest-but-curious"'),
        TEXT.replace("[run]", "[run]\nper_round = 3")
        .replace("rounds = 2", "rounds = 4")
        .replace("dropouts = 1", "dropouts = 0"),
        TEXT.replace("budgets = 8.0", "budgets = 8.0\ndelta = 1e-6").replace(
            "clip = 0.3", "clip = 0.3\nclip_lr = 0.5"
        ),
        RECORDS_TEXT,
    ],
    ids=["honest-but-curious", "cohorts", "adaptive-bound", "records"],
)
def test_variants_and_cohorts(tmp_path: Path, text: str) -> None:
    with silos(tmp_path, text) as held:
        carrier = Direct(held)
        deployed = finish(coordinator(tmp_path, carrier))
    assert_same(deployed, in_process(tmp_path, text))
    curious = "honest-but-curious" in text
    assert any(kind is Kind.CONSENT for _, kind, _ in carrier.left) is not curious
    certificate = (tmp_path / "state-client-00" / "certificate.json").read_text()
    assert ("honest-but-curious" in certificate) is curious
    assert verify(tmp_path / "state-client-00").matches


def test_silos_that_draw_whom_they_mask_against(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As more than a hundred would: each shares with two others. A graph whose chance to fail is not charged is
    refused."""
    monkeypatch.setattr(secure_terms, "agree_shape", lambda *_: Shape(2, 2))
    with silos(tmp_path) as held:
        with pytest.raises(UserError, match="more than is charged"):
            coordinator(tmp_path, Direct(held))
        monkeypatch.setattr(secure_terms, "failure_probability", lambda *_: 0.0)
        carrier = Direct(held)
        deployed = finish(coordinator(tmp_path, carrier))
    assert_same(deployed, in_process(tmp_path))
    shares = [len(m) for (_, kind, _), sent in carrier.left.items() if kind is Kind.SHARES for m in sent]
    assert shares
    assert set(shares) == {HEADER.size + 32 + 2 * SEALED + SIGNATURE}


class KilledError(Exception):
    pass


def test_a_sum_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server dies after opening the first round; the next one has that sum, though a silo is gone by then."""

    def gone(kind: Kind, name: str, honest: Callable[[], Answer]) -> Answer | None:
        return None if kind in SECURE and name == "client-01" else honest()

    def killed(*_: object) -> None:
        raise KilledError

    with silos(tmp_path) as held:
        first = coordinator(tmp_path, Direct(held))
        with monkeypatch.context() as patch:
            patch.setattr(first.server, "combine", killed)
            with pytest.raises(KilledError):
                first.step()
        first.close()
        opened = (tmp_path / "server" / "opened.safetensors").read_bytes()
        second = coordinator(tmp_path, Direct(held, gone))
        assert second.step().answered == 4
        assert (tmp_path / "server" / "opened.safetensors").read_bytes() == opened
        assert second.step().answered == 3
        assert (tmp_path / "server" / "opened.safetensors").read_bytes() != opened
        second.close()


def test_bytes_stay_close_to_a_plain_message(tmp_path: Path) -> None:
    """Modulo 2^32 a silo sends 4 bytes for each coordinate, and a little for each peer: 1.1 × a plain message."""
    text = TEXT.replace("[run]", '[model]\nname = "mlp"\nhidden = 220\n[run]')  # 16,510 coordinates and a signal
    with silos(tmp_path, text) as held:
        made = coordinator(tmp_path, Direct(held))
        record = made.step()
        made.close()
    assert made.secure is not None
    assert made.secure.of(0).bits == 32
    assert record.traffic["bytes_up"] <= 1.1 * 4 * made.server.state.model.numel()
    assert record.traffic["bytes_down"] <= 1.1 * 4 * made.server.state.model.numel()


def test_a_lost_or_older_store_ends_the_silo_s_part_in_the_run(tmp_path: Path) -> None:
    paths = files(tmp_path)
    with silos(tmp_path) as held:
        made = coordinator(tmp_path, Direct(held))
        made.step()
        store = tmp_path / "state-client-00" / "secure.sqlite"
        older = store.read_bytes()
        made.step()
        made.close()
    store.write_bytes(older)
    with pytest.raises(UserError, match="is an older copy, without round 2"):
        Silo(read_spec(paths["client-00"]))
    store.unlink()
    with pytest.raises(UserError, match="is missing, though rounds were charged"):
        Silo(read_spec(paths["client-00"]))


def test_another_key_than_the_agreed_one(tmp_path: Path) -> None:
    """Before anything is drawn or charged; and a file that is no key is one line."""
    other, path = key_of(tmp_path, "another"), tmp_path / "client-00.toml"
    with silos(tmp_path) as held:
        held["client-00"].close()
        path.write_text(path.read_text().replace("keys/client-00", "keys/another"))
        with pytest.raises(UserError, match="another is not the one that was agreed for 'client-00'"):
            Silo(read_spec(path))
        other.write_text("no key")
        with pytest.raises(UserError, match="another is no Ed25519 key"):
            Silo(read_spec(path))
    assert charged_rounds(tmp_path / "client-00.toml") == set()


def test_terms_that_an_active_server_could_abuse_are_refused(tmp_path: Path) -> None:
    """2t > P + c: with 4 silos, 1 colluder and 2 dropouts a server could open two sets."""
    text = TEXT.replace("dropouts = 1", "dropouts = 2")
    with silos(tmp_path, text) as held, pytest.raises(UserError, match="needs 2t > P \\+ c"):
        coordinator(tmp_path, Direct(held))


def test_a_silo_without_secure_aggregation_refuses_its_steps(tmp_path: Path) -> None:
    text = TEXT.replace('view = "secure-aggregation"\n', "").replace('secure_aggregation = "protocol"\n', "")
    with silos(tmp_path, text) as held:
        silo = held["client-00"]
        assert ask_silo(silo, Kind.KEYS, bytes(16)).refused is Code.NOT_JOINED


def test_the_command_that_makes_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["silo", "key", str(tmp_path / "k")]) == 0
    said = capsys.readouterr().out
    assert said.startswith('key = "ssh-ed25519 AAAA')
    assert (tmp_path / "k").stat().st_mode & 0o077 == 0
    run(app, ["silo", "key", str(tmp_path / "k")])
    assert capsys.readouterr().out == said  # kept
    (tmp_path / "k").write_text("no key")
    assert run(app, ["silo", "key", str(tmp_path / "k")]) == 2
    assert "no Ed25519 key" in capsys.readouterr().err


def test_a_silo_that_is_gone_is_waited_for_once(tmp_path: Path) -> None:
    """And when it is back it takes part again."""
    away, asked = True, list[tuple[Kind, bool, float]]()

    class Slow(Direct):
        def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
            asked.append((kind, "client-01" in bodies, seconds))
            return super().ask(kind, bodies, seconds)

    def trouble(kind: Kind, name: str, honest: Callable[[], Answer]) -> Answer | None:
        return None if away and kind in SECURE and name == "client-01" else honest()

    with silos(tmp_path, TEXT.replace("rounds = 2", "rounds = 3")) as held:
        config = read(tmp_path / "experiment.toml")
        made = Coordinator(
            config,
            NAMES,
            tmp_path / "server",
            Slow(held, trouble),
            key_of(tmp_path, "server"),
            Patience(1, 1, 300),
        )
        answered = [made.step().answered, made.step().answered]
        away = False
        answered.append(made.step().answered)
        made.close()
    assert answered == [3, 3, 4]
    waits = [seconds for kind, lost, seconds in asked if kind is Kind.KEYS and lost]
    assert waits == [60 + 6 * 4, 20, 20]
