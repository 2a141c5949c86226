"""Choose an OpenGL backend for MuJoCo that works on this machine; ``MUJOCO_GL`` overrides the choice."""

import functools
import os
import subprocess
import sys

from atlas_wm.errors import UserError

BACKENDS = ("egl", "osmesa")  # on Linux, tried in this order; both work without a display
NATIVE = "native"  # macOS and Windows: MUJOCO_GL is not set there
OFF = ("disable", "disabled", "off", "false", "0")
TIMEOUT = 20.0  # seconds for one attempt, which takes about one

# A red box seen from above. The image must contain red and more than one colour.
_TRY = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 2'/><geom type='box' size='.1 .1 .1' rgba='1 0 0 1'/></worldbody></mujoco>"
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
image = renderer.render()
red, green = image[..., 0].astype(int), image[..., 1].astype(int)
assert (red - green).max() > 50 and red.min() < red.max(), "the image is blank"
"""


@functools.cache
def pick_renderer() -> str | None:
    """The backend that works on this machine: ``MUJOCO_GL`` if it is set, else EGL, else OSMesa, or None.

    Each backend renders a test image in a separate process, once per process.
    """
    return next((backend for backend in candidates() if try_renderer(backend) is None), None)


@functools.cache
def asked_for() -> str:
    """``MUJOCO_GL`` as the user set it, before :func:`set_renderer` did."""
    return os.environ.get("MUJOCO_GL", "").strip().lower()


def candidates() -> tuple[str, ...]:
    if asked_for():
        return (asked_for(),)
    return BACKENDS if sys.platform == "linux" else (NATIVE,)


@functools.cache
def try_renderer(backend: str, timeout: float = TIMEOUT) -> str | None:
    """Render a small scene with ``backend`` → None if it works, else the reason why not."""
    if backend in OFF:
        return "MUJOCO_GL turns rendering off"
    env = dict(os.environ)
    if backend != NATIVE:
        env["MUJOCO_GL"] = backend
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY], env=env, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"no image after {timeout:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()
    return last[-1] if last else f"ended with status {done.returncode}"


def set_renderer() -> None:
    """Set ``MUJOCO_GL`` for this process. Call it before MuJoCo is imported, which reads the variable once.

    If no backend works, rendering is turned off: simulation works without frames, but not with a missing library.
    """
    backend = pick_renderer()
    if backend != NATIVE and "mujoco" not in sys.modules:
        os.environ["MUJOCO_GL"] = backend or OFF[0]


def remedy() -> str:
    """What to install if no backend works."""
    install = (
        "on Debian or Ubuntu `apt-get install libegl1 libgl1 libgl1-mesa-dri` (EGL; with an NVIDIA card the "
        "driver's own) or `apt-get install libosmesa6` (OSMesa)"
    )
    if asked_for():
        return f"MUJOCO_GL={asked_for()} is set: unset it to have one chosen, or install what it needs: {install}"
    return f"{install}, and do not set MUJOCO_GL"


def require_renderer() -> None:
    if pick_renderer() is None:
        raise UserError(f"MuJoCo cannot render frames on this machine: {remedy()}")
