"""The command of studies: run one, list them, render a report."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rectiformer.cli.options import app, option
from rectiformer.errors import ArgumentError, RectiformerError
from rectiformer.studies.catalog import STUDIES, find_study
from rectiformer.studies.learning_rate import LEARNING_RATE, describe_choices
from rectiformer.studies.plan import SCALES, Study, find_task
from rectiformer.studies.report import write_report
from rectiformer.studies.results import Results
from rectiformer.studies.running import choose, list_tasks, load_results, run_studies
from rectiformer.studies.schedule import describe_queue
from rectiformer.studies.single import run_single
from rectiformer.terminal import Terminal

EVERY = "all"
ESTIMATES = "GPU minutes are of an H200 that several trainings share, measuring included, compiling not"


@app.command("study")
def study_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A study, several (A,B), or one of: all, list, plan, report.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="For plan and report: the folder of studies.")
    ] = None,
    scale: Annotated[str, option("smoke, small or paper.", "--scale", one_of=tuple(SCALES))] = "smoke",
    out: Annotated[Path | None, option("Folder for trainings and results; what is in it is resumed.", "--out")] = None,
    data: Annotated[
        Path | None,
        option("Folder of the corpus or, for several studies, of all corpora; default: under data/.", "--data"),
    ] = None,
    jobs: Annotated[int, option("Trainings in parallel.", min=1)] = 1,
    minutes: Annotated[float, option("Save everything and stop after this time; 0: run to the end.", min=0)] = 0.0,
    whole: Annotated[bool, option("With --minutes: start only trainings that should finish in time.")] = False,
    only: Annotated[str, option("Only trainings with PART in their names; A,B for either.", metavar="PART")] = "",
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check claims of the papers: train the models, measure, compare.

    Run the same command again to resume; finished trainings are kept. Tables are printed at the end. `list` shows all
    studies, `plan` the trainings that are left, in order; `report` writes a page of claims and one page per study.

        rectiformer study list
        rectiformer study plan docs --scale small
        rectiformer study memory-swap --scale smoke --out studies
        rectiformer study ablations,document-length --scale small --out studies --jobs 8
        rectiformer study report studies
    """
    if name == "list":
        list_studies()
    elif name == "report":
        report(folder or out)
    elif name == "plan":
        plan(scale, folder or out, only)
    elif folder is not None:
        raise ArgumentError(f"study {name!r} got {folder}, but only plan and report take a folder; name it with --out")
    else:
        studies = find_studies(name)
        if out is None:
            raise ArgumentError(f"study {name!r} needs --out, a folder for its trainings and results")
        if one:
            run_one(studies[0], scale, data, out, one)
        else:
            run(studies, scale, data, out, jobs, minutes, whole, only)


def list_studies() -> None:
    terminal = Terminal()
    rows = []
    for study in STUDIES.values():
        counts = [str(len(study.trainings(study.at(scale)))) for scale in SCALES]
        rows.append((study.name, study.question, " / ".join(counts)))
    terminal.table(("study", "question", f"trainings ({' / '.join(SCALES)})"), rows)
    terminal.note("")
    for scale, about in SCALES.items():
        terminal.note(f"{scale}: {about}")


def plan(scale: str, folder: Path | None, only: str) -> None:
    """What is finished, what is left in the order in which it runs, and what waits for a choice."""
    if folder is None:
        raise ArgumentError("plan needs a folder, as in `rectiformer study plan DIR`")
    terminal = Terminal()
    every = list_tasks([(study, study.at(scale)) for study in STUDIES.values()], folder)
    left = describe_queue(choose(every, only), every)
    total = 0.0
    rows = []
    for line in left:
        total += line.minutes
        seeds = " ".join(map(str, line.seeds))
        rows.append((line.describe(), seeds, f"{line.minutes:.0f}", f"{total:.0f}"))
    terminal.table(("next, from the top", "seeds", "GPU minutes", "in all"), rows, numbers=("GPU minutes", "in all"))
    results = [load_results(study, study.at(scale), folder) for study in STUDIES.values()]
    finished = sum(entry.study == each.study for each in results for entry in each.finished)
    missing = "" if folder.exists() else f"; {folder} does not exist yet"
    terminal.note(f"\n{finished} of {len(every)} trainings are finished{missing}")
    if scale == "small":
        terminal.note(ESTIMATES)
        for choice in describe_choices(load_results(LEARNING_RATE, LEARNING_RATE.at(scale), folder)):
            terminal.note(choice)


def report(folder: Path | None) -> None:
    if folder is None:
        raise ArgumentError("report needs a folder, as in `rectiformer study report DIR`")
    Terminal().note(f"wrote {write_report(folder)}")


def find_studies(name: str) -> list[Study]:
    """Those that NAME means, each once; ArgumentError where it means none, or one that is not known."""
    if name == EVERY:
        return list(STUDIES.values())
    studies = [find_study(each) for each in dict.fromkeys(name.split(",")) if each]
    if not studies:
        raise ArgumentError(f"{name!r} names no study; rectiformer study list shows them")
    return studies


def run(
    studies: Sequence[Study],
    scale: str,
    data: Path | None,
    out: Path,
    jobs: int,
    minutes: float,
    whole: bool,
    only: str,
) -> None:
    if whole and not minutes:
        raise ArgumentError("--whole starts what ends in time, so it needs --minutes")
    shared = data if len(studies) > 1 else None
    plans = [(study, study.at(scale, root=shared) if shared else study.at(scale, data)) for study in studies]
    deadline = time.monotonic() + 60 * minutes if minutes else None
    with Terminal() as terminal:
        for study in studies:
            terminal.note(f"{study.title}: {study.question}")
        found = run_studies(plans, out, jobs=jobs, only=only, reporter=terminal, deadline=deadline, whole=whole)
        for study, results in zip(studies, found, strict=True):
            show(terminal, study, results, out)
    if failures := sum(entry.study == each.study for each in found for entry in each.failures):
        raise RectiformerError(f"{failures} trainings failed; their reasons are above and in {out}; try them again")


def show(terminal: Terminal, study: Study, results: Results, out: Path) -> None:
    """The tables, then how much is left."""
    for table in study.tables(results):
        terminal.note(f"\n{table.title}\n")
        terminal.table(table.columns, table.rows, numbers=table.columns[1:])
        for note in table.notes:
            terminal.note(note)
    left = results.planned - len(results.finished)
    by = f"those of {study.sources}" if study.shows else "the same command goes on with them"
    rest = f"; {left} are left, {by}" if left else ""
    terminal.note(f"\n{len(results.finished)} of {results.planned} trainings are finished{rest}")
    terminal.note(f"report: rectiformer study report {out}\n")


def run_one(study: Study, scale: str, data: Path | None, out: Path, key: str) -> None:
    """One training, for the process that runs the study: it ends when that one does."""
    threading.Thread(target=stop_with_parent, daemon=True).start()
    with Terminal() as terminal:
        run_single(find_task(study, study.at(scale, data), out, key), terminal)


def stop_with_parent() -> None:
    """Ask this process to save and stop once standard input ends, as it does when the process at its other end does."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
