"""Somebody's own Flower app, made private for each client: a mod for its clients, a wrapper for its strategy."""

from modicum.loops.flower.client import ClientPrivacy, private_app
from modicum.loops.flower.server import PrivateStrategy

__all__ = ["ClientPrivacy", "PrivateStrategy", "private_app"]
