"""A silo: one client's data, grant, ledger and noise in a process of its own, reached by a local socket."""
