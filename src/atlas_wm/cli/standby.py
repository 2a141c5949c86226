"""A process that imports what commands need before it knows which it will run.

Imports take seconds: `atlas study` has them happen while the unit before is still running.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module


def main(modules: Sequence[str]) -> None:
    from atlas_wm.cli import app

    with suppress(Exception):  # the command will say what is missing
        for name in modules:
            import_module(name)
    line = sys.stdin.readline()
    if not line:  # the study is over
        return
    unit = json.loads(line)
    os.environ.update(unit["environment"])
    log = os.open(unit["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, stream)
    app.main(unit["command"])


if __name__ == "__main__":
    main(sys.argv[1:])
