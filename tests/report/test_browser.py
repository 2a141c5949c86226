"""The page in a real browser: nothing overflows, nothing is missing, nothing complains."""

import html
import json
import re
import shutil
import subprocess

import pytest
from made_up import make_run

from atlas_wm.report.page import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)  # of screens
# The page in a frame of the width of each screen, and what the frame's document says about itself.
FRAME = '<iframe style="border: 0; width: WIDTHpx; height: 800px" srcdoc="PAGE"></iframe><pre></pre>'
LOOK = """<!doctype html><body>FRAMES
<script>
for (const frame of document.querySelectorAll("iframe")) frame.onload = (event) => {
  const page = event.target.contentDocument;
  for (const fold of page.querySelectorAll("details")) fold.open = true;
  const before = event.target.contentWindow.getComputedStyle(page.body).backgroundColor;
  page.getElementById("theme").click();
  event.target.nextSibling.textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    images: page.querySelectorAll("figure svg").length,
    broken: [...page.images].filter((image) => !image.naturalWidth).length,
    themes: [before, event.target.contentWindow.getComputedStyle(page.body).backgroundColor],
  });
};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_fits_its_screen_without_complaints(tmp_path, without_figure_files):
    runs = [
        make_run(tmp_path / "a-run-with-quite-a-long-name", "atlas"),
        make_run(tmp_path / "lewm+ood", "lewm+ood"),
    ]
    runs.append(make_run(tmp_path / "another-run-with-quite-a-long-name", "atlas", data="0123456789abcdef"))
    page = html.escape(write_report(runs).read_text())
    look = tmp_path / "look.html"
    frames = [FRAME.replace("WIDTH", str(width)).replace("PAGE", page) for width in WIDTHS]
    look.write_text(LOOK.replace("FRAMES", "".join(frames)))
    done = subprocess.run(
        [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=10000",
         "--dump-dom", look.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.findall(r"<pre>(\{.*?\})</pre>", done.stdout)
    assert len(found) == len(WIDTHS), done.stderr[-2000:]
    for width, text in zip(WIDTHS, found, strict=True):
        seen = json.loads(html.unescape(text))
        assert seen["width"] <= width
        assert seen["images"] >= 20 and seen["broken"] == 0
        assert len(set(seen["themes"])) == 2  # the switch switches
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
