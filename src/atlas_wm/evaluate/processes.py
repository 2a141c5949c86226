"""Stages in processes of their own: many environments work while one planner plans for all of them."""

import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from atlas_wm.errors import UserError
from atlas_wm.evaluate.stage import Seen, Stage
from atlas_wm.tasks import get_task

PATIENCE = 5.0  # seconds for processes to end by themselves


class StageProcesses:
    """Several stages, each in its process, used like one: episode k is on stage k modulo their number."""

    def __init__(self, task: str, image_size: int, count: int):
        self._processes = [_Process(task, image_size) for _ in range(count)]
        for process in self._processes:
            process.send("open")  # at once: importing takes seconds, in which the planner can be set up

    @cached_property
    def _spaces(self) -> list[Any]:
        return [process.receive() for process in self._processes]

    def open(self) -> Any:
        return self._spaces[0]

    def ask(self, what: str, by_number: dict[int, Any], *arguments: Any) -> None:
        self.open()
        count = len(self._processes)
        for i, process in enumerate(self._processes):
            process.send(what, {k: item for k, item in by_number.items() if k % count == i}, *arguments)

    def answer(self) -> Seen:
        """Waits for all of them. The order is that of the numbers, whatever the number of processes."""
        seen = [item for process in self._processes for item in process.receive().items()]
        return dict(sorted(seen, key=lambda item: item[0]))

    def close(self) -> None:
        for process in self._processes:
            process.connection.close()
        deadline = time.monotonic() + PATIENCE
        for process in self._processes:
            process.process.join(max(0.0, deadline - time.monotonic()))
            process.process.kill()  # where it has not ended


@dataclass(frozen=True)
class _Failure:
    message: str
    traceback: str


class _Process:
    def __init__(self, task: str, image_size: int):
        context = get_context("spawn")
        self.task = task
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, task, image_size), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process ends the connection

    def send(self, *request: Any) -> None:
        with suppress(OSError):  # it died: what is then received says how
            self.connection.send(request)

    def receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise UserError(
                f"a process with environments of {self.task} died ({self._cause()}): "
                "try fewer --workers if memory is short"
            ) from None
        if isinstance(answer, _Failure):
            error = UserError(answer.message)
            error.add_note(answer.traceback)
            raise error
        return answer

    def _cause(self) -> str:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


def _serve(connection: Connection, task: str, image_size: int) -> None:
    """Answer requests until the planner's process closes the connection or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the planner's process, which then ends this one
    torch.set_num_threads(1)  # there are as many stages as cores
    stage: Stage | None = None
    with suppress(EOFError, OSError):
        while True:
            what, *arguments = connection.recv()
            try:
                stage = stage or Stage(get_task(task), image_size)
                answer = getattr(stage, what)(*arguments)
            except Exception as error:
                line = traceback.format_exception_only(error)[-1].strip()
                message = str(error) if isinstance(error, UserError) else f"an environment of {task} failed: {line}"
                answer = _Failure(message, traceback.format_exc())
            connection.send(answer)
    if stage is not None:
        stage.close()
    os._exit(0)  # all is closed: to take the interpreter down with its many modules would take another second
