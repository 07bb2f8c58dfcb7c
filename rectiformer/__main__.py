"""The `rectiformer` command, also as `python -m rectiformer`."""

import sys

from rectiformer.errors import missing_package


def start() -> None:
    """Run the command line, or say in one line which extra it needs: the core alone has no commands."""
    try:
        from rectiformer.cli import start as start_command
    except ModuleNotFoundError as error:
        if not (missing := missing_package(error)):
            raise
        sys.exit(f"rectiformer: {missing}")
    start_command()


if __name__ == "__main__":
    start()
