"""Sums of clipped per-example gradients, one client at a time: what a silo runs, and all that it has to trust."""
