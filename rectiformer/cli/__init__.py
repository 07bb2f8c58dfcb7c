"""The command line: one function per command, which parses, calls one function and prints."""

import errno
import io
import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from rectiformer.cli import analyzing, evaluating, exporting, serving, studying, training, translating  # noqa: F401
from rectiformer.cli.options import ConfigFile, Overrides, app, option
from rectiformer.cli.output import write_all
from rectiformer.demo import run_demo
from rectiformer.errors import DeviceMemoryError, NoSpaceError, RectiformerError, is_from_other_rank, missing_package
from rectiformer.interrupts import INTERRUPTED, exchange, quit_at_once
from rectiformer.ops.variants import VARIANTS, find_variant
from rectiformer.terminal import Terminal
from rectiformer.toml import load_config, to_toml


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
def demo(out: Annotated[Path, option("Folder for both runs and the report.", "--out")] = Path("runs/demo")) -> None:
    """Train a rectified and a softmax translator on a built-in grammar and compare them."""
    with Terminal() as terminal:
        run_demo(out, terminal)


@app.command()
def variants(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Show everything about one variant.")] = "",
) -> None:
    """List every attention variant: formula, paper, backends."""
    terminal = Terminal()
    if not name:
        rows = [(each.name, each.formula, each.paper, ", ".join(each.implementations)) for each in VARIANTS.values()]
        terminal.table(("variant", "weight of a key", "paper", "backends"), rows)
        return terminal.note(
            "\nx score, n keys the row sees, [.]+ ReLU; backends as in attention(backend=), fused on a GPU. "
            "`rectiformer variants NAME` shows norm, options and use."
        )
    variant = find_variant(name)
    about = [("weight", variant.formula), ("row scale", variant.scale), ("output norm", variant.output_norm)]
    for key, setting in variant.options.items():
        learned = ", learnable" if setting.learn else ""
        about.append(("option", f"{key} = {setting.default:g}: {setting.about} ({setting.needs}{learned})"))
    about += [("paper", variant.paper), ("use", variant.use), ("backends", ", ".join(variant.implementations))]
    return terminal.table(("variant", variant.name), about)


@app.command("config")
def config_command(file: ConfigFile = None, overrides: Overrides = None) -> None:
    """Print every configuration key with its value and a comment, as TOML."""
    write_all([to_toml(load_config(file, overrides or []), comments=True).removesuffix("\n")])


def start() -> None:
    """Run a command; a rank of torchrun then ends with its exit code, without Python being finalized.

    torch's gloo groups have threads of their own, which `destroy_process_group` does not end. One of them that lets go
    of a tensor while Python is finalized is killed in the midst of C++ code, and the process with it: "terminate called
    without an active exception" and exit code -6, after a training that was complete.
    """
    try:
        main()
    except SystemExit as end:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):  # of a reader that has gone, or where there is no such stream
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def main() -> None:
    """Run a command; what a user can cause comes out as one line, not as a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that it cannot show come out as question marks
        sys.stdout.reconfigure(errors="replace")
    quits = exchange(quit_at_once, signal.default_int_handler)  # a command may have to undo what is half done
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # as it is where a process was started without one
                sys.stdout.flush()
    except RectiformerError as error:
        if is_from_other_rank(error):  # the rank that raised it prints it
            sys.exit(error.exit_code)
        fail(str(error), error.exit_code)
    except BrokenPipeError:
        silence()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        name = error.filename or name_unnamed()
        silence()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code = (NoSpaceError if full else RectiformerError).exit_code
        fail(f"cannot use {name}: {error.strerror or error}", code)
    except ModuleNotFoundError as error:
        if not (missing := missing_package(error)):
            raise
        fail(missing, RectiformerError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(f"no memory left on this machine ({error}); ask for less of it", DeviceMemoryError.exit_code)
    finally:
        if quits:
            exchange(signal.default_int_handler, quit_at_once)


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch could not get memory of the machine; torch has no class of its own for it."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def fail(text: str, exit_code: int) -> None:
    print(f"rectiformer: {' '.join(text.split(chr(10)))}", file=sys.stderr)
    sys.exit(exit_code)


def name_unnamed() -> str:
    """What an error without a file name is about: standard output, unless that is a terminal, a pipe or /dev/null."""
    if sys.stdout is None or sys.stdout.isatty():
        return "a temporary file"
    found = os.fstat(sys.stdout.fileno())
    fills = stat.S_ISREG(found.st_mode) or stat.S_ISCHR(found.st_mode)
    null = os.path.samestat(found, os.stat(os.devnull))
    return "standard output" if fills and not null else "a temporary file"


def silence() -> None:
    """Let what is still buffered for standard output go nowhere, so that Python does not complain as it leaves."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
