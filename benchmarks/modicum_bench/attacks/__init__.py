"""Attacks on every method's messages: reconstructions and membership, with floors and ceilings."""
