"""The command line, called in this process."""

import json
import sys
from types import SimpleNamespace


def run_main(*arguments):
    """The exit code of `rectiformer ARGUMENTS`."""
    from rectiformer.cli import main  # typer and rich are loaded by tests of commands only

    before, sys.argv = sys.argv, ["rectiformer", *map(str, arguments)]
    try:
        main()
    except SystemExit as exit:
        return exit.code
    finally:
        sys.argv = before
    raise AssertionError("every command ends with an exit code")


def lines(text):
    """Lines as the commands count them: by LF only."""
    return text.removesuffix("\n").split("\n")


def read_json(path):
    """A JSON file as objects with attributes."""
    return json.loads(path.read_text(), object_hook=lambda content: SimpleNamespace(**content))
