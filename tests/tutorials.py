"""Pages of the documentation that tests execute, block after block, in this process."""

import re
import shlex
from pathlib import Path

from atlas_wm.cli.app import main

DOCS = Path(__file__).parent.parent / "docs"


def read_blocks(page: str) -> list[tuple[str, str]]:
    """(python or sh, text) of each block."""
    return re.findall(r"```(python|sh)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_block(kind: str, text: str) -> None:
    if kind == "python":
        exec(text, {})
        return
    for command in text.splitlines():
        atlas, *arguments = shlex.split(command)
        assert atlas == "atlas"
        main(arguments)
