"""Work in processes that may die or hang: the one who asked learns of it, and the rest goes on."""

import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from atlas_wm.errors import UserError, user_code_location

PATIENCE = 5.0  # seconds for processes to end by themselves
TIMEOUT = 300.0  # seconds an environment may take, unless told otherwise
Request = tuple[Any, ...]  # the name of a method and its arguments


class Died(Exception):
    """A process ended instead of answering. The message says how."""


class Helper:
    """A process with an object of its own, ``make(*arguments)``, whose methods can be asked for, one at a time.

    It computes on one thread, ignores Ctrl-C, which is for the process that asks, and ends with it.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process ends the connection

    def ask(self, what: str, *arguments: Any) -> None:
        with suppress(OSError):  # it died: the answer says how
            self.connection.send((what, *arguments))

    def answer(self) -> Any:
        """What the method returned, or raised; :class:`Died` if the process did."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise Died(self._cause()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _cause(self) -> str:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        if code == -signal.SIGALRM:
            return "an environment took longer than --timeout"
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        return (
            f"its process died ({name}): out of memory?"
            if code == -signal.SIGKILL
            else f"its process died ({name})"
        )


def end(helpers: Sequence[Helper]) -> None:
    for helper in helpers:
        helper.connection.close()
    deadline = time.monotonic() + PATIENCE
    for helper in helpers:
        helper.process.join(max(0.0, deadline - time.monotonic()))
        helper.process.kill()  # where it has not ended
        helper.process.join()


class Helpers:
    """At most ``count`` helpers that share work, started when they are needed and kept for more."""

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any):
        self.count, self._made_of = count, (make, *arguments)
        self._idle: list[Helper] = []

    def each(self, requests: deque[Request]) -> Generator[tuple[Request, Any], None, None]:
        """Each request and its answer as they come. What a method raises is raised here.

        Where a process died over a request, the answer is :class:`Died` and another process takes its place.
        Requests may be appended meanwhile.
        """
        busy: dict[Any, tuple[Helper, Request]] = {}
        try:
            while requests or busy:
                while requests and len(busy) < self.count:
                    helper = self._idle.pop() if self._idle else Helper(*self._made_of)
                    request = requests.popleft()
                    helper.ask(*request)
                    busy[helper.connection] = helper, request
                for connection in wait(list(busy)):
                    helper, request = busy.pop(connection)
                    try:
                        answer = helper.answer()
                    except Died as died:
                        answer = died
                        end([helper])
                    else:
                        self._idle.append(helper)
                    yield request, answer
        finally:
            for helper, _ in busy.values():
                helper.process.kill()
            end([helper for helper, _ in busy.values()])

    def close(self) -> None:
        end(self._idle)
        self._idle = []


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A block that takes longer ends this process, by a signal: even code that never comes back to Python.

    For helpers, whose end is noticed. 0: any time.
    """
    if not seconds:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def to_make(timeout: float) -> float:
    """Seconds to make an environment in: its first one imports and may compile, however short its episodes are."""
    return timeout and max(timeout, 60.0)


def check_timeout(seconds: float) -> float:
    if not 0 <= seconds < 1e8:
        raise UserError(f"--timeout must be a number of seconds, or 0 for any time, not {seconds}")
    return seconds


def one_line(error: Exception) -> str:
    """``ValueError: what it says``, for a record, and where in the user's own code, if it came from there."""
    place = user_code_location(error)
    return traceback.format_exception_only(error)[-1].strip()[:500] + (f" (at {place})" if place else "")


def _serve(connection: Connection, make: Callable[..., Any], arguments: Request) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # there are as many helpers as cores
    made: Any = None
    with suppress(EOFError, OSError):
        while True:
            what, *given = connection.recv()
            try:
                made = made or make(*arguments)
                answer = getattr(made, what)(*given)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            try:
                connection.send(answer)
            except (TypeError, AttributeError, ValueError) as error:  # it cannot be pickled, as some exceptions
                connection.send(RuntimeError(f"{one_line(answer) if isinstance(answer, Exception) else error}"))
    if made is not None:
        made.close()
    os._exit(0)  # all is closed: to take the interpreter down with its many modules would take another second
