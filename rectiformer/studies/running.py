"""Running a study: what is not finished is trained in processes of its own, side by side, and can be stopped any time.

OUT/<study>/<scale>/<training>/ holds the run, its log and, once it is measured, result.json; OUT/data/ prepared text.
"""

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

from rectiformer.errors import ArgumentError, CheckpointError, DeviceMemoryError
from rectiformer.runs.folder import changed_keys, value_of
from rectiformer.runs.lock import RunLock
from rectiformer.runs.metrics import read_metrics
from rectiformer.studies.held_out import require_folder
from rectiformer.studies.plan import Scale, Study, Training, hash_config, portable
from rectiformer.studies.results import Result, Results, read_result, read_saved
from rectiformer.studies.single import Places, describe, is_finished, is_trained
from rectiformer.toml import load_config
from rectiformer.train.reporting import Reporter, Silent
from rectiformer.train.signals import STOPPED, StoppedError, StopRequest

COMMAND = (sys.executable, "-m", "rectiformer", "study")
LOOK = 0.2  # seconds between looks at the processes
SETTLE = 2.0  # seconds after one has run out of memory in which others do that started with it
ASKED_TO_STOP = (STOPPED, -signal.SIGTERM)


def run_study(
    study: Study,
    scale: Scale,
    out: Path,
    *,
    jobs: int = 1,
    only: str = "",
    reporter: Reporter | None = None,
    deadline: float | None = None,
) -> Results:
    """Train and measure what is not yet finished in `out`, and return all that is.

    A training that fails is recorded with its reason, and tried again by the next call; the others go on. StoppedError
    where this process is asked to stop: the trainings save, and the next call goes on with them.

    Args:
        jobs: trainings side by side; fewer, once the device has no memory for so many. Beside several, others that are
            trained are measured, up to half as many: that leaves a device idle most of the time.
        only: parts of the keys of the trainings to do, with commas between; the rest is left alone.
        deadline: by `time.monotonic`; from then on nothing is started, and what runs is asked to save and stop.
    """
    reporter = reporter or Silent()
    if study.shows is not None:
        reporter.note(f"{study.name} shows what {study.shows.name} has measured; that is the study to run")
        return load_results(study, scale, out)
    require_folder(scale)
    places = Places(study, scale, out)
    chosen = choose(study, scale, only)
    for training in chosen:
        refuse_changed(places, training)
    places.root.mkdir(parents=True, exist_ok=True)
    with RunLock(places.root, reporter.note), StopRequest() as stop:
        pool = Pool(places, [each for each in chosen if not is_finished(places, each)], len(chosen), jobs, reporter)

        def time_is_up() -> bool:
            return stop.requested or (deadline is not None and time.monotonic() > deadline)

        pool.run(time_is_up)
        if stop.requested:
            left = sum(not is_finished(places, training) for training in chosen)
            raise StoppedError(f"stopped as asked with {left} trainings left; the same command goes on with them")
    return load_results(study, scale, out)


def choose(study: Study, scale: Scale, only: str = "") -> list[Training]:
    """The trainings whose keys have one of the parts of `only` in them; ArgumentError where none has."""
    trainings, parts = study.trainings(scale), [part for part in only.split(",") if part]
    chosen = [training for training in trainings if not only or any(part in training.key for part in parts)]
    if not chosen:
        known = ", ".join(dict.fromkeys(training.name for training in trainings))
        raise ArgumentError(f"no training of {study.name} has {only!r} in its name; there are {known}")
    return chosen


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


