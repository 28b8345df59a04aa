"""Keys between runs: a revoked one is never taken again, a new one takes its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.deploy.flower import keys, link
from modicum.deploy.flower.project import STATUS, settings, write_project
from modicum.deploy.flower.register import (
    Register,
    pem,
    read_public_keys,
    read_register,
    write_public_keys,
)
from modicum.deploy.silo.signing import make_signing_key, public
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder

NAMES = ("ward-a", "ward-b")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    at = tmp_path / "keys"
    write_register(at)
    (tmp_path / "server").mkdir()
    return write_project(
        tmp_path / "app",
        settings(tmp_path / "experiment.toml", tmp_path / "server", at / "silos.toml", at / "server.sign"),
    )


def write_register(at: Path) -> Path:
    at.mkdir(parents=True, exist_ok=True)
    write_public_keys(at / "silos.toml", {name: keys.make_node_key(at / name) for name in NAMES})
    return at / "silos.toml"


def said(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert run(app, ["flower", "keys", *arguments]) == code
    out = capsys.readouterr()
    if code:
        assert out.err.count("\n") == 1
    return out.err + out.out


class SuperLink:
    """Flower's own handlers over its own state, without the wire."""

    def __init__(self, folder: Path) -> None:
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
        from flwr.server.superlink.linkstate import LinkStateFactory
        from flwr.supercore.auth.typing import AccountInfo
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.superlink.federation import NoOpFederationManager

        path = str(folder / "link.db")
        self.state = LinkStateFactory(path, NoOpFederationManager(), ObjectStoreFactory(path)).state()
        self.account = AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)

    def __getattr__(self, name: str) -> Any:
        from flwr.superlink.servicer.control import control_handlers

        handler = {
            "RegisterNode": control_handlers.register_node,
            "UnregisterNode": control_handlers.unregister_node,
            "ListNodes": control_handlers.list_nodes,
        }[name]
        return lambda request: handler(request, self.account, self.state)

    def lets_in(self, name: str) -> bool:
        """What happens when the node of this name comes."""
        (node,) = [n for n in link._list_nodes(self) if n.name == name]
        return bool(self.state.activate_node(node.node_id, 30.0))


def test_a_revoked_node_is_turned_away_by_the_superlink(tmp_path: Path) -> None:
    path, superlink = write_register(tmp_path), SuperLink(tmp_path)
    for name, key in read_public_keys(path).items():
        link.register(superlink, name, key)
    read_register(path).without("ward-b").write(path)
    assert link.unregister(superlink, read_register(path).gone()) == ["ward-b"]
    assert not superlink.lets_in("ward-b")
    assert superlink.lets_in("ward-a")
    assert link.unregister(superlink, read_register(path).gone()) == []  # a second start finds nothing to do


def test_a_server_that_only_forgets_the_name_lets_it_in(tmp_path: Path) -> None:
    """The negative control: taking a silo out of the file, and telling the SuperLink nothing."""
    path, superlink = write_register(tmp_path), SuperLink(tmp_path)
    for name, key in read_public_keys(path).items():
        link.register(superlink, name, key)
    register = read_register(path)
    Register({"ward-a": register.silos["ward-a"]}).write(path)
    assert link.unregister(superlink, read_register(path).gone()) == []
    assert superlink.lets_in("ward-b")


