"""A whole experiment as one value: who takes part with what budget, which model, which method, how long."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from modicum.core.device import device_named
from modicum.core.facts import FeatureFacts, Metric
from modicum.core.layout import Layout
from modicum.core.needs import Offer, check_data
from modicum.core.parts import Batch, Method, OnLattice
from modicum.core.persons import Slot, taking_persons
from modicum.core.records import Field, each
from modicum.core.setting import MethodSpec, Setting
from modicum.data.arrays import Arrays, FederatedData
from modicum.data.budgets import Budgets, assign_budgets
from modicum.data.check import check, checked
from modicum.data.kin import check_public
from modicum.errors import UserError, listed
from modicum.federation.correlate import pays, rotation, with_correlated, with_correlated_steps
from modicum.federation.learning import (
    check_labels,
    inputs_of,
    learned_by,
    made_up_rows,
    of_persons,
    row_label_shape,
    rows_of,
    width_of,
    with_task,
)
from modicum.federation.settings import NoiseKind
from modicum.federation.start import begun_with
from modicum.mechanisms.class_sums import class_sums
from modicum.mechanisms.fixed_shapes import KINDS, Kind, shapes_for, with_fixed_shapes
from modicum.mechanisms.record_local import RecordLocal
from modicum.models import build, check_model, fixed_features
from modicum.models.adapter import adapted
from modicum.models.low_rank import from_options as adapters_in
from modicum.models.low_rank import with_adapters
from modicum.models.named import build_named, is_shipped
from modicum.privacy.factors import FactorKind
from modicum.privacy.spec import PrivacySpec, SecureAggregation, Unit
from modicum.privacy.views import Variant
from modicum.public.features import behind, check_features, stand_on
from modicum.public.hot_start import hot_start, public_start
from modicum.tasks import CLASSIFICATION, Task
from modicum.training.compressed import from_options

if TYPE_CHECKING:
    from os import PathLike

    from modicum.data.look import Look
    from modicum.data.partition import Partition

AggregationKind = Literal["ideal", "protocol", "honest-but-curious"]
VARIANTS = {
    "ideal": Variant.IDEAL,
    "protocol": Variant.SIGNED_SURVIVORS,
    "honest-but-curious": Variant.HONEST_BUT_CURIOUS,
}


@dataclass(frozen=True)
class Federation:
    """Clients with their data and their budgets."""

    data: FederatedData
    budgets: tuple[float, ...]

    def __post_init__(self) -> None:
        check(self.data, self.budgets)

    def __repr__(self) -> str:
        """In a line, and without a record."""
        return f"Federation({self.data!r}, ε = {listed([f'{b:g}' for b in sorted({*self.budgets})])})"

    @classmethod
    def from_dataset(
        cls,
        name: str,
        *,
        clients: int | None = None,
        partition: Partition | str | None = None,
        budgets: Budgets = 1.0,
        seed: int = 0,
        validation: float = 0.0,
        test: float = 0.0,
        proxy: bool | float | str = False,
        backbone: str | Path | Sequence[str | Path] | None = None,
        views: int = 1,
        trained_on: Sequence[str] = (),
        features: str | None = None,
        features_from: str | None = None,
        method: MethodSpec | None = None,
        data_dir: str | PathLike[str] | None = None,
    ) -> Federation:
        """Divide a named dataset among clients, each with its budget.

        Args:
            name: Of a dataset, as `modicum datasets` lists them.
            clients: How many [default: those that the data come with].
            partition: How records are divided: `mo.Dirichlet(0.5)`, or its text, `"dirichlet:0.5"` [default:
                natural clients, else IID].
            budgets: ε of the clients: see `mo.assign_budgets`.
            seed: Of the partition and of budgets that are dealt.
            validation: Share of its records that each client holds out for metrics.
            test: Share that it holds out for tests.
            proxy: Public records: a fraction, or the name of another dataset.
            backbone: File of weights that turns records into public features: see docs/data.md. Several are
                joined.
            views: Of each image whose features are averaged: 1 the image, 2 also its mirror image, up to 10.
            trained_on: Datasets that the backbone was trained on, where its file does not say.
            features: A geometry of the features, fitted on public records: `"discriminant:auto"`.
            features_from: Dataset that the geometry is fitted on [default: the proxy].
            method: Whose noise the dimensions of `discriminant:auto` follow: its δ, adjacency and view, with all
                clients in every round [default: records where the server sees messages, δ = 1e-5, zero-out].
            data_dir: Folder of dataset files.

        Returns:
            Records and budgets, for `mo.train`.

        Raises:
            UserError: Where the dataset or a setting cannot be.
        """
        from modicum.data import federate, load
        from modicum.data.fetch import data_folder

        check_features(features, features_from is not None, proxy is not False)
        named = load(proxy, data_dir) if isinstance(proxy, str) else proxy
        other = None if features_from is None else load(features_from, data_dir)
        cache = data_folder(data_dir) / "features"
        task, public, source = behind(
            backbone, cache, load(name, data_dir), named, other, views=views, trained_on=trained_on
        )
        data = federate(
            task,
            clients=clients,
            partition=partition,
            seed=seed,
            validation=validation,
            test=test,
            proxy=public,
        )
        granted = assign_budgets(budgets, len(data.clients), seed)
        size = len(data.clients)

        def spec() -> PrivacySpec:
            promised = PrivacySpec(unit=Unit.RECORD)
            return promised if method is None else method.build(Setting(size, size, 1)).mechanism.spec

        return cls(stand_on(data, features, granted, spec, source), granted)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run's result."""

    federation: Federation
    method: MethodSpec
    model: str | nn.Module = "logistic"
    rounds: int = 30
    per_round: int | None = None  # None: everybody
    max_participations: int | None = None  # None: a public balanced schedule; else random cohorts
    metrics: tuple[Metric, ...] = ()
    seed: int = 0
    start: str | None = None  # the folder of a run whose model is the first one
    hot_start: int = 0  # epochs of the first model on the public proxy; 0: none
    average: float = 0.0  # β of the average over rounds that is reported in place of the last model; 0: none
    bounds: tuple[float, float] | None = None  # that no policy leaves; None: the policy's own limits
    noise: NoiseKind | None = (
        None  # integer: drawn on a lattice; None: what secure_aggregation asks for, else float
    )
    fixed_shapes: Kind | None = None  # of passes over Poisson batches, as deployed silos have them (R16)
    bands: int | None = None  # of correlated noise; None: as many as the separation of a client's rounds
    factor: FactorKind | None = None  # of correlated noise; None: banded, and blt where that has too many bands
    secure_aggregation: AggregationKind = "ideal"  # or the protocol itself, in memory
    evaluate_every: int = 1
    device: str = "cpu"
    compile: bool = False  # clipped sums, on the first batch of each size
    workers: int | None = None  # processes that compute clients, a thread each; None: this one
    ray: str | None = None  # the address of a cluster that has those processes
    model_options: dict[str, Any] = field(default_factory=dict)
    task: Task = CLASSIFICATION
    looks: tuple[Look, ...] = ()  # taken before, whose price is within the budgets

    def __post_init__(self) -> None:
        if not callable(getattr(self.method, "build", None)) or isinstance(self.method, type):
            raise UserError(f"a method is settings, such as mo.methods.DpSgd(lr=4), got {self.method!r}")
        if not isinstance(self.model, str | nn.Module):
            raise UserError(f"a model is a name or a module, such as nn.Linear(6, 2), got {self.model!r}")
        if not all(isinstance(metric, Metric) for metric in self.metrics):
            raise UserError(f'metrics are a tuple of mo.Metric("accuracy", 5, 20.0), got {self.metrics!r}')
        if self.rounds < 1 or self.evaluate_every < 1:
            raise UserError(
                f"rounds and evaluate_every must be at least 1, got {self.rounds} and {self.evaluate_every}"
            )
        if self.workers is not None and self.workers < 1:
            raise UserError(f"the number of workers must be at least 1, got {self.workers}")
        if not 0 <= self.average < 1:
            raise UserError(f"the factor of the average over rounds lies in [0, 1), got {self.average}")
        if self.secure_aggregation not in VARIANTS:
            raise UserError(f"unknown secure_aggregation {self.secure_aggregation!r}: use {', '.join(VARIANTS)}")
        if self.noise not in (None, "float", "integer", "correlated"):
            raise UserError(f"unknown noise {self.noise!r}: use float, integer or correlated")
        if self.noise != "correlated" and (self.bands is not None or self.factor is not None):
            raise UserError('bands and factor are those of correlated noise: set noise = "correlated"')
        if self.factor not in (None, "banded", "blt"):
            raise UserError(f"unknown factor {self.factor!r}: use banded or blt")
        if self.fixed_shapes not in (None, *KINDS):
            raise UserError(f"unknown fixed_shapes {self.fixed_shapes!r}: use {', '.join(KINDS)}")
        if self.noise in ("float", "correlated") and self.secure_aggregation != "ideal":
            raise UserError('masks need integers: leave noise out, or set noise = "integer"')
        data = self.federation.data
        check_labels(self.task, data)
        for metric in self.metrics:
            if metric.name not in self.task.shares:
                known = ", ".join(self.task.shares) or "no metric"
                why = "is no sum over records" if metric.name in self.task.metrics else "is unknown"
                raise UserError(
                    f"the metric {metric.name!r} {why}: for {self.task.name} clients can release {known}"
                )
        if self.hot_start and not offer_of(data).public_labels:
            raise UserError(
                "a hot start needs public records with the task's labels: set proxy to a share of the data"
            )

    @property
    def integers(self) -> bool:
        """Whether noise is drawn on a lattice."""
        return self.noise == "integer" or self.secure_aggregation != "ideal"

    @property
    def learned(self) -> Task:
        """The task of an example: of a record as it was given, or of a person."""
        return learned_by(self.task, self.federation.data.slot)

    @property
    def setting(self) -> Setting:
        """Clients, clients a round and rounds, as a method is built for."""
        population = self.federation.data.population
        clients = len(self.federation.budgets) if population is None else population.count
        return Setting(clients, self.per_round or clients, self.rounds)