@dataclass
class Job:
    """A training in a process of its own."""

    training: Training
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
    """The processes of a study."""

    def __init__(self, places: Places, waiting: Sequence[Training], chosen: int, jobs: int, reporter: Reporter) -> None:
        self.places, self.jobs, self.reporter = places, jobs, reporter
        self.waiting, self.running = list(waiting), list[Job]()
        self.steps = {training.key: training.config.training.steps for training in waiting}
        self.chosen, self.ended = chosen, chosen - len(waiting)
        self.shortage = Shortage(0.0, jobs)

    def has_room(self) -> bool:
        """Whether one more may start."""
        settled = time.monotonic() > self.shortage.latest + SETTLE
        return settled and self.in_training() < self.jobs and len(self.running) < self.jobs + self.jobs // 2

    def in_training(self) -> int:
        return sum(not is_trained(self.places, job.training) for job in self.running)

    def next_ready(self) -> Training | None:
        """The first that can start: of those on the same text one prepares it, and the others wait for that."""
        preparing = {self.places.data(job.training) for job in self.running}
        for training in self.waiting:
            data = self.places.data(training)
            if data.exists() or data not in preparing:
                return training
        return None

    def run(self, time_is_up: Callable[[], bool]) -> None:
        """Until nothing is left to do, or time is up and everything has stopped."""
        asked = False
        self.reporter.begin(0, max(1, sum(self.steps.values())))
        try:
            while self.running or (self.waiting and not asked):
                if not asked and time_is_up():
                    asked = True
                    self.ask_to_stop()
                while not asked and self.has_room() and (training := self.next_ready()) is not None:
                    self.waiting.remove(training)
                    self.start(training)
                time.sleep(LOOK)
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.running.remove(job)
                    self.collect(job)
                self.reporter.advance(sum(self.progress(key) for key in self.steps))
        finally:
            self.ask_to_stop()
            for job in self.running:
                self.collect(job)
            self.reporter.end()

    def ask_to_stop(self) -> None:
        for job in self.running:
            job.process.terminate()

    def start(self, training: Training) -> None:
        """Begin or go on with a training."""
        log = self.places.folder(training) / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*COMMAND, *self.arguments(training)],
                stdin=subprocess.PIPE,  # its end is how a training hears that this process was killed
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then asks each training once
                # One thread each: results do not depend on how many run side by side.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for other in self.running:
                other.alone = False
            self.running.append(Job(training, process, log, file.tell(), alone=not self.running))

    def arguments(self, training: Training) -> list[str]:
        scale = self.places.scale
        data = [] if scale.data is None else ["--data", str(scale.data)]
        return [
            self.places.study.name, "--scale", scale.name, *data, "--out", str(self.places.out), "--one", training.key,
        ]  # fmt: skip

    def collect(self, job: Job) -> None:
        """Tell how a training has ended, and record it where it failed."""
        code, key = job.process.wait(), job.training.key
        assert job.process.stdin is not None
        job.process.stdin.close()
        if code == 0 and is_finished(self.places, job.training):
            self.ended += 1
            result = read_result(self.places.folder(job.training))
            assert result is not None
            took = f"{time.monotonic() - job.started:.0f} s"
            self.reporter.note(f"{key}: {headline(result)}{took} ({self.ended} of {self.chosen})")
        elif code in ASKED_TO_STOP:
            self.reporter.note(f"{key}: stopped; the same command goes on with it")
        elif code == DeviceMemoryError.exit_code and not job.alone:
            self.make_room(job)
        else:
            self.fail(job.training, f"killed by signal {-code}" if code < 0 else job.last_line() or f"exit code {code}")

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
        self.waiting.insert(0, job.training)
        rest = "the rest go on one at a time" if self.jobs == 1 else f"{self.jobs} go on side by side"
        self.reporter.note(f"{job.training.key}: no memory left on the device beside the others; it waits, and {rest}")

    def fail(self, training: Training, reason: str) -> None:
        self.ended += 1
        reason = " ".join(reason.split())
        self.places.folder(training).mkdir(parents=True, exist_ok=True)
        replace(describe(self.places, training), failed=reason).write(self.places.folder(training))
        self.reporter.note(f"{training.key}: failed: {reason} ({self.ended} of {self.chosen})")

    def progress(self, key: str) -> int:
        """Updates done of a training, as its log says; all of them where it has ended."""
        if not any(job.training.key == key for job in self.running):
            return 0 if any(training.key == key for training in self.waiting) else self.steps[key]
        job = next(job for job in self.running if job.training.key == key)
        records = read_metrics(self.places.run(job.training) / "metrics.jsonl")
        return max((int(record["step"]) for record in records if "step" in record), default=0)


def headline(result: Result) -> str:
    """The number one looks for first."""
    found = [(name, result.measures[name]) for name in ("bleu", "d_bleu", "valid_bleu") if name in result.measures]
    names = {"bleu": "BLEU", "d_bleu": "d-BLEU", "valid_bleu": "validation BLEU"}
    return f"{names[found[0][0]]} {found[0][1]:.2f}, " if found else ""
