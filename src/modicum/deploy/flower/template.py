"""The folder that `modicum flower init` writes: all that a first deployment needs, and its commands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modicum.data import federate, load
from modicum.deploy.flower import gate, keys, register
from modicum.deploy.flower.project import FLWR, SERVER_KEY, settings, write_project
from modicum.deploy.silo.signing import make_signing_key, public_text
from modicum.errors import UserError

EXPERIMENT = """# What everyone agrees on. Every silo keeps its own copy and refuses a server with another one.

[data]                      # used by `modicum run` and `modicum flower up`; deployed silos have their own
name = "digits"
clients = {clients}

[method]
name = "dp-sgd"
{method}

[model]
name = "logistic"

[run]
rounds = 10
server = "{server}"
{run}
[run.silos]                 # what was agreed: a silo that has other records or grants another ε does not join
{silos}
"""

SILO = """# This silo's own terms. The server cannot change any of them.

[silo]
name = "{name}"
experiment = "../experiment.toml"
folder = "state-{name}"
socket = "{name}.sock"
key = "{name}.key"          # signs what it says; never leaves this machine

[grant]
budget = 2.0                # ε of everything that leaves in this run
delta = 1e-5
unit = "record"
{view}bounds = [0.01, 10.0]       # clipping bounds it accepts
smallest_noise = 0.3        # noise multiplier under which nothing leaves
rounds = 50

[account]                   # over all runs on these records, for ever: see docs/silo-account.md
budget = 8.0
delta = 1e-5

[data]
npz = "records-{name}"      # a folder with {name}.npz: arrays x and y; here a share of the digits, to try out
classes = 10
"""

SECURE_METHOD = """view = "secure-aggregation" # the server learns sums only: docs/secure-aggregation.md
colluding = 1               # silos that may help the server
dropouts = {dropouts}                # silos that may be lost in a round: of more than colluding + 2 · dropouts"""
SECURE_RUN = """secure_aggregation = "protocol"
"""
SECURE_VIEW = """view = "secure-aggregation"
"""
KEYS = """
## Keys

Server and silos sign all that they say to one another: the server with `keys/server.sign`, a silo with
`silos/NAME.key`. These were made here so that the project runs at once. For real records they are not copied: each
silo makes its own with `modicum silo key silos/NAME.key`, and the line that this prints replaces the key in
everybody's `experiment.toml`. Compare that file by another way than the server: whoever writes the keys says who
is counted.
"""

README = """# A deployment of {count} silos

Flower {flwr}. Everything below was made by `modicum flower init`; keys are in `keys/`.

## On one machine

```
modicum flower superlink app{listen} &
modicum flower register app
{silos}modicum flower start app
```

## On several machines

Each silo needs `experiment.toml`, its own file from `silos/`, its own key `keys/NAME` and `keys/ca.crt`. The
server keeps `app/`, `experiment.toml`, `keys/server.*`, `keys/ca.crt`, `keys/control.token` and `keys/silos.toml`.
Run `modicum silo serve` as one user and `modicum flower node` as another: see docs/deploy.md.

Whoever has `keys/control.token` starts runs on the server. Flower's own `flower-superlink` asks nobody for a
token, and Flower's own `flower-supernode` runs the code that its server sends: either in place of the commands
above opens **remote code execution** to whoever reaches its port.
"""


def write_template(folder: Path, names: Sequence[str], host: str, port: int, *, secure: bool = False) -> None:
    """A folder with keys, and settings for a server and for each silo, to be divided among its machines.

    `secure`: behind secure aggregation, against one colluding silo.
    """
    if not names or len(set(names)) != len(names):
        raise UserError("give each silo a name of its own: --silos hospital-a,hospital-b,hospital-c")
    if odd := [name for name in names if not re.fullmatch(r"[\w-]{1,60}", name)]:
        raise UserError(
            f"a silo's name becomes a file's: {odd[0]!r} has other characters than letters, digits, - and _"
        )
    if secure and len(names) < 2:
        raise UserError("secure aggregation needs a silo that does not collude with the server: name at least two")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder")
    at = folder / "keys"
    keys.make_tls(at, tuple(dict.fromkeys((host, "127.0.0.1", "localhost"))))
    pairs = {name: keys.make_node_key(at / name) for name in names}
    register.write_public_keys(at / "silos.toml", pairs)
    gate.make_token(at)
    (folder / "silos").mkdir(parents=True, exist_ok=True)
    (folder / "flower").mkdir(exist_ok=True)
    for name in names:
        text = SILO.format(name=name, view=SECURE_VIEW if secure else "")
        (folder / "silos" / f"{name}.toml").write_text(text, encoding="utf-8")
    server = make_signing_key(at / SERVER_KEY)
    experiment = _experiment(folder / "silos", names, public_text(server), secure=secure)
    (folder / "experiment.toml").write_text(experiment, encoding="utf-8")
    files = (folder / "experiment.toml", folder / "server", at / "silos.toml", server)
    write_project(folder / "app", settings(*files, control=f"127.0.0.1:{port + 1}"))
    (folder / "README.md").write_text(_readme(names, host, port) + KEYS, encoding="utf-8")


def _experiment(folder: Path, names: Sequence[str], server: str, *, secure: bool) -> str:
    """What all agree on, with the public half of each silo's own key, which is made here."""
    lines = []
    for name, size in _write_records(folder, names).items():
        key = public_text(make_signing_key(folder / f"{name}.key"))
        lines.append(f'{json.dumps(name)} = {{ records = {size}, budget = 2.0, key = "{key}" }}')
    method = SECURE_METHOD.format(dropouts=int(len(names) > 3)) if secure else "batch = 64"
    run = SECURE_RUN if secure else ""
    return EXPERIMENT.format(clients=len(names), silos="\n".join(lines), method=method, run=run, server=server)


def _write_records(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Records to try out, and how many: each silo gets a share of the digits, in a folder that is its own."""
    shares = federate(load("digits"), clients=len(names), partition="iid").clients
    for name, share in zip(names, shares, strict=True):
        own = folder / f"records-{name}"
        own.mkdir(mode=0o700)
        np.savez(own / f"{name}.npz", x=share.train.x, y=share.train.y)
    return {name: len(share.train.y) for name, share in zip(names, shares, strict=True)}


def _readme(names: Sequence[str], host: str, port: int) -> str:
    address, bind = f"{host}:{port}", host if host == "127.0.0.1" else "0.0.0.0"
    lines = []
    for name in names:
        lines.append(f"modicum silo serve silos/{name}.toml &\n")
        files = f"--ca keys/ca.crt --key keys/{name} --silo silos/{name}.sock"
        lines.append(f"modicum flower node {address} {files} &\n")
    return README.format(count=len(names), flwr=FLWR, listen=f" --listen {bind}:{port}", silos="".join(lines))
