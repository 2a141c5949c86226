"""A CUDA graph on the CPU: records the tensor operations of a capture, and replays them on the same memory.

As in a real graph, a replay runs no Python: numbers are those of the capture, tensors are read from where they lie,
and results are written to where the capture wrote them.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self):
        self.calls, self.replays = [], 0

    def replay(self):
        self.replays += 1
        if self.replays == 1:  # the recording has computed already, which a capture does not
            return
        with torch.no_grad():
            for function, args, kwargs, result in self.calls:
                for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                        old.copy_(new)


class NoStream:
    def wait_stream(self, other):
        pass


def record_graphs(monkeypatch):
    """Let ``torch.cuda`` record on the CPU. Returns the options of the captures."""
    asked = []

    @contextmanager
    def capture(graph, **options):
        asked.append(options)
        with Recorder() as recorder:
            yield
        graph.calls = recorder.calls

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: NoStream())
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return asked
