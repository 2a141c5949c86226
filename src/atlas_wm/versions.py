"""The versions a result depends on."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("atlas-wm", "torch", "timm", "lightning", "stable-worldmodel", "gymnasium", "numpy")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
