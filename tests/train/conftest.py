from pathlib import Path

import pytest
import torch
from short_runs import short_config, short_train, small_banks


@pytest.fixture(autouse=True)
def few_frames_in_banks():
    with small_banks():
        yield


@pytest.fixture(scope="module")
def one_thread():
    """The same sums in the same order, in this process and in others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def undisturbed(dataset_path, tmp_path_factory) -> Path:
    """The short run, from the beginning to the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = short_train(short_config(), dataset_path, tmp_path_factory.mktemp("whole") / "run")
    torch.set_num_threads(threads)
    return run
