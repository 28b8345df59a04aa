"""Records that every user of the machine can read are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.deploy.silo import readable
from modicum.deploy.silo.readable import for_everybody
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.errors import UserError
from tests.deploy.silo.helpers import EXPERIMENT, own_records, write_silo


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that everybody may enter, as if nothing above it forbade that."""
    honest = readable._mode
    tmp_path.chmod(0o755)
    monkeypatch.setattr(readable, "_mode", lambda p: 0o755 if p in tmp_path.resolve().parents else honest(p))
    return tmp_path


def test_who_can_get_there(everywhere: Path) -> None:
    file = everywhere / "d" / "records.csv"
    file.parent.mkdir(mode=0o755)
    file.write_text("x")
    for folder, mode, found in ((0o755, 0o644, file), (0o755, 0o640, None), (0o700, 0o644, None)):
        file.parent.chmod(folder)
        file.chmod(mode)
        assert for_everybody(file) == found
        assert for_everybody(file.parent) == found
    assert for_everybody(everywhere / "none.csv") is None


def test_a_silo_refuses(everywhere: Path) -> None:
    data = own_records(everywhere, "ward")
    path = write_silo(everywhere, "ward", experiment=EXPERIMENT, data=data)
    file = everywhere / "records-ward" / "ward.npz"
    file.chmod(0o644)
    file.parent.chmod(0o755)
    with pytest.raises(UserError, match=r"every user of this machine can read .*ward.npz: .*chmod o-rwx"):
        Silo(read_spec(path))
    file.chmod(0o600)
    Silo(read_spec(path)).close()
