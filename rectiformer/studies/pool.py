"""The processes of studies: trainings side by side, begun when they can be, told and recorded as they end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rectiformer.errors import DeviceMemoryError
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.plan import Training, start_folder
from rectiformer.studies.results import Result, read_result
from rectiformer.studies.single import Places, describe, is_finished, is_trained
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import STOPPED

COMMAND = (sys.executable, "-m", "rectiformer", "study")
LOOK = 0.2  # seconds between looks at the processes
SETTLE = 2.0  # seconds after one has run out of memory in which others do that started with it
ASKED_TO_STOP = (STOPPED, -signal.SIGTERM)


@dataclass(frozen=True)
class Task:
    """A training of a study that is to be done."""

    places: Places
    training: Training

    @property
    def folder(self) -> Path:
        return self.places.folder(self.training)

    @property
    def alone(self) -> bool:
        return self.places.study.alone

    @property
    def data(self) -> Path:
        return self.places.data(self.training)

    @property
    def steps(self) -> int:
        return self.training.config.training.steps

    def waits_for(self, other: Task) -> bool:
        """Whether `other`, which has not ended, must come first: it trains what this one measures or starts from."""
        if self.places.study.reads and other.folder == self.places.owner(self.training):
            return True
        start = start_folder(self.training.config, self.places.out, self.places.scale)
        return other.folder == start and not is_trained(other.places, other.training)


@dataclass
class Job:
    """A training in a process of its own."""

    task: Task
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    alone: bool
    """Whether nothing has ever run beside it."""
    started: float = field(default_factory=time.monotonic)

    def last_line(self) -> str:
        """The last thing it said, which is the reason where it failed."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = [line for line in file.read().decode("utf-8", "replace").split("\n") if line.strip()]
        return lines[-1].strip().removeprefix("rectiformer: ") if lines else ""


@dataclass
class Shortage:
    """A time at which the device had too little memory for all trainings that had started before it."""

    began: float
    jobs: int
    """How many might run side by side until then."""
    count: int = 0
    latest: float = -math.inf
    """When the last of `count` trainings ran out."""


class Pool:
    """The processes of one study or several."""

    def __init__(self, waiting: Sequence[Task], chosen: int, jobs: int, reporter: Reporter) -> None:
        self.jobs, self.reporter = jobs, reporter
        self.waiting, self.running = list(waiting), list[Job]()
        self.tasks = tuple(waiting)
        self.several = len({task.places.study.name for task in waiting}) > 1
        self.chosen, self.ended = chosen, chosen - len(waiting)
        self.shortage = Shortage(0.0, jobs)

    def name(self, task: Task) -> str:
        """What a task is called, with its study where there are several."""
        return f"{task.places.study.name}/{task.training.key}" if self.several else task.training.key

    def has_room(self) -> bool:
        """Whether one more may start."""
        settled = time.monotonic() > self.shortage.latest + SETTLE
        room = self.in_training() < self.jobs and len(self.running) < self.jobs + self.jobs // 2
        return settled and room and not any(job.task.alone for job in self.running)

    def in_training(self) -> int:
        return sum(not is_trained(job.task.places, job.task.training) for job in self.running)

    def next_ready(self) -> Task | None:
        """The first that can start: of those on the same text one prepares it, and the others wait for that; one that
        needs another's model waits for that; and one that is measured alone for all others that can go on."""
        running = [job.task for job in self.running]
        preparing = {task.data for task in running}
        for task in self.waiting:
            if task.alone and running:
                continue
            others = (other for other in (*running, *self.waiting) if other is not task)
            if (task.data.exists() or task.data not in preparing) and not any(map(task.waits_for, others)):
                return task
        return None

    def run(self, time_is_up: Callable[[], bool]) -> None:
        """Until nothing is left to do, or time is up and everything has stopped."""
        asked = False
        self.reporter.begin(0, max(1, sum(task.steps for task in self.tasks)))
        try:
            while self.running or (self.waiting and not asked):
                if not asked and time_is_up():
                    asked = True
                    self.ask_to_stop()
                while not asked and self.has_room() and (task := self.next_ready()) is not None:
                    self.waiting.remove(task)
                    self.start(task)
                time.sleep(LOOK)
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
        """Begin or go on with a training."""
        log = task.folder / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*COMMAND, *arguments(task)],
                stdin=subprocess.PIPE,  # its end is how a training hears that this process was killed
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then asks each training once
                # One thread each: results do not depend on how many run side by side.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for other in self.running:
                other.alone = False
            self.running.append(Job(task, process, log, file.tell(), alone=not self.running))

    def collect(self, job: Job) -> None:
        """Tell how a training has ended, and record it where it failed."""
        code, task = job.process.wait(), job.task
        assert job.process.stdin is not None
        job.process.stdin.close()
        if code == 0 and is_finished(task.places, task.training):
            self.ended += 1
            result = read_result(task.folder)
            assert result is not None
            took = f"{time.monotonic() - job.started:.0f} s"
            self.reporter.note(f"{self.name(task)}: {headline(result)}{took} ({self.ended} of {self.chosen})")
        elif code in ASKED_TO_STOP:
            self.reporter.note(f"{self.name(task)}: stopped; the same command goes on with it")
        elif code == DeviceMemoryError.exit_code and not job.alone:
            self.make_room(job)
        else:
            self.fail(task, f"killed by signal {-code}" if code < 0 else job.last_line() or f"exit code {code}")

    def make_room(self, job: Job) -> None:
        """Put back a training that had too little memory beside others, and from now on run fewer side by side: of
        those that ran out together, half come back together.

        It is put back even if the others have ended since: they may have held what it missed.
        """
        if job.started > self.shortage.began:
            self.shortage = Shortage(time.monotonic(), self.jobs)
        self.shortage.latest = time.monotonic()
        self.shortage.count += 1
        self.jobs = max(1, min(self.shortage.jobs - 1, self.in_training() + self.shortage.count // 2))
        self.waiting.insert(0, job.task)
        rest = "the rest go on one at a time" if self.jobs == 1 else f"{self.jobs} go on side by side"
        name = self.name(job.task)
        self.reporter.note(f"{name}: no memory left on the device beside the others; it waits, and {rest}")

    def fail(self, task: Task, reason: str) -> None:
        self.ended += 1
        reason = " ".join(reason.split())
        task.folder.mkdir(parents=True, exist_ok=True)
        replace(describe(task.places, task.training), failed=reason).write(task.folder)
        self.reporter.note(f"{self.name(task)}: failed: {reason} ({self.ended} of {self.chosen})")

    def progress(self, task: Task) -> int:
        """Updates done of a training, as its log says; all of them where it has ended."""
        if not any(job.task is task for job in self.running):
            return 0 if any(other is task for other in self.waiting) else task.steps
        records = read_metrics(task.places.run(task.training) / "metrics.jsonl")
        return max((int(record["step"]) for record in records if "step" in record), default=0)


def arguments(task: Task) -> list[str]:
    """What the command of one training is told."""
    places, scale = task.places, task.places.scale
    data = [] if scale.data is None else ["--data", str(scale.data)]
    return [
        places.study.name, "--scale", scale.name, *data, "--out", str(places.out), "--one", task.training.key,
    ]  # fmt: skip


def headline(result: Result) -> str:
    """The number one looks for first."""
    found = [(name, result.measures[name]) for name in ("bleu", "d_bleu", "valid_bleu") if name in result.measures]
    names = {"bleu": "BLEU", "d_bleu": "d-BLEU", "valid_bleu": "validation BLEU"}
    return f"{names[found[0][0]]} {found[0][1]:.2f}, " if found else ""
