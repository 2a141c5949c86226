"""A scripted pusher for PushT: walks around the block, pushes it from any side, walks on.

It has nothing to do with the goal of an episode. It carries the block to a far place by pushes that head there,
does other things for a while (mostly pushes at any point of the outline, which turn the block), and so on.
"""

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

AGENT_RADIUS = 15.0  # px; the environment's own constants
WINDOW = 512.0
ACTION_SCALE = 100.0
# A steady action moves the agent by this share of its length in each step: the environment's position controller
# is critically damped and gets that far in a tenth of a second.
SHARE_PER_STEP = 0.4


@dataclass(frozen=True)
class PusherSettings:
    """Lengths in px, speeds in px a step, ranges as (low, high). Speeds are drawn log-uniformly."""

    walk_speed: tuple[float, float] = (24.0, 48.0)
    push_speed: tuple[float, float] = (9.0, 24.0)
    push_length: tuple[float, float] = (60.0, 260.0)  # of pushes that carry the block nowhere in particular
    push_tilt: float = 0.1  # rad: deviation of a push from the normal of the edge
    push_curve: float = 0.02  # rad a step: how fast its direction changes
    steer: float = 3.0  # how strongly a carrying push keeps behind the block, seen from the destination
    action_noise: float = 0.03
    carry_first: float = 0.85  # probability that an episode begins with carrying
    tries: int = 4  # pushes to get the block to a destination
    between: tuple[int, int] = (0, 3)  # other things done before the next destination
    pause: float = 0.06  # probability that one of them is a pause
    pause_steps: tuple[int, int] = (3, 10)
    stroll: float = 0.08  # probability that it is a walk to a random place; else, a push at any point
    clearance: float = 20.0  # of the agent's centre from the block on the way; its radius is 15
    agent_margin: float = 20.0  # the agent does not go closer to the border
    block_margin: float = 48.0  # the block is not pushed closer: the agent must be able to get behind it again
    destination_margin: float = 130.0  # of the places the block is carried to
    destination_choice: int = 16  # the farthest from the block of as many random places is the next destination
    arrived: float = 40.0  # the block is closer to the destination than that


