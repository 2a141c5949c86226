"""Plans over the network are those of a planner in this process; sessions remember the goal and the last plan."""

import json
import logging
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from websockets.sync.client import connect

from atlas_wm.client import RemoteError, pack, unpack


def same(remote, local):
    fields = ("actions", "cost", "start_cost", "remaining", "risk", "rest", "novelty")
    return all(np.array_equal(getattr(remote, name), getattr(local, name)) for name in fields)


@pytest.fixture
def running(serving, planner):
    with serving(planner) as running:
        yield running


def test_a_remote_plan_is_the_plan_of_this_process(running, planner, frames):
    with running.client() as client:
        remote = client.plan(frames[0], frames[1], seed=3, latents=True)
        local = planner.plan(frames[0], frames[1], seed=3)
        assert same(remote, local) and np.array_equal(remote.latents, local.latents)
        assert remote.novelty.frame_image == local.novelty.frame_image and max(remote.novelty) <= 100
        assert client.plan(frames[0], frames[1]).latents is None
        assert not same(client.plan(frames[0], frames[1], seed=4), local)
        seconds = remote.seconds
        assert seconds["waiting"] >= 0 and seconds["planning"] > 0
        assert seconds["waiting"] + seconds["planning"] <= seconds["total"] < 10
        assert client.metadata["task"] == "tworoom" and client.metadata["action_size"] == 2
        assert client.metadata["warm_start"] and client.metadata["execute"] == 2


def test_without_a_goal_the_last_goal_and_the_last_plan_are_used(running, planner, frames):
    first = planner.plan(frames[0], frames[1])
    warm = planner.plan(frames[2], frames[1], last=first)
    cold = planner.plan(frames[2], frames[1])
    assert not same(warm, cold)
    with running.client() as client, running.client() as other:
        assert same(client.plan(frames[0], frames[1]), first)
        other.plan(frames[5], frames[6])  # of no concern to the first client
        assert same(client.plan(frames[2]), warm)
        remote = client.plan(frames[0], frames[1])
        assert same(client.plan(frames[2], frames[1]), cold)  # a goal begins anew
        assert same(client.plan(frames[2], frames[1], last=remote), warm)
        client.reset()
        with pytest.raises(RemoteError, match="no goal is set: send the goal image"):
            client.plan(frames[2])
        assert same(client.plan(frames[0], frames[1]), first)


def test_plans_do_not_depend_on_the_rest_of_their_batch(serving, planner, held, frames):
    alone = [planner.plan(frames[i], frames[7 - i], seed=i) for i in range(8)]
    held.armed = True
    with serving(planner, max_batch=8, max_wait_ms=200) as running, ThreadPoolExecutor(8) as pool:
        held.release.set()
        clients = [running.client() for _ in range(8)]
        asked = [pool.submit(clients[i].plan, frames[i], frames[7 - i], seed=i) for i in range(8)]
        assert all(same(request.result(), plan) for request, plan in zip(asked, alone, strict=True))
        assert max(held.sizes) > 1 and sum(held.sizes) >= 8
        for client in clients:
            client.close()


def test_a_request_waits_for_other_clients_and_no_longer_than_asked(serving, planner, frames):
    with serving(planner, max_batch=8, max_wait_ms=300) as running, running.client() as client:
        assert client.plan(frames[0], frames[1]).seconds["waiting"] < 0.25  # nobody else can ask
        with running.client():
            assert 0.29 < client.plan(frames[0]).seconds["waiting"] < 2


def test_clients_that_ask_again_at_once_are_planned_together(serving, planner, held, frames):
    """Although some of them asked while the others' batch was planned."""
    with serving(planner, max_batch=8, max_wait_ms=400) as running, ThreadPoolExecutor(4) as pool:
        clients = [running.client() for _ in range(4)]
        held.armed = True
        early = pool.submit(clients[0].plan, frames[0], frames[1])  # alone, after waiting for the others
        assert held.started.wait(10)
        late = [pool.submit(client.plan, frames[0], frames[1]) for client in clients[1:]]
        time.sleep(0.5)
        held.release.set()
        early.result()
        again = pool.submit(clients[0].plan, frames[0])
        for request in [*late, again]:
            request.result()
        assert held.sizes[-1] == 4
        for client in clients:
            client.close()


