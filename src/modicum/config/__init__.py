"""Experiments as TOML files: read with errors that point at the line, and written with every default."""

from modicum.config.build import account_in, experiment, experiment_over, federation, task_in
from modicum.config.read import read
from modicum.config.schema import Config
from modicum.config.write import differences, to_toml

__all__ = [
    "Config",
    "account_in",
    "differences",
    "experiment",
    "experiment_over",
    "federation",
    "read",
    "task_in",
    "to_toml",
]
