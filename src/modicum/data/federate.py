"""From a dataset to a federation: a public proxy, clients, and each client's own train, validation and test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modicum.data.arrays import Array, Arrays, ClientData, Dataset, FederatedData, Peek
from modicum.data.partition import Iid, Natural, Partition, SizeSkew, apportion, parse_partition
from modicum.data.persons import single_rows
from modicum.errors import UserError

DEFAULT_PROXY = 0.05
DEFAULT_PROXY_NATURAL = 0.10


def federate(
    dataset: Dataset,
    *,
    clients: int | None = None,
    partition: Partition | str | None = None,
    seed: int = 0,
    validation: float = 0.0,
    test: float = 0.0,
    proxy: bool | float | Dataset = False,
    proxy_validation: float = 0.2,
) -> FederatedData:
    """Divide a dataset among clients.

    Args:
        dataset: Of `mo.load_dataset`, `mo.from_csv` and their like.
        clients: How many [default: those that the data come with].
        partition: How records are divided [default: natural clients, else IID].
        seed: Of the division.
        validation: The share of its records that each client holds out for metrics. Which ones is decided by
            position alone, so that no record's value moves another in or out of training.
        test: The share held out for tests. With 0 and natural clients, a client's test data are the dataset's own
            test records of that client.
        proxy: Public records that no client holds. A fraction is taken from the training data beforehand, in
            proportion by class (and by natural client); `True` means 5%, or 10% where there are natural clients. A
            dataset is used as it is, fitted to the input's shape.
        proxy_validation: The share of the proxy that is kept for choosing settings.

    Returns:
        Records by client; `mo.train` takes them with `budgets`.

    Raises:
        UserError: Where the data cannot be divided so.
    """
    part = _partition(dataset, partition)
    if isinstance(part, Natural) and part.groups is not None:
        dataset = replace(dataset, clients=part.groups, test_clients=None, client_names=())
    public, rest, groups = _take_proxy(dataset, proxy, seed)
    if isinstance(part, Natural):
        part = replace(part, groups=groups)
        clients = int(np.max(groups)) + 1 if clients is None and groups is not None else clients
    if clients is None:
        raise UserError(f"say how many clients to divide {dataset.name} among, e.g. clients=20")
    if not rest.has_classes and not isinstance(part, Natural | Iid | SizeSkew):
        raise UserError(
            f"{part} divides records by their classes, and {'persons' if dataset.slot else 'these'} have "
            "none: use iid, size-skew:10 or natural"
        )
    rows = part.split(_classes(rest), clients, _rng(seed, "partition"))
    own = tuple(
        _client(dataset, part, i, rest.take(r), clients, (validation, test), seed) for i, r in enumerate(rows)
    )
    held_out = _shuffled_split(len(public.train), (proxy_validation,), _rng(seed, "proxy-validation"))
    return FederatedData(
        dataset=dataset.name,
        clients=own,
        test=dataset.test if len(dataset.test) else Arrays.concatenate([c.test for c in own]),
        classes=dataset.classes,
        proxy=public.train.take(held_out[0]),
        proxy_validation=public.train.take(held_out[1]),
        proxy_classes=public.classes,
        note=dataset.note,
        proxy_name=public.name,
        peeks=_peeks(dataset, part, proxy),
        values=dataset.values,
        labels=dataset.labels,
        slot=dataset.slot,
        made_by=dataset.made_by,
    )


def _peeks(dataset: Dataset, part: Partition, proxy: bool | float | Dataset) -> tuple[Peek, ...]:
    """What these records decided that everybody sees. By labels, one record would also move others elsewhere."""
    share = (Peek.PROXY,) if proxy and not isinstance(proxy, Dataset) else ()
    division = () if isinstance(part, Natural | Iid) else (Peek.DIVISION,)
    return (*dataset.peeks, *share, *division)


def stratified_rows(strata: Array, fraction: float, rng: np.random.Generator) -> Array:
    """About `fraction` of the rows, each stratum in proportion; none is taken whole unless the fraction is 1."""
    if not 0 <= fraction < 1:
        raise UserError(f"a fraction of the records must be at least 0 and less than 1, got {fraction}")
    values, sizes = np.unique(strata, return_counts=True)
    total = round(fraction * len(strata))
    counts = np.minimum(apportion(total, sizes), sizes - 1) if len(values) else sizes
    chosen = [rng.permutation(np.flatnonzero(strata == v))[:n] for v, n in zip(values, counts, strict=True)]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)


def _rng(seed: int, purpose: str, client: int = 0) -> np.random.Generator:
    """One stream per purpose, so that asking for a proxy or a test set changes nothing else by accident."""
    if seed < 0:
        raise UserError(f"a seed must be 0 or more, got {seed}")
    return np.random.default_rng([seed, client, *purpose.encode()])


def _partition(dataset: Dataset, partition: Partition | str | None) -> Partition:
    if partition is None:
        return Iid() if dataset.clients is None else Natural()
    part = parse_partition(partition) if isinstance(partition, str) else partition
    if isinstance(part, Natural) and dataset.clients is None and part.groups is None:
        raise UserError(f"{dataset.name} has no natural clients: use iid, dirichlet:0.5, shards:2 or size-skew:10")
    return part


def _take_proxy(
    dataset: Dataset, proxy: bool | float | Dataset, seed: int
) -> tuple[Dataset, Arrays, Array | None]:
    """The public proxy, the training records that remain, and their natural clients."""
    train, groups = dataset.train, dataset.clients
    if isinstance(proxy, Dataset):
        if dataset.slot is not None:
            proxy = single_rows(proxy, dataset.slot)
        fitted = fit_to(proxy.train, train.shape, proxy.name)
        return replace(proxy, train=fitted), train, groups
    if proxy is True:
        proxy = DEFAULT_PROXY if groups is None else DEFAULT_PROXY_NATURAL
    strata = _classes(train) if groups is None else groups * max(1, dataset.classes) + _classes(train)
    chosen = stratified_rows(strata, float(proxy), _rng(seed, "proxy"))
    if proxy and not len(chosen):
        raise UserError(f"a proxy of {proxy:g} of {len(train)} records is empty: raise the fraction")
    kept = np.setdiff1d(np.arange(len(train)), chosen)
    public = replace(dataset, train=train.take(chosen))
    return public, train.take(kept), None if groups is None else groups[kept]


def _classes(arrays: Arrays) -> Array:
    """The classes of records; all alike where labels are something else."""
    return arrays.y if arrays.has_classes else np.zeros(len(arrays), np.int64)


def fit_to(arrays: Arrays, shape: tuple[int, ...], name: str = "the proxy") -> Arrays:
    """Images in another dataset's shape: grey is repeated over the channels, small ones get a black frame."""
    x = arrays.x
    if arrays.shape == shape:
        return arrays
    if (
        not arrays.plain
        or len(shape) != 3
        or x.ndim != 4
        or x.shape[1] not in (1, shape[0])
        or x.shape[2] > shape[1]
        or x.shape[3] > shape[2]
    ):
        raise UserError(
            f"records of {name} have shape {arrays.shape} and cannot be fitted to {shape}: choose another proxy"
        )
    high, wide = shape[1] - x.shape[2], shape[2] - x.shape[3]
    x = np.pad(x, ((0, 0), (0, 0), (high // 2, high - high // 2), (wide // 2, wide - wide // 2)))
    return Arrays(np.repeat(x, shape[0] // x.shape[1], axis=1), arrays.y)


def _client(
    dataset: Dataset, part: Partition, i: int, own: Arrays, clients: int, held_out: tuple[float, float], seed: int
) -> ClientData:
    natural = isinstance(part, Natural)
    name = dataset.client_names[i] if natural and i < len(dataset.client_names) else client_name(i, clients)
    train, validation, test = (own.take(r) for r in _shuffled_split(len(own), held_out, _rng(seed, "client", i)))
    if natural and not held_out[1] and dataset.test_clients is not None:
        test = dataset.test.take(dataset.test_clients == i)
    return ClientData(name, train, validation, test)


def client_name(i: int, clients: int) -> str:
    """client-00, client-01, … with as many digits as the largest needs."""
    return f"client-{i:0{max(2, len(str(clients - 1)))}d}"


def _shuffled_split(n: int, fractions: tuple[float, ...], rng: np.random.Generator) -> list[Array]:
    """Rows that remain, then rows of each fraction; at least one remains where there is any."""
    if any(not 0 <= f < 1 for f in fractions) or sum(fractions) >= 1:
        raise UserError(f"held-out fractions must be at least 0 and sum to less than 1, got {fractions}")
    counts = [int(round(n * f, 9)) for f in fractions]  # 100 · 0.29 is 29, not 28.999…
    rows = rng.permutation(n)
    parts = np.split(rows, np.cumsum(counts))
    return [np.sort(parts[-1]), *(np.sort(p) for p in parts[:-1])]
