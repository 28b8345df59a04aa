"""`modicum flower node`: carries the server's messages to a silo's socket, and its answers back.

It speaks Flower's interface for nodes and is all that a hospital runs of Flower. It fetches no app, runs no code
of the server's and listens at no port, so that neither the server nor another user of this machine gets in by it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from modicum.deploy.flower import link, parcel
from modicum.deploy.silo.wire import Answer, Code, UnreachableError, ask
from modicum.errors import UserError

PATIENCE = 20.0  # seconds for a silo that restarts
TIMEOUT = 3600.0  # seconds for a silo that computes
BUSY, IDLE = 0.2, 2.0  # seconds between looks for messages: while a run goes on, and long after
AGAIN = 1.0  # seconds before a server that is away is asked again
STALL = 30.0  # seconds without anything of the server's, which has ended then
SLOW = 60.0  # seconds for a piece of an answer on a slow line, as many as the server's gate gives it
PIECE, FEW = 5 * 2**20, 8  # bytes into which Flower cuts what is large, and pieces that any message may have
ANSWER = 8 * 2**20  # bytes of one answer of the server's
LARGEST = 1024  # MiB of one message, if nothing else is said
LOG = logging.getLogger("modicum.node")
Tell = Callable[[str], None]


class Node:
    """A silo's messenger.

    Args:
        server: address of the server, host:port.
        ca: the deployment's certificate authority; no other is accepted.
        key: this node's private key, whose public half the server has registered.
        silo: the silo's socket.
        tell: where to say what is waited for.
        largest: MiB of a message; what claims to be larger is not fetched.

    Raises:
        UserError: Another version of Flower, or files that are no key or certificate.
    """

    def __init__(self, server: str, ca: Path, key: Path, silo: Path, tell: Tell, largest: int = LARGEST) -> None:
        os.environ.update(link.QUIET)
        link.check_version()
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        private = _private_key(key)
        self.server, self.silo, self.tell = server, silo, tell
        self.pieces = FEW + (largest << 20) // PIECE
        self.public = public_key_to_bytes(private.public_key())
        try:
            self.client: Any = FleetHttpClient.from_server_address(
                server,
                False,
                ca.read_bytes(),
                interceptors=[
                    RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                    NodeAuthHttpInterceptor(private, private.public_key()),
                ],
            )
        except (OSError, ValueError):
            raise UserError(
                f"{ca} is no PEM certificate that can be read: ask the server for its ca.crt"
            ) from None
        _guard(self.client._client)
        self._said = ""

    def serve(self) -> None:
        """Until a signal ends it: wait for the server, then carry, and wait again when the server is gone."""
        import httpx
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        node = None
        try:
            while True:
                node = node or self._activated()
                try:
                    self._carry_on(node)
                except Exception as error:  # a hostile server provokes any
                    self._say(f"lost {self.server} ({why(error)}): waiting for it")
                    if not isinstance(error, httpx.TransportError):
                        node = None  # else this one goes on: for a minute the server would activate no other
                    time.sleep(AGAIN)
        finally:  # else it would be taken for connected still
            if node is not None:
                with suppress(Exception):
                    self.client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))

    def _say(self, text: str) -> None:
        """Once: waiting for an hour is one line, not a thousand."""
        if text != self._said:
            self._said = text
            self.tell(text)

    def _activated(self) -> Any:
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.node_pb2 import Node as NodeProto

        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        while True:
            try:
                return NodeProto(node_id=self.client.ActivateNode(request).node_id)
            except Exception as error:
                self._say(f"waiting for {self.server}: {why(error)}")
                time.sleep(AGAIN)

    def _carry_on(self, node: Any) -> None:
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
        from flwr.supercore.heartbeat import HeartbeatSender

        beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        heart = HeartbeatSender(lambda: _succeeds(self.client.SendNodeHeartbeat, beat))
        heart.start()
        last = time.monotonic()
        try:
            while True:
                found = self.client.PullMessages(PullMessagesRequest(node=node))
                self._say(f"connected to {self.server}; carrying messages to {self.silo}")
                if found.messages_list:
                    self._carry(node, found.messages_list[0].metadata.run_id, found.message_object_trees[0])
                    last = time.monotonic()
                else:
                    time.sleep(min(IDLE, max(BUSY, (time.monotonic() - last) / 30)))
        finally:
            heart.stop()

    def _carry(self, node: Any, run: int, tree: Any) -> None:
        """One message to the silo and its answer back. What cannot be delivered is asked for again."""
        import httpx
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        from modicum.deploy.flower.pulling import whole

        if 1 + parcel.pieces(tree.children, self.pieces) > self.pieces:
            self._say(f"run {run} sends a message of more than {self.pieces} pieces: not fetched (--largest)")
            return
        try:
            message = whole(self.client, node, run, tree, STALL)
            began = time.monotonic()
            reply = Message(parcel.answer(self.answer(message.content)), reply_to=message)
            self._push(node, run, reply, time.monotonic() - began)
        except httpx.HTTPStatusError as error:
            self._say(f"the server takes no answer for run {run}: {why(error)}")
        except ObjectPullError as error:
            self._say(f"a message of run {run} did not come: {_line(str(error))}")

    def answer(self, content: Any) -> Answer:
        """The silo's answer to a message; one that is no question, or finds no silo, is unavailable."""
        try:
            kind, body = parcel.read_request(content)
            return ask(str(self.silo), kind, body, timeout=TIMEOUT, patience=PATIENCE)
        except (UnreachableError, KeyError, ValueError, TypeError):
            return Answer(refused=Code.UNAVAILABLE)

    def _push(self, node: Any, run: int, reply: Any, seconds: float) -> None:
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable import inflatable_object as inflatable
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import push_objects

        reply.metadata.__dict__["_message_id"] = reply.object_id
        with inflatable.no_object_id_recompute():
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[inflatable.get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            taken = self.client.PushMessages(request)
            push = make_push_object_fn_protobuf(self.client.PushObject, node, run, taken.session_id)
            wanted = set(taken.objects_to_push)
            # One after the other: two at a time would each have half of a slow line, and come too late.
            push_objects(
                inflatable.get_all_nested_objects(reply), push, object_ids_to_push=wanted, max_concurrent_pushes=1
            )


def _guard(client: Any) -> None:
    """A server is followed nowhere else, and what it sends is as long as it says beforehand.

    Flower's client would follow a redirection, to any address that this machine reaches, and unpack whatever is
    compressed, into as much memory as that takes.
    """
    import httpx

    def doubt(response: httpx.Response) -> None:
        length = response.headers.get("content-length", "")
        if "content-encoding" in response.headers or not length.isdecimal() or int(length) > ANSWER:
            raise httpx.RemoteProtocolError("it sends what no SuperLink sends: too long, or compressed")

    client.follow_redirects = False
    client.timeout = httpx.Timeout(STALL, read=SLOW)
    client.event_hooks = {"request": [], "response": [doubt]}


def _private_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is no node key: make one with `modicum flower keys node FILE`")
    return key


def _succeeds(call: Callable[[Any], Any], request: Any) -> bool:
    """A heartbeat that fails is tried again by its sender; what is wrong, the next message tells."""
    try:
        return bool(call(request).success)
    except Exception:
        return False


def why(error: Exception) -> str:
    """What stands between this node and its server, in a line that says who can mend it."""
    import httpx

    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not of the authority in ca.crt, or has expired: ask the server for its ca.crt"
    if isinstance(error, httpx.HTTPStatusError):
        from flwr.supercore.error import ApiErrorCode, FlowerError

        try:
            known = FlowerError.from_json(error.response.text)
        except Exception:  # nested without end, for one
            known = None
        if known is not None and known.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            return (
                "it does not know this node's key (there, `modicum flower register app` makes it known), or takes "
                "one that was killed for alive, for up to a minute"
            )
        if error.response.status_code == 401:
            return "it does not accept this node's key, or the clocks differ"
        return f"it answers {error.response.status_code}" + (f", {_line(str(known.message))}" if known else "")
    return _line(text) or type(error).__name__


def _line(text: str) -> str:
    """What a server wrote, as one short line of this machine's log."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])
