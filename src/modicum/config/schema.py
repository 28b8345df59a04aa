"""What an experiment file may say. The text beside a field is its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from modicum.config.fields import setting
from modicum.core.persons import Slot
from modicum.data.columns import Column
from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.config.source import Source
    from modicum.data.look import Look


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The records and how they divide among clients. Give one of `name`, `npz`, `csv` and `parquet`."""

    name: str | None = setting(None, 'a named dataset, e.g. "digits" or "emnist-balanced:10-46"')
    npz: str | None = setting(None, "your own: a folder with one .npz file per client")
    csv: str | None = setting(None, "your own: a table with a client column")
    parquet: str | None = setting(None, "your own: the same as a Parquet file")
    client_column: str = setting("client", "of the csv file")
    label_column: str | list[str] = setting("label", "of the csv file; several: a row of labels; []: next tokens")  # noqa: RUF009
    labels: list[str] | None = setting(None, "names of the classes in their order, where labels are text")  # noqa: RUF009
    id_column: str | None = setting(None, "of the csv file, or an array of the npz files: who a record is")
    person: str | None = setting(
        None, "of the csv file, or an array of the npz files: whose a record is, where the unit is a person"
    )
    rows_per_person: int | None = setting(
        None, "a public number: further records of a person are left out, missing ones count for nothing"
    )
    join_rows: Literal["mean", "sum"] = setting("mean", "of the losses of a person's rows, before clipping")
    columns: dict[str, Column] = setting(  # noqa: RUF009
        dict, "of the csv file, by public constants: age = { range = [0, 120], fill = 50 }"
    )
    feature_columns: list[str] | None = setting(  # noqa: RUF009
        None, "of the csv file, matched by name, in this order (default: all, in the table's own order)"
    )
    classes: int | None = setting(None, "of your own data (default: the largest label + 1)")
    values: int | dict[str, int] | None = setting(  # noqa: RUF009
        None, "how many different whole numbers the npz files' inputs hold, e.g. tokens (default: the largest + 1)"
    )
    scale: float | None = setting(None, "a public constant that the npz files' inputs are divided by, e.g. 255")
    dir: str | None = setting(None, "folder of dataset files (default: MODICUM_DATA, else the cache)")
    clients: int | None = setting(None, "how many (default: the clients that the data come with, else 20)")
    partition: str | None = setting(
        None, "iid, dirichlet:α, shards:s, size-skew:r, natural (default: natural, else iid)"
    )
    validation: float = setting(0.0, "share of its records that each client keeps for declared metrics")
    test: float = setting(0.0, "share of its records that each client keeps for its own test")
    proxy: bool | float | str = setting(False, "public records: a share of the data, or another dataset's name")
    backbone: str | list[str] | None = setting(  # noqa: RUF009
        None, "public networks whose features take the place of images: names of modicum backbones, or weights"
    )
    views: int = setting(1, "of each image, whose features are averaged: 2 with its mirror image, up to 10")
    trained_on: list[str] = setting(  # noqa: RUF009
        list, "datasets that a backbone's own file was trained on, where nothing beside it says so"
    )
    features: str | None = setting(
        None, 'public features: "discriminant:64", "discriminant:auto", or the file of a geometry'
    )
    features_from: str | None = setting(
        None, "a dataset with other labels that features are fitted to (default: the proxy)"
    )
    seed: int | None = setting(None, "decides the division (default: the run's seed)")
    ranges: str | None = setting(None, "a look's folder, whose outer quantiles become the ranges of columns")
    impute: str | None = setting(None, "a look's folder, whose means fill in for missing numbers")
    standardise: str | None = setting(None, "a look's folder, by whose means and deviations columns are scaled")

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.name, self.npz, self.csv, self.parquet)) != 1:
            raise UserError('give exactly one of name, npz, csv and parquet, e.g. name = "digits"')
        paths = (self.npz, self.csv, self.parquet, self.dir, *self.backbones, self.features)
        if any("\0" in (path or "") for path in paths):
            raise UserError("a path holds no zero byte")
        if self.scale is not None and not (self.npz is not None and 0 < self.scale < float("inf")):
            raise UserError("scale is a positive number that the inputs of npz files are divided by")
        if self.columns and self.table is None:
            raise UserError("columns belong to a csv or parquet file: leave them out, or give one")
        if self.slot is not None and (self.backbone or self.features):
            raise UserError("rows of persons go through no backbone or features: leave them out")
        if any((self.ranges, self.impute, self.standardise)) and self.table is None:
            raise UserError("looks are of columns of a csv or parquet file: leave them out, or give one")
        if self.values is not None and self.npz is None:
            raise UserError("values belong to npz files: leave them out, or give npz")

    @property
    def slot(self) -> Slot | None:
        """What a person's records are, where the unit is a person."""
        return None if self.rows_per_person is None else Slot(self.rows_per_person, self.join_rows)

    @property
    def backbones(self) -> tuple[str, ...]:
        """The networks that are named."""
        named = self.backbone
        return () if named is None else (named,) if isinstance(named, str) else tuple(named)

    @property
    def table(self) -> str | None:
        """The csv or parquet file, where there is one."""
        return self.csv or self.parquet


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """What the clients grant."""

    budgets: float | list[float] | dict[str, float] | str = setting(  # noqa: RUF009
        1.0, 'ε: 1.0, [0.5, 1, 8] in turn, {"0.5" = 0.9, "8" = 0.1} by weight'
    )
    unit: Literal["record", "person", "client"] | None = setting(
        None,
        "whose participation is hidden; person needs person and rows_per_person under [data] (default: the "
        "method's)",
    )
    delta: float | None = setting(None, "δ of every guarantee (default: the method's)")
    adjacency: str | None = setting(None, "zero-out or replace-one: sizes are public (default: the method's)")
    noise: Literal["float", "integer", "correlated"] | None = setting(
        None,
        "integer: on a lattice, for whole batches (default: where masks need it, and deployed where it can be); "
        "correlated: over rounds (default: where clients come in turn to a trusted server); float: neither",
    )
    fixed_shapes: Literal["auto", "lanes", "capacity"] | None = setting(
        None,
        "passes of one shape over secret Poisson batches: lanes, a capacity, or auto, the cheaper "
        "(default: none in a simulation, deployed auto)",
    )
    bands: int | None = setting(
        None, "of correlated noise, up to the rounds between two turns of a client (default: as many)"
    )
    factor: Literal["banded", "blt"] | None = setting(
        None, "of correlated noise (default: banded, and blt where that would have more than 64 bands)"
    )
    looks: list[str] = setting(  # noqa: RUF009
        list, "folders of looks that the budgets pay for beside the training; those named elsewhere are among them"
    )

    def __post_init__(self) -> None:
        if self.noise != "correlated" and (self.bands is not None or self.factor is not None):
            raise UserError('bands and factor are those of correlated noise: set noise = "correlated"')
        if self.bands is not None and self.bands < 1:
            raise UserError(f"bands must be at least 1, got {self.bands}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by name; the other keys of the table are its options."""

    name: str = setting(
        "logistic",
        "logistic, mlp, cnn-small, lenet, cnn8, resnet18, resnet34, …, a folder of transformers: hf:FOLDER, or "
        "your own: package.module:factory",
    )
    options: dict[str, Any] = setting(  # noqa: RUF009
        dict,
        "of the model: numbers, or names of .npz files; of any: adapters = { rank = 8, targets = […] }",
    )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A task by name; the other keys of the table are its options."""

    name: str = setting("classification", "classification, regression, multi-label, next-token, or a package's")
    options: dict[str, Any] = setting(dict, "of the task, e.g. weights: numbers, or a look's folder")  # noqa: RUF009


@dataclass(frozen=True, kw_only=True)
class MetricConfig:
    """A metric on clients' validation records: a release like any other, so it is declared and paid for."""

    name: str = setting("accuracy", "what is measured: one of those that the task lists (docs/tasks.md)")
    every: int = setting(5, "in every how many rounds")
    noise_multiplier: float = setting(20.0, "noise of the count, in units of its sensitivity")

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.noise_multiplier < float("inf"):
            raise UserError("a metric needs every of at least 1 and a positive finite noise_multiplier")


@dataclass(frozen=True, kw_only=True)
class SiloTerms:
    """What a deployed run knows of one silo: agreed beforehand, never taken from what the silo says (R14)."""

    records: int = setting(0, "it trains on")
    budget: float = setting(0.0, "ε that it grants (inf for no privacy)")
    validation: int = setting(0, "records that it holds out for declared metrics")
    key: str = setting("", "its public key, as `modicum silo key` prints it")
    account: Literal["known", "new"] = setting(
        "known", "new: all agree that it begins a new account, for other records than those of its earlier one"
    )

    def __post_init__(self) -> None:
        if self.records < 1 or self.validation < 0 or not self.budget > 0:
            raise UserError("an agreed silo needs its records and budget, e.g. { records = 479, budget = 1.0 }")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, with whom, and what is written down."""

    rounds: int = setting(30, "communication rounds")
    per_round: int | None = setting(None, "clients a round (default: all of them)")
    max_participations: int | None = setting(
        None, "random cohorts, each client at most so often (default: a public balanced schedule)"
    )
    seed: int = setting(0, "decides the division, the first weights and, in simulation, the noise")
    start: str | None = setting(
        None, "begin with the model of a finished run, by its folder, in place of made-up weights"
    )
    hot_start: int = setting(0, "epochs of the first model on the public proxy, which cost nothing (0: none)")
    average: float = setting(
        0.0,
        "report the average of the models so far, each round's weight β times the next one's (0: the last one)",
    )
    evaluate_every: int = setting(1, "rounds between looks at the test data (simulated ground truth)")
    device: str = setting("cpu", "cpu, cuda, cuda:1, …")
    compile: bool = setting(
        False, "compile clipped sums on the first batch of each size: pays on a GPU, after thousands of steps"
    )
    workers: int | None = setting(
        None, "processes that compute clients, a thread each, with the same bits for any number (default: none)"
    )
    ray: str | None = setting(
        None, 'a Ray cluster that has those processes: HOST:PORT, "auto" or "local" (default workers: all it has)'
    )
    simulation: bool = setting(
        True, "seeded noise that protects nobody; false: cryptographic noise (deployed: unless true is written)"
    )
    transcript: bool = setting(False, "write down what each party sees, in transcript.bin (read: load_transcript)")
    audit: Literal["one-run", "canife", "client-canaries"] | None = setting(
        None, "play the experiment again with canaries when it is over; in the certificate beside ε"
    )
    early_stop: str | None = setting(
        None, 'a public or released metric and rounds without a better one that end the run, e.g. "loss:5"'
    )
    metrics: tuple[MetricConfig, ...] = setting((), "metrics on clients' own data, paid from their budgets")
    secure_aggregation: Literal["ideal", "protocol", "honest-but-curious"] = setting(
        "ideal", "ideal: assumed and simulated; protocol: its masks are made and taken away, in memory"
    )
    bounds: tuple[float, float] | None = setting(
        None, "smallest and largest clipping bound, whatever a policy chooses (default: deployed, 0.001 and 1000)"
    )
    server: str = setting("", "a deployment's server: its public key, as `modicum flower keys make` prints it")
    silos: dict[str, SiloTerms] = setting(  # noqa: RUF009
        dict, "a deployment's silos as agreed, e.g. clinic = { records = 479, budget = 1.0 }"
    )

    def __post_init__(self) -> None:
        for name in ("rounds", "evaluate_every", "per_round", "max_participations", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.start is not None and (self.hot_start or "\0" in self.start):
            raise UserError("a run begins with the model of another or with a hot start: give one of the two")
        if self.hot_start < 0:
            raise UserError(f"hot_start must be 0 or more epochs, got {self.hot_start}")
        if not 0 <= self.average < 1:
            raise UserError(f"average must lie in [0, 1), got {self.average}")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"seed must be 0 or more, and fit into 63 bits, got {self.seed}")
        if self.bounds is not None and not 0 < self.bounds[0] <= self.bounds[1] < float("inf"):
            raise UserError(f"bounds are two positive numbers, smallest first, got {list(self.bounds)}")


@dataclass(frozen=True, kw_only=True)
class LifetimeConfig:
    """One grant for all runs on the same records, in one process; silos have their own, in their own files."""

    budget: float = setting(None, "ε over all runs")
    delta: float = setting(1e-5, "δ of the same")
    folder: str = setting("account", "where the account is kept, outside of any run's folder")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole experiment file. `method` is the settings object of the method named `method_name`."""

    data: DataConfig
    privacy: PrivacyConfig
    model: ModelConfig
    method_name: str
    method: Any
    run: RunConfig
    source: Source = field(compare=False, repr=False)
    task: TaskConfig = field(default_factory=TaskConfig)
    account: LifetimeConfig | None = None
    looks: tuple[Look, ...] = field(default=(), compare=False, repr=False)  # that are named, as they were read
