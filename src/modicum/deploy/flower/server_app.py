"""The server of a run: an experiment file, a folder for the run, and the public keys of the silos in it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.deploy.flower.project import LOG_FILE, STATUS
from modicum.deploy.silo.watched import log_format
from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord

LOG = logging.getLogger("modicum.flower")


def run(grid: Any, settings: dict[str, str]) -> None:
    """Run or continue. Killed at any moment, a second call with the same folder goes on from the last round."""
    from modicum.config import read
    from modicum.core.store import write_durably
    from modicum.deploy.flower.carrier import GridCarrier
    from modicum.deploy.flower.coordinator import Coordinator, Patience
    from modicum.deploy.flower.register import read_public_keys
    from modicum.federation.run_folder import RunFolder

    folder = Path(settings["folder"])
    files = RunFolder(folder)
    files.make(fresh=False)

    def status(state: str, said: str = "") -> None:
        write_durably(folder / STATUS, json.dumps({"state": state, "said": said, "pid": os.getpid()}).encode())

    with files.alone(), _written_down(folder / LOG_FILE):
        status("running")
        try:
            keys = read_public_keys(Path(settings["silos"]))
            patience = Patience(joining=float(settings["joining"]), round=float(settings["round"]))
            carrier = GridCarrier(grid, keys, lambda said: status("running", said))
            config, key = read(settings["experiment"]), _key(settings)
            coordinator = Coordinator(config, list(keys), folder, carrier, key, patience)
            try:
                for record in coordinator.rounds():
                    LOG.info("round %d: %s answered%s", record.round + 1, record.answered, without(record))
                coordinator.finish()
            finally:
                coordinator.close()
        except UserError as error:
            LOG.error("%s", error)
            status("failed", str(error))
            raise
        except Exception as error:  # whatever it was, the folder says that it ended and how
            LOG.exception("the server failed")
            status("failed", f"{type(error).__name__}: {error}")
            raise
        LOG.info("finished")
        status("finished")


def without(record: RoundRecord) -> str:
    """Who was asked in a round and did not answer in time, for the end of a sentence."""
    missing = [name for name, party in record.parties.items() if "seconds" not in party]
    return f"; no answer from {', '.join(missing)}" if missing else ""


def _key(settings: dict[str, str]) -> Path:
    if "key" not in settings:
        raise UserError(
            "the project does not say where the server's own key is: make it with `modicum flower keys make` and "
            'write key = "/path/to/keys/server.sign" under [tool.flwr.app.config] in its pyproject.toml'
        )
    return Path(settings["key"])


@contextmanager
def _written_down(path: Path) -> Iterator[None]:
    """What Modicum logs also goes to a file in the run folder."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(log_format())
    top = logging.getLogger("modicum")
    before = top.level
    top.addHandler(handler)
    top.setLevel(logging.INFO)
    try:
        yield
    finally:
        top.removeHandler(handler)
        top.setLevel(before)
        handler.close()
