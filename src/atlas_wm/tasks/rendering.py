"""Which OpenGL backend MuJoCo draws with: one call picks one that works, ``MUJOCO_GL`` overrides."""

import functools
import os
import subprocess
import sys

from atlas_wm.errors import UserError

BACKENDS = ("egl", "osmesa")  # of Linux, in the order they are tried; both work without a display
NATIVE = "native"  # what macOS and Windows bring: MUJOCO_GL is left alone there
OFF = ("disable", "disabled", "off", "false", "0")
TIMEOUT = 20.0  # seconds for one try; it takes about one

# A red box seen from above: the image must have red in it, and not be all of one colour.
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
    """The backend that draws here: ``MUJOCO_GL`` where it is set, else EGL, else OSMesa; None where none does.

    Each is tried for real, in a process of its own, once in the life of this one.
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
    """Draw a small scene with ``backend``: None when it works, else why not."""
    if backend in OFF:
        return "MUJOCO_GL turns drawing off"
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
    """Choose for this process. To be called before MuJoCo is imported: it looks at ``MUJOCO_GL`` only then.

    Where nothing draws, MuJoCo is told so: simulation without frames works, a missing library would break it.
    """
    backend = pick_renderer()
    if backend != NATIVE and "mujoco" not in sys.modules:
        os.environ["MUJOCO_GL"] = backend or OFF[0]


def remedy() -> str:
    """What to do where nothing draws."""
    install = (
        "on Debian or Ubuntu `apt-get install libegl1 libgl1 libgl1-mesa-dri` (EGL; with an NVIDIA card the "
        "driver's own) or `apt-get install libosmesa6` (OSMesa)"
    )
    if asked_for():
        return f"MUJOCO_GL={asked_for()} is set: unset it to have one chosen, or install what it needs: {install}"
    return f"{install}, and leave MUJOCO_GL unset"


def require_renderer() -> None:
    if pick_renderer() is None:
        raise UserError(f"frames are needed, but MuJoCo cannot draw on this machine: {remedy()}")
