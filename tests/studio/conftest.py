"""A folder of small runs, made once for all tests of the studio, and a client that knows its secret."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import modicum as mo
from modicum.federation.run_folder import RunFolder
from modicum.privacy.verify import verify
from modicum.studio import audited
from modicum.studio.guard import RequestGuard
from modicum.studio.server import Studio

starlette = pytest.importorskip("starlette")
pytest.importorskip("httpx")
TOKEN, PORT = "a-secret", 8000
NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one method, one run of another with a name that wants to be markup."""
    folder = tmp_path_factory.mktemp("studio")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = mo.Federation.from_dataset("digits", clients=4, budgets=[1.0, 8.0], test=0.2, seed=0)
    for name, method, seed in (("two/a", "dp-sgd", 0), ("two/b", "dp-sgd", 1), (NASTY, "aqc", 0)):
        mo.train(data, method=method, rounds=3, seed=seed, folder=folder / name)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "runs")


class Client:
    """Asks a studio as its own page does."""

    def __init__(self, folder: Path) -> None:
        from starlette.testclient import TestClient

        self.studio = Studio(folder)
        app = RequestGuard(self.studio.app(), TOKEN, PORT)
        self.http = TestClient(app, base_url=f"http://127.0.0.1:{PORT}")  # type: ignore[arg-type]

    def get(self, path: str, status: int = 200):  # type: ignore[no-untyped-def]
        answer = self.http.get(f"/{TOKEN}/{path}")
        assert answer.status_code == status, answer.text
        return answer.json() if answer.headers["content-type"] == "application/json" else answer

    def post(self, path: str, status: int = 200, **body: object):  # type: ignore[no-untyped-def]
        answer = self.http.post(f"/{TOKEN}/{path}", **body)  # type: ignore[arg-type]
        assert answer.status_code == status, answer.text
        return answer.json()

    def id(self, name: str) -> str:
        """The id of the run of this name."""
        return next(str(row["id"]) for row in self.get("api/runs")["runs"] if row["name"] == name)


@pytest.fixture
def client(runs: Path) -> Client:
    return Client(runs)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify in this process; the test of traces has one of its own, as users do."""

    def in_process(files: RunFolder, *, alone: bool) -> dict[str, object]:
        return verify(files.ledger if alone else files.path).to_dict()

    monkeypatch.setattr(audited, "_verify", in_process)
