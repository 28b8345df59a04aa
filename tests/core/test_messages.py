"""The wire: bit for bit there and back, and nothing hostile gets through."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from modicum.core import messages
from modicum.core.messages import (
    DTYPES,
    Broadcast,
    Decision,
    Message,
    Noised,
    NoiseFacts,
    Released,
    ReleasedSum,
    Sealed,
    Share,
    decode,
    encode,
    encoded_parts,
    mean_metrics,
)
from modicum.errors import UserError

VALUES = torch.tensor([1.5, -0.0, 3e-39, 7e37], dtype=torch.float32)
FACTS = NoiseFacts(0.5, 2.0, {"clip-bit": 0.1})
MESSAGES: list[Message | Broadcast | ReleasedSum] = [
    Broadcast("run", 3, "c", Decision(0.1, 2.0), VALUES, ("accuracy",)),
    Broadcast("run", 3, "c", Decision(0.1), VALUES),
    Noised("c", 3, VALUES, {"clip-bit": 0.3}, {"accuracy": -0.2}),
    Released("c", 3, VALUES, {"clip-bit": 0.3}, FACTS, {"accuracy": -0.2}),
    Sealed("c", 3, VALUES.double(), {"clip-bit": 0.5}),
    Share("c", 3, VALUES, {}),
    ReleasedSum(3, VALUES, {"clip-bit": 0.3}, FACTS, 4.0, {}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_there_and_back(message: Message | Broadcast | ReleasedSum) -> None:
    blob = encode(message)
    back = decode(blob)
    assert type(back) is type(message)
    assert encode(back) == blob


def _with(meta: dict[str, object], tensor: torch.Tensor = VALUES) -> bytes:
    return bytes(save({"values": tensor}, metadata={"modicum": json.dumps(meta)}))


GOOD = {
    "kind": "released",
    "client": "c",
    "round": 0,
    "signals": {},
    "facts": {"variance": 1.0, "gain": 1.0, "signal_variance": {}},
    "metrics": {},
}
HOSTILE = {
    "no kind": {k: v for k, v in GOOD.items() if k != "kind"},
    "another kind": {**GOOD, "kind": "password"},
    "a round that is text": {**GOOD, "round": "0"},
    "a round before the first": {**GOOD, "round": -1},
    "a round that is true": {**GOOD, "round": True},
    "a client that is a list": {**GOOD, "client": ["c"]},
    "a signal that is not a number": {**GOOD, "signals": {"clip-bit": math.nan}},
    "an endless signal": {**GOOD, "signals": {"clip-bit": math.inf}},
    "a signal that is text": {**GOOD, "signals": {"clip-bit": "1"}},
    "signals that are a list": {**GOOD, "signals": [1.0]},
    "facts without end": {**GOOD, "facts": {"variance": math.inf, "gain": 1.0, "signal_variance": {}}},
    "no facts": {**GOOD, "facts": None},
    "a metric that is an object": {**GOOD, "metrics": {"accuracy": {}}},
}


def test_the_plain_message_behind_the_hostile_ones_is_fine() -> None:
    assert isinstance(decode(_with(GOOD)), Released)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_fields_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match="not a message") as refused:
        decode(_with(HOSTILE[name]))
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 2), torch.zeros(3, dtype=torch.long), torch.zeros(())],
    ids=["matrix", "whole", "scalar"],
)
def test_tensors_of_another_kind_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UserError, match="not a message"):
        decode(_with(GOOD, tensor))


def test_more_tensors_than_one_are_refused() -> None:
    blob = save({"values": VALUES, "more": VALUES.clone()}, metadata={"modicum": json.dumps(GOOD)})
    with pytest.raises(UserError, match="not a message"):
        decode(bytes(blob))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), which=st.integers(0, len(MESSAGES) - 1))
def test_damaged_bytes_are_refused_or_read_as_a_message(data: st.DataObject, which: int) -> None:
    """Any change of bytes: one clear error, or a message of the right types; never another exception."""
    blob = bytearray(encode(MESSAGES[which]))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(blob)))
    for hostile in (bytes(blob), bytes(blob[:cut])):
        try:
            back = decode(hostile)
        except UserError:
            continue
        assert isinstance(back, Broadcast | Released | Sealed | Share | ReleasedSum)


def test_a_claim_of_many_gigabytes_costs_nothing() -> None:
    with pytest.raises(UserError, match="not a message"):
        decode((10 << 30).to_bytes(8, "little") + b"{}")


def padded(size: int) -> bytes:
    """A plain message whose header is so long, by a list of lists that nobody asked for."""
    blob = encode(Noised("a", 0, torch.zeros(3), {}))
    length = int.from_bytes(blob[:8], "little")
    header = blob[8 : 8 + length].rstrip()[:-1] + b',"x":['
    header += b"[]," * ((size - len(header)) // 3) + b"0]}"
    return len(header).to_bytes(8, "little") + header + blob[8 + length :]


def test_a_long_header_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, it would take thirty times as much memory: one client could end the server, at each restart."""
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(len(text)), loads(text))[1])
    for limit, most in ((messages.LARGEST_HEADER, 0), (1 << 30, 2 << 20)):  # the second is the negative control
        monkeypatch.setattr(messages, "LARGEST_HEADER", limit)
        with pytest.raises(UserError, match="not a message"):
            decode(padded(2 << 20))
        assert max(parsed, default=0) >= most * 0.9
        assert (most == 0) == (parsed == [])


def test_metrics_are_told_as_they_were_released() -> None:
    """The mean over the clients that released one; a sum's own; nothing of a round that was not opened."""
    facts, update = NoiseFacts(1.0, 1.0), torch.zeros(2)
    clients = [
        Released(name, 0, update, {}, facts, metrics)
        for name, metrics in (("a", {"accuracy": 0.5, "loss": 2.0}), ("b", {"accuracy": 0.7}), ("c", {}))
    ]
    assert mean_metrics(tuple(clients)) == {"accuracy": pytest.approx(0.6), "loss": 2.0}
    assert mean_metrics(ReleasedSum(0, update, {}, facts, 3.0, {"accuracy": 0.4})) == {"accuracy": 0.4}
    assert mean_metrics(None) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7])
def test_bytes_are_those_of_safetensors(dtype: torch.dtype, size: int) -> None:
    values = torch.arange(size).to(dtype)
    for name in ("a", 'é"\\', "名前"):
        sent = Noised(name, 3, values, {"s": 1e-30, "t": -0.5})
        header, numbers = encoded_parts(sent)
        length = int.from_bytes(header[:8], "little")
        meta = json.loads(header[8 : 8 + length])["__metadata__"]
        assert encode(sent) == header + bytes(numbers) == save({"values": values}, metadata=meta)
