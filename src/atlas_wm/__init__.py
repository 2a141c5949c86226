"""atlas-wm: latent world models whose planning can be trusted.

The public names are imported on first use, so ``import atlas_wm`` stays light:

>>> from atlas_wm import Planner, load_model
>>> model = load_model("runs/x")
>>> plan = Planner(model).plan(frame, goal)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas_wm import losses as losses
    from atlas_wm.models.world_model import WorldModel as WorldModel
    from atlas_wm.plan.planner import Planner as Planner
    from atlas_wm.runs.model import load_model as load_model
    from atlas_wm.runs.model import push_to_hub as push_to_hub
    from atlas_wm.runs.model import save_model as save_model

__version__ = "0.1.0"

_LAZY = {
    "WorldModel": ("atlas_wm.models.world_model", "WorldModel"),
    "Planner": ("atlas_wm.plan.planner", "Planner"),
    **{name: ("atlas_wm.runs.model", name) for name in ("load_model", "save_model", "push_to_hub")},
    "losses": ("atlas_wm.losses", None),
}
__all__ = ["Planner", "WorldModel", "__version__", "load_model", "losses", "push_to_hub", "save_model"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'atlas_wm' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)
