"""Imagined futures: what the model expects after each action chunk, beside what the environment then shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atlas_wm.data.card import check_task
from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError
from atlas_wm.evaluate.training_frames import TrainingFrames, open_training_frames
from atlas_wm.images import frame_to_tensor
from atlas_wm.plan.planner import Plan, Planner
from atlas_wm.plan.retrieval import NONE
from atlas_wm.rng import make_rng
from atlas_wm.runs.files import writing
from atlas_wm.tasks import Task, get_task_of

SIDE, MARGIN, LINE = 224, 16, 20  # px of a film
MILLISECONDS = 600  # between its frames


class Imagined(NamedTuple):
    """One imagined latent, and the environment at that time."""

    step: int  # of the episode
    frame: np.ndarray  # (S, S, 3) uint8, the nearest training frame
    distance: float  # of the latent from it (TrainingFrames)
    real: np.ndarray | None  # (H, W, 3) uint8; None where nothing was executed


@dataclass(frozen=True)
class Future:
    """start: the frame that planning began with. success: None where nothing was executed."""

    start: np.ndarray
    goal: np.ndarray
    imagined: list[Imagined]
    success: bool | None


def imagined_frames(planner: Planner, known: TrainingFrames, plan: Plan) -> list[Imagined]:
    """Of the whole plan, as if it began at step 0."""
    frames, distances = known.nearest(plan.latents)
    images, skip = frames.permute(0, 2, 3, 1).numpy(), planner.model.config.frameskip
    return [Imagined((i + 1) * skip, *one, None) for i, one in enumerate(zip(images, distances, strict=True))]


def imagine_episode(
    planner: Planner,
    known: TrainingFrames,
    task: Task,
    env: Any,
    goal_state: np.ndarray,
    goal: Tensor,
    rng_of: Callable[[int], torch.Generator],
    budget: int,
    left_out: int = NONE,
) -> tuple[Future, list[Plan]]:
    """Plan and act until the goal is reached or ``budget`` steps are done. env: reset to the start, with this goal.

    goal: (3, S, S) uint8. rng_of: the rng of each plan, by its number. left_out: as in plan_batch. An episode that
    ends within an action chunk shows its last frame beside that chunk.
    """
    skip, start = planner.model.config.frameskip, env.render()
    future = Future(start, goal.permute(1, 2, 0).numpy(), [], False)
    plans: list[Plan] = []
    steps, reached = 0, False
    while steps < budget and not reached:
        frame = planner.prepare(frame_to_tensor(env.render()))
        rest = plans[-1].rest if plans else None
        plan = planner.plan_batch(frame, goal[None], [rng_of(len(plans))], [rest], [left_out])[0]
        plans.append(plan)
        chunks = plan.actions.reshape(-1, skip, plan.actions.shape[-1])
        for chunk, imagined in zip(chunks, imagined_frames(planner, known, plan), strict=False):
            for action in chunk[: budget - steps]:
                _, _, terminated, _, _ = env.step(np.asarray(action, np.float32))
                steps += 1
                reached = task.reached(env, goal_state, bool(terminated))
                if reached:
                    break
            future.imagined.append(imagined._replace(step=steps, real=env.render()))
            if reached or steps == budget:
                break
    return Future(start, future.goal, future.imagined, reached), plans


def film_of_images(
    planner: Planner,
    run: Path,
    data: str | Path | None,
    plan: Plan,
    frame: np.ndarray,
    goal: np.ndarray,
    path: Path,
) -> None:
    """The imagined future of a plan from one image to another."""
    known = open_training_frames(planner.model, run, data)
    write_film(Future(frame, goal, imagined_frames(planner, known, plan), None), path)


def film_of_row(
    planner: Planner, run: Path, data: str | Path | None, row: int, offset: int, seed: int, path: Path | None
) -> Plan:
    """A plan from a row of the dataset to the one ``offset`` rows later. ``path``: execute it, and film that."""
    model = planner.model
    assert model.run is not None
    task, config = get_task_of(model.run), model.config
    rows = EpisodeData(data or model.run.data.path, task, config.encoder.image_size, config.frameskip)
    check_task(rows)
    episodes, _ = rows.locate(np.clip([row, row + offset], 0, len(rows.actions) - 1))
    if row < 0 or offset < 1 or row + offset >= len(rows.actions) or episodes[0] != episodes[1]:
        start, length = (int(part[episodes[0]]) for part in (rows.offsets, rows.lengths))
        raise UserError(
            f"--row {row} and --offset {offset} do not lie in one episode of {rows.path}, which has "
            f"{len(rows.actions)} rows: the episode of that row has {length}, from row {start}"
        )
    frames = rows.frames_of(np.array([row, row + offset]))
    if path is None:
        return planner.plan_batch(frames[:1], frames[1:], [make_rng(seed)])[0]
    task.require_env("--row with --film", "pass --frame and --goal")
    known, goal_state, env = open_training_frames(model, run, data), rows.states[row + offset], task.make_env()
    try:
        task.reset(env, rows.start_states(np.array([row]))[0], goal_state)
        budget = planner.config.execute * config.frameskip
        future, plans = imagine_episode(
            planner, known, task, env, goal_state, frames[1], lambda _: make_rng(seed), budget
        )
    finally:
        env.close()
    write_film(future, path)
    return plans[0]


def write_film(future: Future, path: Path) -> None:
    """An animation: the imagined future above the real one, where there is one, and the goal at the right."""
    shown = future.imagined[0].real is not None
    images = [_page(future.start, "now", future.start if shown else None, "now", future.goal)]
    for one in future.imagined:
        above = f"imagined, step {one.step}: distance {one.distance:.1f}"
        images.append(_page(one.frame, above, one.real, f"real, step {one.step}", future.goal))
    with writing(path):
        images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=MILLISECONDS, loop=0)


def _page(above: np.ndarray, over: str, below: np.ndarray | None, under: str, goal: np.ndarray) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    cells: Sequence[tuple[int, int, np.ndarray | None, str]] = (
        (0, 0, above, over),
        (0, 1, below, under),
        (1, 0, goal, "goal"),
    )
    height = (2 if below is not None else 1) * (SIDE + LINE + MARGIN) + MARGIN
    page = Image.new("RGB", (2 * (SIDE + MARGIN) + MARGIN, height), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for column, row, image, text in cells:
        if image is not None:
            x, y = MARGIN + column * (SIDE + MARGIN), MARGIN + row * (SIDE + LINE + MARGIN)
            page.paste(Image.fromarray(np.ascontiguousarray(image)).resize((SIDE, SIDE)), (x, y + LINE))
            draw.rectangle((x - 1, y + LINE - 1, x + SIDE, y + LINE + SIDE), outline="#bbbbbb")
            draw.text((x, y), text, fill="#333333", font=font)
    return page
