"""Does adaptive quantile clipping find the quantile? 100 clients with fixed norms, from 100× above and below.

Modicum's policy is compared with the adaptive clipping of Flower, run through Flower's own functions where that
package is installed and reported as missing elsewhere. Both get the same norms, target, rate and bit noise.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
import torch

from modicum.core.facts import PublicFacts
from modicum.core.messages import NoiseFacts, ReleasedSum
from modicum.core.parts import Observation, SignalName
from modicum.policies import AdaptiveQuantile

RATE = 0.2
Step = Callable[[], float]  # one round; gives the bound after it


def modicum(norms: np.ndarray, start: float, quantile: float, noise: float, seed: int) -> Step:
    policy, rng = AdaptiveQuantile(start, quantile, RATE), np.random.default_rng(seed)
    state = policy.init(PublicFacts((), 1, 1, {}))

    def step() -> float:
        nonlocal state
        share = float(np.mean(norms <= state["bound"])) + noise * rng.normal()
        facts = NoiseFacts(0.0, 1.0, {SignalName.CLIP_BIT: noise**2})
        opened = ReleasedSum(0, torch.zeros(1), {SignalName.CLIP_BIT: share}, facts, float(len(norms)))
        state = policy.observe(state, Observation(0, opened, {}))
        return float(state["bound"])

    return step


def flower(norms: np.ndarray, start: float, quantile: float, noise: float, seed: int) -> Step:
    """Flower's server-side adaptive clipping: its own clipping function, bit, noisy count and update."""
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
    from flwr.supercore.differential_privacy import adaptive_clip_inputs_inplace

    np.random.seed(seed)  # it draws from numpy's global generator
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        strategy=FedAvg(),
        noise_multiplier=1.0,
        num_sampled_clients=len(norms),
        initial_clipping_norm=start,
        target_clipped_quantile=quantile,
        clip_norm_lr=RATE,
        clipped_count_stddev=max(noise * len(norms), 1e-9),
    )

    def step() -> float:
        updates = [[np.array([norm])] for norm in norms]
        count = sum(adaptive_clip_inputs_inplace(u, strategy.clipping_norm) for u in updates)
        strategy._geometric_update(strategy._noisy_fraction(count, len(norms)))
        return float(strategy.clipping_norm)

    return step


def measure(make: Callable[..., Step], norms: np.ndarray, start: float, args: argparse.Namespace) -> str:
    """The last fifth of the run: the bound over the true quantile, and the share of norms under it."""
    truth = float(np.quantile(norms, args.quantile))
    try:
        step = make(norms, start * truth, args.quantile, args.noise, args.seed)
    except (ImportError, AttributeError, TypeError) as error:
        return f"missing ({type(error).__name__}) | | "
    bounds = [step() for _ in range(args.rounds)]
    late = math.exp(float(np.mean(np.log(bounds[-max(1, args.rounds // 5) :]))))
    first = next((t for t, b in enumerate(bounds, 1) if 0.8 < b / truth < 1.25), None)
    return f"{late / truth:.3g} | {np.mean(norms <= late):.2f} | {'never' if first is None else first}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--quantile", type=float, default=0.5, help="share of norms that should stay unclipped")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of the noisy share")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    norms = np.random.default_rng(args.seed).lognormal(0.0, 0.7, args.clients)
    print(f"target quantile {args.quantile}, {args.clients} clients, {args.rounds} rounds, noise {args.noise}\n")
    print("| implementation | start | last bound / true quantile | share unclipped | round within 25% |")
    print("|---|---|---|---|---|")
    for name, make in (("Modicum", modicum), ("Flower", flower)):
        for label, start in (("100× above", 100.0), ("100× below", 0.01)):
            print(f"| {name} | {label} | {measure(make, norms, start, args)} |")


if __name__ == "__main__":
    main()
