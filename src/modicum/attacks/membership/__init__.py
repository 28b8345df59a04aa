"""Attacks that ask whether a given record was used. Each gives a score: larger means member."""
