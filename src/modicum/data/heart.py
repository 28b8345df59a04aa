"""UCI Heart Disease: four hospitals, 13 features, and whether the disease is present.

Missing values and scaling use constants that are written here, never a statistic of the patients: a mean taken
over private records would be a release of its own, and would let one patient move the features of another.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from modicum.data.arrays import Arrays
from modicum.errors import UserError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

# name: (lowest, highest, value where missing, whether 0 means missing). Ranges are clinical, rounded, and clipped
# to; fill-ins are the normal finding, or the middle of the normal range at rest. Some copies write missing values
# as ?, others as -9 or 0. Where 0 is also a normal finding it is the fill-in, so that all copies read alike.
FEATURES: dict[str, tuple[float, float, float, bool]] = {
    "age": (20, 90, 55, True),
    "sex": (0, 1, 0, False),  # 1 male
    "cp": (1, 4, 4, True),  # chest pain: 1 typical angina, 2 atypical, 3 other pain, 4 none
    "trestbps": (80, 200, 120, True),  # resting blood pressure, mm Hg
    "chol": (100, 400, 200, True),  # serum cholesterol, mg/dl
    "fbs": (0, 1, 0, False),  # fasting blood sugar over 120 mg/dl
    "restecg": (0, 2, 0, False),
    "thalach": (60, 220, 150, True),  # highest heart rate reached
    "exang": (0, 1, 0, False),  # angina when exercising
    "oldpeak": (-3, 7, 0, False),  # ST depression
    "slope": (1, 3, 1, True),
    "ca": (0, 3, 0, False),  # major vessels coloured by fluoroscopy
    "thal": (3, 7, 3, True),  # 3 normal, 6 fixed defect, 7 reversible defect
}


def read_hospital(path: Path) -> Arrays:
    """One hospital's patients: features in [−1, 1], label 1 where the diagnosis is not 0."""
    rows = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    try:
        table = np.array([[_number(cell) for cell in row.split(",")] for row in rows], float)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): fetch it again") from None
    if table.ndim != 2 or table.shape[1] != len(FEATURES) + 1:
        raise UserError(f"{path} should have {len(FEATURES) + 1} comma-separated columns: fetch it again")
    if np.isnan(table[:, -1]).any():
        raise UserError(f"{path} has a patient without a diagnosis: fetch it again")
    return Arrays(_scale(table[:, :-1]), (table[:, -1] > 0).astype(np.int64))


def _number(cell: str) -> float:
    return float("nan") if cell.strip() in ("?", "", "-9", "-9.0") else float(cell)


def _scale(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    low, high, fill, zero_is_missing = (np.array(column) for column in zip(*FEATURES.values(), strict=True))
    missing = np.isnan(table) | (zero_is_missing.astype(bool) & (table == 0))
    filled = np.clip(np.where(missing, fill, table), low, high)
    return np.asarray(2 * (filled - low) / (high - low) - 1, np.float32)
