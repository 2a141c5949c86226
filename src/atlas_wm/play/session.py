"""One visitor of the page: an environment for each model, a goal, and what happens. Messages in, events out."""

import base64
import io
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atlas_wm.data.dataset import EpisodeData
from atlas_wm.errors import UserError, short
from atlas_wm.plan.planner import Plan
from atlas_wm.play.boards import Handle, board_of
from atlas_wm.play.player import Player
from atlas_wm.report.naming import task_name
from atlas_wm.tasks import Task
from atlas_wm.tasks.variation import make_varied_env, parse_variation, variation_ranges

Event = dict[str, Any]
STEP_SECONDS = 0.04  # between two steps of the environment, as the page shows them
BUDGET = 200  # steps until an attempt ends
FAN_SECONDS, FAN_MOST = 0.1, 36  # for simulating candidates of one plan; how many at most
FAN_ITERATIONS = 3  # of the search, from the first to the last
FRAMES_OFFERED = 24  # of the dataset
STEPS_BEFORE = 25  # where a frame of the dataset is the goal, and farther ones are out of reach: the start


@dataclass
class Lane:
    """A model in its own environment."""

    player: Player
    env: Any = None
    simulation: Any = None  # a second environment, in which candidates are tried
    frame: np.ndarray = field(default_factory=lambda: np.zeros((1, 1, 3), np.uint8))  # the last that was rendered
    actions: deque[np.ndarray] = field(default_factory=deque)
    last: Plan | None = None
    plans: int = 0
    steps: int = 0
    reached: bool = False

    def close(self) -> None:
        for env in (self.env, self.simulation):
            if env is not None:
                env.close()
        self.env = self.simulation = None