def test_a_failing_plan_hurts_only_its_own_client(serving, planner, frames, monkeypatch):
    plan_batch, poison = planner.plan_batch, frames[5]

    def fragile(images, *rest):
        if any((image == planner.prepare(torch_image(poison))[0]).all() for image in images):
            raise RuntimeError("out of luck")
        return plan_batch(images, *rest)

    monkeypatch.setattr(planner, "plan_batch", fragile)
    with serving(planner, max_batch=2, max_wait_ms=500) as running, ThreadPoolExecutor(2) as pool:
        good, bad = running.client(), running.client()
        fine = pool.submit(good.plan, frames[0], frames[1])
        broken = pool.submit(bad.plan, poison, frames[1])
        with pytest.raises(RemoteError, match="see the server's log"):
            broken.result()
        assert len(fine.result().actions) == 10
        assert len(bad.plan(frames[0]).actions) == 10


def torch_image(image):
    from atlas_wm.images import frame_to_tensor

    return frame_to_tensor(image)


def test_the_event_loop_answers_while_a_plan_is_computed(serving, planner, held, frames):
    with serving(planner) as running, running.client() as client:
        held.armed = True
        asking = threading.Thread(target=client.plan, args=(frames[0], frames[1]))
        asking.start()
        assert held.started.wait(10)
        with urllib.request.urlopen(f"{running.http}/healthz", timeout=5) as answer:
            assert answer.read() == b"OK\n"
        assert asking.is_alive()
        held.release.set()
        asking.join(10)


def test_clients_of_openpi_are_understood(running, planner, frames):
    """Arrays as maps with keys of bytes; metadata first, then a map with actions and server_timing."""

    def array(x):
        return {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}

    with connect(running.ws, compression=None) as socket:
        assert unpack(socket.recv())["server"] == "atlas-wm"
        socket.send(pack({"frame": array(frames[0]), "goal": array(frames[1])}))
        answer = unpack(socket.recv())
    assert np.array_equal(answer["actions"], planner.plan(frames[0], frames[1]).actions)
    assert set(answer["server_timing"]) == {"waiting", "planning", "total"}


def form(tmp_path, frame, goal, **fields):
    boundary, body = "x1", b""
    for name, image in (("frame", frame), ("goal", goal)):
        Image.fromarray(image).save(tmp_path / f"{name}.png")
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n'.encode()
        body += b"Content-Type: image/png\r\n\r\n" + (tmp_path / f"{name}.png").read_bytes() + b"\r\n"
    for name, value in fields.items():
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def test_two_image_files_over_http(running, planner, frames, tmp_path):
    body, headers = form(tmp_path, frames[0], frames[1], seed=3, latents="true")
    request = urllib.request.Request(f"{running.http}/plan", body, headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        found = json.load(answer)
    plan = planner.plan(frames[0], frames[1], seed=3)
    assert np.array_equal(np.array(found["actions"], np.float32), plan.actions)
    assert np.array_equal(np.array(found["latents"], np.float32), plan.latents)
    assert found["cost"] == plan.cost and found["novelty"] == plan.novelty._asdict()


def test_a_plan_over_http_is_answered_although_the_server_stops(serving, planner, held, frames, tmp_path, caplog):
    body, headers = form(tmp_path, frames[0], frames[1])
    with serving(planner) as running, ThreadPoolExecutor(1) as pool:
        running.client().close()  # it has started
        running.server.config.timeout_graceful_shutdown = 0.1
        held.armed = True
        request = urllib.request.Request(f"{running.http}/plan", body, headers)
        asked = pool.submit(urllib.request.urlopen, request, timeout=20)
        assert held.started.wait(10)
        running.server.should_exit = True
        time.sleep(1)
        held.release.set()
        with asked.result() as answer:
            assert answer.status == 200 and len(json.load(answer)["actions"]) == 10
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []
