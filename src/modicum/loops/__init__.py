"""Modicum inside other people's programs: a PyTorch loop, a Flower app."""
