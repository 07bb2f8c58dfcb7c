"""train(): data prepared or found, folder created or resumed, lock held, then the loop.

Preparing text may take hours, and the folder of a refused run would be in the way of the next try. So whatever a run
can be refused for is refused before anything of it is made: see `require_trainable`.
"""

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch

from rectiformer.config import Config, TrainingConfig
from rectiformer.distributed.pulse import Pulse
from rectiformer.distributed.ranks import Ranks, init_ranks, torchrun_store
from rectiformer.distributed.sharding import require_ranks
from rectiformer.errors import CheckpointError, ConfigError
from rectiformer.files import put_in_place, remove
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import find_checkpoint, open_checkpoint, step_folders
from rectiformer.runs.folder import (
    BEFORE_RECORD,
    Run,
    adopt_vocabularies,
    create_run,
    is_created,
    keep_vocabularies,
    open_run,
    refuse_existing,
    require_fit,
    resume_run,
)
from rectiformer.runs.lock import lock_run
from rectiformer.text.corpus import check_files, has_documents, has_split
from rectiformer.text.prepared import Prepared, Progress, is_linked, prepare, require_text
from rectiformer.text.stream import require_stream
from rectiformer.text.vocabulary import Vocabulary, load_named
from rectiformer.train.annealing import Annealing
from rectiformer.train.loop import Trainer
from rectiformer.train.loss import require_weights
from rectiformer.train.optimizer import learning_rate
from rectiformer.train.reporting import Reporter
from rectiformer.train.saving import State
from rectiformer.train.signals import StoppedError, StopRequest
from rectiformer.train.teacher import require_teacher
from rectiformer.train.unread import find_unread
from rectiformer.train.validation import require_validation
from rectiformer.translate.translator import find_device

UNFINISHED = re.compile(
    r"(data|data\.again)\.tmp-[0-9]+|data\.again|data\.old"
    r"|(source\.model|target\.model|config\.toml|run\.json|metrics\.jsonl|diverged\.json)\.tmp"
)

FALLING = ("linear", "cosine", "wsd")
"""Schedules whose learning rate depends on `training.steps`."""
SMALL_FACTOR = 0.05
"""Below this a factor of the Noam schedule is more likely to be meant as a rate."""


def train(
    config: Config, folder: Path, *, resume: bool = False, data: Path | None = None, reporter: Reporter | None = None
) -> State:
    """Train a run in `folder` to its end.

    Args:
        resume: go on with what is in `folder`; without it, a folder with anything in it is refused. A folder that was
            stopped before its first checkpoint begins anew.
        data: a folder written by `prepare`; otherwise the text named in `config` is prepared inside `folder`.
    """
    with init_ranks(lambda: find_device(config.training.device)) as (ranks, device):
        reporter = reporter if reporter is not None and ranks.is_rank0 else Reporter()
        announce(config, folder, resume, reporter, data)
        resume = ranks.on_rank0(lambda: begin(config, folder, data, resume, ranks))
        with StopRequest() as stop, ExitStack() as stack:
            ranks.on_rank0(lambda: stack.enter_context(lock_run(folder, reporter.note)))
            run, prepared = open_together(config, folder, data, reporter, stop, ranks)
            stack.enter_context(Pulse(ranks, torchrun_store()))
            newest = ranks.on_rank0(lambda: find_newest(folder, reporter) if resume else "")
            trainer = Trainer(run, prepared, device, reporter, stop, ranks, fresh=not newest)
            if newest:
                ranks.all_gather_object(lambda: trainer.restore(open_checkpoint(Path(newest), verify=False)))
                reporter.note(f"resumed at step {trainer.state.step}")
            reporter.note(
                f"{trainer.plan.text}, vocabulary {run.target.size:,}, "
                f"{trainer.parameters / 1e6:.2f} M parameters, {describe(device, ranks)}"
            )
            return trainer.run()


