from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.data import Arrays, Dataset, Dirichlet, FederatedData, Natural, check, federate, load
from modicum.data.federate import fit_to
from modicum.errors import UserError


def numbered(n: int = 300, classes: int = 5, hospitals: int = 0) -> Dataset:
    """Records that carry their own number, so that every copy of one can be traced."""
    rng = np.random.default_rng(0)
    train = Arrays(np.arange(n, dtype=np.float32)[:, None], rng.integers(0, classes, n))
    test = Arrays(np.arange(n, n + 50, dtype=np.float32)[:, None], rng.integers(0, classes, 50))
    if not hospitals:
        return Dataset("numbered", train, test, classes)
    names = tuple(f"hospital {i}" for i in range(hospitals))
    return Dataset("numbered", train, test, classes, np.arange(n) % hospitals, np.arange(50) % hospitals, names)


def _ids(arrays: Arrays) -> list[int]:
    return arrays.x[:, 0].astype(int).tolist()


def _all_parts(data: FederatedData) -> list[list[int]]:
    own = [_ids(part) for c in data.clients for part in (c.train, c.validation, c.test)]
    return [*own, _ids(data.proxy), _ids(data.proxy_validation)]


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 10),
    partition=st.sampled_from(["iid", "shards:5", "size-skew:5", Dirichlet(1.0, min_records=1)]),
    validation=st.sampled_from([0.0, 0.1, 0.3]),
    test=st.sampled_from([0.0, 0.2, 0.5]),
    proxy=st.sampled_from([False, True, 0.2]),
    seed=st.integers(0, 1000),
)
def test_all_parts_are_disjoint_and_nothing_is_lost(clients, partition, validation, test, proxy, seed) -> None:
    data = federate(
        numbered(), clients=clients, partition=partition, validation=validation, test=test, proxy=proxy, seed=seed
    )
    everything = [i for part in _all_parts(data) for i in part]
    assert sorted(everything) == list(range(300))  # each once: disjoint, and complete
    assert not set(everything) & set(_ids(data.test))
    assert min(data.sizes) >= 1
    assert bool(len(data.proxy)) == bool(proxy)


def test_the_disjointness_check_bites() -> None:
    """A proxy drawn from the clients' records, the usual mistake, shows up in the same comparison."""
    data = federate(numbered(), clients=5)
    leaky = replace(data, proxy=data.clients[0].train.take(slice(0, 3)))
    everything = [i for part in _all_parts(leaky) for i in part]
    assert sorted(everything) != list(range(300))


def test_the_same_seed_gives_the_same_federation_and_another_does_not() -> None:
    def make(seed: int) -> list[list[int]]:
        return _all_parts(
            federate(numbered(), clients=6, partition="dirichlet:0.5", test=0.2, proxy=True, seed=seed)
        )

    assert make(4) == make(4)
    assert make(4) != make(5)


def test_a_proxy_is_five_percent_of_every_class() -> None:
    dataset = load("digits")
    data = federate(dataset, clients=10, proxy=True)
    taken = np.bincount(np.concatenate([data.proxy.y, data.proxy_validation.y]))
    assert np.abs(taken - 0.05 * np.bincount(dataset.train.y)).max() < 1
    assert taken.sum() == round(0.05 * len(dataset.train))


def test_a_natural_proxy_is_ten_percent_of_every_hospital() -> None:
    dataset = numbered(400, hospitals=4)
    data = federate(dataset, proxy=True)
    owners = dataset.clients[_ids(data.proxy) + _ids(data.proxy_validation)]
    assert np.bincount(owners) == pytest.approx(np.full(4, 10), abs=1)
    assert data.names == ("hospital 0", "hospital 1", "hospital 2", "hospital 3")


def test_natural_clients_keep_their_own_test_records() -> None:
    dataset = numbered(hospitals=3)
    data = federate(dataset)
    for i, client in enumerate(data.clients):
        assert {row % 3 for row in _ids(client.train)} == {i}
        assert {(row - 300) % 3 for row in _ids(client.test)} == {i}
    assert len(federate(dataset, test=0.5).clients[0].test) == 50


def test_natural_data_can_be_divided_otherwise() -> None:
    data = federate(numbered(hospitals=3), clients=7, partition="iid")
    assert data.names[0] == "client-00"
    assert all(len(c.test) == 0 for c in data.clients)


