"""Requests and answers: what arrives is checked here, and an error says how to put it right."""

import io
import re
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from atlas_wm import __version__
from atlas_wm.client import unpack
from atlas_wm.errors import UserError, short, unknown
from atlas_wm.image_remedies import unlike_training
from atlas_wm.images import frame_to_tensor
from atlas_wm.plan.planner import Plan, Planner, check_seed
from atlas_wm.serve.batching import Planned

PROTOCOL = 1
FIELDS = ("frame", "goal", "seed", "rest", "latents", "reset")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
MOST_PIXELS = 2**24


class Request(NamedTuple):
    frame: Tensor | None  # (1, 3, S, S) uint8; None: a reset
    goal: Tensor | None  # None: the last one
    seed: int
    rest: np.ndarray | None
    latents: bool


def metadata(planner: Planner, run: Path, max_bytes: int) -> dict[str, Any]:
    """The first message of the server."""
    model, config = planner.model, planner.config
    normalizer = model.normalizer
    return {
        "server": "atlas-wm",
        "version": __version__,
        "protocol": PROTOCOL,
        "run": run.resolve().name,
        "task": model.run.task if model.run else None,
        "method": model.run.method if model.run else None,
        "image_size": model.config.encoder.image_size,
        "action_size": model.action_size,
        "action_low": normalizer.low and list(normalizer.low),
        "action_high": normalizer.high and list(normalizer.high),
        "frameskip": model.config.frameskip,
        "horizon": config.horizon,
        "execute": config.execute,
        "cost": config.cost,
        "warm_start": planner.cost.warm_start,
        "novelty": model.bank is not None,
        "max_bytes": max_bytes,
    }


def read_message(planner: Planner, data: bytes) -> Request:
    """Of a websocket: a msgpack map."""
    try:
        fields = unpack(data)
    except ValueError as error:
        raise UserError(f"{error}; see docs/guides/serve.md for the messages") from None
    if not isinstance(fields, dict):
        raise UserError(f"a request is a map such as {{'frame': image, 'goal': image}}, not {short(fields)}")
    fields = {key.decode(errors="replace") if isinstance(key, bytes) else key: v for key, v in fields.items()}
    return read_fields(planner, fields)


def read_fields(planner: Planner, fields: Mapping[str, Any]) -> Request:
    for name in fields:
        if name not in FIELDS:
            raise unknown("field", str(name)[:80], FIELDS)
    if _flag(fields, "reset"):
        return Request(None, None, 0, None, False)
    if fields.get("frame") is None:
        raise UserError("the request has no frame: send the image of the current state as 'frame'")
    goal = fields.get("goal")
    return Request(
        _image(planner, fields["frame"], "frame"),
        None if goal is None else _image(planner, goal, "goal"),
        check_seed(fields.get("seed", 0)),
        _rest(planner, fields.get("rest")),
        _flag(fields, "latents"),
    )


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false, not {short(value)}")
    return value


def _image(planner: Planner, image: Any, name: str) -> Tensor:
    """Planner.plan only warns of an image that is unlike the training frames; a robot does not read the log."""
    frame = frame_to_tensor(image, name)
    run = planner.model.run
    size = planner.model.config.encoder.image_size
    unlike = unlike_training(frame.shape[-2:], size, run.data.frame_size if run else None)
    if unlike is not None:
        raise UserError(f"{name}: {unlike}")
    return planner.prepare(frame)


def _rest(planner: Planner, rest: Any) -> np.ndarray | None:
    if rest is None:
        return None
    most, chunk = planner.config.horizon, planner.model.config.frameskip * planner.model.action_size
    fits = isinstance(rest, np.ndarray) and rest.ndim == 2 and rest.shape[1] == chunk and len(rest) <= most
    if not fits or rest.dtype.kind != "f" or not np.isfinite(rest).all():
        raise UserError(f"rest must be that of a plan of this server: (at most {most}, {chunk}) finite numbers")
    return rest.astype(np.float32)


def answer(planned: Planned, total: float, latents: bool) -> dict[str, Any]:
    """What a client gets, with NumPy arrays. Times are in seconds."""
    plan: Plan = planned.plan
    found = {
        "actions": plan.actions,
        "cost": plan.cost,
        "start_cost": plan.start_cost,
        "remaining": plan.remaining,
        "strayed": plan.strayed,
        "crossed": plan.crossed,
        "risk": plan.risk,
        "novelty": plan.novelty and plan.novelty._asdict(),
        "rest": plan.rest,
        "server_timing": {"waiting": planned.waiting, "planning": planned.planning, "total": total},
    }
    return found | ({"latents": plan.latents} if latents else {})


def as_json(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def read_form(planner: Planner, content_type: str, body: bytes) -> Request:
    """Of HTTP: ``multipart/form-data`` with two image files, as ``curl -F frame=@now.png`` sends it."""
    parts = split_form(content_type, body)
    fields: dict[str, Any] = {}
    for name, content in parts.items():
        if name in ("frame", "goal"):
            fields[name] = decode_image(content, name)
        elif name == "seed":
            text = content.decode(errors="replace")
            fields[name] = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else text
        elif name == "latents":
            fields[name] = {b"true": True, b"false": False}.get(content, content.decode(errors="replace"))
        else:
            raise unknown("field", name[:80], ("frame", "goal", "seed", "latents"))
    request = read_fields(planner, fields)
    if request.goal is None:
        raise UserError("the request has no goal: send the goal image as 'goal'")
    return request


def split_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The parts of a multipart body by name (RFC 7578)."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise UserError(
            "send the images as multipart/form-data: curl -F frame=@now.png -F goal=@goal.png http://HOST:PORT/plan"
        )
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    found: dict[str, bytes] = {}
    for part in parts[1:]:  # before the first boundary is nothing of interest
        if part.startswith(b"--"):
            return found
        head, separator, content = part.partition(b"\r\n\r\n")
        name = re.search(rb'^content-disposition:[^\r\n]*;\s*name="([^"\r\n]*)"', head, re.I | re.M)
        if not separator or name is None:
            raise UserError("a part of the form has no name: use curl -F name=value")
        found[name[1].decode(errors="replace")] = content
    raise UserError("the form ends too early: send it again as a whole")


def decode_image(data: bytes, name: str) -> np.ndarray:
    """An image file → (H, W, 3) uint8."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                pixels = f"{image.width}×{image.height} pixels"
                raise UserError(f"{name} has {pixels}, more than {MOST_PIXELS}: send a smaller one")
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise UserError(f"{name} is no image: send one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        kinds = ", ".join(FORMATS)
        raise UserError(f"{name} cannot be read as an image ({short(str(error))}): send one of {kinds}") from None
