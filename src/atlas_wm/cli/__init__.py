"""The command line: one module per command. ``app`` parses the arguments."""

from atlas_wm.cli.app import main

__all__ = ["main"]
