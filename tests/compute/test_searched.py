"""A model with operations that were not searched takes one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute import Clipper, Flat, clipped_sum
from modicum.compute.clipped_sum import SlowClippingWarning
from modicum.compute.convolution import ConvWeight, Geometry
from modicum.compute.even_products import even_products
from modicum.compute.pieces import LinearWeight
from modicum.compute.problem import ROWS, enough_rows
from modicum.compute.row_steps import operations
from modicum.compute.searched import ALIKE, SEARCHED, unsearched
from tests.compute.helpers import cross_entropy
from tests.compute.test_bound import threads
from tests.compute.test_even_products import kinds, need_a_library_that_minds
from tests.compute.test_row_steps import step_of

RECORDS = 64
FIXED = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], size: int = 16, out: int = 8) -> None:
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(4, size), nn.Linear(out, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.function(self.first(x)))
        return found


def distances(x: Tensor) -> Tensor:
    return torch.cdist(x, FIXED)


def pairs(x: Tensor) -> Tensor:
    return functional.bilinear(x, x, torch.ones(8, 30, 30))


def columns(x: Tensor) -> Tensor:
    return torch.einsum("bd,kd->kb", x, FIXED).t()


def by_a_number(x: Tensor) -> Tensor:
    return x[:, :8] * (2.0 if bool(x.sum() > 0) else 1.0)


STRANGE = [(distances, 16), (pairs, 30), (columns, 16), (by_a_number, 16)]


def names(model: nn.Module) -> frozenset[str]:
    return frozenset(
        operations(model, dict(model.named_parameters()), cross_entropy, torch.rand(2, 4), torch.tensor([0, 1]))
    )


@pytest.mark.parametrize(("function", "size"), STRANGE)
def test_what_was_not_searched_is_seen(function: Callable[[Tensor], Tensor], size: int) -> None:
    assert unsearched(names(Between(function, size)))


@pytest.mark.parametrize(("size", "out"), [(16, 33), (22, 8), (44, 88), (37, 8)])
def test_records_as_columns_are_told_from_layers_of_their_number(size: int, out: int) -> None:
    fixed = torch.randn(out, size)
    assert unsearched(names(Between(lambda x: (fixed @ x.t()).t(), size, out)))
    assert not unsearched(names(Between(lambda x: x @ fixed.t(), size, out)))


def norms(model: nn.Module) -> Tensor:
    """Of one record in all places of a batch."""
    x = torch.linspace(0.1, 0.9, 4).expand(RECORDS, 4)
    return clipped_sum(model, cross_entropy, x.clone(), torch.zeros(RECORDS, dtype=torch.long), Flat(1.0)).norms


def last_bits(function: Callable[[Tensor], Tensor], size: int) -> int:
    """In how many ways a record's gradient is computed, of several models."""
    return max(kinds(norms(model)) for model in several(function, size))


def several(function: Callable[[Tensor], Tensor], size: int) -> Iterator[nn.Module]:
    for seed in range(8):
        torch.manual_seed(seed)
        yield Between(function, size)


@pytest.fixture
def taken_for_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """For twins, where the library itself computes a record's distances by where it stands; not every one does."""
    x = torch.linspace(0.1, 0.9, 4).repeat(RECORDS, 1)
    with threads(1):
        need_a_library_that_minds(torch.cat([model(x) for model in several(distances, 16)], 1))
    monkeypatch.setattr(import_module("modicum.compute.clipped_sum"), "unsearched", lambda _: "")


@pytest.mark.filterwarnings("ignore::modicum.compute.clipped_sum.SlowClippingWarning")
def test_distances_do_not_depend_on_where_a_record_stands() -> None:
    assert last_bits(distances, 16) == 1


@pytest.mark.usefixtures("taken_for_searched")
def test_distances_that_are_taken_for_searched_are_caught() -> None:
    with threads(1):
        assert last_bits(distances, 16) > 1


