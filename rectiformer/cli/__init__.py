"""The command line: one function a command. Parse, call one function, print."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rectiformer.cli import (  # noqa: F401 (they register)
    analyzing,
    evaluating,
    exporting,
    serving,
    studying,
    training,
    translating,
)
from rectiformer.cli.options import ConfigFile, Overrides, app, option
from rectiformer.errors import NoSpaceError, RectiformerError, was_heard


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"rectiformer {version('rectiformer')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(out: Annotated[Path, option("Run folder to make.", "--out")] = Path("runs/demo")) -> None:
    """Train a small translator and show what it does."""
    from rectiformer.demo import run_demo
    from rectiformer.terminal import Terminal

    with Terminal() as terminal:
        run_demo(out, terminal)


@app.command()
def variants(name: Annotated[str, typer.Argument(help="Show everything about one variant.")] = "") -> None:
    """List every attention variant: formula, paper, what runs it."""
    from rectiformer.cli.printing import print_variant, print_variants
    from rectiformer.terminal import Terminal

    if name:
        print_variant(Terminal(), name)
    else:
        print_variants(Terminal())


@app.command("config")
def config_command(file: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print every configuration key and its value, as TOML."""
    from rectiformer.toml import load_config, to_toml

    print(to_toml(load_config(file, overrides or [])), end="")


def main() -> None:
    """Run a command; what a user can cause comes out as one line, not as a traceback."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # as it is where a process was started without one
                sys.stdout.flush()
    except RectiformerError as error:
        if was_heard(error):  # the rank that met it says it
            sys.exit(error.exit_code)
        fail(str(error), error.exit_code)
    except BrokenPipeError:
        silence()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        silence()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fail(
            f"cannot use {error.filename or 'standard output'}: {error.strerror}",
            (NoSpaceError if full else RectiformerError).exit_code,
        )


def fail(text: str, exit_code: int) -> None:
    print(f"rectiformer: {' '.join(text.split(chr(10)))}", file=sys.stderr)
    sys.exit(exit_code)


def silence() -> None:
    """Let what is still buffered for standard output go nowhere, so that Python does not complain as it leaves."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
