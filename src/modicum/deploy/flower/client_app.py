"""The app that Flower ships to a node: it carries requests to the silo's socket and answers back.

Every message starts this in a fresh process, so it imports neither torch nor numpy of its own.
"""

from __future__ import annotations

from typing import Any

from flwr.clientapp import ClientApp

from modicum.deploy.flower import parcel
from modicum.deploy.silo.wire import Answer, Code, UnreachableError, ask

app = ClientApp()
PATIENCE = 20.0  # seconds for a silo that restarts
TIMEOUT = 3600.0  # seconds for a silo that computes


@app.query(parcel.ACTION)  # type: ignore[untyped-decorator, unused-ignore]
def carry(message: Any, context: Any) -> Any:
    """One message of the server taken to the silo's socket, and the answer back; a silo out of reach is
    unavailable."""
    kind, body = parcel.read_request(message.content)
    try:
        given = ask(str(context.node_config["silo"]), kind, body, timeout=TIMEOUT, patience=PATIENCE)
    except (UnreachableError, KeyError):
        given = Answer(refused=Code.UNAVAILABLE)
    return parcel.flower().Message(parcel.answer(given), reply_to=message)
