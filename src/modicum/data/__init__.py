"""Readers, partitioners, budgets per client, and data of one's own."""

from modicum.data.arrays import Arrays, ClientData, Dataset, FederatedData
from modicum.data.budgets import Budgets, assign_budgets, parse_budgets
from modicum.data.catalogue import DatasetEntry, catalogue, load
from modicum.data.check import check
from modicum.data.federate import federate
from modicum.data.own import from_npz_folder, from_torch
from modicum.data.partition import Dirichlet, Iid, Natural, Partition, Shards, SizeSkew, parse_partition
from modicum.data.persons import in_persons
from modicum.data.population import from_population
from modicum.data.tables import from_csv, from_frame, from_parquet

__all__ = [
    "Arrays",
    "Budgets",
    "ClientData",
    "Dataset",
    "DatasetEntry",
    "Dirichlet",
    "FederatedData",
    "Iid",
    "Natural",
    "Partition",
    "Shards",
    "SizeSkew",
    "assign_budgets",
    "catalogue",
    "check",
    "federate",
    "from_csv",
    "from_frame",
    "from_npz_folder",
    "from_parquet",
    "from_population",
    "from_torch",
    "in_persons",
    "load",
    "parse_budgets",
    "parse_partition",
]
