"""One thread for torch, for as long as it is asked for."""

from threading import Event, Thread

import torch

from atlas_wm.parallel.devices import one_thread


def test_threads_that_overlap_leave_the_usual_number():
    usual, left, seen = torch.get_num_threads(), Event(), {}
    inside = Event()

    def second():
        with one_thread():
            inside.set()
            left.wait(20)
            seen["within"] = torch.get_num_threads()
        seen["after"] = torch.get_num_threads()

    def new():
        seen["new"] = torch.get_num_threads()

    torch.set_num_threads(3)
    try:
        thread = Thread(target=second)
        with one_thread():
            thread.start()
            assert inside.wait(20)
        assert torch.get_num_threads() == 3
        left.set()
        thread.join()
        fresh = Thread(target=new)
        fresh.start()
        fresh.join()
        assert seen == {"within": 1, "after": 3, "new": 3}
    finally:
        torch.set_num_threads(usual)


def test_one_within_another():
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            with one_thread():
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(usual)
