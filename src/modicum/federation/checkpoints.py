"""A run on disk: a line and a checkpoint a round, from which it continues after a crash."""

from __future__ import annotations

from pathlib import Path

from modicum.core.store import load_state, save_state
from modicum.federation.records import MetricsFile, RoundRecord
from modicum.federation.run_folder import RunFolder
from modicum.federation.server import Server


class Folder:
    """Keeps a run on disk: a line and a checkpoint a round, from which it continues after a crash."""

    def __init__(self, files: RunFolder, server: Server) -> None:
        self.checkpoint: Path = files.checkpoint
        if self.checkpoint.exists():
            server.restore(load_state(self.checkpoint))
        self.metrics = MetricsFile(files.metrics, server.state.round)

    def keep(self, record: RoundRecord, server: Server) -> None:
        """The round's line first, then the checkpoint: see `MetricsFile`."""
        self.metrics.append(record)
        save_state(self.checkpoint, server.state.to_dict())
