"""What can be tried on a recorded run, how hard, and by which function: the table of attacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from modicum.attacks.adversary_view import AdversaryView, Public
from modicum.attacks.bounds import FloatArray
from modicum.attacks.breaks import by_lengths, without_pruned
from modicum.attacks.inversion.analytic import analytic
from modicum.attacks.inversion.bayes import bayes
from modicum.attacks.inversion.dlg import dlg
from modicum.attacks.inversion.gi import NOTE as NO_BATCH_NORM
from modicum.attacks.inversion.gi import gi
from modicum.attacks.inversion.ig import ig
from modicum.attacks.inversion.objective import Cost, Guess, Targets
from modicum.attacks.membership.game import Questions
from modicum.attacks.membership.matched import matched
from modicum.attacks.membership.quantile import quantile
from modicum.attacks.membership.shadow import Keep, lira, lr_mia
from modicum.core.release_gate import SERVER
from modicum.errors import UserError
from modicum.mechanisms.soteria import Soteria


@dataclass(frozen=True)
class Effort:
    """How long each attack searches."""

    dlg: int
    starts: int  # of DLG
    ig: int
    gi: int
    seeds: int
    bayes: int
    shadows: int
    epochs: int = 30  # of quantile regression


EFFORTS = {
    "quick": Effort(dlg=60, starts=1, ig=400, gi=400, seeds=2, bayes=300, shadows=8, epochs=10),
    # for networks like ResNet-18, where one evaluation takes as long as all of a small network's search
    "large": Effort(dlg=15, starts=1, ig=400, gi=400, seeds=2, bayes=300, shadows=8, epochs=10),
    "medium": Effort(dlg=100, starts=1, ig=1200, gi=1200, seeds=4, bayes=600, shadows=16, epochs=10),
    "paper": Effort(dlg=300, starts=3, ig=4800, gi=4800, seeds=8, bayes=2000, shadows=64),
}

Step = Callable[[int], None]  # told after each step of a search
Found = list[Guess]


@dataclass(frozen=True)
class Inversion:
    """A search for records in messages."""

    search: Callable[[Targets, Effort, int, Step], Found]
    cost: Cost
    steps: Callable[[Effort, int], int]  # that it tells of, with so many targets
    knows: str = ""  # of the defence, beyond what a naive attacker assumes
    note: str = ""
    alone: bool = False  # it reads the method, so that messages of several methods are not searched together


@dataclass(frozen=True)
class Asking:
    """A score for every question of the membership game."""

    score: Callable[[AdversaryView, Questions, Effort, int, Keep, Step], FloatArray]
    steps: Callable[[Effort, AdversaryView], int]
    knows: str = ""


def undefended(public: Public) -> Tensor | None:
    """Parameters that count for an attacker who knows the defence; None: all."""
    return without_pruned(public) if isinstance(public.method.mechanism, Soteria) else None


NOISE = "C and the noise"
INVERSIONS: dict[str, Inversion] = {
    "dlg": Inversion(
        lambda t, e, s, d: dlg(t, steps=e.dlg, restarts=e.starts, seed=s, done=d), "l2", lambda _, n: n
    ),
    "idlg": Inversion(
        lambda t, e, s, d: dlg(t, steps=e.dlg, restarts=e.starts, seed=s, joint=False, done=d),
        "l2",
        lambda _, n: n,
    ),
    "ig": Inversion(lambda t, e, s, d: ig(t, steps=e.ig, seed=s, done=d), "cosine", lambda e, _: e.ig),
    "ig-adaptive": Inversion(
        lambda t, e, s, d: ig(t, steps=e.ig, seed=s, keep=undefended(t.public), done=d),
        "cosine",
        lambda e, _: e.ig,
        knows="the pruned tensor",
        alone=True,
    ),
    "gi": Inversion(
        lambda t, e, s, d: gi(t, steps=e.gi, seeds=e.seeds, seed=s, done=d),
        "l2",
        lambda e, _: e.gi,
        note=NO_BATCH_NORM,
    ),
    "analytic": Inversion(lambda t, e, s, d: analytic(t, steps=e.bayes, seed=s), "l2", lambda _, __: 0),
    "bayes": Inversion(
        lambda t, e, s, d: bayes(t, steps=e.bayes, seed=s, done=d), "gaussian", lambda e, _: e.bayes, knows=NOISE
    ),
}
MEMBERSHIP: dict[str, Asking] = {
    "matched": Asking(
        lambda w, q, e, s, k, d: matched(w, q, done=d),
        lambda _, w: len(w.observed),
        knows=NOISE,
    ),
    "lengths": Asking(
        lambda w, q, e, s, k, d: by_lengths(w, q, done=d),
        lambda _, w: len(w.observed),
        knows="that lengths of tensors are kept",
    ),
    "lira": Asking(
        lambda w, q, e, s, k, d: lira(w, q, shadows=e.shadows, seed=s, keep=k, done=d),
        lambda e, _: e.shadows,
        knows="the whole recipe, which its shadows repeat",
    ),
    "lr": Asking(
        lambda w, q, e, s, k, d: lr_mia(w, q, shadows=min(8, e.shadows), seed=s, keep=k, done=d),
        lambda e, _: min(8, e.shadows),
        knows="the whole recipe, which its shadows repeat",
    ),
    "quantile": Asking(
        lambda w, q, e, s, k, d: quantile(w, q, epochs=e.epochs, seed=s, done=d),
        lambda e, _: e.epochs,
    ),
    "quantile-unseen": Asking(  # two classes leave the attacker's data, never the target's
        lambda w, q, e, s, k, d: quantile(
            w, q, epochs=e.epochs, seed=s, unseen=range(w.public.classes - 2, w.public.classes), done=d
        ),
        lambda e, _: e.epochs,
    ),
}


@dataclass(frozen=True)
class Order:
    """What to try."""

    attacks: tuple[str, ...]
    targets: int = 4
    effort: str = "quick"
    party: str = SERVER
    seed: int = 0
    reference: bool = True  # try each inversion where nothing is hidden, and behind a part of the noise, too
    device: str = "cpu"

    def __post_init__(self) -> None:
        unknown = [name for name in self.attacks if name not in (*INVERSIONS, *MEMBERSHIP)]
        if unknown or not self.attacks:
            named = f"unknown attack {unknown[0]!r}" if unknown else "no attack is named"
            raise UserError(f"{named}: use some of {', '.join((*INVERSIONS, *MEMBERSHIP))}, by commas")
        if self.targets < 1:
            raise UserError(f"attack at least 1 target, got {self.targets}")
        if self.effort not in EFFORTS:
            raise UserError(f"unknown preset {self.effort!r}: use {', '.join(EFFORTS)}")
