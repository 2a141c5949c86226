"""The versions a result depends on, and what to install where a module is missing."""

import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("atlas-wm", "torch", "timm", "stable-worldmodel", "gymnasium", "numpy")

MODULES = {  # format of a dataset → the modules that read and write it, and the packages they come in
    "lance": {"lancedb": "lancedb", "lance": "pylance"},
    "hdf5": {"h5py": "h5py", "hdf5plugin": "hdf5plugin"},
    "video": {"decord": "decord", "imageio": "imageio imageio-ffmpeg"},
}


def to_install(error: object, otherwise: str) -> str:
    """What puts an error right: ``pip install pylance`` where it says that the module lance is missing."""
    module = re.search(r"No module named '(\w+)", str(error))
    if module is None:
        return otherwise
    packages = {name: package for modules in MODULES.values() for name, package in modules.items()}
    return f"pip install {packages.get(module[1], module[1])}"


def check_modules(format: str) -> None:
    """Raises ImportError where a module of this format is missing."""
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
