"""Where `option` was before `modicum.parts`: kept for one version, for methods of other packages."""

from __future__ import annotations

import warnings

from modicum.parts.options import option

__all__ = ["option"]

warnings.warn("import option from modicum.parts, not modicum.methods.options", DeprecationWarning, stacklevel=2)
