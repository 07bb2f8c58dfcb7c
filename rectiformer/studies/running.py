"""Running studies: unfinished trainings run side by side, each in a process of its own, and can be stopped at any time.

OUT/<study>/<scale>/<training>/ holds the run, its log and, once it is measured, result.json; OUT/data/ prepared text.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from rectiformer.errors import ArgumentError, CheckpointError, DataError, DeviceMemoryError
from rectiformer.runs.folder import changed_keys, value_of
from rectiformer.runs.lock import lock_run
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.plan import Scale, Study, Task, hash_config, portable
from rectiformer.studies.results import Results, read_result, read_saved
from rectiformer.studies.schedule import gpu_seconds, list_left
from rectiformer.studies.single import describe
from rectiformer.toml import load_config
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import STOPPED, StoppedError, StopRequest

COMMAND = (sys.executable, "-m", "rectiformer", "study")
POLL = 0.2  # seconds between looks at the processes
SETTLE = 2.0  # seconds after one ran out of memory in which others that started with it may do so too
ASKED_TO_STOP = (STOPPED, -signal.SIGTERM)
HEADLINES = {"bleu": "BLEU", "d_bleu": "d-BLEU", "valid_bleu": "validation BLEU"}
"""The measure that is told when a training ends: the first of these that it has."""


def run_studies(
    plans: Sequence[tuple[Study, Scale]],
    out: Path,
    *,
    jobs: int = 1,
    only: str = "",
    reporter: Reporter | None = None,
    deadline: float | None = None,
    whole: bool = False,
) -> list[Results]:
    """Train and measure what is not yet finished in `out`, and return all results, study by study.

    The trainings of all studies share `jobs`, in the order of `list_left`; a training that starts from another's model,
    or measures it, waits for it. A training that fails is recorded with its reason and tried again by the next call;
    the others go on. StoppedError where this process is asked to stop: the trainings save, and the next call resumes
    them.

    Args:
        jobs: trainings side by side; fewer once the device runs out of memory. Measuring leaves a device mostly idle,
            so up to half as many finished trainings are measured in addition.
        only: parts of the keys of the trainings to run, separated by commas; the rest is left alone. A part with a
            slash is matched against `study/key`.
        deadline: by `time.monotonic`; from then on nothing is started, and what runs is asked to save and stop.
        whole: start only what should end and be measured before the deadline, as its size and what runs suggest.
    """
    reporter = reporter or Reporter()
    for study, scale in plans:
        if not study.trains and study.shows is not None:
            reporter.note(f"{study.name} shows what {study.sources} has measured; that is the study to run")
        elif scale.data is not None and not scale.data.is_dir():
            raise DataError(
                f"--scale {scale.name} reads its text in {scale.data}, which is no folder; name it with --data"
            )
    every = list_tasks(plans, out)
    chosen = choose(every, only)
    used = {folder for task in chosen for folder in (task.folder, task.start)}
    for task in every:
        if task.folder in used:
            refuse_changed(task)
    left = list_left(chosen, every)
    with ExitStack() as stack:
        for root in dict.fromkeys(task.root for task in (*chosen, *left)):
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_run(root, reporter.note))
        stop = stack.enter_context(StopRequest())

        def time_is_up() -> bool:
            return stop.requested or (deadline is not None and time.monotonic() > deadline)

        total = len({task.folder for task in (*chosen, *left)})
        Pool(left, total, jobs, reporter, deadline if whole else None).run(time_is_up)
        if stop.requested:
            undone = sum(not task.is_finished for task in left)
            raise StoppedError(f"stopped as asked with {undone} trainings left; the same command resumes them")
    return [load_results(study, scale, out) for study, scale in plans]


def list_tasks(plans: Sequence[tuple[Study, Scale]], out: Path) -> list[Task]:
    """All trainings, study by study, each in the order of its plan."""
    return [Task(study, scale, out, training) for study, scale in plans for training in study.trainings(scale)]


def choose(tasks: Sequence[Task], only: str = "") -> list[Task]:
    """The trainings whose names contain one of the parts of `only`; ArgumentError where none does."""
    parts = [part for part in only.split(",") if part]
    if not only:
        return list(tasks)

    def is_meant(task: Task) -> bool:
        return any(part in (task.name if "/" in part else task.training.key) for part in parts)

    chosen = [task for task in tasks if is_meant(task)]
    if not chosen:
        known = ", ".join(dict.fromkeys(task.training.name for task in tasks))
        names = ", ".join(dict.fromkeys(task.study.name for task in tasks))
        raise ArgumentError(f"no training of {names} has {only!r} in its name; there are {known}")
    return chosen


def refuse_changed(task: Task) -> None:
    """CheckpointError where the folder holds this training with other settings than it has now."""
    path, wanted = task.run / "config.toml", portable(task.config)
    if path.exists():
        found = portable(load_config(path))
        keys = changed_keys(found, wanted)
        changes = ", ".join(f"{key} = {value_of(found, key)!r}, now {value_of(wanted, key)!r}" for key in keys)
    else:
        result = read_result(task.folder)
        same = result is None or result.failed or result.config == hash_config(task.config)
        changes = "" if same else "other settings than it has now"
    if changes:
        raise CheckpointError(f"{task.folder} was made with {changes}; name another --out, or remove that folder")


def load_results(study: Study, scale: Scale, out: Path) -> Results:
    """All results of a study at a scale in `out`, of trainings done there, else saved there; then those it shows."""
    tasks, saved = list_tasks([(study, scale)], out), read_saved(out, study.name, scale.name)
    found = [(task, read_result(task.folder) or saved.get(task.training.key)) for task in tasks]
    known = [(task, result) for task, result in found if result is not None]
    changed = [task.training.name for task, result in known if result.config != hash_config(task.config)]
    own = Results(study.name, scale.name, len(tasks), [each for _, each in known], list(dict.fromkeys(changed)))
    if study.shows is None:
        return own
    shown = load_results(study.shows, scale, out)
    return replace(
        own,
        planned=own.planned + shown.planned,
        entries=[*own.entries, *shown.entries],
        changed=[*own.changed, *shown.changed],
    )


def must_wait(task: Task, other: Task) -> bool:
    """Whether `other`, which has not ended, must come first: it trains what `task` measures or starts from."""
    if task.study.reads and other.folder == task.owner:
        return True
    return other.folder == task.start and not other.is_trained


@dataclass
class Job:
    """A task in a process of its own."""

    task: Task
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    alone: bool
    """Whether nothing has ever run next to it."""
    started: float = field(default_factory=time.monotonic)

    def last_line(self) -> str:
        """The last line it printed, which is the reason where it failed."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = [line for line in file.read().decode("utf-8", "replace").split("\n") if line.strip()]
        return lines[-1].strip().removeprefix("rectiformer: ") if lines else ""


