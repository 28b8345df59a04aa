"""What events cost: exact Gaussian composition, PLD for sampled Gaussians, RDP for filters.

`epsilon(releases, spec)` picks the accountant; the modules `gdp`, `pld` and `rdp` hold them. `calibration` goes
from a budget to noise; `filters` prices releases for a filter; `classic` and `claims` set published figures beside
true ones.
"""

from modicum.privacy.accounting.choose import Guarantee, epsilon
from modicum.privacy.accounting.gaussians import Gaussians, hidden_rate, normal_form

__all__ = ["Gaussians", "Guarantee", "epsilon", "hidden_rate", "normal_form"]
