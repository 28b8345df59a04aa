"""Regression: how far diabetes has advanced after a year, from ten measurements of 442 patients."""

from __future__ import annotations

import torch
from beside import beside  # the file beside this one
from sklearn.datasets import load_diabetes
from torch.utils.data import TensorDataset

import modicum as mo

HIGHEST = 350.0  # of the published scale: a public constant


def main() -> None:
    patients = load_diabetes()  # scaled by its publishers, so that each column has length 1
    x = torch.from_numpy(patients.data * 10).float()
    y = torch.from_numpy(patients.target / HIGHEST).float()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    clinics = mo.from_torch([TensorDataset(x[rows], y[rows]) for rows in order.split(221)])
    data = mo.federate(clinics, test=0.2)
    beside(
        "diabetes",
        data,
        task=mo.tasks.regression(),
        budgets=8.0,
        rounds=30,
        private=mo.methods.DpSgd(lr=0.5, clip=0.5, steps=1, batch=None),
        public=mo.methods.FedAvg(lr=0.1),
    )


if __name__ == "__main__":
    main()
