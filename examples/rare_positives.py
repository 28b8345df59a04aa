"""A table with 7% positives: class weights, and the area under the ROC curve (a generated table)."""

from __future__ import annotations

import torch
from beside import beside  # the file beside this one
from sklearn.datasets import make_classification
from torch.utils.data import TensorDataset

import modicum as mo


def main() -> None:
    x, y = make_classification(
        n_samples=8000, n_features=20, n_informative=8, weights=[0.93], class_sep=1.2, flip_y=0.01, random_state=0
    )
    records, default = torch.from_numpy(x / 5).float(), torch.from_numpy(y)
    banks = mo.from_torch(
        [TensorDataset(*part) for part in zip(records.split(2000), default.split(2000), strict=True)]
    )
    data = mo.federate(banks, test=0.2)
    for weights in (None, [1, 13]):
        beside(
            f"defaults, weights {weights}",
            data,
            task=mo.tasks.classification(weights=weights, metrics=["auc", "f1"]),
            model="mlp",
            budgets=3.0,
            rounds=30,
            private=mo.methods.DpSgd(lr=4.0),
            public=mo.methods.FedAvg(lr=0.5),
        )


if __name__ == "__main__":
    main()