@dataclass
class Shortage:
    """A time at which the device had too little memory for all trainings that had started before it."""

    began: float
    jobs: int
    """How many were allowed side by side until then."""
    count: int = 0
    latest: float = -math.inf
    """When the last of `count` trainings ran out."""


class Pool:
    """The processes of one study or several."""

    def __init__(
        self, waiting: Sequence[Task], total: int, jobs: int, reporter: Reporter, end: float | None = None
    ) -> None:
        """With `end`, only what should be over by then is started."""
        self.jobs, self.reporter, self.end = jobs, reporter, end
        self.waiting, self.running = list(waiting), list[Job]()
        self.tasks = tuple(waiting)
        self.several = len({task.study.name for task in waiting}) > 1
        self.total, self.ended = total, total - len(waiting)
        self.shortage = Shortage(0.0, jobs)

    def name(self, task: Task) -> str:
        """What a task is called, with its study where there are several."""
        return task.name if self.several else task.training.key

    def in_training(self) -> int:
        """How many run that are not yet trained; the others are being measured."""
        return sum(not job.task.is_trained for job in self.running)

    def fits(self, task: Task) -> bool:
        """Whether a training should end in time: trainings share the GPU, and each is then measured."""
        if self.end is None:
            return True

        def seconds(each: Task) -> float:
            if each.is_trained or each.study.reads:
                return 0.0
            return gpu_seconds(each.config) * (1 - trained_steps(each) / each.config.training.steps)

        needed = sum(seconds(each) for each in [task, *(job.task for job in self.running)]) + task.training.measuring
        return time.monotonic() + needed < self.end

    def next_ready(self) -> Task | None:
        """The first task that may start now, if any.

        The first one to read some text prepares it, and the others wait for that; a task that needs another's model
        waits for it; one that must run alone waits for all that can go on.
        """
        settled = time.monotonic() > self.shortage.latest + SETTLE
        free = self.in_training() < self.jobs and len(self.running) < self.jobs + self.jobs // 2
        running = [job.task for job in self.running]
        if not (settled and free) or any(task.study.alone for task in running):
            return None
        preparing = {task.data for task in running}
        for task in self.waiting:
            if (task.study.alone and running) or not self.fits(task):
                continue
            others = (other for other in (*running, *self.waiting) if other is not task)
            has_text = task.data.exists() or task.data not in preparing
            if has_text and not any(must_wait(task, other) for other in others):
                return task
        return None

    def run(self, time_is_up: Callable[[], bool]) -> None:
        """Until nothing is left, or time is up and everything has stopped."""
        asked = False
        self.reporter.begin(0, max(1, sum(task.config.training.steps for task in self.tasks)))
        try:
            while self.running or (not asked and any(map(self.fits, self.waiting))):
                if not asked and time_is_up():
                    asked = True
                    self.ask_to_stop()
                while not asked and (task := self.next_ready()) is not None:
                    self.waiting.remove(task)
                    self.start(task)
                time.sleep(POLL)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.running.remove(job)
                    self.collect(job)
                self.reporter.advance(sum(map(self.progress, self.tasks)))
        finally:
            self.ask_to_stop()
            for job in self.running:
                self.collect(job)
            self.reporter.end()

    def ask_to_stop(self) -> None:
        for job in self.running:
            job.process.terminate()

    def start(self, task: Task) -> None:
        """Begin or resume a training."""
        log = task.folder / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        data = [] if task.scale.data is None else ["--data", str(task.scale.data)]
        where = ["--scale", task.scale.name, *data, "--out", str(task.out)]
        with log.open("ab") as file:
            log_start = file.tell()  # the process shares this position and moves it
            process = subprocess.Popen(
                [*COMMAND, task.study.name, *where, "--one", task.training.key],
                stdin=subprocess.PIPE,  # its end tells a training that this process was killed
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then asks each training once
                # One thread each: results do not depend on how many run side by side.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for other in self.running:
                other.alone = False
            self.running.append(Job(task, process, log, log_start, alone=not self.running))

    def collect(self, job: Job) -> None:
        """Report how a training has ended, and record it where it failed."""
        code, task = job.process.wait(), job.task
        assert job.process.stdin is not None
        job.process.stdin.close()
        if code == 0 and task.is_finished:
            self.ended += 1
            result = read_result(task.folder)
            assert result is not None
            scores = [
                f"{shown} {result.measures[key]:.2f}, " for key, shown in HEADLINES.items() if key in result.measures
            ]
            took = f"{time.monotonic() - job.started:.0f} s"
            self.reporter.note(f"{self.name(task)}: {''.join(scores[:1])}{took} ({self.ended} of {self.total})")
        elif code in ASKED_TO_STOP:
            self.reporter.note(f"{self.name(task)}: stopped; the same command resumes it")
        elif code == DeviceMemoryError.exit_code and not job.alone:
            self.put_back(job)
        else:
            self.fail(task, f"killed by signal {-code}" if code < 0 else job.last_line() or f"exit code {code}")

    def put_back(self, job: Job) -> None:
        """Let a training that ran out of memory wait, and run fewer side by side from now on.

        Of those that ran out together, half come back together. It waits even if the others have ended since: they may
        have held what it lacked.
        """
        if job.started > self.shortage.began:
            self.shortage = Shortage(time.monotonic(), self.jobs)
        self.shortage.latest = time.monotonic()
        self.shortage.count += 1
        self.jobs = max(1, min(self.shortage.jobs - 1, self.in_training() + self.shortage.count // 2))
        self.waiting.insert(0, job.task)
        rest = "the rest run one at a time" if self.jobs == 1 else f"{self.jobs} run side by side"
        name = self.name(job.task)
        self.reporter.note(f"{name}: no device memory left next to the others; it waits, and {rest}")

    def fail(self, task: Task, reason: str) -> None:
        self.ended += 1
        reason = " ".join(reason.split())
        task.folder.mkdir(parents=True, exist_ok=True)
        replace(describe(task), failed=reason).write(task.folder)
        self.reporter.note(f"{self.name(task)}: failed: {reason} ({self.ended} of {self.total})")

    def progress(self, task: Task) -> int:
        """Updates of a training so far, as its log says; all of them once it has ended."""
        if not any(job.task is task for job in self.running):
            return 0 if any(other is task for other in self.waiting) else task.config.training.steps
        return trained_steps(task)


def trained_steps(task: Task) -> int:
    """The updates of a training so far, as its log says."""
    records = read_metrics(task.run / "metrics.jsonl")
    return max((int(record["step"]) for record in records if "step" in record), default=0)
