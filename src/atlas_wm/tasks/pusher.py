"""A scripted policy for PushT: it walks around the block and pushes it to the green T, one push after another."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import shapely
from scipy.sparse.csgraph import dijkstra
from shapely.affinity import affine_transform
from shapely.geometry import Point, Polygon, box
from shapely.geometry.polygon import orient

from atlas_wm.settings import check_types, require, within

AGENT_RADIUS = 15.0  # px; the environment's own constants
WINDOW = 512.0
ACTION_SCALE = 100.0
# A constant action moves the agent by this share of its length per step: the environment's position controller is
# critically damped and a step lasts a tenth of a second.
SHARE_PER_STEP = 0.4
NOISE_CORRELATION = 0.8  # of the action noise of consecutive steps
GYRATION = 45.0  # px, radius of gyration of the block


@dataclass(frozen=True)
class PusherSettings:
    """Lengths in px, speeds in px per step, ranges as (low, high). Speeds are log-uniform."""

    goal: tuple[float, float, float] = (256.0, 256.0, math.pi / 4)  # pose of the green T
    goal_noise: tuple[float, float] = (12.0, 0.2)  # std of the goal pose that an episode aims for: px, rad
    arrived: tuple[float, float] = (14.0, 0.18)  # distance from the goal that counts as reached: px, rad
    rows: tuple[int, int] = (50, 250)  # per episode
    walk_speed: tuple[float, float] = (12.0, 31.0)
    push_speed: tuple[float, float] = (4.0, 10.0)
    push_length: tuple[float, float] = (8.0, 150.0)
    push_error: tuple[float, float] = (0.6, 1.2)  # factor on the best length of a push
    push_curve: float = 0.01  # rad per step, std of the change of a push's direction
    choice_noise: float = 0.05  # std of the score of a push, as a share of the block's distance from its goal
    action_noise: float = 0.03  # std, correlated over steps
    white_noise: float = 0.0  # largest std of noise that is new at every step; each episode draws its own std
    pause: float = 0.06  # probability of a pause before a push
    pause_steps: tuple[int, int] = (3, 10)
    stroll: float = 0.18  # probability of a walk to a random position before a push
    clearance: float = 20.0  # between the block and the agent's centre while it walks; its radius is 15
    agent_margin: float = 20.0  # least distance of the agent from the border
    block_margin: float = 30.0  # least distance of the block from the border, so that the agent fits behind it

    def __post_init__(self) -> None:
        check_types("", self)
        for name in ("rows", "walk_speed", "push_speed", "push_length", "push_error", "pause_steps"):
            low, high = getattr(self, name)
            require(0 < low <= high, f"{name} must be a range of positive numbers, not {low:g},{high:g}")
        within("", self, 0, 1, "push_curve", "choice_noise", "action_noise", "white_noise", "pause", "stroll")
        within("", self, 0, WINDOW / 4, "clearance", "agent_margin", "block_margin")


class Pusher:
    """The policy of one episode; its actions are a function of the seed and the infos.

    ``finished`` is true once the block has arrived, or after the maximum number of rows.
    """

    def __init__(self, env: gym.Env, seed: int, settings: PusherSettings | None = None):
        self.settings = settings or PusherSettings()
        self.finished = False
        self._env: Any = env.unwrapped
        self._rng = np.random.default_rng(seed)
        self._shape: Polygon | None = None
        self._script = self._play()
        self._rows, self._noise = 0, np.zeros(2)
        self._white = np.random.default_rng([seed, 1])
        self._white_std = self._white.uniform(0.0, self.settings.white_noise)
        margin = self.settings.agent_margin
        self._floor = box(margin, margin, WINDOW - margin, WINDOW - margin)

    def get_action(self, info: dict[str, Any]) -> np.ndarray:
        self._shape = self._shape or block_shape(self._env)  # the block exists after the first reset
        self._agent = np.asarray(info["pos_agent"], np.float64)
        self._angle = float(info["block_pose"][2])
        self._block = move_shape(self._shape, info["block_pose"])
        self._rows += 1
        fresh = self._rng.normal(0.0, self.settings.action_noise, 2)
        self._noise = NOISE_CORRELATION * self._noise + math.sqrt(1 - NOISE_CORRELATION**2) * fresh
        white = self._white.normal(0.0, self._white_std, 2)
        action = next(self._script) / ACTION_SCALE + self._noise + white
        low, high = self.settings.rows
        self.finished = self._rows + 1 >= high or (self._rows + 1 >= low and self._arrived())
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _play(self) -> Iterator[np.ndarray]:
        """The steps of an episode as target displacements of the agent."""
        rng, s = self._rng, self.settings
        assert self._shape is not None
        pose = np.array(s.goal) + rng.normal(0.0, [s.goal_noise[0], s.goal_noise[0], s.goal_noise[1]])
        self._goal, self._goal_angle = _xy(move_shape(self._shape, pose).centroid), float(pose[2])
        while True:
            if rng.random() < s.pause or self._arrived():
                for _ in range(rng.integers(*s.pause_steps, endpoint=True)):
                    yield np.zeros(2)
            if self._arrived():
                continue
            if rng.random() < s.stroll:
                somewhere = rng.uniform(s.agent_margin, WINDOW - s.agent_margin, 2)
                if self._block.distance(Point(somewhere)) > s.clearance:
                    yield from self._walk(somewhere)
            start, direction, length = self._choose_push()
            yield from self._walk(start)
            yield from self._push(direction, length)

    def _goal_offset(self) -> tuple[np.ndarray, float]:
        """From the block to its goal: px of the centre of mass, and rad in (−π, π]."""
        turn = math.remainder(self._goal_angle - self._angle, 2 * math.pi)
        return self._goal - self._centre(), turn

    def _arrived(self) -> bool:
        shift, turn = self._goal_offset()
        return bool(np.linalg.norm(shift) < self.settings.arrived[0] and abs(turn) < self.settings.arrived[1])

    def _choose_push(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The start position next to the block, the direction and the length of a push.

        Pushed by d at a lever ℓ, a block with radius of gyration ρ moves by about d·ρ²/(ρ² + ℓ²) and turns by
        d·ℓ/(ρ² + ℓ²). The chosen push minimises |shift|² + (ρ·turn)² up to noise.
        """
        rng, s = self._rng, self.settings
        centre, outline = self._centre(), self._block.exterior
        shift, turn = self._goal_offset()
        wanted = np.array([*shift, GYRATION * turn])
        size = np.linalg.norm(wanted)
        choices = []
        for at in rng.uniform(0.0, outline.length, 48):
            before, after = (_xy(outline.interpolate((at + d) % outline.length)) for d in (-1.0, 1.0))
            normal = np.array([after[1] - before[1], before[0] - after[0]])  # outward: the outline is ccw
            normal /= np.linalg.norm(normal) + 1e-9
            contact = (before + after) / 2
            start = contact + (s.clearance + 4.0) * normal
            direction = -normal
            arm = contact - centre
            lever = arm[0] * direction[1] - arm[1] * direction[0]
            # Effect of a push of one px, in px: translation and rotation of the block.
            effect = np.array([*(GYRATION * direction), lever]) * GYRATION / (GYRATION**2 + lever**2)
            best = float(np.clip(effect @ wanted / (effect @ effect), *s.push_length))
            length = best * rng.uniform(*s.push_error)
            moved = length * effect[:2]
            score = -np.linalg.norm(wanted - length * effect) + s.choice_noise * size * rng.normal()
            if not self._floor.contains(Point(start)) or self._block.distance(Point(start)) < s.clearance:
                score -= 1e4  # behind a wall, or in a corner of the T that is too narrow
            if self._beyond_walls(moved) > max(0.0, self._beyond_walls(np.zeros(2))) + 1.0:
                score -= 1e3
            choices.append((score, start, direction, length))
        _, start, direction, length = max(choices, key=lambda choice: choice[0])
        return start, direction, length

    def _walk(self, target: np.ndarray) -> Iterator[np.ndarray]:
        """Walk to ``target`` without touching the block."""
        speed = self._speed(self.settings.walk_speed)
        path = self._path(target)
        for number, point in enumerate(path):
            near = 20.0 if 0 < number < len(path) - 1 else 6.0  # corners are cut
            for _ in range(40):
                ahead = point - self._agent
                if np.linalg.norm(ahead) < near:
                    break
                yield _limit(ahead, speed / SHARE_PER_STEP)

    def _push(self, direction: np.ndarray, length: float) -> Iterator[np.ndarray]:
        """Push until the block has arrived, has moved far enough, is lost, or is close to a wall."""
        s = self.settings
        speed = self._speed(s.push_speed)
        curve = self._rng.normal(0.0, s.push_curve)
        allowed = max(0.0, self._beyond_walls(np.zeros(2))) + 1.0
        reach = math.ceil((s.clearance + 8.0) / speed) + 3  # steps within which the agent must touch the block
        touched: np.ndarray | None = None
        for step in range(math.ceil(length / speed) + 2 * reach):
            gap = self._block.distance(Point(self._agent)) - AGENT_RADIUS
            if touched is None and gap < 2.0:
                touched = self._agent
            pushed = 0.0 if touched is None else float(np.linalg.norm(self._agent - touched))
            direction, soon = _turn(direction, curve), speed * 2.0
            off_limits = self._beyond_walls(direction * soon) > allowed
            lost = step > reach and gap > 6.0
            if pushed > length or off_limits or lost or self._arrived():
                return
            if not self._floor.contains(Point(self._agent + direction * soon)):
                return
            yield direction * speed / SHARE_PER_STEP

    def _path(self, target: np.ndarray) -> list[np.ndarray]:
        """The shortest path around the block, over the corners of its widened outline."""
        s = self.settings
        obstacle, lane = self._block.buffer(s.clearance), self._block.buffer(s.clearance + 6.0, join_style="mitre")
        points = [self._agent, target]
        if obstacle.contains(Point(self._agent)):  # after a push: first step back from the block
            free = lane.exterior.intersection(self._floor)
            points[0] = _xy(shapely.shortest_line(free, Point(self._agent)).coords[0])
        corners = [np.array(c) for c in lane.exterior.coords[:-1]]
        points += [c for c in corners if self._floor.contains(Point(c))]
        nodes = np.stack(points)
        pairs = np.stack(np.broadcast_arrays(nodes[:, None], nodes[None]), axis=2)  # (n, n, 2 ends, xy)
        lengths = np.linalg.norm(pairs[:, :, 0] - pairs[:, :, 1], axis=-1)
        lengths[shapely.intersects(obstacle, shapely.linestrings(pairs))] = 0.0  # no edge
        _, came_from = dijkstra(lengths, directed=False, indices=0, return_predecessors=True)
        path, at = [], 1
        while at >= 0:  # from the target back; only the target if there is no path
            path.append(points[at])
            at = int(came_from[at])
        return path[::-1]

    def _centre(self) -> np.ndarray:
        return _xy(self._block.centroid)

    def _beyond_walls(self, shift: np.ndarray) -> float:
        """How far the shifted block extends past the margin, in px."""
        x0, y0, x1, y1 = self._block.bounds
        dx, dy = shift
        margin = self.settings.block_margin
        return max(margin - min(x0 + dx, y0 + dy), max(x1 + dx, y1 + dy) - (WINDOW - margin))

    def _speed(self, bounds: tuple[float, float]) -> float:
        return float(np.exp(self._rng.uniform(*np.log(bounds))))


def block_shape(env: Any) -> Polygon:
    """The outline of the block in its own frame, counter-clockwise."""
    parts = [Polygon([tuple(v) for v in shape.get_vertices()]).convex_hull for shape in env.unwrapped.block.shapes]
    return orient(shapely.union_all(parts))


def move_shape(shape: Polygon, pose: np.ndarray) -> Polygon:
    """The outline at a pose (x, y, angle)."""
    x, y, angle = (float(v) for v in pose)
    c, s = math.cos(angle), math.sin(angle)
    return affine_transform(shape, [c, -s, s, c, x, y])


def _xy(point: Any) -> np.ndarray:
    return np.array(point if isinstance(point, tuple) else (point.x, point.y))


def _turn(vector: np.ndarray, angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([c * vector[0] - s * vector[1], s * vector[0] + c * vector[1]])


def _limit(vector: np.ndarray, length: float) -> np.ndarray:
    return vector * min(1.0, length / (float(np.linalg.norm(vector)) + 1e-9))
