"""The command line, called in this process."""

import sys


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
