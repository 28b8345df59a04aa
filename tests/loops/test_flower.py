"""A Flower app made private: nothing but a clipped, noised update leaves, and no more often than was agreed."""

from __future__ import annotations

import difflib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from modicum.errors import UserError
from modicum.loops.flower import ClientPrivacy, PrivateStrategy, client, private_app
from modicum.loops.flower.question import EPSILON, PLANNED, RESERVED, Question
from modicum.privacy.certificate import Certificate
from modicum.privacy.ledger import Ledger
from modicum.privacy.verify import verify
from tests.loops.flower_apps import (
    MODEL,
    InProcess,
    adding,
    app_of,
    arrays_of,
    context,
    everything,
    load,
    question,
    record,
)

SECRET = 0.123456


def private(app: ClientApp, folder: Path, **more: Any) -> ClientApp:
    return private_app(app, **{"epsilon": 8, "participations": 3, "folder": folder, "seed": 0, **more})


def update(reply: Message, asked: dict[str, np.ndarray] = MODEL) -> np.ndarray:
    after = arrays_of(reply)
    return np.concatenate([(after[n].astype(float) - a).ravel() for n, a in asked.items() if a.dtype.kind == "f"])


def test_a_reply_is_the_models_arrays_moved_by_a_noised_update(tmp_path: Path) -> None:
    reply = private(adding(1.0), tmp_path, seed=None)(question(), context())
    after = arrays_of(reply)
    assert {n: (a.dtype, a.shape) for n, a in after.items()} == {n: (a.dtype, a.shape) for n, a in MODEL.items()}
    assert after["steps"] == 7
    assert set(reply.content) == {"arrays", "metrics"}
    said = reply.content["metrics"]
    assert dict(said) == {"num-examples": 1, PLANNED: 3, RESERVED: 1, EPSILON: pytest.approx(8, rel=1e-3)}


def test_the_noise_is_what_the_plan_says(tmp_path: Path) -> None:
    """Real noise of 20,000 coordinates: its spread is within 2% but for one in 10^4."""
    model = {"w": np.zeros(20_000)}
    privacy = {"epsilon": 2, "participations": 5, "clip": 3.0, "folder": tmp_path}
    reply = private_app(adding(0.0), **privacy)(question(model), context())
    with Ledger.open(tmp_path / "client-0" / "ledger.sqlite", read_only=True) as ledger:
        (plan,) = ledger.plans.values()
    assert plan.multiplier("update") == pytest.approx(math.sqrt(5) / 0.5048, rel=0.02)  # μ(2) at δ = 1e-5
    assert update(reply, model).std() == pytest.approx(3.0 * plan.multiplier("update"), rel=0.02)


def test_a_client_moves_its_reply_by_no_more_than_the_bound(tmp_path: Path) -> None:
    """Noise from one seed cancels: what is left of an update is at most the bound, and rounding to integers."""
    model = {"w": np.zeros(300)}
    still = update(private(adding(0.0), tmp_path / "a", epsilon=30)(question(model), context()), model)
    far = update(private(adding(1e6), tmp_path / "b", epsilon=30)(question(model), context()), model)
    near = update(private(adding(0.01), tmp_path / "c", epsilon=30)(question(model), context()), model)
    assert np.linalg.norm(far - still) == pytest.approx(1.0, rel=0.05)
    assert np.linalg.norm(near - still) == pytest.approx(0.01 * math.sqrt(300), rel=0.2)


def leaking(channel: Callable[[Message, Context, float], Message | None]) -> Callable[[float], ClientApp]:
    """An app that moves nothing, and tells a secret in another way."""

    def app(secret: float) -> ClientApp:
        def train(message: Message, context: Context) -> Message:
            own = channel(message, context, secret)
            return (
                Message(RecordDict({"arrays": record(MODEL), "metrics": examples()}), reply_to=message)
                if own is None
                else own
            )

        return app_of(train)

    return app


def examples(**more: Any) -> MetricRecord:
    return MetricRecord({"num-examples": 17, **more})


