"""Worker processes that may die or hang: the caller gets an error, the other workers continue."""

import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from atlas_wm.errors import UserError, user_code_location

EXIT_GRACE = 5.0  # seconds for a process to exit by itself
TIMEOUT = 300.0  # default for the seconds an environment may take
Request = tuple[Any, ...]  # method name and arguments


@contextmanager
def quiet_start() -> Iterator[None]:
    """A process that is started within leaves Ctrl-C to this one, and imports stable-worldmodel without its warning
    about Atari."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:ale-py not found")))
    resource_tracker.ensure_running()  # the first start would run it, and that unblocks the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a process inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.pop("PYTHONWARNINGS")
        os.environ |= {} if before is None else {"PYTHONWARNINGS": before}


class WorkerDied(Exception):
    """A worker process ended without an answer. The message says how."""


class WorkerProcess:
    """A process that owns an object, ``make(*arguments)``, and calls its methods on request, one at a time.

    It computes on one thread, leaves Ctrl-C to its parent, and exits with it.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        with quiet_start():
            self.process.start()
        theirs.close()  # so the connection closes when the process exits

    def ask(self, what: str, *arguments: Any) -> None:
        with suppress(OSError):  # if it died, answer() reports it
            self.connection.send((what, *arguments))

    def answer(self) -> Any:
        """Return what the method returned, raise what it raised, or :class:`WorkerDied`."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise WorkerDied(self._cause()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _cause(self) -> str:
        self.process.join(EXIT_GRACE)
        code = self.process.exitcode
        if code == -signal.SIGALRM:
            return "an environment took longer than --timeout"
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return (
            f"its process died ({name}): out of memory?"
            if code == -signal.SIGKILL
            else f"its process died ({name})"
        )


def stop(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.connection.close()
    deadline = time.monotonic() + EXIT_GRACE
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()  # if it is still running
        worker.process.join()


class WorkerPool:
    """At most ``count`` worker processes, started when needed and reused."""

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any):
        self.count, self._factory = count, (make, *arguments)
        self._idle: list[WorkerProcess] = []

    def start(self, count: int) -> None:
        """Start processes before there are requests: they make their object meanwhile, and import what it needs."""
        self._idle += [WorkerProcess(*self._factory) for _ in range(min(count, self.count))]

    def each(self, requests: deque[Request]) -> Generator[tuple[Request, Any], None, None]:
        """Yield each request with its answer, as they finish. What a method raises is raised here.

        If a process dies, the answer is a :class:`WorkerDied` and a new process replaces it. The caller may append
        requests while it iterates.
        """
        busy: dict[Any, tuple[WorkerProcess, Request]] = {}
        try:
            while requests or busy:
                while requests and len(busy) < self.count:
                    worker = self._idle.pop() if self._idle else WorkerProcess(*self._factory)
                    request = requests.popleft()
                    worker.ask(*request)
                    busy[worker.connection] = worker, request
                for connection in wait(list(busy)):
                    worker, request = busy.pop(connection)
                    try:
                        answer = worker.answer()
                    except WorkerDied as died:
                        answer = died
                        stop([worker])
                    else:
                        self._idle.append(worker)
                    yield request, answer
        finally:
            for worker, _ in busy.values():
                worker.process.kill()
            stop([worker for worker, _ in busy.values()])

    def close(self) -> None:
        stop(self._idle)
        self._idle = []


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """If the block takes longer, a signal ends this process, even in code that never returns to Python.

    For worker processes, whose parent notices. 0: no limit.
    """
    if not seconds:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def startup_limit(timeout: float) -> float:
    """Seconds that making an environment may take: the first one imports modules and may compile."""
    return timeout and max(timeout, 60.0)


def check_timeout(seconds: float) -> float:
    if not 0 <= seconds < 1e8:
        raise UserError(f"--timeout must be a number of seconds, or 0 for no limit, not {seconds}")
    return seconds


def one_line(error: Exception) -> str:
    """``ValueError: message``, and where in the user's own code it was raised, if it was."""
    location = user_code_location(error)
    return traceback.format_exception_only(error)[-1].strip()[:500] + (f" (at {location})" if location else "")


def _serve(connection: Connection, make: Callable[..., Any], arguments: Request) -> None:
    import torch

    torch.set_num_threads(1)  # there is one worker per core
    target: Any = None
    with suppress(Exception):  # if it fails, the first request tries again and reports it
        target = make(*arguments)
    with suppress(EOFError, OSError):
        while True:
            what, *given = connection.recv()
            try:
                target = target or make(*arguments)
                answer = getattr(target, what)(*given)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            try:
                connection.send(answer)
            except (TypeError, AttributeError, ValueError) as error:  # it cannot be pickled
                connection.send(RuntimeError(f"{one_line(answer) if isinstance(answer, Exception) else error}"))
    if target is not None:
        target.close()
    os._exit(0)  # everything is closed; a regular interpreter exit would take another second
