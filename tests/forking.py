"""Python processes that find large packages already imported: a server imports them and forks a child for each.

What is being tested is not imported before the fork, so a child differs from a fresh interpreter in nothing but time.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import warnings


class Forks:
    """Runs `python ...`, one at a time; leave it to end the server."""

    def __init__(self, *packages, cwd, env):
        self.server = subprocess.Popen(
            [sys.executable, __file__, *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )

    def run(self, *arguments, **environment):
        """The exit code of `python ARGUMENTS`, negative for a signal, and all that it printed."""
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as printed:
            self.server.stdin.write(json.dumps([printed.name, environment, *map(str, arguments)]) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline()), printed.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.communicate()


def serve():
    for line in sys.stdin:
        printed, environment, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            file = os.open(printed, os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os._exit(be_python(arguments))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def be_python(arguments):
    """Its exit code."""
    warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    how, *rest = arguments
    code = 1
    try:
        if how == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            sys.argv, sys.path[0] = rest, ""
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [how, *rest], os.path.dirname(how)
            runpy.run_path(how, run_name="__main__")
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    for package in sys.argv[1:]:
        importlib.import_module(package)
    serve()
