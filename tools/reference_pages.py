"""Write docs/reference/cli.md and config.md from the code: `make docs` runs it, and a test compares the pages."""

import argparse
import dataclasses
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from atlas_wm.cli.app import COMMANDS
from atlas_wm.cli.train import make_train
from atlas_wm.config import RunConfig
from atlas_wm.recipes import RECIPES

PAGES = Path(__file__).parent.parent / "docs" / "reference"
HINT = re.compile(r"\s*\((?:default: (?P<default>.*)|required)\)$", re.S)  # what tyro puts behind a help text
WIDE = 41  # characters: a longer list of values is left to the description
SETTINGS = tuple(f"--{part.name}." for part in dataclasses.fields(RunConfig))


def parser_of(command: Callable[..., None]) -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro has no other public view of its flags
        return tyro.extras.get_parser(command)


def links(text: str) -> str:
    """`docs/x.md` in a help text becomes a link from this folder."""

    def link(found: re.Match[str]) -> str:
        path = found[1].removeprefix("reference/") if found[1].startswith("reference/") else f"../{found[1]}"
        return f"[{found[1]}]({path}.md)"

    return re.sub(r"docs/([\w/-]+)\.md", link, text)


def cell(text: str) -> str:
    return links(" ".join(text.split()).replace("|", "\\|"))


def row(action: argparse.Action) -> tuple[str, str, str]:
    """Flag or argument, default, description."""
    hint = HINT.search(action.help or "")
    meaning = HINT.sub("", action.help or "")
    if hint and hint["default"] is None:
        meaning += " **Required.**"
    if not action.option_strings:
        return f"`{action.metavar}`", "", cell(meaning)
    values = str(action.metavar or "").removeprefix("{None}|")
    values = f" {values}" if values and len(values) < WIDE else ""
    flags = [f"`{flag}{values}`" for flag in action.option_strings]
    default = (hint["default"] or "none") if hint and hint["default"] is not None else ""
    return cell(", ".join(flags)), cell(default), cell(meaning)


def actions_of(command: Callable[..., None]) -> list[argparse.Action]:
    return [action for action in parser_of(command)._actions if action.dest != "help"]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def description(command: Callable[..., None]) -> str:
    """The docstring without its Args; indented commands become code blocks."""
    text = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:")[0].strip()
    code = re.compile(r"(?:^    .+\n?)+", re.M)
    return links(code.sub(lambda lines: f"```sh\n{inspect.cleandoc(lines[0])}\n```\n", text)).strip()


def cli_page() -> str:
    parts = [
        "# Commands",
        "*Generated from the code by `make docs`.*",
        "`atlas COMMAND --help` prints the same. Add `--debug` to any command, or set `ATLAS_DEBUG=1`, to see the "
        "full traceback of an error.",
    ]
    for name, command in COMMANDS.items():
        rows = [
            row(action) for action in actions_of(command) if not "".join(action.option_strings).startswith(SETTINGS)
        ]
        parts += [f"## atlas {name}", description(command)]
        if rows:
            parts.append(table(("argument", "default", "meaning"), rows))
        if name == "train":
            parts.append("Every setting of the run is a flag too: [Settings](config.md).")
    return "\n\n".join(parts) + "\n"


def config_page() -> str:
    recipes: dict[str, dict[str, Any]] = {}
    for recipe in RECIPES:
        train = make_train(RECIPES[recipe]("atlas"))
        recipes[recipe] = {a.option_strings[0]: a for a in actions_of(train) if a.option_strings}
    parts = [
        "# Settings",
        "*Generated from the code by `make docs`.*",
        "Every setting is a flag of `atlas train`, a field of the dataclasses in `atlas_wm.config`, and an entry\n"
        "of `config.json` in the run folder. The columns show the values of the recipes for `--method\n"
        "atlas`. Other methods differ in `objective`, some also in encoder and predictor (`atlas methods`).",
    ]
    sections: dict[str, list[tuple[str, ...]]] = {}
    for flag, action in recipes["paper"].items():
        if flag.startswith(SETTINGS):
            name, paper, meaning = row(action)
            others = (row(recipes[recipe][flag])[1] for recipe in list(RECIPES)[1:])
            section = flag.removeprefix("--").rpartition(".")[0]
            cells = ("same" if value == paper else value for value in others)
            sections.setdefault(section, []).append((name, paper, *cells, meaning))
    for section, rows in sections.items():
        parts += [f"## {section}", table(("flag", *RECIPES, "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    return {PAGES / "cli.md": cli_page(), PAGES / "config.md": config_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(PAGES.parent.parent), file=sys.stderr)
