"""Self-decoupled distillation: a client's previous personalised model teaches the next (ACDP-pFSD, Eqs. 5–9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, softplus

from modicum.core.layout import Layout
from modicum.core.needs import Need
from modicum.core.optimisers import Optimiser, Sgd
from modicum.core.parts import PERSONALISED, Backend, Batch, State
from modicum.errors import UserError


@dataclass(frozen=True)
class Distilled:
    """α·CE + (1−α)·(w_T·TKD + 𝒩·NCKD), with the client's last model as teacher. Eq. (9)

    The trained model stays with the client as its personalised model and teaches its next round. A client without
    one yet minimises the cross-entropy alone. α = 1 is training without distillation that still keeps the
    personalised model.

    With `prior`, the log-frequencies of the client's own classes, times `prior`, are added to outputs in the loss
    (logit adjustment, Menon et al. 2021; at clients, Zhang et al. 2022). What a client with few classes learns
    first otherwise, that the others never come, stays out of its update; its own model gets it as a bias.
    """

    optimiser: Optimiser = field(default_factory=lambda: Sgd(0.1))
    alpha: float = 0.5
    temperature: float = 3.0  # KT
    non_target: float | None = (
        0.25  # 𝒩; None: 1 − p_target of the teacher, which is ordinary distillation, Eq. (5)
    )
    target: float = 1.0  # w_T, for ablations
    prior: float = 0.0  # weight of the client's own class frequencies; 1 takes them out of what is learned

    needs = (Need.CLASSES,)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"the weight α of the cross-entropy must lie in [0, 1], got {self.alpha}")
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"the distillation temperature must be positive and finite, got {self.temperature}")
        if (self.non_target is not None and not self.non_target >= 0) or not self.target >= 0:
            raise UserError("the weights of the target and non-target terms must be at least 0")
        if not 0 <= self.prior < float("inf"):
            raise UserError(
                f"the weight of a client's class frequencies must be finite and at least 0, got {self.prior}"
            )

    @property
    def by_record(self) -> bool:
        return not self.prior  # class frequencies are those of all of a client's records

    def targets(self, records: Batch, state: State, backend: Backend) -> dict[str, Tensor]:
        """The teacher's logits, once a round; blank ones that count for nothing where there is no teacher."""
        targets = dict(records.targets)
        if self.prior:
            own = self.prior * log_frequencies(targets["y"], _output_bias(backend.layout))
            targets["prior"] = own.to(records.x.dtype).expand(len(records), -1)
        if self.alpha == 1:
            return targets
        taught = PERSONALISED in state
        blank = records.x.new_zeros(backend.layout.dimension)
        theta = state[PERSONALISED].to(blank) if taught else blank
        logits = backend.outputs(theta, records.x)
        return {**targets, "teacher": logits, "taught": logits.new_full((len(records),), float(taught))}

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        if self.prior:
            outputs = outputs + targets["prior"]
        fit = cross_entropy(outputs, targets["y"], reduction="none")
        if self.alpha == 1:
            return fit
        weight = (1 - self.alpha) * targets["taught"].to(fit.dtype)
        return (1 - weight) * fit + weight * self.distillation(outputs, targets["teacher"], targets["y"])

    def distillation(self, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
        """w_T·TKD + 𝒩·NCKD of each record, Eq. (8)."""
        tkd, nckd, rest = decoupled(student, teacher, y, self.temperature)
        weight = rest if self.non_target is None else self.non_target
        return self.target * tkd + weight * nckd

    def finish(self, records: Batch, state: State, trained: Tensor, backend: Backend) -> State:
        own = trained.clone()
        if self.prior:
            bias = _output_bias(backend.layout)
            own[bias] += (self.prior * log_frequencies(records.targets["y"], bias)).to(own.dtype)
        return {**state, PERSONALISED: own}


def log_frequencies(y: Tensor, classes: slice) -> Tensor:
    """Of each class among a client's own labels; one more record of each keeps them finite."""
    count = classes.stop - classes.start
    counts = torch.ones(count, dtype=torch.float64, device=y.device)
    counts.index_add_(0, y, counts.new_ones(len(y)))  # bincount would wait for a GPU
    return (counts / counts.sum()).log()


def _output_bias(layout: Layout) -> slice:
    """Where the bias of a model's outputs stands: last, in all models of the catalogue."""
    if len(layout.shapes[-1]) != 1 or not layout.names[-1].endswith("bias"):
        raise UserError("prior needs a model whose last parameters are the bias of its outputs: set prior = 0")
    return slice(layout.dimension - layout.sizes[-1], layout.dimension)


def decoupled(student: Tensor, teacher: Tensor, y: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """TKD of Eq. (6), NCKD of Eq. (7), and the teacher's non-target mass 1 − p_target, for each record."""
    log_t, log_t_rest, hat_t = _split(teacher / temperature, y)
    log_s, log_s_rest, hat_s = _split(student / temperature, y)
    rest = log_t_rest.exp()
    tkd = log_t.exp() * (log_t - log_s) + rest * (log_t_rest - log_s_rest)
    nckd = (hat_t.exp() * (hat_t - hat_s)).sum(-1)
    return tkd, nckd, rest


def _split(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log p_y, log(1 − p_y), and the log-probabilities of the other classes among themselves."""
    classes = logits.shape[-1]
    own = logits.gather(-1, y[:, None]).squeeze(-1)
    # Column j of the others is class j, or j + 1 from the target on.
    others = torch.arange(classes - 1, device=logits.device).expand(len(logits), -1)
    others = logits.gather(-1, others + (others >= y[:, None]))
    odds = own - torch.logsumexp(others, -1)  # log p/(1 − p)
    return -softplus(-odds), -softplus(odds), log_softmax(others, -1)
