"""Runs in folders: trained, carried out, read back."""

from modicum.runs.finished import Run, load, write_audit
from modicum.runs.playing import carry_out, new_folder
from modicum.runs.training import train

__all__ = ["Run", "carry_out", "load", "new_folder", "train", "write_audit"]
