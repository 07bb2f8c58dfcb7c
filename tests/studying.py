"""Studies run by themselves, and played: their trainings are scripts that pretend."""

import sys

from rectiformer.studies.running import run_studies
from rectiformer.studies.single import describe
from rectiformer.train.reporting import Reporter

# What every training that is played begins with.
PREAMBLE = """
import sys, time
from pathlib import Path

name, out, key = sys.argv[1], Path(sys.argv[-3]), sys.argv[-1]
folder = out / name / "smoke" / key

def tell(word):
    with (out / "journal").open("a") as file:
        file.write(f"{word} {name}/{key}\\n")

tell("begins")
"""


def run_study(study, scale, out, **how):
    return run_studies([(study, scale)], out, **how)[0]


class Telling(Reporter):
    """Keeps what is said, and touches a file, so that trainings which are played can wait for it."""

    def __init__(self, told):
        self.said, self.told = [], told

    def note(self, text):
        self.said.append(text)
        self.told.touch()


def play_trainings(folder, monkeypatch, script):
    """From now on a training is this script, with the arguments of one; a reporter for its study."""
    path = folder / "play.py"
    path.write_text(PREAMBLE + script)
    monkeypatch.setattr("rectiformer.studies.running.COMMAND", (sys.executable, "-S", str(path)))
    monkeypatch.setattr("rectiformer.studies.running.POLL", 0.05)
    return Telling(folder / "told")


def lay_out(task, **files):
    """The folder of a training that is to be played, with its text prepared and its result under another name."""
    folder = task.folder
    folder.mkdir(parents=True, exist_ok=True)
    describe(task).write(folder)
    (folder / "result.json").rename(folder / "result")
    for name, text in files.items():
        (folder / name).write_text(text)
    task.data.mkdir(parents=True, exist_ok=True)
