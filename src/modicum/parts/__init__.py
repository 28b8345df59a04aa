"""Everything that a method is made of, in one import.

Four parts (training, policy, mechanism, aggregation), the protocols that new ones follow, and the settings that
methods share: groups to inherit from, and `option`, a setting with its help. docs/add-a-method.md adds a method.
"""

from modicum.aggregation import (
    LineSearch,
    Mean,
    Median,
    Momentum,
    NoiseAware,
    NormBounded,
    Paced,
    Thresholded,
    TrimmedMean,
    Weighted,
)
from modicum.core.clips import Auto, Clip, Flat, PerLayer
from modicum.core.facts import ClientFacts, Metric, PublicFacts
from modicum.core.messages import Decision, NoiseFacts, Opened, Released, ReleasedSum
from modicum.core.needs import Need
from modicum.core.optimisers import Adam, Optimiser, Sgd
from modicum.core.parts import (
    Aggregation,
    LocalTraining,
    Mechanism,
    Method,
    Observation,
    Place,
    Policy,
    Scope,
    Signal,
    SignalName,
    State,
)
from modicum.core.setting import MethodSpec, Setting
from modicum.mechanisms.clear import Clear
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_sums import RecordSums
from modicum.parts.groups import (
    Aggregated,
    ClientLevelView,
    Guarantee,
    Minibatches,
    Optimised,
    PrivacyOptions,
    RecordSteps,
    SeenBy,
    ServerStep,
)
from modicum.parts.options import option
from modicum.policies import AdaptiveQuantile, Fixed, MedianNorm
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, ServerSeesMessages, TrustedServer, Unit
from modicum.training.local_steps import LocalSteps
from modicum.training.plain import Supervised
from modicum.training.proximal import Proximal

__all__ = [
    "Adam",
    "AdaptiveQuantile",
    "Adjacency",
    "Aggregated",
    "Aggregation",
    "Auto",
    "Clear",
    "ClientFacts",
    "ClientLevel",
    "ClientLevelView",
    "Clip",
    "Decision",
    "Fixed",
    "Flat",
    "Guarantee",
    "LineSearch",
    "LocalSteps",
    "LocalTraining",
    "Mean",
    "Mechanism",
    "Median",
    "MedianNorm",
    "Method",
    "MethodSpec",
    "Metric",
    "Minibatches",
    "Moment",
    "Momentum",
    "Need",
    "Noise",
    "NoiseAware",
    "NoiseFacts",
    "NormBounded",
    "Observation",
    "Opened",
    "Optimised",
    "Optimiser",
    "Paced",
    "PerLayer",
    "Place",
    "Policy",
    "PrivacyOptions",
    "PrivacySpec",
    "Proximal",
    "PublicFacts",
    "RecordLocal",
    "RecordSteps",
    "RecordSums",
    "Released",
    "ReleasedSum",
    "Schedule",
    "Scope",
    "SecureAggregation",
    "SeenBy",
    "ServerSeesMessages",
    "ServerStep",
    "Setting",
    "Sgd",
    "Signal",
    "SignalName",
    "State",
    "Supervised",
    "Thresholded",
    "TrainingReleases",
    "TrimmedMean",
    "TrustedServer",
    "Unit",
    "Weighted",
    "option",
]
