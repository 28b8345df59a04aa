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
        if names := way(frame):
            found.setdefault("norm", [*names, "linalg_vector_norm"])

fed = mo.Federation.from_dataset("digits", clients=3, budgets=8.0)
folder = tempfile.mkdtemp()
sys.setprofile(look)
mo.train(fed, method=DpSgd(batch=20, steps=2), model="mlp", rounds=1, folder=folder + "/run")
sys.setprofile(None)
for name in ("noise", "norm"):
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
    assert len(ways["norm"]) - len(ways["noise"]) <= 8, ways["norm"]
