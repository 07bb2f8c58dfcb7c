"""Opening a run: data prepared or found, folder created or resumed, lock held, then the loop."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from rectiformer.config import Config
from rectiformer.errors import ConfigError
from rectiformer.runs.checkpoint import find_checkpoint
from rectiformer.runs.durable import remove
from rectiformer.runs.folder import Run, create_run, open_run, refuse_existing, resume_run
from rectiformer.runs.lock import RunLock
from rectiformer.text.prepared import Prepared, Progress, prepare
from rectiformer.train.loop import State, Trainer, require_validation
from rectiformer.train.reporting import Reporter, Silent
from rectiformer.train.signals import StoppedError, StopRequest
from rectiformer.translate.translator import find_device

UNFINISHED = re.compile(
    r"(data|data\.again|source\.model|target\.model)\.tmp-[0-9]+|data\.again"
    r"|(config\.toml|run\.json|metrics\.jsonl|diverged\.json)\.tmp"
)


def train(
    config: Config, folder: Path, *, resume: bool = False, data: Path | None = None, reporter: Reporter | None = None
) -> State:
    """Train a run in `folder` to its end.

    Args:
        resume: go on with what is in `folder`; without it, a folder with anything in it is refused. A folder that was
            stopped before its first checkpoint begins anew.
        data: a folder written by `prepare`; otherwise the text named in `config` is prepared inside `folder`.
    """
    reporter = reporter or Silent()
    if not resume:
        refuse_existing(folder)
    device = find_device(config.training.device)
    folder.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop, RunLock(folder, reporter.note):
        remove_unfinished(folder, reporter)
        prepared = open_data(config, folder, data, lambda stage, count: tell_unless_asked(reporter, stop, stage, count))
        require_validation(config, prepared)
        run = open_or_create(config, folder, prepared)
        trainer = Trainer(run, prepared, device, reporter, stop)
        checkpoint = find_checkpoint(folder, reporter.note) if resume else None
        if checkpoint is not None:
            trainer.restore(checkpoint)
            reporter.note(f"resumed at step {checkpoint.step}")
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        reporter.note(
            f"{prepared.train[0].pairs:,} pairs, vocabulary {run.target.size:,}, {parameters / 1e6:.2f} M parameters, "
            f"{device.type}, {torch.get_num_threads()} threads"
        )
        return trainer.run()


def remove_unfinished(folder: Path, reporter: Reporter) -> None:
    """Remove what a process that was killed while it made the folder, or prepared data in it, has left."""
    for path in sorted(folder.iterdir()):
        if UNFINISHED.fullmatch(path.name):
            remove(path)
            reporter.note(f"removed {path}, left by a killed process")


def tell_unless_asked(reporter: Reporter, stop: StopRequest, stage: str, count: int) -> None:
    """Report on preparation; StoppedError, upon which nothing of it is kept, where a stop was asked for."""
    reporter.preparing(stage, count)
    if stop.requested:
        raise StoppedError("stopped as asked while preparing data; nothing of it is kept; go on with --resume")


def open_data(config: Config, folder: Path, data: Path | None, progress: Progress) -> Prepared:
    """Prepared data: the folder given, or the run's own, made now if it is not there or the text may have changed."""
    if data is not None:
        given = Prepared.open(data)
        if given.segment != config.data.segment:
            raise ConfigError(
                f"{data} was prepared with data.segment = {given.segment}, but here it is {config.data.segment}; "
                "use the same for both"
            )
        return given
    own = folder / "data"
    if not own.exists():
        return prepare(config, own, progress)
    found = Prepared.open(own)
    if found.is_from(config):
        return found
    # Files may have been touched, moved or changed: what counts is whether they still give the same ids.
    again = folder / "data.again"
    try:
        fresh = prepare(config, again, progress)
        if fresh.hash != found.hash and (folder / "run.json").exists():
            return fresh  # refused by the run, with both hashes named
        shutil.rmtree(own)
        again.rename(own)
        return Prepared.open(own)
    finally:
        shutil.rmtree(again, ignore_errors=True)


def open_or_create(config: Config, folder: Path, prepared: Prepared) -> Run:
    if (folder / "run.json").exists():
        return resume_run(open_run(folder), config, prepared.hash)
    return create_run(folder, config, prepared.source, prepared.target, prepared.hash)
