"""How far it is from `mo.train` to the noise and to a norm: frames of a traced run. The way stays short."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, tempfile
import torch
import modicum as mo
from modicum.methods import DpSgd

torch.set_num_threads(1)
found = {}

def way(frame):
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        if frame.f_code is mo.train.__code__:
            return names[::-1]
        frame = frame.f_back
    return []

def look(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_name == "normal" and code.co_filename.endswith("source.py"):
        found.setdefault("noise", way(frame))
    if event == "c_call" and arg.__name__ == "linalg_vector_norm" and "compute" in code.co_filename:
        names = way(frame)
        if names and not {"_settle", "_compare"} & {*names}:  # a route that is still being tried out
            found.setdefault(model, [*names, "linalg_vector_norm"])

fed = mo.Federation.from_dataset("digits", clients=3, budgets=8.0)
folder = tempfile.mkdtemp()
for model in ("mlp", "cnn-small"):
    sys.setprofile(look)
    mo.train(fed, method=DpSgd(batch=20, steps=2), model=model, rounds=1, folder=f"{folder}/{model}")
    sys.setprofile(None)
for name in ("noise", "mlp", "cnn-small"):
    print(name, len(found[name]), *found[name])
"""


@pytest.fixture(scope="module")
def ways() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: names for name, _, *names in lines}


def test_from_train_to_the_noise_are_at_most_twelve_frames(ways: dict[str, list[str]]) -> None:
    """Twenty before the round was one function; both ends count."""
    assert ways["noise"][0] == "train"
    assert len(ways["noise"]) <= 12, ways["noise"]


def test_a_norm_is_eight_frames_further(ways: dict[str, list[str]]) -> None:
    """Fourteen before; autograd's own are three of the eight."""
    assert len(ways["mlp"]) - len(ways["noise"]) <= 8, ways["mlp"]


def test_one_client_at_a_time_has_eleven(ways: dict[str, list[str]]) -> None:
    """What a silo runs: a route that was settled before, and pieces that are stored on the way back."""
    assert len(ways["cnn-small"]) - len(ways["noise"]) <= 11, ways["cnn-small"]