class Pusher:
    """``get_action(info)`` for one episode; a function of the seed and of what it is shown."""

    def __init__(self, env: gym.Env, seed: int, settings: PusherSettings | None = None):
        self.settings = settings or PusherSettings()
        self._env: Any = env.unwrapped
        self._rng = np.random.default_rng(seed)
        self._shape: Polygon | None = None
        self._script = self._play()
        margin = self.settings.agent_margin
        self._floor = box(margin, margin, WINDOW - margin, WINDOW - margin)

    def get_action(self, info: dict[str, Any]) -> np.ndarray:
        self._shape = self._shape or block_shape(self._env)  # there is no block before the first reset
        self._agent = np.asarray(info["pos_agent"], np.float64)
        self._block = place(self._shape, info["block_pose"])
        action = next(self._script) / ACTION_SCALE + self._rng.normal(0.0, self.settings.action_noise, 2)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _play(self) -> Iterator[np.ndarray]:
        """The steps of an episode, as displacements towards which the agent is drawn."""
        rng, s = self._rng, self.settings
        carry = rng.random() < s.carry_first
        while True:
            if carry:
                places = [self._somewhere(s.destination_margin) for _ in range(s.destination_choice)]
                destination = max(places, key=self._way_to)
                for _ in range(s.tries):
                    if self._way_to(destination) > s.arrived:
                        yield from self._push(destination)
            else:
                for _ in range(rng.integers(*s.between, endpoint=True)):
                    yield from self._something_else()
            carry = not carry

    def _something_else(self) -> Iterator[np.ndarray]:
        rng, s = self._rng, self.settings
        kind = rng.random()
        if kind < s.pause:
            for _ in range(rng.integers(*s.pause_steps, endpoint=True)):
                yield np.zeros(2)
        elif kind < s.pause + s.stroll:
            place_to_go = self._somewhere(s.agent_margin)
            if self._block.distance(Point(place_to_go)) > s.clearance:
                yield from self._walk(place_to_go)
        else:
            yield from self._push(None)

    def _choose_push(self, destination: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """A place beside the block to start from, and the direction to push."""
        rng, s = self._rng, self.settings
        centre = self._centre()
        outline, low = self._block.exterior, s.push_length[0]
        choices = []
        for at in rng.uniform(0.0, outline.length, 32):
            before, after = (_xy(outline.interpolate((at + d) % outline.length)) for d in (-1.0, 1.0))
            normal = np.array([after[1] - before[1], before[0] - after[0]])  # outward: the outline is ccw
            normal /= np.linalg.norm(normal) + 1e-9
            start = (before + after) / 2 + (s.clearance + 4.0) * normal
            score = 0.3 * rng.normal()
            if destination is not None:
                way = _limit(destination - centre, 1.0)
                lever = abs((start - centre) @ _turn(normal, math.pi / 2))
                score += float((_limit(centre - start, 1.0) - normal) @ way) - lever / 80.0
            if not self._floor.contains(Point(start)) or self._block.distance(Point(start)) < s.clearance:
                score -= 100.0  # behind a wall, or in a corner of the T that is too narrow
            if self._beyond_walls(low * -normal) > max(0.0, self._beyond_walls(np.zeros(2))) + 1.0:
                score -= 10.0
            choices.append((score, start, -normal))
        _, start, direction = max(choices, key=lambda choice: choice[0])
        return start, _turn(direction, rng.uniform(-s.push_tilt, s.push_tilt))

    def _walk(self, target: np.ndarray) -> Iterator[np.ndarray]:
        """Go there without touching the block."""
        speed = self._speed(self.settings.walk_speed)
        path = self._path(target)
        for number, point in enumerate(path):
            near = 20.0 if 0 < number < len(path) - 1 else 6.0  # corners are cut
            for _ in range(40):
                way = point - self._agent
                if np.linalg.norm(way) < near:
                    break
                yield _limit(way, speed / SHARE_PER_STEP)

    def _push(self, destination: np.ndarray | None) -> Iterator[np.ndarray]:
        """Walk to the block and push until it has arrived, is carried far enough, lost, or close to a wall."""
        s = self.settings
        start, direction = self._choose_push(destination)
        yield from self._walk(start)
        speed = self._speed(s.push_speed)
        length = self._rng.uniform(*s.push_length) if destination is None else WINDOW
        curve = self._rng.normal(0.0, s.push_curve)
        allowed = max(0.0, self._beyond_walls(np.zeros(2))) + 1.0
        reach = math.ceil((s.clearance + 8.0) / speed) + 3  # steps until the block must have been touched
        for step in range(math.ceil(length / speed) + reach):
            gap = self._block.distance(Point(self._agent)) - AGENT_RADIUS
            block_goes = direction = _turn(direction, curve)
            if destination is not None:
                ahead = _limit(self._centre() - self._agent, 1.0)
                block_goes = way = _limit(destination - self._centre(), 1.0)
                if gap < 3.0:  # the block strays to one side: follow it beyond the line to the destination
                    direction = way + s.steer * (ahead - (ahead @ way) * way)
                    direction /= np.linalg.norm(direction)
                if self._way_to(destination) < s.arrived or (gap < 3.0 and ahead @ way < 0.0):  # or not behind it
                    return
            soon = speed * 2.0
            if max(self._beyond_walls(np.zeros(2)), self._beyond_walls(block_goes * soon)) > allowed:
                return
            lost = step > reach and gap > 6.0
            if lost or not self._floor.contains(Point(self._agent + direction * soon)):
                return
            yield direction * speed / SHARE_PER_STEP

    def _path(self, target: np.ndarray) -> list[np.ndarray]:
        """The shortest way around the block: over the corners of its outline, widened."""
        s = self.settings
        obstacle, lane = self._block.buffer(s.clearance), self._block.buffer(s.clearance + 6.0, join_style="mitre")
        points = [self._agent, target]
        if obstacle.contains(Point(self._agent)):  # after a push: first step back from the block
            free = lane.exterior.intersection(self._floor)
            points[0] = _xy(shapely.shortest_line(free, Point(self._agent)).coords[0])
        corners = [np.array(c) for c in lane.exterior.coords[:-1]]
        points += [c for c in corners if self._floor.contains(Point(c))]
        places = np.stack(points)
        pairs = np.stack(np.broadcast_arrays(places[:, None], places[None]), axis=2)  # (n, n, 2 ends, xy)
        lengths = np.linalg.norm(pairs[:, :, 0] - pairs[:, :, 1], axis=-1)
        lengths[shapely.intersects(obstacle, shapely.linestrings(pairs))] = 0.0  # no way
        _, came_from = dijkstra(lengths, directed=False, indices=0, return_predecessors=True)
        path, at = [], 1
        while at >= 0:  # from the target back; it stands alone where there is no way
            path.append(points[at])
            at = int(came_from[at])
        return path[::-1]

    def _centre(self) -> np.ndarray:
        return _xy(self._block.centroid)

    def _way_to(self, destination: np.ndarray) -> float:
        return float(np.linalg.norm(destination - self._centre()))

    def _beyond_walls(self, shift: np.ndarray) -> float:
        """How far the block, shifted, reaches past the margin."""
        x0, y0, x1, y1 = self._block.bounds
        dx, dy = shift
        margin = self.settings.block_margin
        return max(margin - min(x0 + dx, y0 + dy), max(x1 + dx, y1 + dy) - (WINDOW - margin))

    def _somewhere(self, margin: float) -> np.ndarray:
        return self._rng.uniform(margin, WINDOW - margin, 2)

    def _speed(self, bounds: tuple[float, float]) -> float:
        return float(np.exp(self._rng.uniform(*np.log(bounds))))


def block_shape(env: Any) -> Polygon:
    """The outline of the block in its own frame, counter-clockwise."""
    parts = [Polygon([tuple(v) for v in shape.get_vertices()]).convex_hull for shape in env.unwrapped.block.shapes]
    return orient(shapely.union_all(parts))


def place(shape: Polygon, pose: np.ndarray) -> Polygon:
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