def test_groups_of_ones_own() -> None:
    data = federate(numbered(), partition=Natural(np.arange(300) // 100), proxy=0.1)
    assert data.names == ("client-00", "client-01", "client-02")
    assert {i // 100 for i in _ids(data.clients[1].train)} == {1}


def test_a_client_is_held_out_by_position_alone() -> None:
    """No record's value may move another record in or out of training; a stratified split would."""
    dataset = numbered(hospitals=2)
    changed = dataset.train.y.copy()
    changed[0] = (changed[0] + 1) % 5
    other = replace(dataset, train=Arrays(dataset.train.x, changed))
    a, b = (federate(d, validation=0.2, test=0.3) for d in (dataset, other))
    assert _all_parts(a) == _all_parts(b)


def test_a_clients_test_data_follow_its_own_training_data() -> None:
    data = federate(load("digits"), clients=5, partition="shards:2", test=0.3)
    for client in data.clients:
        assert set(client.test.y.tolist()) == set(client.train.y.tolist())


def test_without_a_test_set_the_clients_own_ones_are_joined() -> None:
    dataset = numbered()
    dataset = replace(dataset, test=Arrays.empty(dataset.test))
    data = federate(dataset, clients=4, test=0.2)
    assert sorted(_ids(data.test)) == sorted(i for c in data.clients for i in _ids(c.test))


def test_another_dataset_as_proxy_is_fitted() -> None:
    colour = Dataset("colour", *[Arrays(np.zeros((40, 3, 32, 32), np.uint8), np.arange(40) % 2)] * 2, classes=2)
    grey = np.full((20, 1, 28, 28), 9, np.uint8)
    other = Dataset("grey", *[Arrays(grey, np.arange(20) % 10)] * 2, classes=10)
    data = federate(colour, clients=2, proxy=other)
    check(data)
    assert data.proxy_classes == 10
    assert len(data.proxy) + len(data.proxy_validation) == 20
    assert data.proxy.x.shape[1:] == (3, 32, 32)
    assert data.proxy.x[0].sum() == 3 * 28 * 28 * 9
    with pytest.raises(UserError, match="cannot be fitted"):
        fit_to(colour.train, (1, 28, 28))


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({}, "how many clients"),
        ({"clients": 3, "partition": "natural"}, "no natural clients"),
        ({"clients": 301}, "take fewer clients"),
        ({"clients": 3, "test": 0.6, "validation": 0.4}, "sum to less than 1"),
        ({"clients": 3, "test": -0.1}, "at least 0"),
        ({"clients": 3, "proxy": 1.0}, "less than 1"),
        ({"clients": 3, "proxy": 0.001}, "raise the fraction"),
        ({"clients": 3, "partition": "random"}, "unknown partition"),
    ],
)
def test_bad_settings(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        federate(numbered(), **settings_)  # type: ignore[arg-type]


def _broken(data: FederatedData, **changes: object) -> FederatedData:
    first = replace(data.clients[0], **changes)  # type: ignore[arg-type]
    return replace(data, clients=(first, *data.clients[1:]))


def _with_x(arrays: Arrays, value: float) -> Arrays:
    x = arrays.x.copy()
    x[1] = value
    return Arrays(x, arrays.y)


def test_check_names_what_is_wrong() -> None:
    data = federate(numbered(), clients=3, validation=0.2, proxy=True)
    check(data, [1.0, 2.0, np.inf])
    train = data.clients[0].train
    one_class = tuple(replace(c, train=Arrays(c.train.x, np.zeros(len(c.train)))) for c in data.clients)
    cases = [
        (
            _broken(data, train=_with_x(train, np.nan)),
            None,
            "client-00's training data has NaN or Inf in record 1",
        ),
        (_broken(data, validation=_with_x(data.clients[0].validation, np.inf)), None, "validation data has NaN"),
        (replace(data, proxy=_with_x(data.proxy, -np.inf)), None, "the proxy has NaN"),
        (_broken(data, train=Arrays.empty(train)), None, "client-00 has no training records"),
        (_broken(data, train=Arrays(train.x, train.y + 5)), None, "label 9, outside 0–4"),
        (_broken(data, train=Arrays(train.x, train.y - 1)), None, "label -1, outside 0–4"),
        (_broken(data, name="client-01"), None, "same name"),
        (replace(data, clients=()), None, "no clients"),
        (replace(data, clients=one_class), None, "same label"),
        (replace(data, test=Arrays(np.zeros((2, 7), np.float32), [0, 1])), None, "shape"),
        (data, [1.0, 0.0, 1.0], "client-01: the budget"),
        (data, [1.0, np.nan, 1.0], "client-01: the budget"),
        (data, [1.0], "1 budgets for 3 clients"),
    ]
    for broken, budgets, message in cases:
        with pytest.raises(UserError, match=message) as error:
            check(broken, budgets)
        assert "\n" not in str(error.value)


def test_one_class_in_one_client_is_fine() -> None:
    data = federate(numbered(), clients=3)
    check(_broken(data, train=Arrays(data.clients[0].train.x, np.zeros(data.sizes[0]))))


def test_labels_must_be_whole_numbers() -> None:
    assert Arrays(np.zeros((2, 1)), np.array([0.0, 1])).has_classes
    assert not Arrays(np.zeros((2, 1)), np.array([0.5, 1])).has_classes
    with pytest.raises(UserError, match="one number per record"):
        Arrays(np.zeros((2, 1)), np.array([1]))
