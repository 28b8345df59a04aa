"""A page on this machine for looking at runs: watch, compare, plan, audit. It never writes to a run."""
