"""TwoRoom that draws something else, or nothing; in a file that another process imports quickly."""

import gymnasium as gym
import numpy as np

from atlas_wm.tasks.tworoom import TwoRoom


class BlueForRed(gym.Wrapper):
    def render(self):
        return np.ascontiguousarray(self.env.render()[..., ::-1])


class OtherColour(TwoRoom):
    """As an environment of another version, in which the agent is of another colour."""

    def make_env(self):
        return BlueForRed(super().make_env())


class Offline(TwoRoom):
    def make_env(self):
        raise RuntimeError("there is only data")
