import pytest
import torch

import modicum as mo
from modicum.core.device import device_named
from modicum.errors import UserError


def test_a_device_that_is_there() -> None:
    assert device_named("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", ""])
def test_one_line_for_a_device_that_is_not(name: str) -> None:
    with pytest.raises(UserError, match="is not there: use cpu"):
        device_named(name)
    federation = mo.Federation.from_dataset("digits", clients=2, budgets=[1.0])
    with pytest.raises(UserError, match="is not there"):
        mo.train(federation, model="logistic", method=mo.methods.DpSgd(), rounds=1, engine=mo.Engine(device=name))
