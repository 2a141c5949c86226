"""The methods of the paper, as rows: they differ in nothing but the weights of the loss terms."""

from dataclasses import dataclass

from atlas_wm.config import ObjectiveConfig
from atlas_wm.errors import unknown


@dataclass(frozen=True)
class Method:
    summary: str
    objective: ObjectiveConfig


METHODS: dict[str, Method] = {
    "atlas": Method("ATLAS: WEMReg and OOD-recovery", ObjectiveConfig(wemreg=3.0, relational=0.1)),
    "lewm": Method("LeWM: SIGReg alone", ObjectiveConfig(sigreg=0.09)),
    "lewm+ood": Method(
        "ATLAS without WEMReg: SIGReg and OOD-recovery", ObjectiveConfig(sigreg=0.09, relational=0.1)
    ),
    "wemreg": Method("ATLAS without OOD-recovery: WEMReg alone", ObjectiveConfig(wemreg=3.0)),
}


def get_method(name: str) -> Method:
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]
