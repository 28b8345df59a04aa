"""What is true of a simulated run: for those who score attacks, never for attacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from modicum.core.parts import Batch
from modicum.data.arrays import Arrays
from modicum.federation.experiment import Experiment, Federation, build_method, prepare


@dataclass(frozen=True, eq=False)
class Truth:
    """Every client's records, and fresh records of the same kind that nobody has."""

    records: Mapping[str, Batch] = field(repr=False)
    fresh: Batch = field(repr=False)


def truth_of(experiment: Experiment, fresh: Arrays) -> Truth:
    """Records as the model is given them, in the order in which the clients hold them."""
    data = replace(experiment.federation.data, test=fresh)
    made = replace(experiment, federation=Federation(data, experiment.federation.budgets), hot_start=0)
    prepared = prepare(made, build_method(made))
    return Truth(dict(zip(data.names, prepared.records, strict=True)), prepared.test)
