"""A process that imports what commands need before it knows which it will run.

Imports take seconds: `atlas study` has them happen while the unit before is still running.
"""

import json
import os
import sys
from contextlib import suppress


def main() -> None:
    from atlas_wm.cli import app

    with suppress(Exception):  # the command will say what is missing
        import atlas_wm.evaluate.evaluate
        import atlas_wm.train.loop  # noqa: F401
        from atlas_wm.tasks.base import import_harness

        import_harness()
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
    main()