def announce(config: Config, folder: Path, resume: bool, reporter: Reporter, data: Path | None = None) -> None:
    """Warn of what may be a mistake, before anything takes time."""
    if resume and not step_folders(folder / "checkpoints"):
        reporter.note(f"there is no checkpoint in {folder} to resume; training starts anew")
    for warning in find_unread(config):
        reporter.note(warning)
    own_text = config.data.source or config.data.stream
    if own_text and data is None and not config.data.valid_source:
        reporter.note(
            "warning: no validation text, so the latest weights will be taken as best; name some with "
            "data.valid_source and data.valid_target"
        )
    factor = config.training.learning_rate
    if config.training.schedule == "noam" and factor < SMALL_FACTOR:
        peak = learning_rate(config.training, config.model.hidden_size, config.training.warmup)
        reporter.note(
            f'warning: with training.schedule = "noam", training.learning_rate = {factor:g} is a factor, and the '
            f"highest rate is {peak:.1g}; if {factor:g} is to be the highest, name another schedule, such as linear"
        )
    steps, warmup = config.training.steps, config.training.warmup
    if warmup > steps:
        reporter.note(
            f"warning: training.warmup = {warmup:,} is more than training.steps = {steps:,}: the learning rate rises "
            f"to the end and gets to {steps / warmup:.0%} of its peak; make one smaller or the other larger"
        )


def begin(config: Config, folder: Path, data: Path | None, resume: bool, ranks: Ranks) -> bool:
    """Make a folder for the run, which must be new unless it resumes; returns whether it does, as after a restart."""
    store, key = torchrun_store(), f"rectiformer begins {folder.absolute()}"
    resume = resume or (store is not None and store.check([key]))
    if not resume:
        refuse_existing(folder)
    require_ranks(config.training, ranks.world_size)
    require_stream(config, ranks.world_size)
    if not is_created(folder):
        require_trainable(config, data)
    folder.mkdir(parents=True, exist_ok=True)
    if store is not None:
        store.set(key, "yes")  # from now on the folder is that of these ranks, also after a restart
    return resume


def open_together(
    config: Config, folder: Path, data: Path | None, reporter: Reporter, stop: StopRequest, ranks: Ranks
) -> tuple[Run, Prepared]:
    """The run and its data: rank 0 makes what is not there yet, then all the others open it."""
    opened: list[tuple[Run, Prepared]] = []

    def make() -> None:
        remove_unfinished(folder, reporter)
        own = keep_vocabularies(config, folder) if is_created(folder) else adopt_vocabularies(config)
        prepared = open_data(own, folder, data, lambda stage, count: report_or_stop(reporter, stop, stage, count))
        require_validation(own, prepared.valid is not None)
        opened.append((open_or_create(own, folder, prepared, reporter), prepared))

    def find() -> None:
        if not opened:
            opened.append(open_made(folder, data or folder / "data"))

    ranks.on_rank0(make)
    ranks.all_gather_object(find)
    return opened[0]


def open_made(folder: Path, data: Path) -> tuple[Run, Prepared]:
    """A run that rank 0 has made or resumed, and its data, which may differ on another host."""
    run, prepared = open_run(folder), Prepared.open(data)
    if prepared.hash != run.data_hash:
        raise CheckpointError(
            f"cannot train {folder}: {data} has hash {prepared.hash[:12]} here, but {run.data_hash[:12]} for rank 0; "
            "give all ranks the same data"
        )
    return run, prepared


def find_newest(folder: Path, reporter: Reporter) -> str:
    """The path of the newest complete checkpoint, "" if there is none."""
    checkpoint = find_checkpoint(folder, reporter.note)
    return "" if checkpoint is None else str(checkpoint.path)


def describe(device: torch.device, ranks: Ranks) -> str:
    threads = torch.get_num_threads()
    each = f"{device.type}, {threads} {'thread' if threads == 1 else 'threads'}"
    return each if ranks.world_size == 1 else f"{ranks.world_size} ranks of {each}"


def remove_unfinished(folder: Path, reporter: Reporter) -> None:
    """Remove what a process left that was killed while it made the folder, or prepared data in it."""
    for path in sorted(folder.iterdir()):
        if UNFINISHED.fullmatch(path.name):
            remove(path)
            reporter.note(f"removed {path}, left by a killed process")


def require_configured(folder: Path) -> None:
    """CheckpointError for what a process left that ended before the run was made: nothing in it says how to go on."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if names and all(name in BEFORE_RECORD or UNFINISHED.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{folder} was left before its configuration was saved; name its CONFIG with --resume, or remove {folder} "
            "and train anew"
        )


def report_or_stop(reporter: Reporter, stop: StopRequest, stage: str, count: int) -> None:
    """Report progress of the preparation; StoppedError where a stop was requested, and nothing of it is kept."""
    reporter.preparing(stage, count)
    if stop.requested:
        raise StoppedError("stopped as asked while preparing data; nothing of it is kept; go on with --resume")


def open_data(config: Config, folder: Path, data: Path | None, progress: Progress) -> Prepared:
    """Prepared data: the folder given, or the run's own, prepared now if it is missing or the text may have changed."""
    if data is not None:
        given = Prepared.open(data)
        require_same_segments(config, given)
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
        if fresh.hash != found.hash and is_created(folder):
            return fresh  # refused by the run, with both hashes named
        put_in_place(again, own)
        return Prepared.open(own)
    finally:
        shutil.rmtree(again, ignore_errors=True)


