"""A silo and everybody's accounts: it refuses a run where one is older than somebody remembers."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from modicum.deploy.silo.account import new_account
from modicum.deploy.silo.signing import read_public
from modicum.deploy.silo.terms import Join
from modicum.deploy.silo.wire import Code, Refuse
from modicum.deploy.silo.witness import Statement, Witness, objection, read_statements
from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.deploy.silo.silo import Silo

LOG = logging.getLogger("modicum.silo")
FILE = "witness.json"  # in the account's folder, which outlasts runs


def check_accounts(silo: Silo, join: Join) -> None:
    """Before anything is drawn. What is found goes to the operator's log; the server gets a code."""
    found = _own(silo, join.heard.get(silo.spec.name, ()))
    if found is None and (witness := witness_of(silo)) is not None:
        agreed = silo.spec.experiment.run.silos
        for name, shown in _said(silo, join.accounts).items():
            found = found or witness.objection(name, shown, new=agreed[name].account == "new")
    if found is not None:
        LOG.warning("%s", found)
        raise Refuse(Code.ACCOUNT_BEHIND)


def _own(silo: Silo, heard: tuple[Statement, ...]) -> str | None:
    """What the server remembers of this account has to be in it: a longer chain of another history is none."""
    shown = silo.account.shown()
    if shown is None:
        return None
    for one in heard:
        if one.id == shown.id and not silo.account.holds(one):
            return (
                f"the account in {silo.spec.account_folder} is an older copy: the server remembers entry "
                f"{one.entries} of it (head {one.head[:12]}…), which is not here; what was drawn since would be "
                "spent twice: put the last copy back"
            )
    return objection(silo.spec.name, shown, heard, new=new_account(silo.spec))


def remember_accounts(silo: Silo, body: bytes) -> None:
    """What the others stated when they joined, as the server passes it on when a run is over."""
    try:
        said = read_statements(json.loads(body)) if body else {}
    except ValueError:
        raise Refuse(Code.MALFORMED) from None
    witness = witness_of(silo)
    if witness is not None:
        witness.keep(_said(silo, said))


def _said(silo: Silo, accounts: dict[str, Statement]) -> dict[str, Statement]:
    """Statements of other silos under their own signatures: a server makes up none."""
    found = {}
    for name, agreed in silo.spec.experiment.run.silos.items():
        statement = accounts.get(name)
        if name != silo.spec.name and statement is not None:
            if statement.said_by(name, read_public(name, agreed.key)):
                found[name] = statement
            else:
                LOG.warning("the server passes on a statement of %s that %s did not sign", name, name)
    return found


def witness_of(silo: Silo) -> Witness | None:
    """Where this silo remembers others' accounts; None where it keeps none itself."""
    if silo.account.shown() is None:
        return None
    try:
        return Witness(silo.spec.account_folder / FILE)
    except UserError as damaged:
        LOG.warning("%s", damaged)
        raise Refuse(Code.ACCOUNT_BEHIND) from None
