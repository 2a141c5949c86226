"""Versions of the packages that results depend on, and what to install if a module is missing."""

import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("atlas-wm", "torch", "timm", "stable-worldmodel", "gymnasium", "numpy")

MODULES = {  # format of a dataset → the modules that read and write it
    "lance": ("lancedb", "lance"),
    "hdf5": ("h5py", "hdf5plugin"),
    "video": ("decord", "imageio"),
}
EXTRAS = {  # module → the extra in pyproject.toml that installs it
    **dict.fromkeys(("stable_worldmodel", "gymnasium", "pymunk", "pygame", "shapely", "ogbench", "mujoco"), "envs"),
    **dict.fromkeys(("h5py", "hdf5plugin", "lancedb", "lance", "imageio", "cv2", "tensorboard"), "data"),
    **dict.fromkeys(("matplotlib", "jinja2", "sklearn"), "report"),
    **dict.fromkeys(("starlette", "uvicorn", "websockets", "msgpack"), "serve"),
    "s3fs": "cloud",
}


def install_command(*modules: str) -> str:
    """The command that installs modules: ``pip install "atlas-wm[data]"``, or by name where no extra has them."""
    extras = sorted({EXTRAS[name] for name in modules if name in EXTRAS})
    others = sorted(name for name in modules if name not in EXTRAS)
    return " ".join(["pip install", *([f'"atlas-wm[{",".join(extras)}]"'] if extras else []), *others])


def to_install(error: object, otherwise: str) -> str:
    """The command that fixes an error which says that a module is missing."""
    module = re.search(r"No module named '(\w+)", str(error))
    return otherwise if module is None else install_command(module[1])


def check_modules(format: str) -> None:
    """Raise ImportError if a module of this format is missing."""
    for module in MODULES[format]:
        import_module(module)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
