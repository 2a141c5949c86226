"""What methods and tasks are called in tables and figures."""

NAMES = {
    "atlas": "ATLAS",
    "lewm": "LeWM",
    "lewm+ood": "LeWM + OOD-recovery",
    "wemreg": "WEMReg alone",
    "pldm": "PLDM",
    "dino-wm": "DINO-WM",
    "fast-wm": "FAST-WM",
}
TASKS = {"tworoom": "TwoRoom", "pusht": "PushT", "cube": "OGBench-Cube"}


def method_name(method: str) -> str:
    return NAMES.get(method, method.rpartition(":")[-1])


def task_name(task: str) -> str:
    return TASKS.get(task, task.rpartition(":")[-1])
