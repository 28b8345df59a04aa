"""Multi-label: six findings of a report, each there or not, from thirty numbers (a generated table).

About a third of reports have each finding: a weight of 2 is the odds against it, so that a finding that is as
likely as usual is told, in place of being left out.
"""

from __future__ import annotations

import torch
from beside import beside  # the file beside this one
from sklearn.datasets import make_multilabel_classification
from torch.utils.data import TensorDataset

import modicum as mo


def main() -> None:
    x, y = make_multilabel_classification(
        n_samples=4000, n_features=30, n_classes=6, n_labels=2, length=60, random_state=0
    )
    records, findings = torch.from_numpy(x / 10).float(), torch.from_numpy(y)
    wards = mo.from_torch(
        [TensorDataset(*part) for part in zip(records.split(1000), findings.split(1000), strict=True)]
    )
    data = mo.federate(wards, test=0.2)
    for weights in (None, [2.0] * 6):
        beside(
            f"findings, weights {weights and weights[0]}",
            data,
            task=mo.tasks.multi_label(weights=weights),
            budgets=3.0,
            rounds=30,
            private=mo.methods.DpSgd(lr=4.0),
            public=mo.methods.FedAvg(lr=0.5),
        )


if __name__ == "__main__":
    main()
