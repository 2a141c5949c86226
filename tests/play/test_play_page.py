"""The page in a real browser: it loads, a click sets the goal, the agent arrives, the gauge moves."""

from pathlib import Path

import pytest
from browser import BROWSER, open_page

STATUS = "document.querySelector('.status')?.textContent"
NOVELTY = "Number(document.querySelector('.meter').dataset.value)"
SET_DOOR = """(() => { const door = document.getElementById("door.position");
door.value = 150; door.dispatchEvent(new Event("input")); })()"""
# How long the longest pause between two frames of the screen is, over a second.
SMOOTH = """new Promise((done) => { let last = performance.now(), worst = 0, end = last + 1000;
const look = (now) => { worst = Math.max(worst, now - last); last = now;
now < end ? requestAnimationFrame(look) : done(worst); }; requestAnimationFrame(look); })"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_click_sets_a_goal_and_the_agent_arrives(playing, tmp_path):
    with playing(Path("demo")) as server, open_page(server.url, tmp_path / "profile") as page:
        page.resize(1280, 900)
        page.wait(f"{STATUS} === 'ready'", 60)
        page.click("canvas.view", 0.8, 0.75)  # a point in the other room
        goal = "document.querySelector('#goal').toDataURL()"
        before = page.run(goal)
        page.wait(f"{goal} !== {before!r}")
        familiar = page.run(NOVELTY)
        page.click("#go")
        page.wait("document.querySelectorAll('.imagined li img').length === 5")
        assert 0 < page.run("Number(document.querySelector('.risk').dataset.value)") <= 100
        assert "distance that remains" in page.run("document.querySelector('.risk .details').textContent")
        assert page.run(SMOOTH) < 300  # ms, while the server plans and acts; usually 17
        page.wait(f"{STATUS}.startsWith('reached in')")
        assert page.run("document.querySelector('#go').textContent") == "Again"
        assert page.run("document.querySelector('.numbers').textContent").endswith("ms")

        page.run(SET_DOOR)  # which no training frame has there
        page.wait(f"{NOVELTY} === 100")
        assert familiar < 99
        assert page.run("document.querySelector('.meter').classList.contains('flagged')")
        assert "door position 150" in page.run("document.querySelector('#variations').textContent")
        page.click("#restore")
        page.wait(f"{NOVELTY} < 99")

        page.run("document.activeElement.blur()")
        page.key("r")
        page.wait(f"{STATUS} === 'ready'")
        page.key(" ", "Space")
        page.wait(f"{STATUS}.startsWith('step')")
        page.resize(390, 844, mobile=True)  # a phone
        assert page.run("document.documentElement.scrollWidth") == 390
        assert not page.complaints