def test_a_revoked_key_never_comes_back(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project.parent / "keys" / "silos.toml"
    old = read_register(path).silos["ward-b"]
    assert "turns its node away" in said(capsys, 0, "revoke", str(project), "ward-b")
    assert list(read_public_keys(path)) == ["ward-a"]
    for name in ("ward-b", "ward-c"):  # by hand, under its own name or another, with a comment behind it
        now = read_register(path)
        Register({**now.silos, name: f"{old} somebody@ward"}, now.revoked).write(path)
        with pytest.raises(UserError, match=f"the key of silo '{name}' was revoked"):
            read_public_keys(path)
        now.write(path)
    write_public_keys(path, {name: path.parent / name for name in NAMES})  # written anew from the files
    with pytest.raises(UserError, match="was revoked"):
        read_public_keys(path)
    Register(read_register(path).silos).write(path)  # the mutant: a register that forgets takes it back
    assert list(read_public_keys(path)) == list(NAMES)


def test_rotating_replaces_the_pair_and_revokes_the_old_one(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = project.parent / "keys"
    old = read_public_keys(at / "silos.toml")
    assert "send it there by a safe way" in said(capsys, 0, "rotate", str(project), "ward-a")
    new = read_public_keys(at / "silos.toml")
    assert new["ward-a"] != old["ward-a"]
    assert new["ward-b"] == old["ward-b"]
    assert new["ward-a"] == pem(public(at / "ward-a").read_text())
    assert (at / "ward-a").stat().st_mode & 0o077 == 0
    assert old["ward-a"] in read_register(at / "silos.toml").gone()
    own = public(keys.make_node_key(project.parent / "own"))
    assert "its old one is revoked" in said(capsys, 0, "rotate", str(project), "ward-b", "--key", str(own))
    assert read_public_keys(at / "silos.toml")["ward-b"] == pem(own.read_text())
    assert not list(at.glob("*.new*"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["revoke", "nowhere", "ward-a"], "there is no project in nowhere"),
        (["revoke", "{project}", "ward-z"], "there is no silo 'ward-z': there are ward-a, ward-b"),
        (["revoke", "{project}"], "Missing argument"),
        (["rotate", "nowhere", "ward-a"], "there is no project in nowhere"),
        (["rotate", "{project}", "ward-z"], "there is no silo 'ward-z'"),
        (["rotate", "{project}", "ward-z", "--key", "{own}"], "there is no silo 'ward-z'"),
        (["rotate", "{project}", "ward-a", "--key", "none.pub"], "cannot read none.pub"),
        (["rotate", "{project}", "ward-a", "--key", "{folder}"], "cannot read"),
        (["rotate", "{project}", "ward-a", "--key", "{toml}"], "that is no public key"),
        (["rotate", "{project}", "ward-a", "--key", "{bundle}"], "that is no public key"),  # another kind of key
        (["rotate", "{project}", "ward-a", "--key", "{a}"], "has already"),
        (["rotate", "{project}", "ward-a", "--key", "{b}"], "another silo has that key"),
        (["rotate", "{project}", "ward-a", "--key", "{gone}"], "was revoked"),
        (["mak", "x"], "No such command"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], expected: str, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = tmp_path / "keys"
    gone = public(keys.make_node_key(at / "gone"))
    found = read_register(at / "silos.toml")
    Register(found.silos, (gone.read_text().strip(),)).write(at / "silos.toml")
    before = (at / "silos.toml").read_bytes()
    names = {
        "project": project,
        "folder": tmp_path,
        "toml": at / "silos.toml",
        "bundle": public(make_signing_key(at / "bundle")),
        "own": public(keys.make_node_key(tmp_path / "own")),
        "a": public(at / "ward-a"),
        "b": public(at / "ward-b"),
        "gone": gone,
    }
    assert expected in said(capsys, 2, *(a.format(**names) for a in arguments))
    assert (at / "silos.toml").read_bytes() == before


@pytest.mark.parametrize(
    "text", ["", "[silos]\na = 3\n", "silos = 3\n", '[silos]\na = "ssh-rsa x"\n', "revoked = 3\n[silos]\n", "[si"]
)
def test_a_register_that_is_none(text: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project.parent / "keys" / "silos.toml").write_text(text)
    assert "must hold a table [silos]" in said(capsys, 2, "revoke", str(project), "ward-a")


def test_not_while_a_run_goes_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = project.parent / "server" / STATUS
    status.write_text(json.dumps({"state": "running", "said": "", "pid": 1}))
    with RunFolder(project.parent / "server").alone():
        for verb in ("revoke", "rotate"):
            assert "a run goes on" in said(capsys, 2, verb, str(project), "ward-a")
    status.write_text(json.dumps({"state": "finished", "said": "", "pid": 1}))
    said(capsys, 0, "revoke", str(project), "ward-a")


def test_a_silo_joins_a_known_federation(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own key, under a name that nobody has; a name or key that is taken, or was revoked, is refused."""
    half = public(keys.make_node_key(tmp_path / "ward-c"))
    give = ("flower", "keys", "add", str(project))
    assert run(app, [*give, "ward-c", "--key", str(half)]) == 0
    assert "write it into [run.silos]" in capsys.readouterr().out
    known = read_public_keys(tmp_path / "keys" / "silos.toml")
    assert known["ward-c"] == pem(half.read_text())
    assert len(known) == 3
    for name in ("ward-c", "ward-d"):
        assert run(app, [*give, name, "--key", str(half)]) == 2
    assert run(app, ["flower", "keys", "revoke", str(project), "ward-c"]) == 0
    assert run(app, [*give, "ward-c", "--key", str(half)]) == 2


def trusted(ca: Path, certificate: Path, host: str = "study.example.org") -> bool:
    """As a node decides that holds this authority and no other."""
    from cryptography import x509
    from cryptography.x509 import verification

    store = verification.Store([x509.load_pem_x509_certificate(ca.read_bytes())])
    verifier = verification.PolicyBuilder().store(store).build_server_verifier(x509.DNSName(host))
    try:
        verifier.verify(x509.load_pem_x509_certificate(certificate.read_bytes()), [])
    except verification.VerificationError:
        return False
    return True


def test_the_server_s_certificate_is_renewed_and_nodes_keep_their_authority(tmp_path: Path) -> None:
    tls = keys.make_tls(tmp_path, ("study.example.org", "127.0.0.1"), days=-1)
    with pytest.raises(UserError, match=r"server\.crt expired on .* `modicum flower keys renew`"):
        keys.check_tls(tls)
    held = tls.ca.read_bytes()
    assert not trusted(tls.ca, tls.certificate)
    assert run(app, ["flower", "keys", "renew", str(tmp_path)]) == 0
    keys.check_tls(tls)
    assert (trusted(tls.ca, tls.certificate), tls.ca.read_bytes() == held) == (True, True)
    assert not trusted(tls.ca, tls.certificate, "elsewhere.example.org")
    for secret in (tmp_path / "ca.key", tls.key):
        assert secret.stat().st_mode & 0o077 == 0
    other = keys.make_tls(tmp_path / "other", ("study.example.org",))
    assert not trusted(tls.ca, other.certificate)  # the negative control: another authority, as renewal once was
    (tmp_path / "other" / "ca.key").replace(tmp_path / "ca.key")
    with pytest.raises(UserError, match="is not the key of"):
        keys.renew(tmp_path)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(UserError, match="all nodes need a new"):
        keys.renew(tmp_path)


def test_half_a_renewal_is_one_line(tmp_path: Path) -> None:
    """A key that is not the certificate's ended in a traceback of the SuperLink's."""
    tls = keys.make_tls(tmp_path / "keys")
    keys.check_tls(tls)
    keys.make_tls(tmp_path / "other").key.replace(tls.key)
    with pytest.raises(UserError, match=r"is not the key of .* `modicum flower keys renew`"):
        keys.check_tls(tls)
    tls.key.write_text("no key")
    with pytest.raises(UserError, match="is not the key of"):
        keys.check_tls(tls)
    keys.renew(tmp_path / "keys")
    keys.check_tls(tls)


def test_a_hospital_makes_the_key_of_its_node_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "keys" / "ward-a"
    assert f"send {own}.pub" in said(capsys, 0, "node", str(own))
    assert sorted(path.name for path in own.parent.iterdir()) == ["ward-a", "ward-a.pub"]
    assert own.stat().st_mode & 0o077 == 0
    assert pem(public(own).read_text())
