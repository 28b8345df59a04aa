"""Modicum: adaptive, personalised, provable differentially private federated learning."""

__version__ = "0.1.0"
