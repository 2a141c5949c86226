"""What of a task's state can be seen and moved in its image. Positions are shares of the image's sides."""

from typing import NamedTuple

import numpy as np

from atlas_wm.tasks import Task
from atlas_wm.tasks.cube import CUBE, POSITIONS, STATE


class Handle(NamedTuple):
    """A part of the state that the page can drag."""

    name: str
    x: float
    y: float
    angle: float | None = None  # radians; None: it cannot be turned


class Board:
    """Of a task that is not listed below: its goals are frames of the dataset, and no paths are drawn."""

    variations: tuple[str, ...] = ()  # that the page offers, by their names in stable-worldmodel
    first: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # start and goal; None: the environment's

    def handles(self, state: np.ndarray) -> list[Handle]:
        return []

    def moved(self, state: np.ndarray, handle: Handle) -> np.ndarray:
        """The state with this handle elsewhere."""
        raise NotImplementedError

    def point(self, state: np.ndarray) -> tuple[float, float] | None:
        """Where a path of states goes through the image."""
        first = next(iter(self.handles(state)), None)
        return None if first is None else (first.x, first.y)


class TwoRoomBoard(Board):
    size, wall, thickness = 224.0, 112.0, 10.0  # px
    margin = 21.0  # of the walls around, and of the dot
    variations = ("door.position", "agent.color", "wall.color", "background.color")
    first = ((60.0, 60.0), (170.0, 90.0))

    def handles(self, state: np.ndarray) -> list[Handle]:
        return [Handle("agent", float(state[0]) / self.size, float(state[1]) / self.size)]

    def moved(self, state: np.ndarray, handle: Handle) -> np.ndarray:
        x, y = (float(np.clip(v * self.size, self.margin, self.size - self.margin)) for v in handle[1:3])
        half = self.thickness  # the wall's half, and room for the dot
        if abs(x - self.wall) < half:
            x = self.wall + (half if x >= self.wall else -half)
        return np.array([x, y], np.float32)


class PushTBoard(Board):
    size, margin = 512.0, 40.0  # px
    variations = ("block.color", "agent.color", "background.color")

    def handles(self, state: np.ndarray) -> list[Handle]:
        (x, y), (bx, by) = state[:2] / self.size, state[2:4] / self.size
        return [Handle("T", float(bx), float(by), float(state[4])), Handle("disc", float(x), float(y))]

    def moved(self, state: np.ndarray, handle: Handle) -> np.ndarray:
        state = np.array(state, np.float64)
        margin = self.margin if handle.name == "disc" else 2 * self.margin
        at = np.clip(np.array(handle[1:3]) * self.size, margin, self.size - margin)
        if handle.name == "disc":
            state[:2] = at
        else:
            state[2:4] = at
            state[4] = (handle.angle if handle.angle is not None else state[4]) % (2 * np.pi)
        state[5:7] = 0.0  # at rest
        return state

    def point(self, state: np.ndarray) -> tuple[float, float]:
        return float(state[0]) / self.size, float(state[1]) / self.size


class CubeBoard(Board):
    """The cube lies on the table, seen by a fixed camera. No paths are drawn: the state does not say where the
    gripper is."""

    variations = ("cube.color",)
    # The camera's position, and its axes to the right, up and backwards; the image's height is 1 at this distance.
    camera = np.array([1.053, -0.014, 0.639])
    axes = np.array([[0.0, 1.0, 0.0], [-0.62810427, 0.0, 0.77812918], [0.77812918, 0.0, 0.62810427]])
    distance = 0.5 / np.tan(np.deg2rad(45) / 2)
    low, high, height = np.array([0.3, -0.3]), np.array([0.55, 0.3]), 0.02  # m, where cubes lie

    def handles(self, state: np.ndarray) -> list[Handle]:
        right, up, back = self.axes @ (state[CUBE][:3] - self.camera)
        return [Handle("cube", float(0.5 - self.distance * right / back), float(0.5 + self.distance * up / back))]

    def moved(self, state: np.ndarray, handle: Handle) -> np.ndarray:
        ray = np.array([handle.x - 0.5, 0.5 - handle.y, -self.distance]) @ self.axes
        if ray[2] > -1e-3:  # at or above the horizon
            ray[2] = -1e-3
        at = self.camera + ray * (self.height - self.camera[2]) / ray[2]
        state = np.array(state[:STATE], np.float64)
        state[CUBE] = [*np.clip(at[:2], self.low, self.high), self.height, 1.0, 0.0, 0.0, 0.0]
        state[POSITIONS:] = 0.0  # at rest
        return state

    def point(self, state: np.ndarray) -> None:
        return None


BOARDS: dict[str, type[Board]] = {"tworoom": TwoRoomBoard, "pusht": PushTBoard, "cube": CubeBoard}


def board_of(task: Task) -> Board:
    return BOARDS.get(task.name, Board)()
