"""The losses, as plain functions of tensors that work in any JEPA."""

from atlas_wm.losses.objective import ClipLatents, Losses, Progress, objective
from atlas_wm.losses.prediction import prediction
from atlas_wm.losses.relational import normalized_distances, relational
from atlas_wm.losses.sigreg import sigreg
from atlas_wm.losses.wemreg import gaussian_cells, wemreg
from atlas_wm.parallel.processes import gathered

__all__ = [
    "ClipLatents",
    "Losses",
    "Progress",
    "gathered",
    "gaussian_cells",
    "normalized_distances",
    "objective",
    "prediction",
    "relational",
    "sigreg",
    "wemreg",
]