def by_metrics(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    return Message(RecordDict({"arrays": record(MODEL), "metrics": examples(loss=secret)}), reply_to=message)


def by_weight(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    said = MetricRecord({"num-examples": int(secret * 1e6)})
    return Message(RecordDict({"arrays": record(MODEL), "metrics": said}), reply_to=message)


def by_dtype(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    kind = np.float16 if secret else np.float64
    own = {n: a.astype(kind) for n, a in MODEL.items()}
    return Message(RecordDict({"arrays": record(own), "metrics": examples()}), reply_to=message)


def by_integers(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    own = {**MODEL, "steps": np.array(int(secret * 1e6))}
    return Message(RecordDict({"arrays": record(own), "metrics": examples()}), reply_to=message)


def by_more_arrays(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    own = {**MODEL, f"extra-{secret}": np.array([secret])}
    return Message(RecordDict({"arrays": record(own), "metrics": examples()}), reply_to=message)


def by_records(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    own = {"arrays": record(MODEL), "metrics": examples(), "config": ConfigRecord({"said": secret})}
    return Message(RecordDict(own), reply_to=message)


def by_record_names(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    return Message(RecordDict({f"arrays-{secret}": record(MODEL), "metrics": examples()}), reply_to=message)


def by_writing_into_the_question(message: Message, context: Context, secret: float) -> None:  # noqa: ARG001
    message.content["config"]["said"] = secret
    message.content["said"] = ConfigRecord({"said": secret})
    message.metadata.group_id = str(secret)


def by_a_reply_about_nothing(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    message.metadata.group_id = str(secret)
    return Message(RecordDict({"arrays": record(MODEL), "metrics": examples()}), reply_to=message, ttl=1 + secret)


def by_exception(message: Message, context: Context, secret: float) -> None:  # noqa: ARG001
    raise RuntimeError(f"patient {secret}")


def by_exception_or_not(message: Message, context: Context, secret: float) -> None:  # noqa: ARG001
    if secret:
        raise ValueError


def by_exit(message: Message, context: Context, secret: float) -> None:  # noqa: ARG001
    if secret:
        sys.exit(int(secret * 100))


def by_an_error_reply(message: Message, context: Context, secret: float) -> Message:  # noqa: ARG001
    from flwr.app import Error

    return Message(Error(int(secret * 100), str(secret)), reply_to=message)


def by_nothing_at_all(message: Message, context: Context, secret: float) -> Any:  # noqa: ARG001
    return secret or Message(RecordDict(), reply_to=message)


CHANNELS = [
    by_metrics,
    by_weight,
    by_dtype,
    by_integers,
    by_more_arrays,
    by_records,
    by_record_names,
    by_writing_into_the_question,
    by_a_reply_about_nothing,
    by_exception,
    by_exception_or_not,
    by_exit,
    by_an_error_reply,
    by_nothing_at_all,
]


def seen(app: ClientApp) -> object:
    try:
        return everything(app(question(), context()))
    except BaseException as error:  # what Flower would send, with its text
        return repr(error)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda c: c.__name__)
def test_what_an_app_says_besides_its_update_never_leaves(
    channel: Callable[[Message, Context, float], Message | None], tmp_path: Path
) -> None:
    own = leaking(channel)
    assert seen(own(0.0)) != seen(own(SECRET)), "the control: without privacy the secret is seen"
    assert seen(private(own(0.0), tmp_path / "a")) == seen(private(own(SECRET), tmp_path / "b"))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200, 1e308], ids=str)
def test_updates_that_are_no_numbers_count_as_zero(value: float, tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        own = {n: np.full(a.shape, value) for n, a in MODEL.items()}
        return Message(RecordDict({"arrays": record(own), "metrics": examples()}), reply_to=message)

    told = update(private(app_of(train), tmp_path / "a")(question(), context()))
    still = update(private(adding(0.0), tmp_path / "b")(question(), context()))
    assert np.isfinite(told).all()
    if value == 1e200 or not math.isfinite(value):
        assert np.linalg.norm(told - still) <= 1.1
    if not math.isfinite(value):
        np.testing.assert_array_equal(told, still)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_models_that_no_client_can_train_protect_it_all_the_same(value: float, tmp_path: Path) -> None:
    model = {"w": np.full(50, value, np.float32)}
    replies = [private(adding(by), tmp_path / str(by))(question(model), context()) for by in (0.0, 1.0)]
    assert everything(replies[0]) == everything(replies[1])


def shaped(shape: tuple[int, ...]) -> ClientApp:
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        own = {**MODEL, "w": np.ones(shape, np.float32)}
        return Message(RecordDict({"arrays": record(own), "metrics": examples()}), reply_to=message)

    return app_of(train)


@pytest.mark.parametrize("shape", [(5, 40), (200,), (2_000_000,), (0,), ()])
def test_arrays_of_another_shape_are_no_update(shape: tuple[int, ...], tmp_path: Path) -> None:
    told = private(shaped(shape), tmp_path / "a")(question(), context())
    assert everything(told) == everything(private(adding(0.0), tmp_path / "b")(question(), context()))


def test_arrays_that_an_app_numbers_anew_are_taken_in_their_order(tmp_path: Path) -> None:
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        own = [a + a.dtype.type(1) for a in arrays_of(message).values()]
        return Message(RecordDict({"a": ArrayRecord(own), "metrics": examples()}), reply_to=message)

    model = {"w": np.zeros((40, 5)), "b": np.zeros(5)}
    told = private(app_of(train), tmp_path / "a")(question(model), context())
    assert everything(told) == everything(private(adding(1.0), tmp_path / "b")(question(model), context()))


@pytest.mark.parametrize("kind", ["evaluate", "query", "query.names", "evaluate.again", "get_parameters"])
def test_figures_and_queries_are_refused_before_the_app_is_asked(kind: str, tmp_path: Path) -> None:
    asked = []

    def answer(message: Message, context: Context) -> Message:  # noqa: ARG001
        asked.append(kind)
        return Message(message.content, reply_to=message)

    app = app_of(answer)
    for register in (app.evaluate, app.query):
        register()(answer)
    reply = private(app, tmp_path)(question(kind=kind), context())
    assert reply.has_error()
    assert "without noise" in str(reply.error.reason)
    assert not asked


def test_the_budget_ends_whoever_asks(tmp_path: Path) -> None:
    """Other rounds, other runs, another process: the folder remembers."""
    for run in (1, 1, 2):
        app = private(adding(1.0), tmp_path, seed=None)
        config = {"server-round": 1, "run": run, "again": np.random.default_rng().integers(1 << 30).item()}
        assert not app(question(config=config, run=run), context()).has_error()
    reply = private(adding(1.0), tmp_path, seed=None)(question(config={"x": 9}, run=7), context())
    assert reply.has_error()
    assert "3 participations were agreed for ε = 8" in str(reply.error.reason)
    report = verify(tmp_path / "client-0")
    assert report.matches, report
    certificate = Certificate.read(tmp_path / "client-0" / "certificate.json")
    assert certificate.epsilon("client-0") <= 8
    assert certificate.clients["client-0"].releases_made == 3
    assert "every reply of the app" in certificate.clients["client-0"].meaning


def test_a_question_that_is_repeated_gets_the_same_bytes_and_costs_nothing(tmp_path: Path) -> None:
    calls: list[int] = []

    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        calls.append(1)
        return Message(RecordDict({"arrays": record(MODEL), "metrics": examples()}), reply_to=message)

    app = private(app_of(train), tmp_path, seed=None)
    first, again = (everything(app(question(), context())) for _ in range(2))
    assert first == again
    other = app(question(config={"server-round": 2}), context())
    assert len(calls) == 2
    assert other.content["metrics"][RESERVED] == 2


@pytest.mark.parametrize("when", ["reserved", "computed", "settled"])
def test_a_crash_forgets_nothing_and_pays_for_nothing_twice(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        if when == "reserved":
            patch.setattr(client, "_moved", kill)
        elif when == "computed":
            patch.setattr(Ledger, "settle", kill)
        else:
            patch.setattr(Question, "reply", kill)
        with pytest.raises(Killed):
            private(adding(1.0), tmp_path, seed=None)(question(), context())
    reply = private(adding(1.0), tmp_path, seed=None)(question(), context())
    assert reply.content["metrics"][RESERVED] == 1


def test_a_lost_ledger_or_other_settings_are_no_new_budget(tmp_path: Path) -> None:
    private(adding(1.0), tmp_path)(question(), context())
    for other in ({"epsilon": 9}, {"clip": 2.0}, {"participations": 4}, {"delta": 1e-6}):
        assert private(adding(1.0), tmp_path, **other)(question(), context()).has_error()
    assert private(adding(1.0), tmp_path)(question({"w": np.zeros(3)}), context()).has_error()
    (tmp_path / "client-0" / "ledger.sqlite").unlink()
    reply = private(adding(1.0), tmp_path)(question(), context())
    assert reply.has_error()
    assert str(tmp_path) not in str(reply.error.reason)


def test_a_node_has_the_last_word_on_its_budget_and_the_server_none(tmp_path: Path) -> None:
    app = private(adding(0.0), tmp_path)
    asked = question(config={"privacy-epsilon": 1e6, "epsilon": 1e6, "server-round": 1})
    assert app(asked, context()).content["metrics"][EPSILON] <= 8
    own = app(question(), context(1, **{"privacy-epsilon": 0.5, "privacy-folder": str(tmp_path / "mine")}))
    assert own.content["metrics"][EPSILON] <= 0.5
    assert (tmp_path / "mine" / "client-1" / "certificate.json").exists()
    assert app(question(), context(2, **{"privacy-epsilon": math.inf})).has_error()


def test_an_app_does_not_change_the_nodes_word_for_later_messages(tmp_path: Path) -> None:
    """A node keeps the context from message to message, and an app may write into it."""

    def train(message: Message, context: Context) -> Message:
        context.node_config.update({"privacy-epsilon": 29.0, "privacy-folder": str(tmp_path / "elsewhere")})
        return Message(message.content, reply_to=message)

    app, own = private(app_of(train), tmp_path), context()
    app(question(), own)
    said = app(question(config={"server-round": 2}), own).content["metrics"]
    assert (said[RESERVED], said[EPSILON]) == (2, pytest.approx(8, rel=1e-3))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("arrays", "said"),
    [({"steps": np.array([1, 2])}, "no floating-point number"), ({}, "no floating-point number")],
)
def test_models_without_floats_are_refused(arrays: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    reply = private(adding(1.0), tmp_path)(question(arrays), context())
    assert said in str(reply.error.reason)


def test_two_models_in_a_message_are_refused(tmp_path: Path) -> None:
    asked = question()
    asked.content["more"] = record(MODEL)
    assert "one ArrayRecord, got 2" in str(private(adding(1.0), tmp_path)(asked, context()).error.reason)


def test_apps_of_the_older_kind_are_refused_and_not_charged(tmp_path: Path) -> None:
    asked = question()
    asked.content["fitins.parameters"] = asked.content.pop("arrays")
    assert "NumPyClient" in str(private(adding(1.0), tmp_path)(asked, context()).error.reason)
    assert not (tmp_path / "client-0").exists()


def test_settings_that_cannot_be_are_refused_before_any_message(tmp_path: Path) -> None:
    for wrong in (
        {"epsilon": 0},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"epsilon": "8"},
        {"participations": 0},
        {"participations": "3"},
        {"clip": 0},
        {"adjacency": "both"},
        {"seed": "a"},
        {"weight": 3},
    ):
        with pytest.raises(UserError):
            private(adding(1.0), tmp_path, **wrong)
    with pytest.raises(UserError, match="taken"):
        private(adding(1.0), tmp_path, weight=RESERVED)
    with pytest.raises(UserError, match="add-remove"):
        private(adding(1.0), tmp_path, adjacency="add-remove")


def lifespan_that_tells(app: ClientApp) -> ClientApp:
    @app.lifespan()
    def tells(context: Context) -> Iterator[None]:  # noqa: ARG001
        yield
        raise RuntimeError(f"patient {SECRET}")

    return app


def test_round_a_whole_app_also_what_its_lifespan_raises_is_inside(tmp_path: Path) -> None:
    """The control is the mod alone, which is inside of the lifespan."""
    alone = ClientApp(mods=[ClientPrivacy(epsilon=8, participations=3, folder=tmp_path / "a", seed=0)])
    alone.train()(lambda message, context: Message(message.content, reply_to=message))
    with pytest.raises(RuntimeError, match="patient"):
        lifespan_that_tells(alone)(question(), context())
    reply = private(lifespan_that_tells(adding(1.0)), tmp_path / "b")(question(), context())
    assert not reply.has_error()


@pytest.mark.parametrize("inner", [FedAvg, FedAdam])
def test_a_strategy_trains_stops_at_the_budget_and_evaluates_nobody(inner: type[FedAvg], tmp_path: Path) -> None:
    grid = InProcess(private(adding(0.01), tmp_path, seed=1, epsilon=30, clip=5.0), nodes=4)
    strategy = PrivateStrategy(inner())
    model = {"w": np.zeros((40, 5))}
    result = strategy.start(grid, record(model), num_rounds=5)
    assert len(grid.asked) == 4 * 3
    assert strategy.spent == set(grid.get_node_ids())
    assert {(t.planned, t.reserved) for t in strategy.told.values()} == {(3, 3)}
    assert all(t.epsilon <= 30 for t in strategy.told.values())
    assert not result.evaluate_metrics_clientapp
    assert "loss" not in result.train_metrics_clientapp[1]
    if inner is FedAvg:
        (found,) = (a.numpy() for a in result.arrays.values())
        assert found.mean() == pytest.approx(0.03, abs=0.5)


def test_who_is_spent_is_not_asked(tmp_path: Path) -> None:
    grid = InProcess(private(adding(0.0), tmp_path), nodes=3)
    app = grid.app
    for i in range(3):
        app(question(config={"server-round": i + 50}), grid.contexts[100])
    strategy = PrivateStrategy(FedAvg())
    strategy.start(grid, record(MODEL), num_rounds=3)
    assert grid.asked.count(100) <= 1  # its refusal says so once
    assert grid.asked.count(101) == 3


@pytest.mark.parametrize("said", [{}, {PLANNED: 3}, {PLANNED: 1.0, RESERVED: math.nan, EPSILON: 1.0}])
def test_a_client_that_talks_nonsense_of_its_plan_stops_nothing(said: dict[str, float]) -> None:
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        own = MetricRecord({"num-examples": 1, **said})
        return Message(RecordDict({"arrays": record(MODEL), "metrics": own}), reply_to=message)

    strategy = PrivateStrategy(FedAvg())
    strategy.start(InProcess(app_of(train), nodes=2), record({"w": MODEL["w"], "b": MODEL["b"]}), num_rounds=1)
    assert not strategy.told


PLAIN = {
    "client_app.py": """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg, context):
    arrays = [a + 1 for a in msg.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": 10 + context.node_config["partition-id"], "loss": 0.5})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=msg)
""",
    "server_app.py": """
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_train=1.0)
    arrays = ArrayRecord([np.zeros((30, 10)), np.zeros(10)])
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=4)
    np.save("model.npy", np.concatenate([a.ravel() for a in result.arrays.to_numpy_ndarrays()]))
""",
}


def run_module(path: Path) -> Any:
    space: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), space)
    return space["app"]


def test_four_lines_make_an_app_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's change, on an app of the same build as the one that it is for."""
    for name, text in PLAIN.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    load("make").make_private(tmp_path)
    added = [
        line
        for name, text in PLAIN.items()
        for line in difflib.ndiff(text.splitlines(), (tmp_path / name).read_text(encoding="utf-8").splitlines())
        if line[0] in "+-" and line[1:].strip()
    ]
    assert len(added) == 4
    assert all(line[0] == "+" for line in added)
    monkeypatch.chdir(tmp_path)
    grid = InProcess(run_module(tmp_path / "client_app.py"), nodes=3)
    run_module(tmp_path / "server_app.py")(grid, grid.contexts[100])
    assert len(grid.asked) == 3 * 3, "of four rounds, three were agreed"
    assert np.isfinite(np.load("model.npy")).all()
    for i in range(3):
        assert verify(tmp_path / "privacy" / f"client-{i}").matches


@pytest.mark.heavy
def test_flowers_own_app_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's scikit-learn template, on digits that are blown up to the size that it expects."""
    from sklearn.datasets import load_digits

    make, play = load("make"), load("play")
    try:
        package = make.wheel()
    except subprocess.CalledProcessError:
        pytest.skip("pip finds no package of Flower's here")
    make.make(tmp_path / "app", package)
    images, labels = load_digits(return_X_y=True)
    images = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    for name in ("flwr_datasets", "flwr_datasets.partitioner", "logreg"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    play.stand_in(images.astype(np.uint8), labels)
    model = play.play(tmp_path / "app", 20)
    assert model.coef_.shape == (10, 784)
    assert verify(tmp_path / "app" / "privacy" / "client-0").matches