def build_method(experiment: Experiment) -> Method:
    """The experiment's method, whose parts find what they need in its data; nothing is reserved before."""
    method = with_task(experiment.method.build(experiment.setting), experiment.learned)
    if (slot := experiment.federation.data.slot) is not None:
        method = of_persons(method, slot)
    setting, most = experiment.setting, experiment.max_participations
    if experiment.noise == "correlated" or (experiment.noise is None and pays(method.mechanism, setting, most)):
        if isinstance(method.mechanism, RecordLocal):
            method = with_correlated_steps(method, experiment.bands, experiment.factor)
        else:
            cohorts = rotation(setting, experiment.seed, most)
            method = with_correlated(method, cohorts, experiment.bands, experiment.factor)
    if experiment.integers:
        method = with_integers(method, VARIANTS[experiment.secure_aggregation])
    check_data(method, offer_of(experiment.federation.data, experiment.learned))
    return method


def with_integers(method: Method, variant: Variant) -> Method:
    """The method with noise on a lattice, and behind a sum with what is to stand behind secure aggregation."""
    if not isinstance(method.mechanism, OnLattice):
        raise UserError(
            f'{method.name} draws no integer noise: set noise = "float" and secure_aggregation = "ideal"'
        )
    mechanism = method.mechanism.on_integers(variant)
    view = mechanism.spec.view
    if isinstance(view, SecureAggregation) and view.variant is not Variant.IDEAL:
        from modicum.federation.protocol_parties import check_view  # needs an extra that others do not

        check_view(view)
    return replace(method, mechanism=mechanism)