def open_or_create(config: Config, folder: Path, prepared: Prepared, reporter: Reporter) -> Run:
    if not is_created(folder):
        return create_run(folder, config, prepared.source, prepared.target, prepared.hash)
    run = open_run(folder)
    resumed = resume_run(run, config, prepared.hash)
    if warning := describe_new_length(run.config.training, config.training, bool(config.distillation.teacher)):
        reporter.note(warning)
    return resumed


def describe_new_length(old: TrainingConfig, new: TrainingConfig, distills: bool = False) -> str:
    """A warning for a run of more or fewer updates than before, where its updates depend on how many there are."""
    settings = [f"training.schedule = {new.schedule}"] if new.schedule in FALLING else []
    settings += [f"training.{key}" for key in ("penalty_warmdown", "anneal_from") if getattr(new, key)]
    settings += ["distillation.align"] if distills else []
    if new.steps == old.steps or not settings:
        return ""
    return (
        f"training.steps = {new.steps} (was {old.steps}) changes the updates from here on, by "
        f"{' and '.join(settings)}; a run that had {new.steps} from its start ends with other weights"
    )


def require_trainable(config: Config, data: Path | None) -> None:
    """Raise what a new run would fail with whatever its text says.

    Args:
        data: a folder written by `prepare`; otherwise the text named in `config` will be prepared.
    """
    config = adopt_vocabularies(config)
    if data is None:
        check_files(config.data)
        require_text(config)
        if config.guided and not config.data.links:
            raise ConfigError(
                f"training.guided_alignment = {config.training.guided_alignment:g}, but data.links names no files of "
                "word links to learn; `rectiformer align` and statistical aligners write them"
            )
        require_validation(config, has_split(config.data, "valid"))
        vocabularies = load_named(config.vocabulary, config.data.segment_length > 0)
    else:
        prepared = Prepared.open(data, verify=False)  # all of it is read when it is opened to be trained on
        require_same_segments(config, prepared)
        require_training_text(config, prepared)
        require_validation(config, prepared.valid is not None)
        vocabularies = prepared.source, prepared.target
    require_model(config, *vocabularies)
    if config.training.init_from:
        require_fit(config, *vocabularies)
    if config.distillation.teacher:
        require_teacher(config)


def require_model(config: Config, source: Vocabulary | None, target: Vocabulary | None) -> None:
    """ConfigError, or the model's own, where it cannot be built; here it is built on torch's meta device.

    A vocabulary is None where it is yet to be trained.
    """
    shared = source.sha256 == target.sha256 if source and target else config.vocabulary.shared
    if config.model.tie_embeddings == "all" and not shared:
        raise ConfigError(
            'model.tie_embeddings = "all" needs one vocabulary, but source and target each have their own; use '
            'model.tie_embeddings = "target" or vocabulary.shared = true'
        )
    sizes = [config.vocabulary.size if each is None else each.size for each in (source, target)]
    default = Vocabulary.EOS + 1 if has_documents(config.data) else None
    separators = [default if each is None else each.separator for each in (source, target)]
    with torch.device("meta"):
        model = Transformer(config.model, sizes[0], sizes[1], separators=(separators[0], separators[1]))
    require_weights(model, config.training)
    Annealing(model, config.training)


def require_same_segments(config: Config, prepared: Prepared) -> None:
    """ConfigError where data was cut into other segments than those to train on."""
    if prepared.segment_length != config.data.segment_length:
        raise ConfigError(
            f"{prepared.folder} was prepared with data.segment_length = {prepared.segment_length}, but here it is "
            f"{config.data.segment_length}; use the same for both"
        )


def require_training_text(config: Config, prepared: Prepared) -> None:
    """ConfigError where data has no pairs to train on, not those that are weighed, or no links to learn."""
    if config.data.stream:
        return
    if not prepared.train:
        raise ConfigError(
            f"{prepared.folder} was prepared for a stream and has no text to train on; set data.stream = true, or "
            "prepare it without"
        )
    if config.guided and not is_linked(prepared.manifest):
        raise ConfigError(
            f"{prepared.folder} has no word links for training.guided_alignment to learn; prepare it with data.links"
        )
    prepared.set_weights(config.data.weights)
