"""MetaNet: our BERT-tiny, its inputs and outputs, its files, and what it does with kinds of noise."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released
from modicum.core.parts import Observation
from modicum.core.setting import Setting
from modicum.errors import MissingExtraError, UserError
from modicum.methods import FedMap
from modicum.papers.fedmap import bert, kinds
from modicum.papers.fedmap.bert import Shape, check_shape, encode, first_weights, read_folder
from modicum.papers.fedmap.metanet import MetaNet
from modicum.papers.fedmap.network import SEEN, Network, load_network, padded, save_network

NAMES = ("a", "b")
SCALES = (0.7, 1.0, 1.4)
PUBLIC = PublicFacts(
    tuple(ClientFacts(n, 100, e, 6) for n, e in zip(NAMES, (1.0, 4.0), strict=True)),
    rounds=6,
    dimension=8,
    multipliers={},
    scales=SCALES,
    stock=dict.fromkeys(NAMES, (2.0, 2.0, 2.0)),
)


def released(seed: int, scale: float = 1.0) -> tuple[Released, ...]:
    g = torch.Generator().manual_seed(seed)
    facts = NoiseFacts(0.01, 1.0, {"clip-bit": 0.01, "square-norm": 0.01})
    signals = {"clip-bit": 0.4, "square-norm": 0.7}
    return tuple(Released(n, 0, scale * torch.randn(8, generator=g), signals, facts) for n in NAMES)


def trained(path: Path, step: float = 0.3, favourite: int = 0, count: int = 3) -> Path:
    """A file whose head always asks for the same."""
    network = Network(count)
    weights = network.first(0, SCALES[:count])
    weights["head.bias"] = torch.tensor([step, *(1.0 * (j == favourite) for j in range(count))])
    save_network(path, weights, network, {})
    return path


def play(policy: MetaNet, rounds: int = 6) -> list[tuple[float, int | None]]:
    state, left, seen = policy.init(PUBLIC), {n: [2.0] * 3 for n in NAMES}, []
    for t in range(rounds):
        decisions = policy.decide(state, t, NAMES)
        seen.append((decisions["a"].bound, decisions["a"].kind))
        for name, d in decisions.items():
            if d.kind is not None:
                left[name][d.kind] -= 1
        stock = {n: tuple(v / 2 for v in left[n]) for n in NAMES}
        state = policy.observe(
            state, Observation(t, released(t), decisions, left=dict.fromkeys(NAMES, 0.5), stock=stock)
        )
    return seen


def test_the_encoder_has_the_size_that_the_paper_states() -> None:
    count = sum(math.prod(s) for n, s in Shape().parameters().items() if n.startswith("encoder."))
    assert count == 99_968


def test_ours_equals_transformers_and_reads_its_folders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for shape in (Shape(), Shape(hidden=128, inner=512)):
        config = transformers.BertConfig(
            vocab_size=2,
            hidden_size=shape.hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=shape.inner,
            max_position_embeddings=16,
        )
        theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
        weights = first_weights(shape, 3)
        theirs.load_state_dict(weights, strict=False)
        x, mask = torch.randn(4, 6, shape.hidden), torch.ones(4, 6)
        mask[1, 3:] = 0
        with torch.no_grad():
            a = theirs(inputs_embeds=x, attention_mask=mask).last_hidden_state[:, 0]
        torch.testing.assert_close(encode(weights, x, mask, shape)[:, 0], a, atol=1e-5, rtol=1e-5)
        theirs.save_pretrained(tmp_path / str(shape.hidden))
        back, found = read_folder(tmp_path / str(shape.hidden))
        assert found == shape
        assert bert.fingerprint(back) == bert.fingerprint(weights)


def test_a_folder_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        read_folder(tmp_path)
    with pytest.raises(UserError, match="does not fit"):
        check_shape(first_weights(Shape(), 0), Shape(hidden=128), "here")
    with pytest.raises(UserError, match="gelu"):
        check_shape(first_weights(Shape(), 0), Shape(), "here", "relu")
    with pytest.raises(UserError, match="positions"):
        check_shape(first_weights(Shape(positions=4), 0), Shape(positions=4), "here")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((UserError, MissingExtraError)) as error:
        MetaNet(backbone=str(tmp_path)).init(PUBLIC)
    assert "\n" not in str(error.value)


def test_padded_rounds_change_nothing() -> None:
    network = Network(3)
    weights = network.first(1)
    weights["head.weight"] = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    rows, mask = padded([[0.1] * 13, [0.2] * 13], 13)
    other = rows.clone()
    other[0, 2:] = 7.0
    torch.testing.assert_close(network(weights, rows, mask), network(weights, other, mask))
    assert not torch.allclose(network(weights, rows, mask), network(weights, other, torch.ones(1, SEEN)))


def test_the_head_moves_the_bound_by_at_most_a_factor_of_two_within_its_reach(tmp_path: Path) -> None:
    bounds = [c for c, _ in play(MetaNet(1.0, network=str(trained(tmp_path / "n.npz", step=50.0))))]
    assert bounds == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    policy = MetaNet(1.0, network=str(trained(tmp_path / "n.npz", step=-50.0)))
    assert play(policy, 20)[-1][0] == pytest.approx(0.01)


@pytest.mark.parametrize("favourite", [0, 1, 2])
def test_kinds_are_used_up_in_the_order_of_preference(favourite: int, tmp_path: Path) -> None:
    policy = MetaNet(1.0, network=str(trained(tmp_path / "n.npz", favourite=favourite)))
    used = [kind for _, kind in play(policy)]
    assert used[:2] == [favourite] * 2
    assert sorted(k for k in used if k is not None) == [0, 0, 1, 1, 2, 2]


def test_an_untrained_head_keeps_the_bound_and_begins_in_the_middle() -> None:
    decided = play(MetaNet(0.5))
    assert {c for c, _ in decided} == {0.5}
    assert [k for _, k in decided][:2] == [1, 1]


def test_nearest_kinds_and_ties() -> None:
    assert kinds.nearest(1, SCALES, [1, 1, 1]) == 1
    assert kinds.nearest(1, (0.5, 1.0, 2.0), [1, 0, 1]) == 2  # equally near: more noise
    assert kinds.nearest(2, SCALES, [1, 0.5, 0]) == 0
    assert kinds.nearest(0, SCALES, [0, 0, 0]) is None


def test_a_bound_for_each_budget_sees_its_own_clients(tmp_path: Path) -> None:
    network = Network(3)
    weights = network.first(0, SCALES)
    weights["head.weight"] = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    save_network(tmp_path / "n.npz", weights, network, {})
    policy = MetaNet(1.0, network=str(tmp_path / "n.npz"), by_budget=True)
    state = policy.init(PUBLIC)
    one, two = released(0), released(0)
    two = (two[0], replace(two[1], update=100 * two[1].update))
    seen = [policy.observe(state, Observation(0, o, policy.decide(state, 0, NAMES))) for o in (one, two)]
    after = [policy.decide(s, 1, NAMES) for s in seen]
    assert after[0]["a"] == after[1]["a"]
    assert after[0]["b"] != after[1]["b"]


def test_without_feedback_releases_change_nothing(tmp_path: Path) -> None:
    network = Network(3)
    weights = network.first(0, SCALES)
    weights["head.weight"] = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    save_network(tmp_path / "n.npz", weights, network, {})
    for feedback in (True, False):
        policy = MetaNet(1.0, network=str(tmp_path / "n.npz"), feedback=feedback)
        state = policy.init(PUBLIC)
        views = [Observation(0, released(0, scale), policy.decide(state, 0, NAMES)) for scale in (0.1, 10.0)]
        bounds = {policy.decide(policy.observe(state, view), 1, NAMES)["a"].bound for view in views}
        assert len(bounds) == 1 + feedback


def test_files_round_trip_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    path = trained(tmp_path / "n.npz")
    weights, network, about = load_network(path)
    save_network(tmp_path / "again", weights, network, about)
    again, same, _ = load_network(tmp_path / "again")
    assert same == network
    assert bert.fingerprint(again) == bert.fingerprint(weights)
    with pytest.raises(UserError, match="3 kinds of noise"):
        MetaNet(network=str(path)).init(replace(PUBLIC, scales=(), stock={}))
    with pytest.raises(UserError, match="a bert for 3"):
        MetaNet(network=str(path), body="mlp").init(PUBLIC)
    (tmp_path / "bad.npz").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="no network of modicum fit-metanet: it is no archive of arrays"):
        load_network(tmp_path / "bad.npz")
    with pytest.raises(UserError, match="cannot read"):
        load_network(tmp_path / "missing.npz")


def test_the_run_says_which_weights_it_has(tmp_path: Path) -> None:
    path = trained(tmp_path / "n.npz")
    note = FedMap(network=str(path)).build(Setting(4, 4, 6)).notes[0]
    assert bert.fingerprint(load_network(path)[0]) in note


def test_a_decision_is_one_small_pass_beside_a_round_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MetaNet(1.0)
    state = policy.init(PUBLIC)
    view = Observation(0, released(0), policy.decide(state, 0, NAMES))
    passes = []
    whole = Network.__call__
    monkeypatch.setattr(Network, "__call__", lambda *given: passes.append(1) or whole(*given))
    policy.decide(policy.observe(state, view), 1, NAMES)
    assert len(passes) == 1
    products = (SEEN + 1) * sum(w.numel() for w in state["network"].values())
    assert products < 1e6  # well under a millisecond of one core
    records, weights = 10 * 100, 61_706  # of a round of LeNet, where convolutions use their weights many times
    assert products < 0.02 * records * weights