def in_fixed_shapes(method: Method, kind: Kind | None, data: Prepared) -> Method:
    """The method whose drawn records are computed in passes of one shape, where that is asked for (R16)."""
    return method if kind is None else with_fixed_shapes(method, shapes_for(kind, data.model, data.records[0].x))


def offer_of(data: FederatedData, task: Task = CLASSIFICATION) -> Offer:
    """What these data offer to the parts of a method."""
    return Offer(
        public_data=len(data.proxy) > 0,
        public_labels=len(data.proxy) > 0 and data.proxy_classes == data.classes,
        validation=all(len(client.validation) > 0 for client in data.clients),
        classes=task.usual,
        numbers=data.clients[0].train.plain,
    )


@dataclass(frozen=True)
class Prepared:
    """Data as tensors and the trainable model; a fixed feature extractor is applied once."""

    model: nn.Module
    first: Tensor  # initial parameters, flat
    records: tuple[Batch, ...]
    validation: tuple[Batch, ...]
    client_test: tuple[Batch, ...]
    test: Batch
    proxy: Batch | None  # public, with the task's own labels; None where there is none
    features: FeatureFacts  # what is public of them
    made_up: Batch | None = None  # synthetic rows within public ranges: to try the model without a record
    member: Callable[[str], Batch] | None = None  # opens a client of a population, by its name


