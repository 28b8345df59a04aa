"""Settings at a stated price (R17): on public stand-ins for nothing, by random stopping, or every trial in full.

Random stopping hides all trials but the winner, so it is for those whose trials nobody sees but the curator: one
party alone, or a trusted server. The number of trials and the setting of each are drawn before the first one.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.comparing import compare
from modicum.comparing.cells import cells_of
from modicum.config import Config, experiment_over, federation, to_toml
from modicum.config.build import account_in
from modicum.config.read import check
from modicum.config.source import parse
from modicum.core.store import write_durably
from modicum.errors import PrivacyWarning, UnsoundError, UserError
from modicum.federation.control import SMALLER
from modicum.federation.experiment import Experiment, Federation, build_method
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import plans_of
from modicum.privacy.accounting import selection
from modicum.privacy.accounting.selection import Stopping
from modicum.privacy.chosen import FILE, Choice, price
from modicum.privacy.noise import CryptoNoise, NoiseKey, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.views import TrustedServer
from modicum.runs import Run, carry_out, load, new_folder

CURATOR = "-curator"  # after the folder's name: what nobody else may see; the studio passes such folders by
JOURNAL, CONFIG, MODEL = "journal.json", "config.toml", "model.safetensors"
CLOSE = 1e-3  # relative: how near the trials' price comes to the budget
LAWS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
TUNER = "(tuning)"  # no client's name: the key of what the curator draws

WARNING = (
    "chosen on stand-ins: a setting transfers as far as they are like the real records. Numbers of records, of "
    "clients and of rounds and the budgets decide how much noise there is: take them as they really are"
)


@dataclass(frozen=True)
class Tuned:
    """What `tune` found: the winner's setting, its certificate's folder, and a warning where there is one."""

    way: str
    winner: Mapping[str, Any] | None
    epsilon: float
    score: float | None
    folder: Path
    warning: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        told = {"way": self.way, "winner": self.winner, "epsilon": self.epsilon, "score": self.score}
        return {**told, "folder": str(self.folder), "warning": self.warning}


def tune(
    file: str | Path,
    grid: Sequence[str],
    epsilon: float,
    *,
    way: str = "stopping",
    mean: float | None = None,
    law: str | None = None,
    public: str | Path | None = None,
    options: Sequence[str] = (),
    seed: int = 0,
    folder: str | Path | None = None,
) -> Tuned:
    """Choose among settings, within one budget for winner and search.

    Args:
        file: The experiment in TOML. But on stand-ins it declares a metric that clients release: the score.
        grid: Several values of a setting, as `modicum compare` takes them: `method.lr=0.5,1,2`; all pairs.
        epsilon: What each client pays for everything together.
        way: stopping, threefold, split or public.
        mean: Trials in the mean, of random stopping [default: as many as there are settings].
        law: Of their number: logarithmic, geometric or poisson [default: the cheapest for these trials].
        public: An experiment of public stand-ins, for the way public.
        options: `table.key=value` on top of the file.
        seed: Of everything that is drawn in a simulation.
        folder: A new one for what may be published [default: one under ./runs]. Random stopping keeps the trials
            beside it, in a folder whose name ends in `-curator`, and goes on there after a crash.

    Returns:
        The winner, whose model and certificate stand in the folder.

    Raises:
        UserError: Where trials can be seen by others, or the budget cannot be met.
    """
    for axis in grid:
        if axis.partition(".")[0] in ("data", "privacy"):
            raise UserError(f"--grid {axis}: what is chosen are settings of method, model and run")
    cells = cells_of([Path(file)], seeds=(seed,), options=[*options, f"privacy.budgets={epsilon}"], grid=grid)
    place = Path(folder) if folder is not None else new_folder(f"tune-{Path(file).stem}")
    settings = tuple(dict(cell.point) for cell in cells)
    configs = [check(parse(cell.config, str(file))) for cell in cells]
    if law is not None and (way != "stopping" or law not in LAWS):
        raise UserError(f"a law is one of random stopping: {', '.join(LAWS)}")
    if len(settings) == 1 and mean is None:
        raise UserError("one setting leaves nothing to choose: list several with --grid, or train it: modicum run")
    if mean is not None and way in ("split", "public"):
        raise UserError(f"the way {way} plays every setting once: leave --mean out, it is for random stopping")
    if way == "public":
        if public is None:
            raise UserError("name an experiment of public stand-ins: --public stand-ins.toml")
        return _on_stand_ins(Path(public), grid, configs, settings, seed, place)
    if public is not None:
        raise UserError("stand-ins are for the way public: leave --public out, or give --way public")
    return _Search(configs, settings, epsilon, way, mean, law, seed, place).play()


class _Search:
    """Trials on private records, and one certificate for the best of them."""

    def __init__(
        self,
        configs: Sequence[Config],
        settings: tuple[dict[str, Any], ...],
        epsilon: float,
        way: str,
        mean: float | None,
        law: str | None,
        seed: int,
        place: Path,
    ) -> None:
        if way not in ("stopping", "threefold", "split"):
            raise UserError(f"unknown way {way!r}: use stopping, threefold, split or public")
        self.configs, self.settings, self.budget, self.way = configs, settings, epsilon, way
        if any(config.looks for config in configs):
            raise UnsoundError(
                "a search after a look does not add up with it (R2): the list of settings, and so the noise of "
                "each trial, may follow from its figures; choose on public stand-ins (--way public), or set name "
                '= "auto" under [method]'
            )
        self.score = _score(configs)
        data = federation(configs[0]).data
        if way != "split":
            if configs[0].account is not None:
                raise UserError(
                    "what a search draws on an account tells how many trials there were: leave [account] out, pay "
                    "for each in full (--way split), or choose on public stand-ins (--way public)"
                )
            self.configs = configs = [_plain_noise(config) for config in configs]
            _refuse_watched(experiment_over(configs[0], Federation(data, (epsilon,) * len(data.clients))))
        self.data, self.simulation = data, configs[0].run.simulation
        self.noise: NoiseSource = SimulatedNoise(seed) if self.simulation else CryptoNoise()
        self.place = place
        self.hidden = place if way == "split" else place.with_name(place.name + CURATOR)
        mean = float(len(settings)) if mean is None else mean
        shape = {"stopping": LAWS[law or "logarithmic"], "threefold": 1.0}
        self.stopping = Stopping(shape[way], mean) if way in shape else None
        self.share = self._calibrated()
        plans = self._plans(self.share)
        if way == "stopping" and law is None:  # the cheapest law for these trials, from plans alone
            delta = plans[0][next(iter(plans[0]))].spec.delta
            worst = max((self._trial(plans, name) for name in plans[0]), key=sum)
            self.stopping = selection.best_stopping(worst, mean, delta)
            self.share = self._calibrated()

    def _experiment(self, config: Config, share: float) -> Experiment:
        return experiment_over(config, Federation(self.data, (share,) * len(self.data.clients)))

    def _plans(self, share: float) -> list[dict[str, PrivacyPlan]]:
        """Of each setting: what every client would release in a trial that has this budget alone."""
        return [plans_of(self._experiment(config, share), self.noise) for config in self.configs]

    def _trial(self, plans: Sequence[Mapping[str, PrivacyPlan]], client: str) -> selection.Curve:
        return selection.largest(selection.curve(own[client]) for own in plans)

    def _prices(self, share: float) -> dict[str, float]:
        plans = self._plans(share)
        alike: dict[tuple[Any, ...], float] = {}  # many clients plan the same
        found = {}
        for name in plans[0]:
            own = tuple(setting[name] for setting in plans)
            kind = tuple((plan.charged, plan.spec) for plan in own)
            if kind not in alike:
                alike[kind] = price(self.way, own, self.stopping)
            found[name] = alike[kind]
        return found

    def _calibrated(self) -> float:
        """The largest budget of one trial with which winner and search cost at most what is granted."""

        def cost(share: float) -> float | None:
            """None where a trial's metrics alone cost more than this."""
            try:
                return max(self._prices(share).values())
            except UserError:
                return None

        low, high, best = self.budget / 1000, self.budget, 0.0
        while high > low * (1 + CLOSE):
            middle = math.sqrt(low * high)
            found = cost(middle)
            if found is not None and found <= self.budget:
                best = middle
            low, high = (middle, high) if found is None or found <= self.budget else (low, middle)
        if not best:
            raise UserError(
                f"a search among {len(self.settings)} settings cannot be met at ε={self.budget:g}: grant more, "
                "list fewer settings, or let the metric have more noise (noise_multiplier)"
            )
        return best

    def play(self) -> Tuned:
        """All trials, or what is left of them after a crash; then what may be published."""
        if not (self.hidden / JOURNAL).exists():
            RunFolder(self.place).refuse_occupied("choose another folder with --out")
        RunFolder(self.hidden).make(fresh=False)
        best: tuple[float, int, Run] | None = None
        for number, (setting, seed) in enumerate(self._journal()):
            run = self._played(number, setting, seed)
            score = _told(run, self.score)
            if best is None or _better(score, best[0], self.score):
                best = (score, setting, run)
        plans, prices = self._plans(self.share), self._prices(self.share)
        told = None
        if best is not None and not math.isnan(best[0]):
            told = {"value": best[0], "noise": _error(best[2], self.score)}
        choice = Choice(
            way=self.way,
            simulation=self.simulation,
            budget=self.budget,
            settings=self.settings,
            plans={name: tuple(own[name] for own in plans) for name in prices},
            stopping=self.stopping,
            epsilon=prices,
            winner=None if best is None else self.settings[best[1]],
            score=told,
        )
        self._publish(choice, None if best is None else best[2])
        epsilon = max(prices.values())
        return Tuned(self.way, choice.winner, epsilon, None if told is None else told["value"], self.place)

    def _journal(self) -> list[tuple[int, int]]:
        """Settings and seeds of all trials, drawn once and before the first: a crash draws nothing again."""
        path = self.hidden / JOURNAL
        facts = {"settings": list(self.settings), "budget": self.budget, "way": self.way}
        facts |= {"stopping": None if self.stopping is None else self.stopping.to_dict()}
        text = "\n".join(to_toml(config) for config in self.configs)
        facts["experiments"] = hashlib.sha256(text.encode()).hexdigest()  # plans follow from them
        if path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            if {name: written.get(name) for name in facts} != facts:
                raise UserError(f"{self.hidden} holds another search: choose another folder with --out")
            return [(int(setting), int(seed)) for setting, seed in written["trials"]]
        trials = list(self._drawn())
        write_durably(path, json.dumps({**facts, "trials": trials}, ensure_ascii=False).encode())
        return trials

    def _drawn(self) -> Iterator[tuple[int, int]]:
        if self.stopping is None:
            many, seeds = len(self.settings), self._uniform("seeds", len(self.settings))
            yield from ((i, int(seeds[i] * 2**53)) for i in range(many))
            return
        count = self.stopping.drawn(float(self._uniform("count", 1)[0]))
        picks, seeds = self._uniform("picks", count), self._uniform("seeds", count)
        yield from ((int(p * len(self.settings)), int(s * 2**53)) for p, s in zip(picks, seeds, strict=True))

    def _uniform(self, purpose: str, size: int) -> Sequence[float]:
        return self.noise.uniform(NoiseKey(TUNER, 0, 0, purpose), size).tolist() if size else []

    def _played(self, number: int, setting: int, seed: int) -> Run:
        files = RunFolder(self.hidden / f"trial-{number:04d}")
        if files.summary.exists():
            return load(files.path)
        config = _of_trial(self.configs[setting], self.share, seed)
        files.make(fresh=False)
        with warnings.catch_warnings():
            # Trials beside this one are in its price; and where they are hidden, nothing on a screen counts them.
            warnings.simplefilter("ignore", PrivacyWarning if self.way == "split" else Warning)
            return carry_out(
                self._experiment(config, self.share),
                files,
                to_toml(config),
                simulation=self.simulation,
                account=account_in(config),
            )

    def _publish(self, choice: Choice, run: Run | None) -> None:
        """The winner's settings and model, and the certificate last: nothing of the others, nor how many."""
        files = RunFolder(self.place)
        files.make(fresh=False)
        if run is not None:
            for name in (CONFIG, MODEL):
                files.write(self.place / name, (run.folder / name).read_bytes())
        text = json.dumps(choice.to_dict(), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
        files.write(self.place / FILE, text.encode())


def _of_trial(config: Config, share: float, seed: int) -> Config:
    """A trial's own budget and seed. Seeds are drawn: one in order would tell which trial won."""
    privacy, run = replace(config.privacy, budgets=share), replace(config.run, seed=seed, audit=None)
    data = config.data if config.data.seed is not None else replace(config.data, seed=config.run.seed)
    return replace(config, privacy=privacy, run=run, data=data)


def _plain_noise(config: Config) -> Config:
    """Noise of floats, a draw for each release, where nothing else is asked for."""
    if config.privacy.noise is not None:
        return config
    return replace(config, privacy=replace(config.privacy, noise="float"))


def _refuse_watched(made: Experiment) -> None:
    view = build_method(made).mechanism.spec.view
    if not isinstance(view, TrustedServer) and len(made.federation.budgets) > 1:
        raise UserError(
            f"random stopping hides the losing trials, and here they are seen by {view.sentence()}: pay for each "
            "in full (--way split), choose on public stand-ins (--way public), or use the view trusted-server"
        )


def _score(configs: Sequence[Config]) -> str:
    """The declared metric that trials are judged by: a release, within each trial's plan."""
    names = {config.run.metrics[0].name if config.run.metrics else "" for config in configs}
    if "" in names or len(names) > 1:
        raise UserError(
            "trials are judged by a metric that clients release: declare one, [[run.metrics]] name = "
            '"accuracy", every = …, and hold out records for it ([data] validation = 0.1)'
        )
    for run in (config.run for config in configs):
        if run.metrics[0].every >= run.rounds:
            raise UserError(
                f"of {run.rounds} rounds the metric is told in the first alone, of a model that nobody has "
                f"trained: set every to {max(1, run.rounds - 1)} or less, with at least 2 rounds"
            )
    return names.pop()


def _told(run: Run, score: str) -> float:
    """The last figure that was released; NaN where there is none."""
    values = [record.released[score] for record in run.records if score in record.released]
    return values[-1] if values else math.nan


def _better(value: float, than: float, metric: str) -> bool:
    """Of losses and errors less is better; no figure is the worst."""
    if math.isnan(value) or math.isnan(than):
        return math.isnan(than) and not math.isnan(value)
    return value < than if metric in SMALLER else value > than


def _error(run: Run, score: str) -> float:
    errors = [record.noise[score] for record in run.records if score in record.noise]
    return errors[-1] if errors else math.nan


def _on_stand_ins(
    public: Path,
    grid: Sequence[str],
    configs: Sequence[Config],
    settings: tuple[dict[str, Any], ...],
    seed: int,
    place: Path,
) -> Tuned:
    """The setting that is best on public records, where truth may be looked at; then one training, in full."""
    found = compare(public, grid=list(grid), seeds=(seed,), folder=place / "stand-ins")
    scores = [row["score"] for row in found.rows]
    if any(score is None for score in scores):
        raise UserError(f"{public} has no test records to choose by: give it some, e.g. [data] test = 0.2")
    at = scores.index(min(scores) if found.main in SMALLER else max(scores))
    config = configs[at]
    files = RunFolder(place / "training")
    files.make(fresh=False)
    run = carry_out(
        experiment_over(config, federation(config)),
        files,
        to_toml(config),
        simulation=config.run.simulation,
        account=account_in(config),
    )
    paid = max(line.epsilon for line in run.certificate.clients.values())
    return Tuned("public", settings[at], paid, float(scores[at]), files.path, WARNING)