def moved(seed: int, records: int = 61) -> float:
    """By the first record, in units of C, if the server knows what distances come out where."""
    torch.manual_seed(seed)
    model, x = Between(distances), torch.zeros(records, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.first.bias.normal_()
        found = model.function(model.first(torch.zeros(enough_rows(records), 4)))[:records].double()
        spread = found.max(0)[0] - found.min(0)[0]
        telling = found[:, spread.argmax()]
        limit, steep = (telling.max() + telling.min()) / 2, 2000.0 / spread.max().clamp(min=1e-7)
        model.last.weight[0, spread.argmax()], model.last.bias[0] = steep, -steep * limit
        model.last.bias[2:] = -1e9
    y = (telling <= limit).long()
    whole, others = (clipped_sum(model, cross_entropy, x[i:], y[i:], Flat(1.0)).total for i in (0, 1))
    return float(torch.cat([(whole[k].double() - others[k].double()).flatten() for k in whole]).norm())


@pytest.mark.filterwarnings("ignore::modicum.compute.clipped_sum.SlowClippingWarning")
def test_a_record_moves_a_sum_of_distances_by_its_bound() -> None:
    assert max(moved(seed) for seed in range(5)) <= 1 + 1e-3


@pytest.mark.usefixtures("taken_for_searched")
def test_it_would_move_it_by_more() -> None:
    """Seen: by 31 times its bound; of 400 records by 201 times."""
    with threads(1):
        assert max(moved(seed) for seed in range(5)) > 2


def test_the_operation_is_named() -> None:
    model = Between(distances)
    with pytest.warns(SlowClippingWarning, match="_cdist_backward, whose rows may depend"):
        Clipper(model)(cross_entropy, torch.rand(3, 4), torch.tensor([0, 1, 2]), Flat(1.0))


def test_the_fall_back_refuses_what_its_mapping_makes_of_a_model() -> None:
    x = torch.rand(3, 4)
    with even_products(searched_alone=True), pytest.raises(RuntimeError, match="not searched"):
        torch.cdist(x, x)
    with even_products():
        torch.cdist(x, x)


def test_products_with_a_vector_are_filled_up() -> None:
    """Rows of one record's numbers many times over, which begin everywhere."""
    row, vector = torch.exp2(torch.arange(13.0)) * torch.tensor([1.0, -1.0] * 6 + [1.0]), torch.rand(13)
    with even_products():
        found = row.expand(RECORDS, 13).contiguous() @ vector
    assert len(found.unique()) == 1
    assert torch.allclose(found.double(), (row.double() @ vector.double()), rtol=1e-3)


def test_softmax_over_what_comes_before_records_needs_a_multiple_of_all_rows() -> None:
    def over_places(x: Tensor) -> Tensor:
        return x.t().softmax(0).t()

    model = Between(over_places, 3, 3)
    assert names(model) - ALIKE
    assert step_of(model, 4) == ROWS


def gram_of_a_layer(a: Tensor, g: Tensor) -> Tensor:
    return LinearWeight(a.transpose(1, 2), g.transpose(1, 2)).measure_factors()


def gram_of_a_convolution(a: Tensor, g: Tensor) -> Tensor:
    geometry = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)
    return ConvWeight(a[:, :, None], g[:, :, None], geometry, torch.Size((16, 8, 1, 1)))._gram()


GRAMS = [gram_of_a_layer, gram_of_a_convolution]


def of_all_and_of_the_rest(of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The same records, one place further on."""
    torch.manual_seed(0)
    a, g = torch.randn(1000, 8, 9), torch.randn(1000, 16, 9)
    return of(a, g)[1:], of(a[1:], g[1:])


@pytest.mark.parametrize("gram", GRAMS)
def test_gram_matrices_do_not_depend_on_where_they_are_written(gram: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert torch.equal(*of_all_and_of_the_rest(gram))


@pytest.mark.parametrize("gram", GRAMS)
def test_gram_matrices_one_after_the_other_are_caught(
    gram: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library itself multiplies by where a matrix begins; not every one does."""
    with threads(1):
        if torch.equal(*of_all_and_of_the_rest(lambda _, g: g.double().transpose(1, 2) @ g.double())):
            pytest.skip("this library multiplies all matrices alike")
        monkeypatch.setattr(
            import_module("modicum.compute.apart"), "_room", lambda like, shape: like.new_empty(shape)
        )
        assert not torch.equal(*of_all_and_of_the_rest(gram))


def test_every_operation_that_computes_alike_was_searched() -> None:
    assert ALIKE < SEARCHED