def prepare(experiment: Experiment, wrap: Method) -> Prepared:
    """Check the model against the data, then turn everything into tensors on the device."""
    data, device = experiment.federation.data, device_named(experiment.device)
    model = make_model(experiment)
    # Checked again: a wrapper may bring layers of its own.
    model = _checked(experiment, wrap.wrapper.wrap(model)).to(device)
    split = fixed_features(model)
    features, trained = split if split else (None, model)
    _check_division(wrap, trained)
    slot = data.slot

    nothing: list[Batch] = []  # most clients of a large federation hold nothing back: they share one empty batch

    def batch(arrays: Arrays) -> Batch:
        if not len(arrays) and nothing:
            return nothing[0]
        made = made_of(arrays)
        if not len(arrays):
            nothing.append(made)
        return made

    def made_of(arrays: Arrays) -> Batch:
        x = each(lambda t: t.to(device), arrays.tensors(floats=is_shipped(experiment.model)))
        return Batch(
            _transform(features, x, slot), {"y": experiment.task.targets(torch.from_numpy(arrays.y)).to(device)}
        )

    def by_row(arrays: Arrays) -> Batch:
        """Public records are taken row by row, without slots."""
        return (
            made_of(arrays) if slot is None else rows_of(made_of(arrays), row_label_shape(experiment.task, data))
        )

    offered = offer_of(data).public_labels
    judged = offered and wrap.predicts
    first = Layout.of(trained).read(trained)
    if experiment.start is not None:
        first = begun_with(trained, Path(experiment.start), wrap.wrapper)
    elif experiment.hot_start:
        public, held_out = by_row(data.proxy), by_row(data.proxy_validation)
        first = hot_start(trained, public, held_out, experiment.hot_start, experiment.seed, experiment.task)
    elif wrap.public_start and offered:
        first = public_start(trained, by_row(data.proxy), data.classes)
    if slot is not None:
        trained = taking_persons(trained, slot)
    return Prepared(
        model=trained,
        first=first,
        records=tuple(batch(c.train) for c in data.clients),
        validation=tuple(batch(c.validation) for c in data.clients),
        client_test=tuple(batch(c.test) for c in data.clients),
        test=batch(data.test if wrap.predicts else Arrays.empty(data.test)),
        proxy=batch(data.proxy_validation if len(data.proxy_validation) else data.proxy) if judged else None,
        features=_feature_facts(data, by_row(data.proxy) if offered and experiment.task.usual else None),
        made_up=_made_up(experiment, features, device),
        member=None if data.population is None else lambda name: batch(checked(data, name)),
    )


def _feature_facts(data: FederatedData, public: Batch | None) -> FeatureFacts:
    """Public records count but for those that are kept for choosing settings."""
    facts = FeatureFacts(data.classes)
    if data.geometry is not None:
        between, within = (torch.from_numpy(v.copy()) for v in (data.geometry.between, data.geometry.within))
        width = 0 if data.made_by is None else len(data.geometry.mean)  # pixels are no network's features
        facts = replace(facts, width=width, between=between, within=within)
    if public is None:
        return facts
    x, y = public.x.flatten(1), public.targets["y"]
    sums, counts = class_sums(x, y, (data.classes, x.shape[1]))
    return replace(facts, sums=sums.cpu(), counts=counts.cpu(), known=(x.cpu(), y.cpu()))


