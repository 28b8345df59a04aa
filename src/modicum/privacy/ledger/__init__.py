"""The ledger: what each client agreed to, and everything it may have released, before data is touched.

`budgets` holds the guards that are asked first, `grammar` and `journal` what is written and how, `memory` a ledger
that ends with its process, `token` the permission that a mechanism asks for.
"""

from modicum.privacy.ledger.ledger import Ledger

__all__ = ["Ledger"]
