"""The session behind the page, without a browser: what messages do, and what the page sees."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atlas_wm.errors import UserError
from atlas_wm.plan.planner import Planner
from atlas_wm.play.boards import CubeBoard, Handle, PushTBoard, TwoRoomBoard
from atlas_wm.play.load import load_session
from atlas_wm.play.session import Session
from atlas_wm.runs.model import load_model
from atlas_wm.tasks.cube import CUBE


@pytest.fixture(scope="module")
def make_session(trained):
    return load_session([Path("demo"), trained], None, "cpu", lambda plan: plan)


@pytest.fixture
def session(make_session):
    session = make_session()
    yield session
    session.close()


def events(session: Session) -> list[dict]:
    """What the page gets, as it arrives there."""
    seen = json.loads(json.dumps(session.events, allow_nan=False))
    session.events.clear()
    return seen


def play(session: Session) -> list[dict]:
    session.handle({"do": "go"})
    while session.advance() is not None:
        pass
    return events(session)


def image(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_a_page_begins_with_the_models_and_the_scene(session, task):
    hello, scene = events(session)
    assert [player["method"] for player in hello["players"]] == ["ATLAS", "ATLAS"]
    assert {one["name"] for one in hello["variations"]} >= {"door.position", "agent.color"}
    first, second = scene["lanes"]
    assert first["image"] == second["image"] and image(first["image"]).shape == (224, 224, 3)
    shown = task.draw(np.array([[60.0, 60.0]]), 224)[0].permute(1, 2, 0).numpy()
    assert np.array_equal(image(first["image"]), shown)
    assert set(first["now"]) == {"frame", "goal"} and set(first["now"]["frame"]) == {"latent", "image"}


def test_the_agent_arrives_and_the_page_sees_how(session):
    session.lanes.pop()  # a model of a few steps seldom arrives
    session.handle({"do": "move", "which": "goal", "name": "agent", "x": 0.8, "y": 0.6})
    events(session)
    seen = play(session)
    assert seen[-1] == {"event": "end"} and seen[-2]["reached"] and seen[-2]["distance"] < 16
    plans = [event for event in seen if event["event"] == "plan"]
    for plan in plans:
        assert len(plan["costs"]) == 10 and plan["costs"][-1] < plan["costs"][0]
        assert len(plan["imagined"]) == 5 and image(plan["imagined"][0]["image"]).shape == (32, 32, 3)
        assert plan["path"] and len(plan["path"][0]) == 2
        assert {one["share"] for one in plan["fan"]} == {0.0, 0.44, 1.0} or len(plan["fan"]) < 3
    # The path is where the agent then goes: the environment is the same.
    steps = [event for event in seen if event["event"] == "step"]
    went = [[step["handles"][0]["x"], step["handles"][0]["y"]] for step in steps[:25]]
    assert np.allclose(went, plans[0]["path"][1 : len(went) + 1], atol=1e-4)


def test_tracing_a_search_does_not_change_its_plan(session):
    (lane, *_), planner = session.lanes, Planner(load_model("demo"))
    frame, goal = lane.env.render(), session.goal_image
    traced, plain = lane.player.plan(frame, goal, 3, None), planner.plan(frame, goal, seed=3)
    assert np.array_equal(traced.actions, plain.actions) and traced.cost == plain.cost


def test_both_models_get_the_same_goal(session):
    seen = play(session)
    assert {event["lane"] for event in seen if event["event"] == "plan"} == {0, 1}
    assert {event["lane"] for event in seen if event["event"] == "step"} == {0, 1}
    assert session.lanes[0].reached and seen[-1] == {"event": "end"}


def test_novelty_reacts_to_the_scene(session):
    before = events(session)[-1]["lanes"][0]["now"]["frame"]["image"]
    for values in ({"door.position": [150, 150, 150]}, {"agent.color": [0, 0, 255]}):
        session.handle({"do": "vary", "values": values})
        scene = events(session)[-1]
        assert scene["lanes"][0]["now"]["frame"]["image"] == 100 > before
    session.handle({"do": "vary", "values": {}})
    assert events(session)[-1]["lanes"][0]["now"]["frame"]["image"] == before


def test_a_new_goal_during_an_attempt_is_followed_from_there(session):
    session.handle({"do": "go"})
    for _ in range(8):
        session.advance()
    here = session.task.state(session.lanes[0].env)
    session.handle({"do": "move", "which": "goal", "name": "agent", "x": 0.3, "y": 0.7})
    assert session.running and np.array_equal(session.task.state(session.lanes[0].env), here)
    session.handle({"do": "reset"})
    assert not session.running and np.allclose(session.task.state(session.lanes[0].env), [60, 60])


def test_frames_of_the_dataset_are_goals(session, trained):
    session.lanes.reverse()  # the first model's dataset, which is there
    session.handle({"do": "frames", "page": 1})
    seen = events(session)[-1]
    assert seen["event"] == "frames" and len(seen["frames"]) == 24
    row = seen["frames"][5]["row"]
    session.handle({"do": "frame", "row": row, "before": 25})
    assert np.array_equal(session.goal, session._data.states[row])
    assert np.array_equal(session.start, session._data.states[row - min(25, session._data.locate([row])[1][0])])


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"do": "delete"},
        {"do": "move", "which": "goal", "name": "door", "x": 0.5, "y": 0.5},
        {"do": "move", "which": "goal", "name": "agent", "x": "a", "y": float("nan")},
        {"do": "vary", "values": {"door.position": ["x"]}},
        {"do": "vary", "values": {"door.position": [1e9]}},
        {"do": "vary", "values": {"task.min_steps": [20]}},
        {"do": "frame", "row": 3},
        {"do": "frames", "page": -1},
        {"do": "frames"},
    ],
)
def test_what_cannot_be_done_is_said(session, message):
    """The last: the model that comes with the package has no dataset here."""
    events(session)
    session.handle(message)
    seen = events(session)
    assert [event["event"] for event in seen] == ["error"] and seen[0]["text"]


def test_runs_of_different_tasks_are_refused(trained, monkeypatch):
    from atlas_wm.play import load

    player = load.load_player

    def other(run, *rest):
        found = player(run, *rest)
        if str(run) != "demo":
            from dataclasses import replace

            found.planner.model.run = replace(found.planner.model.run, task="pusht")
        return found

    monkeypatch.setattr(load, "load_player", other)
    with pytest.raises(UserError, match="different tasks, pusht and tworoom"):
        load_session([Path("demo"), trained], None, "cpu", lambda plan: plan)


def test_goals_stay_inside_the_rooms():
    board = TwoRoomBoard()
    inside = board.moved(np.zeros(2), Handle("agent", -1.0, 2.0))
    assert (inside >= 21).all() and (inside <= 203).all()
    assert abs(board.moved(np.zeros(2), Handle("agent", 0.51, 0.5))[0] - 112) >= 10


def test_the_parts_of_pusht_move_by_themselves():
    board, state = PushTBoard(), np.array([100.0, 100.0, 250.0, 250.0, 1.0, 3.0, 4.0])
    block, disc = board.handles(state)
    assert (block.name, block.angle, disc.name, disc.angle) == ("T", 1.0, "disc", None)
    moved = board.moved(state, Handle("T", 0.5, 0.25, 7.0))
    assert np.allclose(moved, [100, 100, 256, 128, 7.0 - 2 * np.pi, 0, 0])
    assert np.allclose(board.moved(state, Handle("disc", 0.5, 0.25)), [256, 128, 250, 250, 1, 0, 0])
    assert board.point(state) == (100 / 512, 100 / 512)


def test_the_cube_is_where_the_camera_shows_it():
    pytest.importorskip("mujoco")
    from atlas_wm.tasks import get_task

    task, board = get_task("cube"), CubeBoard()
    env = task.make_env()
    env.reset(seed=0)
    camera = env.unwrapped.model.camera("front_pixels")
    assert np.allclose(camera.pos, board.camera) and camera.fovy[0] == 45
    axes = env.unwrapped.data.cam_xmat[camera.id].reshape(3, 3).T
    assert np.allclose(axes, board.axes, atol=1e-6)
    state = task.full_state(env)
    (cube,) = board.handles(state)
    again = board.moved(state, cube)
    assert np.allclose(again[CUBE][:3], state[CUBE][:3], atol=1e-6)  # there and back
    task.reset(env, again, board.moved(state, Handle("cube", 0.7, 0.6)))
    assert not task.solved(task.state(env), board.moved(state, Handle("cube", 0.7, 0.6)))
    sky = board.moved(state, Handle("cube", 0.5, -5.0))[CUBE][:2]
    assert (sky >= board.low).all() and (sky <= board.high).all()
    env.close()
