"""What a run's folder keeps of its account: by it one that was put back to an older copy is noticed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.core.store import write_durably
from modicum.errors import UserError
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.draws import Draw

RECEIPT = "account.json"  # in the run's folder: which account was drawn on, and where


@dataclass(frozen=True)
class Receipts:
    """The receipt of one run, and those of earlier runs beside it."""

    folder: Path  # the run's
    account_folder: Path
    owner: str  # whose account it is: one that is gone is missed by the receipts of its owner

    def check(self, account: DatasetAccount | None, *, new: bool = False) -> None:
        """Refuses an account that lacks what this run drew, or what another run beside it did.

        Args:
            account: Where there is one.
            new: Whether one that is gone is to be followed by a new one.
        """
        self._check_own(account)
        for path in sorted(self.folder.absolute().parent.glob(f"*/{RECEIPT}")):
            try:
                receipt = json.loads(path.read_bytes())
                owner, id = receipt.get("silo"), receipt["account"]
                entry, hash = int(receipt["entry"]), str(receipt["hash"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # another's, which only its own user reads, or damaged: its own run says so
            mine = account is not None and id == account.id
            gone = account is None and owner == self.owner and not new
            if gone or (mine and account is not None and not account.holds(entry, hash)):
                raise UserError(
                    f"the account in {self.account_folder} is an older copy, or gone: it lacks the draw of the "
                    f"run in {path.parent}, which would be spent twice; put the last copy back"
                )

    def note(self, account: DatasetAccount, done: Draw) -> None:
        """The receipt of a hold or draw."""
        receipt = {
            "account": account.id,
            "run": done.run,
            "entry": done.number,
            "hash": done.hash,
            "silo": self.owner,
        }
        if self._own() != receipt:
            write_durably(self.folder / RECEIPT, json.dumps(receipt).encode())

    def _own(self) -> dict[str, Any] | None:
        path = self.folder / RECEIPT
        try:
            value: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
            return value
        except ValueError:
            raise UserError(f"{path} is damaged: put it back as it was") from None

    def _check_own(self, account: DatasetAccount | None) -> None:
        """A run's folder knows which entry of which account it drew on."""
        receipt = self._own()
        if receipt is None:
            return
        if account is None:
            raise UserError(
                f"the run in {self.folder} drew on an account that is not in {self.account_folder}: put it back"
            )
        if receipt.get("account") != account.id:
            raise UserError(
                f"the run in {self.folder} drew on another account than that in {self.account_folder}: use that"
            )
        if not account.holds(int(receipt["entry"]), str(receipt["hash"])):
            raise UserError(
                f"the account in {self.account_folder} is an older copy, without this run's draw: put the last "
                "one back"
            )
