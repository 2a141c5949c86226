"""Shared, small and real: one dataset and one run, made once by the code under test."""

import multiprocessing
import os
import shutil
import signal
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see atlas_wm/cli/app.py
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: kernels run in its interpreter, on the CPU

from dataclasses import replace
from pathlib import Path

import pytest

import preloaded
from atlas_wm.parallel import workers
from banks import small_banks


@pytest.fixture(scope="session", autouse=True)
def preloaded_workers():
    """Worker and loader processes that would be spawned start within a tenth of a second. Those of
    `spawned_workers` and `spawned_loaders` start as users' do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "get_context", lambda method: preloaded.PreloadedContext())
        patch.setattr(multiprocessing, "set_start_method", preloaded.set_start_method)
        yield
    preloaded.stop_forkserver()


@pytest.fixture
def spawned_workers(monkeypatch):
    monkeypatch.setattr(workers, "get_context", multiprocessing.get_context)


@pytest.fixture
def spawned_loaders(monkeypatch):
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", context)


@pytest.fixture(scope="session")
def task():
    from atlas_wm.tasks import get_task

    return get_task("tworoom")


@pytest.fixture(scope="session")
def dataset_path(task, tmp_path_factory) -> Path:
    """60 TwoRoom demonstrations without pixels."""
    from atlas_wm.data.collect import collect

    path = tmp_path_factory.mktemp("data") / "tworoom.h5"
    collect(task, path, 60, seed=5, pixels=False, workers=2)
    return path


@pytest.fixture(scope="session")
def tiny_config():
    """The demo recipe, cut down to 12 steps."""
    from atlas_wm.recipes import demo

    config = demo("atlas")
    return replace(
        config,
        train=replace(config.train, steps=12, batch=16, log_every=5, validate_every=6, batchnorm_batches=3),
        plan=replace(config.plan, candidates=40, iterations=3, elites=5),
    )


@pytest.fixture(scope="session")
def trained(task, dataset_path, tiny_config, tmp_path_factory) -> Path:
    """A run folder that nobody writes to, with the same weights whatever ran before it."""
    import torch

    from atlas_wm.train.loop import train

    out, threads = tmp_path_factory.mktemp("runs") / "tiny", torch.get_num_threads()
    torch.set_num_threads(1)
    train(tiny_config, task, dataset_path, out, method="atlas", recipe="demo", device="cpu")
    torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="module")
def run_folder(trained, tmp_path_factory) -> Path:
    """A copy of it, for the tests of one file."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("runs") / "tiny"))


@pytest.fixture
def working_directory(tmp_path, monkeypatch):
    """An empty one. Modules that were imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def few_frames_in_banks():
    with small_banks():
        yield


@pytest.fixture
def in_this_process(monkeypatch):
    """Evaluation without worker processes, which take seconds to start."""
    import torch

    from atlas_wm.evaluate import evaluate
    from atlas_wm.evaluate.worker import Worker

    def here(setup, data, jobs, workers):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield from map(Worker(setup).run, jobs)
        torch.set_num_threads(threads)

    monkeypatch.setattr(evaluate, "run_in_workers", here)


@pytest.fixture
def render_in_this_process(monkeypatch):
    """The check of stored frames before training and evaluation, without its process."""
    from atlas_wm.data import render_check
    from atlas_wm.tasks import get_task

    def here(task, *states):
        return render_check._render(get_task(task), *states)

    monkeypatch.setattr(render_check, "_render_in_subprocess", here)


@pytest.fixture
def demo_model(request):
    """Random weights in eval mode, the modulation (zero at the start) too, so that actions and history matter.

    For 2 action coordinates, or as many as an indirect parameter says."""
    return random_model(getattr(request, "param", 2))


@pytest.fixture
def shallow_model():
    """Such a model whose predictor has one block: Triton's interpreter takes seconds for each."""
    return random_model(2, depth=1)


def random_model(size, **predictor):
    import torch

    from atlas_wm.models.world_model import WorldModel
    from atlas_wm.normalizer import Normalizer
    from atlas_wm.recipes import demo

    torch.manual_seed(0)
    config = demo("atlas").model
    config = replace(config, predictor=replace(config.predictor, **predictor))
    normalizer = Normalizer((3.0, -1.0, 0.0, 0.0, 0.0)[:size], (0.5, 2.0, 1.0, 1.0, 1.0)[:size])
    model = WorldModel(config, action_size=size, normalizer=normalizer)
    for block in model.predictor.blocks:
        torch.nn.init.normal_(block.modulation[-1].weight, std=0.5)
        torch.nn.init.normal_(block.modulation[-1].bias, std=0.5)
    return model.eval()


@pytest.fixture
def bf16_products(monkeypatch):
    """Triton's interpreter multiplies the bits of bf16 numbers as if they were integers; here, the numbers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    )


def pytest_configure(config):
    """`make test-gpu`: kernels run on the GPU, not in Triton's interpreter. `make test`: one thread per process."""
    asked = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    if all(path.is_relative_to(Path(__file__).parent / "gpu") for path in asked):
        os.environ.pop("TRITON_INTERPRET", None)
    if hasattr(config, "workerinput"):  # a process of xdist, of which there is one for each core
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that none of them is left for the end, when the others are done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)  # there is none without xdist
def pytest_xdist_make_scheduler(config, log):
    """A process takes whole files, which have expensive fixtures; all that share the diagnosed runs go to one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/diagnose" if nodeid.startswith("tests/diagnose/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture
def heard_interrupts():
    """A shell has them ignored by what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
