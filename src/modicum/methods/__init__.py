"""The methods that ship, by name, and the way to those of other packages.

Each is a frozen spec whose `build` composes the four parts.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from modicum.errors import UserError
from modicum.methods.aqc import Aqc
from modicum.methods.auto import Auto
from modicum.methods.cgm_median import CgmMedian
from modicum.methods.class_means import ClassMeans
from modicum.methods.composed import Composed
from modicum.methods.defences import Censor, Soteria
from modicum.methods.dp_fedavg import DpFedAvg
from modicum.methods.dp_sgd import DpSgd
from modicum.methods.fedavg import FedAvg
from modicum.methods.fedprox import FedProx
from modicum.methods.installed import find_installed, installed_names
from modicum.methods.look import Look
from modicum.methods.nbafl import NbAfl
from modicum.papers.acdp_pfsd.dp_fedsam import DpFedSam
from modicum.papers.acdp_pfsd.dp_pfsd import DpPfsd
from modicum.papers.acdp_pfsd.fedper import FedPer
from modicum.papers.acdp_pfsd.method import AcdpPfsd
from modicum.papers.acdp_pfsd.pfedsd import PFedSd
from modicum.papers.acdp_pfsd.pfsd import Pfsd
from modicum.papers.fedcompdp.awdp_fl import AwdpFl
from modicum.papers.fedcompdp.dp_acdn import DpAcdn
from modicum.papers.fedcompdp.dp_fedsam_record import DpFedSamRecord
from modicum.papers.fedcompdp.fedacg import FedAcg
from modicum.papers.fedcompdp.fedsa import FedSa
from modicum.papers.fedcompdp.method import FedCompDp
from modicum.papers.fedmap.method import FedMap
from modicum.papers.pac_dp.method import PacDp
from modicum.papers.pac_dp.rpdp_fl import RpdpFl

if TYPE_CHECKING:
    from modicum.core.setting import MethodSpec

METHODS: dict[str, type[MethodSpec]] = {
    "auto": Auto,
    "fedavg": FedAvg,
    "dp-fedavg": DpFedAvg,
    "fedprox": FedProx,
    "dp-sgd": DpSgd,
    "aqc": Aqc,
    "cgm-median": CgmMedian,
    "class-means": ClassMeans,
    "pac-dp": PacDp,
    "nbafl": NbAfl,
    "rpdp-fl": RpdpFl,
    "acdp-pfsd": AcdpPfsd,
    "dp-pfsd": DpPfsd,
    "pfsd": Pfsd,
    "pfedsd": PFedSd,
    "fedper": FedPer,
    "dp-fedsam": DpFedSam,
    "soteria": Soteria,
    "censor": Censor,
    "fedcompdp": FedCompDp,
    "dp-fedsam-record": DpFedSamRecord,
    "dp-acdn": DpAcdn,
    "fedacg": FedAcg,
    "fedsa": FedSa,
    "awdp-fl": AwdpFl,
    "fedmap": FedMap,
    "look": Look,
}


def method_names() -> tuple[str, ...]:
    """Every method that can be asked for by name: those that ship, then those of other packages."""
    return (*METHODS, *installed_names(METHODS))


def settings_of(name: str) -> type[MethodSpec] | None:
    """The settings class of the named method, of this package or another; None where nobody has it."""
    if name in METHODS:
        return METHODS[name]
    found = find_installed(name, METHODS)
    return None if found is None else found.spec


def registered_name(spec: MethodSpec) -> str:
    """The name under which files ask for a method that ships; of another, its class's."""
    return next((name for name, cls in METHODS.items() if type(spec) is cls), type(spec).__name__)


def method(name: str, **settings: Any) -> MethodSpec:
    """The named method with these settings; the others keep their defaults."""
    spec = settings_of(name)
    if spec is None:
        raise UserError(f"unknown method {name!r}: use one of {', '.join(method_names())}")
    known = [f.name for f in fields(spec)]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in known:
            raise UserError(f"method {name!r} has no setting {setting!r}: it has {', '.join(known)}")
    return spec(**settings)


def method_of(given: MethodSpec | str) -> MethodSpec:
    """A settings object as it is, a name with its defaults; anything else is refused with what to write."""
    if isinstance(given, str):
        return method(given)
    if isinstance(given, type):
        raise UserError(f"give the method's settings, not its class: {given.__name__}()")
    if not callable(getattr(given, "build", None)):
        raise UserError(f'a method is a name ("dp-sgd") or settings (mo.methods.DpSgd()), got {given!r}')
    return given


__all__ = [
    "METHODS",
    "AcdpPfsd",
    "Aqc",
    "Auto",
    "AwdpFl",
    "Censor",
    "CgmMedian",
    "ClassMeans",
    "Composed",
    "DpAcdn",
    "DpFedAvg",
    "DpFedSam",
    "DpFedSamRecord",
    "DpPfsd",
    "DpSgd",
    "FedAcg",
    "FedAvg",
    "FedCompDp",
    "FedMap",
    "FedPer",
    "FedProx",
    "FedSa",
    "Look",
    "NbAfl",
    "PFedSd",
    "PacDp",
    "Pfsd",
    "RpdpFl",
    "Soteria",
    "method",
    "method_names",
    "settings_of",
]
