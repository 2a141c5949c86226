"""A headless Chromium, driven through its DevTools protocol over a websocket: no further package is needed."""

import base64
import json
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from websockets.sync.client import connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Page:
    def __init__(self, socket):
        self.socket, self.number, self.complaints = socket, 0, []
        for domain in ("Runtime", "Page", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            got = json.loads(self.socket.recv(timeout=30))
            if got.get("id") == self.number:
                assert "error" not in got, got
                return got["result"]
            self._listen(got)

    def _listen(self, event):
        what, details = event["method"], event["params"]
        bad = {
            "Runtime.exceptionThrown": True,
            "Runtime.consoleAPICalled": details.get("type") in ("error", "warning", "assert"),
            "Log.entryAdded": details.get("entry", {}).get("level") in ("error", "warning"),
            "Network.loadingFailed": True,
        }
        if bad.get(what):
            self.complaints.append(details)

    def run(self, script):
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script, seconds=30.0):
        until = time.monotonic() + seconds
        while not (value := self.run(script)):
            seen = self.run("document.body?.innerText")
            assert time.monotonic() < until, f"not true within {seconds} s: {script}\n{seen}\n{self.complaints}"
            time.sleep(0.05)
        return value

    def resize(self, width, height, mobile=False):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def click(self, selector, x=0.5, y=0.5):
        """In an element, at shares of its width and height."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        script = f"(({{left, top, width, height}}) => [left + {x} * width, top + {y} * height])"
        at = self.run(f"{script}(document.querySelector({selector!r}).getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": at[0], "y": at[1], "button": "left", "clickCount": 1}
            self.ask("Input.dispatchMouseEvent", type=kind, **where)

    def key(self, key, code=None):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=code or key)

    def screenshot(self, path: Path, whole=False):
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def open_page(url: str, folder: Path):
    """A page at ``url``; ``folder``: for the browser's profile."""
    command = [str(BROWSER), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        port_file, until = folder / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert browser.poll() is None and time.monotonic() < until, "Chromium does not start"
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as control:
            control.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
            target = json.loads(control.recv(timeout=30))["result"]["targetId"]
        with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
            page = Page(socket)
            page.ask("Page.navigate", url=url)
            yield page
    finally:
        browser.kill()
        browser.wait()
