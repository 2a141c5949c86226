"""The tasks of this package by name. Plain strings, so that `atlas --help` and reports import no environment."""

from typing import NamedTuple


class TaskRow(NamedTuple):
    title: str  # in tables and figures
    spec: str  # module:Class
    has_env: bool = True


TASKS = {
    "tworoom": TaskRow("TwoRoom", "atlas_wm.tasks.tworoom:TwoRoom"),
    "pusht": TaskRow("PushT", "atlas_wm.tasks.pusht:PushT"),
    "cube": TaskRow("OGBench-Cube", "atlas_wm.tasks.cube:Cube"),
    "offline": TaskRow("Offline data", "atlas_wm.tasks.offline:OfflineTask", has_env=False),
}
WITH_ENV = [name for name, row in TASKS.items() if row.has_env]
