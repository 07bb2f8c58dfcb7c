"""Running studies: what is not finished is trained in processes of its own, side by side, and can be stopped any time.

OUT/<study>/<scale>/<training>/ holds the run, its log and, once it is measured, result.json; OUT/data/ prepared text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.runs.folder import is_created
from rectiformer.runs.lock import RunLock
from rectiformer.runs.record import changed_keys, value_of
from rectiformer.studies.corpora import require_folder
from rectiformer.studies.plan import Scale, Study, Training, hash_config, portable, start_folder
from rectiformer.studies.pool import Pool, Task
from rectiformer.studies.results import Results, read_result, read_saved
from rectiformer.studies.single import Places, is_finished
from rectiformer.toml import load_config
from rectiformer.train.reporting import Reporter, Silent
from rectiformer.train.signals import StoppedError, StopRequest


def run_studies(
    plans: Sequence[tuple[Study, Scale]],
    out: Path,
    *,
    jobs: int = 1,
    only: str = "",
    reporter: Reporter | None = None,
    deadline: float | None = None,
) -> list[Results]:
    """Train and measure what is not yet finished in `out`, and return all that is, study by study.

    The trainings of all studies share `jobs`, in the order of the studies and of their plans, but models that others
    start from come first; one that starts from another's model, or measures it, waits for that. A training that fails
    is recorded with its reason, and tried again by the next call; the others go on. StoppedError where this process is
    asked to stop: the trainings save, and the next call goes on with them.

    Args:
        jobs: trainings side by side; fewer, once the device has no memory for so many. Beside several, others that are
            trained are measured, up to half as many: that leaves a device idle most of the time.
        only: parts of the keys of the trainings to do, with commas between; the rest is left alone. A part with a
            slash is one of `study/key`.
        deadline: by `time.monotonic`; from then on nothing is started, and what runs is asked to save and stop.
    """
    reporter = reporter or Silent()
    for study, scale in plans:
        if study.shows is not None:
            reporter.note(f"{study.name} shows what {study.shows.name} has measured; that is the study to run")
        else:
            require_folder(scale)
    every = list_tasks(plans, out)
    chosen = choose(every, only)
    for task in chosen:
        refuse_changed(task.places, task.training)
    left = list_left(chosen, every)
    with ExitStack() as stack:
        for root in dict.fromkeys(task.places.root for task in (*chosen, *left)):
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(RunLock(root, reporter.note))
        stop = stack.enter_context(StopRequest())

        def time_is_up() -> bool:
            return stop.requested or (deadline is not None and time.monotonic() > deadline)

        count = len({task.folder for task in (*chosen, *left)})
        Pool(left, count, jobs, reporter).run(time_is_up)
        if stop.requested:
            undone = sum(not is_finished(task.places, task.training) for task in left)
            raise StoppedError(f"stopped as asked with {undone} trainings left; the same command goes on with them")
    return [load_results(study, scale, out) for study, scale in plans]


def list_tasks(plans: Sequence[tuple[Study, Scale]], out: Path) -> list[Task]:
    """All trainings, study by study, each in the order of its plan."""
    return [
        Task(Places(study, scale, out), training)
        for study, scale in plans
        if study.shows is None
        for training in study.trainings(scale)
    ]


def choose(tasks: Sequence[Task], only: str = "") -> list[Task]:
    """The trainings whose names have one of the parts of `only` in them; ArgumentError where none has."""
    parts = [part for part in only.split(",") if part]
    if not only:
        return list(tasks)

    def is_meant(task: Task) -> bool:
        key = task.training.key
        return any(part in (f"{task.places.study.name}/{key}" if "/" in part else key) for part in parts)

    chosen = [task for task in tasks if is_meant(task)]
    if not chosen:
        known = ", ".join(dict.fromkeys(task.training.name for task in tasks))
        names = ", ".join(dict.fromkeys(task.places.study.name for task in tasks))
        raise ArgumentError(f"no training of {names} has {only!r} in its name; there are {known}")
    return chosen


def list_left(chosen: Sequence[Task], every: Sequence[Task]) -> list[Task]:
    """Those without a result, done here or saved here, and before them the models of `every` that they start from and
    that are not here."""
    saved = {
        places.root: read_saved(places.out, places.study.name, places.scale.name)
        for places in {task.places.root: task.places for task in chosen}.values()
    }

    def is_done(task: Task) -> bool:
        result = saved[task.places.root].get(task.training.key)
        known = result is not None and not result.failed and result.config == hash_config(task.training.config)
        return known or is_finished(task.places, task.training)

    left = [task for task in chosen if not is_done(task)]
    starts = {start_folder(task.training.config, task.places.out, task.places.scale) for task in left}
    undone = {task.folder for task in left}
    missing = [
        task for task in every if task.folder in starts - undone and not is_created(task.places.run(task.training))
    ]
    return sorted([*missing, *left], key=lambda task: task.folder not in starts)


def refuse_changed(places: Places, training: Training) -> None:
    """CheckpointError where the folder holds this training with other settings than it has now."""
    path, wanted = places.run(training) / "config.toml", portable(training.config)
    if path.exists():
        found = portable(load_config(path))
        keys = changed_keys(found, wanted)
        changes = ", ".join(f"{key} = {value_of(found, key)!r}, now {value_of(wanted, key)!r}" for key in keys)
    else:
        result = read_result(places.folder(training))
        same = result is None or result.failed or result.config == hash_config(training.config)
        changes = "" if same else "other settings than it has now"
    if changes:
        raise CheckpointError(
            f"{places.folder(training)} was made with {changes}; name another --out, or remove that folder"
        )


def load_results(study: Study, scale: Scale, out: Path) -> Results:
    """Everything that is known in `out` of a study at a scale: of trainings done there, else of results saved there."""
    source = study.source
    places, trainings = Places(source, scale, out), source.trainings(scale)
    saved = read_saved(out, source.name, scale.name)
    found = [read_result(places.folder(training)) or saved.get(training.key) for training in trainings]
    known = [(result, training) for result, training in zip(found, trainings, strict=True) if result is not None]
    changed = [training.name for result, training in known if result.config != hash_config(training.config)]
    entries = [result for result, _ in known]
    return Results(study.name, scale.name, len(trainings), entries, list(dict.fromkeys(changed)))
