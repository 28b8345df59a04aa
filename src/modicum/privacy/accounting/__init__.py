"""What events cost: exact Gaussian composition, PLD for sampled Gaussians, RDP for filters.

`epsilon(releases, spec)` picks the accountant; the modules `gdp`, `pld` and `rdp` hold them. `papers` holds the
accountants of published papers, which are not guarantees.
"""

from modicum.privacy.accounting.choose import Guarantee, epsilon
from modicum.privacy.accounting.gaussians import Gaussians, hidden_rate, normal_form

__all__ = ["Gaussians", "Guarantee", "epsilon", "hidden_rate", "normal_form"]
