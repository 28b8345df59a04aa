"""Public features under a federation: a backbone before records are divided, a geometry after.

Both come from public records alone. What a client's records become depends on each of them and on nothing private
besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from modicum.core.facts import noise_of_sum
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.data.federate import fit_to
from modicum.data.geometry import Geometry, load_geometry
from modicum.data.kin import share_records
from modicum.data.mapped import federation_behind
from modicum.errors import UserError
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import Shows
from modicum.public.geometry import KIND, Public, digest, fit_geometry

AUTO = "auto"
Weights = str | Path | Sequence[str | Path]
Proxy = bool | float | Dataset


def behind(
    weights: Weights | None,
    cache: Path,
    task: Dataset,
    proxy: Proxy,
    source: Dataset | None,
    *,
    own: bool = False,
    views: int = 1,
    trained_on: Sequence[str] = (),
) -> tuple[Dataset, Proxy, Dataset | None]:
    """The task's and public datasets with a backbone's features in place of images; None: as they are.

    Public images are brought to the task's shape first, so that whatever does not fit is said before anything is
    computed. Only their training records are used. Features of somebody's `own` records are computed anew each
    time: the cache lies where others may read, and outlives every run. A network that was trained on the task's
    own records is refused.
    """

    def alike(public: Dataset) -> Dataset:
        if share_records(public.name, task.name):
            raise UserError(
                f"{public.name} shares records with {task.name}, so it is not public for it: name another "
                "dataset, or say which share of these records is public, e.g. proxy = 0.05"
            )
        fitted = fit_to(public.train, task.train.shape, public.name)
        return replace(public, train=fitted, test=Arrays.empty(fitted))

    proxy = alike(proxy) if isinstance(proxy, Dataset) else proxy
    source = None if source is None else alike(source)
    if weights is None:
        if views != 1 or trained_on:
            raise UserError("views and trained_on are of a backbone: name one, or leave them out")
        return task, proxy, source
    from modicum.models.features import extractor, featured

    made = extractor(weights, task.train.shape, views=views, trained_on=trained_on)
    made.check(task.name)
    task = featured(task, made, None if own else cache)
    proxy = featured(proxy, made, cache) if isinstance(proxy, Dataset) else proxy
    return task, proxy, None if source is None else featured(source, made, cache)


def stand_on(
    data: FederatedData,
    features: str | None,
    budgets: Sequence[float],
    spec: Callable[[], PrivacySpec],
    source: Dataset | None = None,
) -> FederatedData:
    """The federation on public features: `discriminant:384`, `discriminant:auto`, or a geometry's own file.

    They are fitted to `source`, or else to the proxy without the records that are kept for choosing settings.
    """
    check_features(features, source is not None, bool(len(data.proxy)))
    if features is None:
        return data
    name = "" if data.made_by is None else data.made_by.name
    if is_file(features):
        return federation_behind(_kept(features, name, data), data)
    size = parse(features)
    noise = class_noise(spec(), budgets, data.sizes, data.classes) if size is None else None
    return federation_behind(fit_geometry(_public(data, source, name), size, noise), data)


def check_features(features: str | None, source: bool, proxy: bool) -> None:
    """Refuse what cannot be fitted: before records go through a network, which takes minutes."""
    if source and (features is None or is_file(features)):
        raise UserError(f'features_from says what features are fitted to: set features = "{KIND}:{AUTO}" with it')
    if features is None or is_file(features):
        return
    parse(features)
    if not source and not proxy:
        raise UserError("features are fitted to public records: set a proxy, or features_from to a dataset's name")


def is_file(features: str) -> bool:
    """Whether `features` names a file of a fitted geometry rather than a way to fit one."""
    return features.endswith(".npz")


def parse(features: str) -> int | None:
    """The dimensions that are asked for; None: to be found."""
    kind, _, size = features.partition(":")
    if kind == KIND and size == AUTO:
        return None
    if kind != KIND or not size.isdecimal() or int(size) < 1:
        raise UserError(
            f'features are written "{KIND}:64", "{KIND}:{AUTO}" or the name of an .npz file, got {features!r}'
        )
    return int(size)


def class_noise(spec: PrivacySpec, budgets: Sequence[float], sizes: Sequence[int], classes: int) -> float:
    """Variance that noise adds to a coordinate of a class's mean: records of length 1, everyone's whole budget.

    Each client noises its sum of a class with z_i, from about n_i/K records; weighted by precision, the mean over
    clients has the variance 1/Σ(n_i/(K·z_i))², and behind a sum N/(Σ n_i/(K·z_i))² with z_i its share. Many noised
    steps cost as much as one release of all, so this is the scale of the noise in training too.
    """
    if not spec.unit.of_client:
        raise UserError(f"{KIND}:{AUTO} knows the noise of records, not of whole clients: say how many dimensions")
    if any(math.isinf(e) for e in budgets):
        return 0.0
    noises = {e: calibrate_noise(spec, e, NoSampling(), 1) for e in set(budgets)}
    if spec.view.shows is Shows.SUM:
        return (classes * noise_of_sum([noises[e] for e in budgets], sizes)) ** 2
    return 1 / sum((n / (classes * noises[e])) ** 2 for e, n in zip(budgets, sizes, strict=True))


def _public(data: FederatedData, source: Dataset | None, backbone: str) -> Public:
    if source is not None:
        return Public(source.train, source.name, same_task=False, backbone=backbone)
    same = data.proxy_classes == data.classes
    return Public(data.proxy, data.proxy_name, same_task=same, backbone=backbone)


def _kept(path: str, backbone: str, data: FederatedData) -> Geometry:
    """A geometry's own file; one of the task's own records only where this run's public share is what it is of."""
    geometry = load_geometry(path)
    source = str(geometry.about.get("source", ""))
    if share_records(source, data.dataset) and geometry.about.get("content") != digest(data.proxy):
        raise UserError(
            f"{path} was fitted to records of {source}, which shares records with {data.dataset}: it is not "
            "public for them, fit one to another dataset"
        )
    fitted = geometry.about.get("backbone", "")
    if fitted != backbone:
        raise UserError(
            f"{path} was fitted behind {fitted or 'no backbone'} and data.backbone is {backbone or 'not set'}: "
            "use the same for both"
        )
    return geometry
