"""All clients of an experiment in one process: the round of the design, durable in a folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from modicum.core.memory import keep_pages
from modicum.core.parts import Backend
from modicum.core.release_gate import GateWatch
from modicum.errors import UserError
from modicum.federation.checkpoints import Folder
from modicum.federation.clients import Clients
from modicum.federation.correlate import own_rows_source, place_of, rows_for
from modicum.federation.evaluation import Evaluation
from modicum.federation.experiment import Experiment
from modicum.federation.foreign import foreign_parts
from modicum.federation.identity import records_id, run_id
from modicum.federation.in_process import Faults, InProcess
from modicum.federation.looks import check_paid
from modicum.federation.records import RoundRecord
from modicum.federation.retention import Retention
from modicum.federation.rounds import Rounds
from modicum.federation.run_folder import RunFolder
from modicum.federation.secure_sums import collect_integers
from modicum.federation.server import OpenedOnce, TrustedLedger
from modicum.federation.setup import set_up
from modicum.federation.transcript import Transcript
from modicum.federation.workers import Workers
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.noise.keyed import destroy_key


class Simulation:
    """Runs an experiment in a folder, one durable round at a time. Opening the same folder again resumes it."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        noise: NoiseSource | None = None,
        faults: Faults | None = None,
        transcript: Transcript | None = None,
        watch: GateWatch | None = None,
        suffix: str | None = None,
    ) -> None:
        """`suffix` ends the name of a run with real noise [default: drawn]."""
        self.experiment, self.folder = experiment, folder
        self.noise = noise or SimulatedNoise(experiment.seed)
        check_paid(experiment.looks)
        if experiment.device == "cpu":
            keep_pages()
        made = set_up(experiment, self.noise)
        self._workers: Workers | None = None
        if experiment.workers is not None or experiment.ray is not None:
            if watch is not None:
                raise UserError("gates are watched in one process: leave workers and ray out")
            self._workers = Workers(made, self.noise)
            made = self._workers.sharing(made)
        self.method, self.data, self.cohorts, self.kit = made.method, made.data, made.cohorts, made.kit
        self.facts, self.plans = made.facts, made.plans
        self.backend: Backend = made.kit.backend
        files = RunFolder(folder)
        foreign = foreign_parts(
            experiment.method, self.method, experiment.model, self.data.model, experiment.federation.data.made_by
        )
        seeded = bool(self.noise.describe()["simulation"])
        drawn = None if seeded else suffix or secrets.token_hex(8)
        self.ledger = files.open_ledger(
            run_id(experiment), self.noise, records_id(experiment), foreign, suffix=drawn
        )
        self.ledger.declare(self.plans.values())
        self.server = made.server(self.ledger.run_id)
        kept, keep = Folder(files, self.server), Retention.for_noise(self.noise)
        central = not self.method.mechanism.spec.view.senders_add_noise
        begun, self._key = self.ledger.share_reserved() > 0, files.noise_key
        rows = own = None
        if not self.server.finished and central:
            rows = rows_for(self.method.mechanism, self.noise, self._key, begun=begun)
        elif not self.server.finished:
            own = own_rows_source(self.plans.values(), self.noise, self._key, begun=begun)
        drawn_again = self._key.exists() and not self.server.finished
        self._place = place_of(self._key, self.ledger, begun=begun) if drawn_again else None
        if self._workers is not None and own is not None and own is not self.noise:
            raise UserError("a key of correlated noise stays in one process: leave workers and ray out")
        self.clients = Clients(
            self.method,
            self.kit,
            made.clients(),
            self.ledger,
            self.noise,
            files.clients,
            made.at_once,
            watch=watch,
            keep=keep,
            done=self.server.state.round,
            rows=own,
            member=self.data.member,
        )
        self.carrier = InProcess(
            self.server,
            self.clients,
            self.ledger,
            trusted=TrustedLedger(self.ledger, self.noise, watch, keep, rows=rows) if central else None,
            once=OpenedOnce(files.opened),
            integers=collect_integers(made, self.ledger.run_id),
            faults=faults,
            transcript=transcript,
            workers=self._workers,
        )
        # Only a run that protects nobody may look at test records: figures of them would be told for free.
        self.evaluation = Evaluation(
            self.server,
            self.backend,
            self.data,
            experiment.evaluate_every,
            ground_truth=seeded,
            states=lambda: {name: self.clients.clients[name].state for name in self.server.names},
        )
        self._rounds = Rounds(self.server, self.carrier, self.evaluation, kept)

    def close(self) -> None:
        """Close the ledger, and end the workers."""
        self.ledger.close()
        if self._workers is not None:
            self._workers.close()

    def rounds(self) -> Iterator[RoundRecord]:
        """Run what is left, round by round; noise that nobody needs any more cannot be drawn again afterwards."""
        while not self._rounds.server.finished:
            done = self._rounds.play()
            self._note()
            yield done
        self.end()

    def end(self) -> None:
        """The run is over, however early: what its correlated noise was drawn from is destroyed."""
        if self._place is not None:
            self._place.end()
        destroy_key(self._key)

    def step(self) -> RoundRecord:
        """One round."""
        done = self._rounds.play()
        self._note()
        return done

    def _note(self) -> None:
        if self._place is not None:
            self._place.note(self.ledger.head())

    @property
    def model(self) -> Tensor:
        """The whole parameter vector: what the server has, and the initial values of personal parameters."""
        return self.evaluation.model

    def client_accuracies(self) -> dict[str, float]:
        """Simulated ground truth: each client's own model, personalised or not, on its own test records."""
        return self.evaluation.by_client(self.data.client_test)
