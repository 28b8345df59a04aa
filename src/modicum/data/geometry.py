"""Public geometry: a linear map that was fitted to public records, and the length 1 that every record is cut to.

It is fitted by `modicum.public.geometry` and kept with its origin. Applying it looks at one record at a time, so
that a record still moves nothing but itself.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.errors import DAMAGED, UserError

FORMAT = "modicum-geometry-1"
CHUNK = 10_000  # records at a time
FIELDS = ("mean", "matrix", "between", "within")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Geometry:
    """`apply(x) = v/‖v‖` with `v = (x − mean)·matrix`.

    `between` and `within` describe public records of length 1, coordinate by coordinate: the variance of their
    classes' means, and the mean variance inside a class. Whoever estimates class means may shrink by them.
    """

    mean: Floats
    matrix: Floats
    between: Floats
    within: Floats
    about: dict[str, Any] = field(default_factory=dict)  # kind, records, classes, their digest, backbone

    @property
    def size(self) -> int:
        """Dimensions after the map."""
        return int(self.matrix.shape[1])

    @cached_property
    def digest(self) -> str:
        """Names the geometry: every bit of it and where it comes from."""
        content = hashlib.blake2b(digest_size=8)
        for name in FIELDS:
            part = np.ascontiguousarray(getattr(self, name))
            content.update(repr(part.shape).encode() + part.tobytes())
        content.update(json.dumps(self.about, sort_keys=True).encode())
        return content.hexdigest()

    @property
    def line(self) -> str:
        """One line for reports."""
        a = self.about
        behind = f" behind {a['backbone']}" if a.get("backbone") else ""
        return (
            f"features: {a['kind']}:{self.size}, fitted to {a['records']:,} public records of {a['source']} "
            f"({a['classes']} classes){behind}, geometry {self.digest}."
        )

    def features(self, x: Floats) -> Floats:
        """Rows of records' values as features of length 1 (or 0)."""
        if len(x) and x.shape[1] != len(self.mean):
            raise UserError(
                f"the geometry takes records of {len(self.mean)} values and these have {x.shape[1]}: use the data "
                "and the backbone that it was fitted behind"
            )
        out = np.empty((len(x), self.size), np.float32)
        for i in range(0, len(x), CHUNK):
            v = (x[i : i + CHUNK] - self.mean) @ self.matrix
            length = np.sqrt(np.einsum("nd,nd->n", v, v))[:, None]
            out[i : i + CHUNK] = v / np.maximum(length, np.float32(1e-12))
        return out

    def to_bytes(self) -> bytes:
        """A file in numpy's own format, without pickles."""
        header, file = json.dumps({"format": FORMAT, "about": self.about}), io.BytesIO()
        np.savez_compressed(file, header=np.array(header), **{name: getattr(self, name) for name in FIELDS})
        return file.getvalue()


def load_geometry(path: str | Path) -> Geometry:
    """The geometry of a file; another format, or values that are not finite, are refused with a line."""
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            parts = {name: file[name] for name in FIELDS}
        size = parts["matrix"].shape[1]
        shapes = {"mean": (len(parts["matrix"]),), "between": (size,), "within": (size,)}
        for name, part in parts.items():
            if (
                part.dtype != np.float32
                or part.shape != shapes.get(name, part.shape)
                or not np.isfinite(part).all()
            ):
                raise ValueError(f"bad {name}")
        return Geometry(**parts, about=dict(header["about"]))
    except FileNotFoundError:
        raise UserError(
            f"no geometry at {path}: fit one with python -m modicum.public.geometry --proxy NAME --out FILE"
        ) from None
    except (*DAMAGED, OSError) as error:
        raise UserError(f"{path} is not a geometry of this version ({error}): fit it again") from None
