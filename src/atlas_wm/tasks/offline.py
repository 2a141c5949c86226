"""Recorded data without an environment, such as that of a robot."""

from typing import Any

from atlas_wm.errors import UserError
from atlas_wm.tasks.base import Task


class OfflineTask(Task):
    """Train, diagnose and plan on a dataset alone. It works as it is (``offline`` on the command line). Derive a
    class from it to name other columns::

        class MyRobot(OfflineTask):
            name = "my_robot"
            image_column = "observation.images.wrist"
            state_columns = (("observation.state",),)
    """

    name = "offline"
    has_env = False
    action_bounds = None  # plans are clipped to the smallest and largest training actions
    state_columns = (("observation.state",), ("state",), ())  # (): data without a state is accepted

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError(f"the task {self.name} has no environment: write a Task with one (docs/guides/own-data.md)")

    make_env = demonstrator = demonstrator_settings = columns = reset = state = distance = solved = _refuse
