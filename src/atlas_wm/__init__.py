"""atlas-wm: latent world models whose planning can be trusted.

The public names are imported on first use, so ``import atlas_wm`` stays light:

>>> from atlas_wm import WorldModel, Planner
>>> model = WorldModel.load("runs/x")
>>> plan = Planner(model).plan(frame, goal)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas_wm import losses as losses
    from atlas_wm.models.world_model import WorldModel as WorldModel
    from atlas_wm.plan.planner import Planner as Planner

__version__ = "0.1.0"

_LAZY = {
    "WorldModel": ("atlas_wm.models.world_model", "WorldModel"),
    "Planner": ("atlas_wm.plan.planner", "Planner"),
    "losses": ("atlas_wm.losses", None),
}
__all__ = ["Planner", "WorldModel", "__version__", "losses"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'atlas_wm' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)