def _check_division(method: Method, model: nn.Module) -> None:
    """Names of personal layers that this model does not have would otherwise change nothing, silently."""
    personal = getattr(method.wrapper, "personal", ())
    kept = {method.wrapper.shared(name) for name, _ in model.named_parameters()}
    if personal and kept != {True, False}:
        layers = dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters())
        raise UserError(
            f"personal = {', '.join(personal)} makes {'nothing' if True in kept else 'everything'} personal in a "
            f"model whose layers are {', '.join(layers)}: name some of them"
        )


def make_model(experiment: Experiment) -> nn.Module:
    """The experiment's model, checked against its data."""
    data = experiment.federation.data
    adapters, options = adapters_in(experiment.model_options)
    compressed, options = from_options(options, experiment.seed)
    model = _uncompressed(experiment, options)
    if compressed is not None:
        public = data.proxy.tensors(floats=True) if compressed.frozen else None
        model = compressed.wrap(model, public)
    if adapters is not None:
        model = with_adapters(model, adapters, experiment.seed)
    return _checked(experiment, model)


def _checked(experiment: Experiment, model: nn.Module) -> nn.Module:
    data, task = experiment.federation.data, experiment.task
    width = width_of(task, data)

    def fits(outputs: object, examples: int) -> None:
        task.check_outputs(outputs, examples, width)

    return check_model(model, inputs_of(data, experiment.model), fits)


def _made_up(experiment: Experiment, features: nn.Module | None, device: torch.device) -> Batch:
    made = made_up_rows(experiment.task, experiment.federation.data, experiment.model)
    x, y = each(lambda t: t.to(device), made.x), {"y": made.targets["y"].to(device)}
    return Batch(_transform(features, x, experiment.federation.data.slot), y)


def _uncompressed(experiment: Experiment, options: Mapping[str, Any]) -> nn.Module:
    data = experiment.federation.data
    inputs, width = inputs_of(data, experiment.model), width_of(experiment.task, data)
    if isinstance(experiment.model, nn.Module):
        return adapted(copy.deepcopy(experiment.model), inputs)  # training must not change the caller's
    if not is_shipped(experiment.model):
        named = build_named(experiment.model, inputs, width, experiment.seed, options)
        check_public(experiment.model, getattr(named, "trained_on", ()), data.dataset)
        return adapted(named, inputs)
    assert isinstance(inputs, Field)
    if width is None:
        raise UserError(
            f"task {experiment.task.name!r} does not say how many outputs a model needs: give it outputs"
        )
    model = build(experiment.model, inputs.shape, width, seed=experiment.seed, **options)
    check_public(experiment.model, getattr(model, "trained_on", ()), data.dataset)
    return model


def compression_line(experiment: Experiment) -> str:
    """Parameters before and after a compression, for reports; nothing where there is none."""
    compressed, options = from_options(adapters_in(experiment.model_options)[1], experiment.seed)
    if compressed is None:
        return ""
    before, after = (
        sum(p.numel() for p in model.parameters())
        for model in (_uncompressed(experiment, options), make_model(experiment))
    )
    return compressed.line(before, after)


def _transform(features: nn.Module | None, x: Tensor, slot: Slot | None, size: int = 512) -> Tensor:
    if features is not None and slot is not None:
        rows = _transform(features, x.flatten(0, 1), None)
        return rows.reshape(-1, slot.rows, *rows.shape[1:])
    if features is None or not len(x):
        return x if features is None else x.new_zeros((0, *_feature_shape(features, x)))
    with torch.no_grad():
        return torch.cat([features(part) for part in torch.split(x, size)])


def _feature_shape(features: nn.Module, x: Tensor) -> Sequence[int]:
    with torch.no_grad():
        shape: Sequence[int] = features(x.new_zeros((1, *x.shape[1:]))).shape[1:]
    return shape
