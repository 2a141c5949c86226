"""``atlas``: finds the command, whose flags come from the signature of its function."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import tyro

from atlas_wm import __version__
from atlas_wm.cli.arguments import split_plugins
from atlas_wm.cli.bank import bank
from atlas_wm.cli.checkpoints import export_checkpoint, import_checkpoint
from atlas_wm.cli.collect import collect
from atlas_wm.cli.demo import demo
from atlas_wm.cli.diagnose import diagnose
from atlas_wm.cli.doctor import doctor
from atlas_wm.cli.errors import errors_in_one_line, setting_flags, split_debug
from atlas_wm.cli.evaluate import evaluate
from atlas_wm.cli.head import head
from atlas_wm.cli.methods import methods
from atlas_wm.cli.plan import PLAN_FLAGS, plan
from atlas_wm.cli.play import PLAY_FLAGS, play
from atlas_wm.cli.report import report
from atlas_wm.cli.serve import SERVE_FLAGS, serve
from atlas_wm.cli.show import show
from atlas_wm.cli.study import study
from atlas_wm.cli.train import make_train, recipe_defaults
from atlas_wm.errors import UserError, short, unknown
from atlas_wm.plugins import import_plugin
from atlas_wm.recipes import get_recipe

# Before torch is imported: idle threads sleep instead of spinning. Alone it costs nothing; beside another busy
# process on the same cores the spinning made training ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HELP = """Train latent world models, plan with them, and measure when their plans can be trusted.

Run everything once, on a laptop:

    atlas demo

Or look at a trained model first, in the browser:

    atlas play

Or step by step:

    atlas collect tworoom --episodes 5000 --no-pixels          # record demonstrations
    atlas show data/tworoom.lance                              # look at them: one HTML page
    atlas train tworoom --method atlas --recipe demo           # train; writes runs/tworoom-atlas-demo
    atlas eval runs/tworoom-atlas-demo --part heldout          # success in the environment
    atlas plan runs/tworoom-atlas-demo --row 1000              # actions from a dataset row to a later one
    atlas diagnose runs/tworoom-atlas-demo                     # the paper's diagnostics
    atlas report runs/tworoom-atlas-demo                       # one HTML page

Commands:

{commands}

`atlas COMMAND --help` explains a command and `atlas --version` prints the version. Any command
takes --plugin MODULE, which imports your own code before a run that names it is loaded
(docs/guides/own-model.md), and --debug (or ATLAS_DEBUG=1), which prints the full traceback of an error."""


COMMANDS: dict[str, Callable[..., None]] = {
    "collect": collect,
    "show": show,
    "train": make_train(get_recipe("paper")("atlas")),
    "eval": evaluate,
    "plan": plan,
    "play": play,
    "serve": serve,
    "diagnose": diagnose,
    "report": report,
    "study": study,
    "bank": bank,
    "head": head,
    "import": import_checkpoint,
    "export": export_checkpoint,
    "methods": methods,
    "doctor": doctor,
    "demo": demo,
}


def main(arguments: Sequence[str] | None = None) -> None:
    given, debug = split_debug(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"atlas-wm {__version__}")
        return
    given, plugins = split_plugins(given)
    flags = {"train": setting_flags(), "eval": PLAN_FLAGS, "plan": PLAN_FLAGS, "serve": SERVE_FLAGS}
    flags["play"] = PLAY_FLAGS
    with errors_in_one_line(flags.get(given[0], {}) if given else {}, debug):
        for module in plugins:
            import_plugin(module)
        run_command(given)


def run_command(arguments: list[str]) -> None:
    from atlas_wm.parallel.launch import process_info

    if process_info().size > 1 and arguments[:1] not in (["train"], ["eval"], ["diagnose"]):
        raise UserError("only train, eval and diagnose run in several processes: start this one without torchrun")
    if process_info().rank:  # rank 0 prints for all; each rank reports its own errors
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        logging.getLogger("atlas_wm").setLevel(logging.ERROR)
    elif logging.lastResort is not None:
        logging.getLogger("atlas_wm").setLevel(logging.INFO)  # such as "fast path: …", on stderr
        logging.lastResort.setLevel(logging.INFO)
    sys.argv[1:] = arguments  # results say by which command they were made
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        sys.exit()
    name, *rest = arguments
    if name.startswith("-"):
        raise UserError(
            f"{short(name)} comes before the command, flags come after it: `atlas --help` lists commands"
        )
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    # Each command is a program of its own, so that an error in a flag points to the help of that command.
    tyro.cli(command_of(arguments), prog=f"atlas {name}", args=rest)


def command_of(arguments: list[str]) -> Callable[..., None]:
    return make_train(recipe_defaults(arguments)) if arguments[0] == "train" else COMMANDS[arguments[0]]


def parse(arguments: list[str]) -> dict[str, Any]:
    """The flags of a command, without running it. What is wrong with them is printed, and the program exits."""
    command = command_of(arguments)

    @wraps(command)
    def given(*_: Any, **flags: Any) -> dict[str, Any]:
        return flags

    return tyro.cli(given, prog=f"atlas {arguments[0]}", args=arguments[1:])


def overview() -> str:
    """The help of ``atlas`` itself: the first line of each command's help."""
    lines = [f"    {name:9} {(inspect.getdoc(run) or '').partition(chr(10))[0]}" for name, run in COMMANDS.items()]
    return HELP.format(commands="\n".join(lines))