class Session:
    """``handle`` a message of the page, and ``advance`` until it returns None. Both add to ``events``."""

    def __init__(self, players: Sequence[Player], task: Task, data: str | Path | None, budget: int = BUDGET):
        self.task, self.board, self.budget, self._data_path = task, board_of(task), budget, data
        self.lanes = [Lane(player) for player in players]
        self.variation: dict[str, list[float]] = {}
        self.running, self.events = False, list[Event]()
        self.offered: list[int] = []
        self.away = False  # from the start
        self._make_envs()
        first = self.board.first
        self.start, self.goal = map(np.array, first) if first else (self._drawn(0), self._drawn(1))
        self.events.append(self._hello())
        self._show()

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    # Messages

    def handle(self, message: Any) -> None:
        """A message of the page: ``{"do": name, ...}``. What is wrong with it becomes an event."""
        does: dict[str, Callable[[dict[str, Any]], None]] = {
            "go": self._go,
            "stop": self._stop,
            "reset": self._reset,
            "move": self._move,
            "vary": self._vary,
            "frames": self._offer_frames,
            "frame": self._take_frame,
        }
        try:
            if not isinstance(message, dict) or message.get("do") not in does:
                raise UserError(f"unknown message {short(message)}")
            does[message["do"]](message)
        except UserError as error:
            self.events.append({"event": "error", "text": str(error)})

    def _go(self, _: dict[str, Any]) -> None:
        if any(lane.reached or lane.steps >= self.budget for lane in self.lanes):
            self._show()  # from the start again
        self.running = True
        for lane in self.lanes:
            lane.actions.clear()

    def _stop(self, _: dict[str, Any]) -> None:
        self.running = False

    def _reset(self, _: dict[str, Any]) -> None:
        self.running = False
        self._show()

    def _move(self, message: dict[str, Any]) -> None:
        """Move a part of the goal, or of the start."""
        which = message.get("which")
        if which not in ("goal", "start"):
            raise UserError(f"which must be goal or start, not {short(which)}")
        state = getattr(self, which)
        names = [handle.name for handle in self.board.handles(state)]
        numbers = [message.get("x"), message.get("y"), message.get("angle", 0.0)]
        if message.get("name") not in names or not all(_is_number(value) for value in numbers):
            raise UserError(f"a {which} of {self.task.name} has {', '.join(names) or 'no parts'} to move")
        x, y, angle = map(float, numbers)
        moved = self.board.moved(state, Handle(message["name"], x, y, angle if "angle" in message else None))
        self._set_states(**{which: moved})

    def _set_states(self, start: np.ndarray | None = None, goal: np.ndarray | None = None) -> None:
        """A new goal while the agent acts is the goal of its next plan; a new start begins again."""
        self.start = self.start if start is None else start
        self.goal = self.goal if goal is None else goal
        if start is None and self.away:
            for lane in self.lanes:
                self.task.reset(lane.env, self.task.full_state(lane.env), self.goal)
                lane.actions.clear()
                lane.last, lane.reached, lane.steps = None, False, 0
            self._render_goal()
            self._scene()
        else:
            self.running = self.running and start is None
            self._show()

    def _vary(self, message: dict[str, Any]) -> None:
        """Change the scene: ``{"values": {"door.position": [100]}}``. The agent stays where it is."""
        values = message.get("values")
        allowed = self.board.variations
        if not isinstance(values, dict) or not all(
            name in allowed and isinstance(v, list) and v and all(map(_is_number, v)) for name, v in values.items()
        ):
            raise UserError(f"the scene of {self.task.name} has {', '.join(allowed) or 'nothing'} to change")
        given = [f"{name}={','.join(f'{number:g}' for number in value)}" for name, value in values.items()]
        self.variation = parse_variation(self.task, given) if given else {}
        states = [self.task.full_state(lane.env) for lane in self.lanes]
        for lane in self.lanes:
            lane.close()
        self._make_envs()
        for lane, state in zip(self.lanes, states, strict=True):
            self.task.reset(lane.env, state, self.goal)
            lane.actions.clear()
            lane.last = None
        self._render_goal()
        self._scene()

    def _offer_frames(self, message: dict[str, Any]) -> None:
        page = message.get("page", 0)
        if not isinstance(page, int) or not 0 <= page < 10_000:
            raise UserError(f"page must be a whole number, not {short(page)}")
        rows = np.random.default_rng(page).integers(len(self._data.actions), size=FRAMES_OFFERED)
        self.offered = np.sort(rows).tolist()
        images = self._data.frames_of(np.array(self.offered)).permute(0, 2, 3, 1).numpy()
        frames = [{"row": row, "image": png(image)} for row, image in zip(self.offered, images, strict=True)]
        self.events.append({"event": "frames", "frames": frames})

    def _take_frame(self, message: dict[str, Any]) -> None:
        """A frame of the dataset as the goal, and with ``before`` the start as many rows earlier."""
        row, before = message.get("row"), message.get("before", 0)
        if row not in self.offered or not isinstance(before, int) or not 0 <= before <= 1000:
            raise UserError("choose one of the frames on the page")
        _, (step,) = self._data.locate(np.array([row]))
        start = self._data.start_states(np.array([row - min(int(step), before)]))[0] if before else None
        self._set_states(start, self._data.states[row])

    @cached_property
    def _data(self) -> EpisodeData:
        planner = self.lanes[0].player.planner
        info, config = planner.model.run, planner.model.config
        assert info is not None
        path = self._data_path or info.data.path
        try:
            return EpisodeData(path, self.task, config.encoder.image_size, config.frameskip)
        except UserError as error:
            raise UserError(
                f"there are no frames to choose from ({error}); start `atlas play` with --data"
            ) from None

    # Acting

    def advance(self) -> float | None:
        """One plan of each model that has none, or one step of all; seconds until the next. None: nothing to do."""
        if not self.running:
            return None
        acting = [(i, lane) for i, lane in enumerate(self.lanes) if not lane.reached and lane.steps < self.budget]
        waiting = [(i, lane) for i, lane in acting if not lane.actions]
        if waiting:
            for number, lane in waiting:
                self._plan(number, lane)
            return 0.0
        started = time.perf_counter()
        for number, lane in acting:
            self._step(number, lane)
        if all(lane.reached or lane.steps >= self.budget for lane in self.lanes):
            self.running = False
            self.events.append({"event": "end"})
            return None
        return max(0.0, STEP_SECONDS - (time.perf_counter() - started))

    def _plan(self, number: int, lane: Lane) -> None:
        player = lane.player
        started = time.perf_counter()
        plan = player.plan(lane.frame, self.goal_image, lane.plans, lane.last)
        seconds = time.perf_counter() - started
        lane.actions.extend(plan.actions)
        lane.last, lane.plans = plan, lane.plans + 1
        event: Event = {
            "event": "plan",
            "lane": number,
            "ms": round(1e3 * seconds, 1),
            "cost": plan.cost,
            "start_cost": plan.start_cost,
            "remaining": plan.remaining,
            "strayed": plan.strayed,
            "crossed": plan.crossed,
            "risk": plan.risk,
            "costs": player.trace.means,
            "novelty": plan.novelty and plan.novelty._asdict(),
            "imagined": [],
            **self._paths(lane, plan),
        }
        if player.frames is not None:
            images, distances = player.frames.nearest(plan.latents)
            event["imagined"] = [
                {"image": png(image.permute(1, 2, 0).numpy()), "distance": distance}
                for image, distance in zip(images, distances, strict=True)
            ]
        self.events.append(_finite(event))

    def _paths(self, lane: Lane, plan: Plan) -> Event:
        """The plan and some candidates, tried in a second environment, as points in the image."""
        if self.board.point(self.task.state(lane.env)) is None:
            return {"path": [], "fan": []}
        state, started = self.task.full_state(lane.env), time.perf_counter()
        self.task.reset(lane.simulation, state, self.goal)
        path, fan = self._path(lane, state, plan.actions), []
        candidates, costs = lane.player.trace.candidates, lane.player.trace.costs
        shown = np.unique(np.linspace(0, len(candidates) - 1, FAN_ITERATIONS).round().astype(int))
        # The cheapest of each iteration first, then the others: (iteration, candidate), until the time is up.
        order = [(i, k) for k in range(FAN_MOST // len(shown)) for i in shown]
        ranked = {i: costs[i].argsort()[:: max(1, len(costs[i]) * len(shown) // FAN_MOST)] for i in shown}
        for i, k in order:
            if k < len(ranked[i]) and time.perf_counter() - started < FAN_SECONDS:
                actions = lane.player.chunks(candidates[i][ranked[i][k]])
                share = float(i) / max(1, len(candidates) - 1)
                fan.append({"share": round(share, 2), "path": self._path(lane, state, actions)})
        return {"path": path, "fan": fan}

    def _path(self, lane: Lane, state: np.ndarray, actions: np.ndarray) -> list[list[float]]:
        self.task.rewind(lane.simulation, state, self.goal)
        states = [self.task.state(lane.simulation)]
        for action in actions:
            lane.simulation.step(np.asarray(action, np.float32))
            states.append(self.task.state(lane.simulation))
        return [[round(v, 4) for v in self.board.point(s) or ()] for s in states]

    def _step(self, number: int, lane: Lane) -> None:
        action = lane.actions.popleft()
        _, _, terminated, _, _ = lane.env.step(np.asarray(action, np.float32))
        lane.steps, self.away = lane.steps + 1, True
        lane.reached = bool(self.task.reached(lane.env, self.goal, bool(terminated)))
        event = {"event": "step", "lane": number, **self._seen(lane)}
        chunk_ended = not lane.steps % lane.player.planner.model.config.frameskip
        if chunk_ended or lane.reached:
            event["now"] = self._novelty(lane)
        self.events.append(_finite(event))

    # What the page sees

    def _hello(self) -> Event:
        ranges = variation_ranges(self.task, self.board.variations) if self.board.variations else {}
        variations = [
            {
                "name": name,
                "kind": "colour" if name.endswith("color") else "number",
                "value": value,
                "low": low[0],
                "high": high[0],
            }
            for name, (value, low, high) in ranges.items()
        ]
        return {
            "event": "hello",
            "task": task_name(self.task.name),
            "steps_before": STEPS_BEFORE if self.board.first is None else 0,
            "players": [lane.player.about for lane in self.lanes],
            "variations": variations,
            "paths": self.board.point(self.start) is not None,
            "budget": self.budget,
        }

    def _show(self) -> None:
        """All environments at the start."""
        self.away = False
        for lane in self.lanes:
            self.task.reset(lane.env, self.start, self.goal)
            lane.actions.clear()
            lane.last, lane.plans, lane.steps, lane.reached = None, 0, 0, False
        self._render_goal()
        self._scene()

    def _scene(self) -> None:
        lanes = [{**self._seen(lane), "now": self._novelty(lane, self.goal_image)} for lane in self.lanes]
        goal = {"image": png(self.goal_image), "handles": self._handles(self.goal)}
        self.events.append(_finite({"event": "scene", "lanes": lanes, "goal": goal, "running": self.running}))

    def _seen(self, lane: Lane) -> Event:
        state, lane.frame = self.task.state(lane.env), np.array(lane.env.render())
        return {
            "image": png(lane.frame),
            "handles": self._handles(state),
            "step": lane.steps,
            "distance": self.task.distance(state, self.goal),
            "reached": lane.reached,
        }

    def _novelty(self, lane: Lane, *others: np.ndarray) -> Event | None:
        found = lane.player.novelty(lane.frame, *others)
        return None if found is None else dict(zip(("frame", "goal"), found, strict=False))

    def _handles(self, state: np.ndarray) -> list[dict[str, Any]]:
        return [handle._asdict() for handle in self.board.handles(state)]

    def _render_goal(self) -> None:
        """In the scene as it is now, where it may look otherwise than in the dataset."""
        simulation = self.lanes[0].simulation
        self.task.reset(simulation, self.goal, self.goal)
        self.goal_image = np.array(simulation.render())

    def _make_envs(self) -> None:
        for lane in self.lanes:
            lane.env, lane.simulation = (make_varied_env(self.task, self.variation) for _ in range(2))

    def _drawn(self, seed: int) -> np.ndarray:
        """A state in which the environment starts by itself."""
        self.lanes[0].env.reset(seed=seed)
        return np.array(self.task.full_state(self.lanes[0].env))


def png(image: np.ndarray) -> str:
    """(H, W, 3) uint8 → a data URL"""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _finite(value: Any) -> Any:
    """None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
