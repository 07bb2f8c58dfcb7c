"""A run folder: everything a command needs of a trained model, and whether it is still what it was.

RUN/source.model and RUN/target.model are its vocabularies, RUN/checkpoints/ holds its weights. RUN/run.json is written
last, so a folder that has it was created completely: it is the record of the whole configuration and of the hashes of
the other files, sealed by a hash of its own.

The record decides how a run is configured. RUN/config.toml repeats it for people, and is compared with it, key by key,
whenever the run is opened: a value that was edited or damaged there is refused, never trained with. What a resumed run
may change comes from the command line or the file given to it, and goes into the record first, then into config.toml.
"""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rectiformer
from rectiformer.config import Config, ModelConfig
from rectiformer.errors import CheckpointError, ConfigError, DataError
from rectiformer.files import damaged, failpoint, replace_file, writing
from rectiformer.model.transformer import Transformer
from rectiformer.runs.checkpoint import (
    Checkpoint,
    find_best,
    newest_checkpoints,
    open_checkpoint,
    read_sealed,
    read_steadily,
    seal,
    step_name,
)
from rectiformer.text.vocabulary import Vocabulary
from rectiformer.toml import build, load_config, to_toml

FREE_KEYS = (
    "log.",
    "checkpoint.",
    "validation.every",
    "validation.sentences",
    "validation.beam",
    "validation.patience",
    "training.steps",
    "training.device",
    "training.compile",
    "training.parallel",
    "data.source",
    "data.target",
    "data.links",
    "data.valid_source",
    "data.valid_target",
    "data.document_tables",
    "vocabulary.source_model",
    "vocabulary.target_model",
)
"""Keys, or sections with a dot after them, that a resumed run may change. Files are judged by what is in them. What is
best so far was found by one metric, and another could not be compared with it."""

RUNS_NAMED, TENSORS_NAMED, KEYS_NAMED = 8, 3, 3
"""At most so many are named in an error."""
BEFORE_RECORD = ("run.lock", "data", "config.toml", "source.model", "target.model")
"""What may be in a folder before run.json is, which makes it a run."""
RECORD_FORMAT = 2
RECORD_LIMIT = 2**26  # bytes of run.json; ours have some thousands, and one for each letter of a file name
IDENTITY = ("config", "data", "source_vocabulary", "target_vocabulary")
WEIGHTS = ("averaged", "ema", "model")
"""The sets of weights a checkpoint may hold, the one to translate with first."""


@dataclass(frozen=True)
class Run:
    """An opened run folder, without its weights."""

    path: Path
    config: Config
    source: Vocabulary
    target: Vocabulary
    data_hash: str

    @property
    def identity(self) -> dict[str, str]:
        """Hashes of what the weights depend on; checkpoints carry them."""
        model = json.dumps(known_by(self.config.model), sort_keys=True)
        return {
            "config": hashlib.sha256(model.encode()).hexdigest(),
            "data": self.data_hash,
            "source_vocabulary": self.source.sha256,
            "target_vocabulary": self.target.sha256,
        }

    def build_model(self) -> Transformer:
        """A model with fresh weights, drawn from torch's current seed."""
        separators = (self.source.separator, self.target.separator)
        return Transformer(self.config.model, self.source.size, self.target.size, self.target.bos, separators)


def known_by(config: ModelConfig) -> dict[str, Any]:
    """The keys that a model is known by: all but those that came later and have their default."""
    later = [item.name for item in dataclasses.fields(config) if item.metadata.get("added")]
    unset = {name for name in later if getattr(config, name) == getattr(ModelConfig(), name)}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in unset}


def create_run(folder: Path, config: Config, source: Vocabulary, target: Vocabulary, data_hash: str) -> Run:
    """Write a new run folder; CheckpointError where something is in it that an unfinished creation would not leave."""
    refuse_existing(folder, but=BEFORE_RECORD)
    run = Run(folder, config, source, target, data_hash)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "config.toml", to_toml(config).encode())  # whatever an unfinished creation left there
        source.save(folder / "source.model")
        target.save(folder / "target.model")
        write_record(run)
    return run


def refuse_existing(folder: Path, but: tuple[str, ...] = ("run.lock",)) -> None:
    """CheckpointError where `folder` holds anything other than files of these names."""
    if folder.exists() and (not folder.is_dir() or any(path.name not in but for path in folder.iterdir())):
        raise CheckpointError(f"run folder {folder} exists; use --resume to go on with it, or another --out")


def is_created(folder: Path) -> bool:
    """Whether `create_run` has finished there."""
    return (folder / "run.json").exists()


def open_run(folder: Path) -> Run:
    """An existing run folder, its vocabularies and configuration checked against the record of its creation."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, but the first argument is a run folder, as `rectiformer train` makes"
        )
    if not folder.is_dir():
        raise CheckpointError(f"there is no run folder {folder}; `rectiformer train` makes one")
    if (folder / "export.json").is_file():
        raise CheckpointError(f"{folder} is exported, and this needs the run folder it was made from; name that one")
    if not is_created(folder):
        runs = sorted(str(path) for path in folder.iterdir() if is_created(path) or (path / "export.json").is_file())
        more = f" and {len(runs) - RUNS_NAMED} more" if len(runs) > RUNS_NAMED else ""
        if runs:
            raise CheckpointError(f"{folder} is no run but holds some; name one: {', '.join(runs[:RUNS_NAMED])}{more}")
    for name in ("run.json", "source.model", "target.model"):
        if (folder / name).is_symlink() or not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is no complete run folder: {name} is missing or not a file in it; put it back or train again"
            )
    identity, config = read_record(folder)
    try:
        source = Vocabulary.load(folder / "source.model", identity["source_vocabulary"])
        target = Vocabulary.load(folder / "target.model", identity["target_vocabulary"])
    except (ConfigError, DataError) as error:
        raise CheckpointError(f"run folder {folder}: {error}") from error
    return Run(folder, config, source, target, identity["data"])


def resume_run(run: Run, config: Config, data_hash: str) -> Run:
    """The run with a new `config`, sealed in the folder too; CheckpointError if more than `FREE_KEYS` changed."""
    keys = [key for key in changed_keys(run.config, config) if not key.startswith(FREE_KEYS)]
    if keys:
        changes = ", ".join(f"{key} = {value_of(config, key)!r} (was {value_of(run.config, key)!r})" for key in keys)
        raise CheckpointError(f"cannot resume {run.path} with {changes}; undo this, or train another run with --out")
    if data_hash != run.data_hash:
        raise CheckpointError(
            f"cannot resume {run.path}: the data has hash {data_hash[:12]}, but it was trained on "
            f"{run.data_hash[:12]}; give it the same files, or train another run with --out"
        )
    return change_config(run, config)


def change_config(run: Run, config: Config) -> Run:
    """The run with another `config`, in its record, then in config.toml.

    After a kill at any moment it opens as the old or the new.
    """
    changed = dataclasses.replace(run, config=config)
    repeat_config(run)  # which may be missing, or older than the record, after a kill
    if config != run.config:
        write_record(changed, replaced=run.config)
        failpoint("before-config")
        repeat_config(changed)
    return changed


def write_record(run: Run, replaced: Config | None = None) -> None:
    """Seal the record of a run: every key of every section, defaults too, and those that were `replaced`."""
    sealed = {"format": RECORD_FORMAT, "identity": run.identity, "rectiformer": rectiformer.__version__}
    sealed["config"] = dataclasses.asdict(run.config)
    if replaced is not None:
        sealed["replaced"] = dataclasses.asdict(replaced)
    with writing(run.path / "run.json"):
        replace_file(run.path / "run.json", seal(sealed))


def repeat_config(run: Run) -> None:
    """Make config.toml say what the record does, unless it does already; comments that somebody added then stay."""
    if read_copy(run.path) != run.config:
        with writing(run.path / "config.toml"):
            replace_file(run.path / "config.toml", to_toml(run.config).encode())


def read_record(folder: Path) -> tuple[dict[str, str], Config]:
    """Identity and configuration of a run; CheckpointError where they are damaged, or config.toml says anything else.

    It may say what was replaced last: a kill, or this reader, may have come between the two writes of `change_config`.
    """
    # In this order: a reader who finds a new config.toml finds the new record too; with an old one it may be either.
    found, path = read_copy(folder), folder / "run.json"
    sealed = read_sealed(path, RECORD_LIMIT, RECORD_FORMAT)
    identity = sealed.get("identity")
    if not isinstance(identity, dict) or not all(isinstance(identity.get(name), str) for name in IDENTITY):
        raise damaged(path, f"it lacks a hash of {', '.join(IDENTITY)}")
    try:
        config = build(Config, sealed.get("config"), "")
        replaced = build(Config, sealed["replaced"], "") if "replaced" in sealed else None
    except ConfigError as error:
        raise damaged(path, f"its configuration is of another version of rectiformer ({error})") from error
    if found is not None and found not in (config, replaced):
        keys = changed_keys(config, found)
        changes = [f"{key} = {value_of(found, key)!r} (saved: {value_of(config, key)!r})" for key in keys[:KEYS_NAMED]]
        changes += [f"and {len(keys) - KEYS_NAMED} more"] if len(keys) > KEYS_NAMED else []
        raise refused(folder, f"not as it was saved: {', '.join(changes)}")
    return identity, config


def read_copy(folder: Path) -> Config | None:
    """What config.toml says, None where it is gone; CheckpointError where it cannot be read."""
    path = folder / "config.toml"
    if not path.exists() and not path.is_symlink():
        return None
    if path.is_symlink() or not path.is_file():
        raise refused(folder, "not a file")
    try:
        return load_config(path)
    except ConfigError as error:
        raise refused(folder, f"damaged: {str(error).removeprefix(f'{path} is ')}") from error


def refused(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder / 'config.toml'} is {why}; undo that, or delete the file: run.json holds what it said, and --resume "
        "writes it again; change keys by --set"
    )


def changed_keys(old: Config, new: Config) -> list[str]:
    """The dotted keys whose values differ, in the order of the configuration."""
    keys = [
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(getattr(old, section.name))
    ]
    return [key for key in keys if value_of(old, key) != value_of(new, key)]


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def load_model(
    run: Run,
    checkpoint: str = "best",
    device: str | torch.device = "cpu",
    notice: Callable[[str], None] = warnings.warn,
) -> tuple[Transformer, int]:
    """The trained model, ready to translate, and the step of its weights.

    Averaged weights are taken before a moving average, and that before the last update's.

    Args:
        checkpoint: "best" (the latest, with a notice, where none is marked best), "latest", a step, or a path.
    """

    def read(notice: Callable[[str], None]) -> tuple[Checkpoint, dict[str, Tensor]]:
        found = find_weights(run, checkpoint, notice)
        require_own(run, found)
        return found, found.tensors(next((name for name in WEIGHTS if found.holds(name)), "model"))

    found, tensors = read_steadily(run.path, read, notice)
    model = run.build_model()
    load_weights(model, tensors, str(found.path))
    return model.to(device).eval(), found.step


def require_own(run: Run, checkpoint: Checkpoint) -> None:
    """CheckpointError where a checkpoint was not saved by this run."""
    found, wanted = checkpoint.manifest["identity"], run.identity
    differences = [
        f"{key} is {found.get(key, 'missing')} in the checkpoint, {wanted.get(key, 'missing')} here"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key) != wanted.get(key)
    ]
    if differences:
        raise CheckpointError(f"{checkpoint.path} does not belong to run {run.path}: {'; '.join(differences)}")


def find_weights(run: Run, checkpoint: str, notice: Callable[[str], None]) -> Checkpoint:
    if checkpoint == "best":
        best = find_best(run.path)
        if best is not None:
            return best
        notice(f"no checkpoint of {run.path} is marked as best; the latest is taken")
    if checkpoint in ("best", "latest"):
        newest = newest_checkpoints(run.path, 1, notice)
        if not newest:
            raise CheckpointError(f"run folder {run.path} has no complete checkpoint; train it with --resume")
        return newest[0]
    if checkpoint.isascii() and checkpoint.isdigit():
        return open_checkpoint(run.path / "checkpoints" / step_name(int(checkpoint)))
    return open_checkpoint(Path(checkpoint))


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter by name, tied ones once, without a copy."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: str = "the weights") -> None:
    """Copy `weights_of` another model into this one; CheckpointError, and nothing copied, unless all of it fits."""
    load_tensors(weights_of(model), tensors, where)


def load_tensors(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into those of the same names; CheckpointError, and nothing copied, unless all of it fits."""
    problems = [f"{name} is missing" for name in own if name not in tensors]
    problems += [f"{name} is unknown to the model" for name in tensors if name not in own]
    problems += [
        f"{name} is {list(tensors[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        more = f"; and {len(problems) - TENSORS_NAMED} more" if len(problems) > TENSORS_NAMED else ""
        named = "; ".join(problems[:TENSORS_NAMED])
        raise CheckpointError(f"{where} does not fit the model: {named}{more}; use the run's own configuration")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def adopt_vocabularies(config: Config) -> Config:
    """The same, with the vocabularies of the run in `training.init_from`, or of the teacher, unless there is none or
    it names its own."""
    other = config.training.init_from or config.distillation.teacher
    if not other or config.vocabulary.source_model or config.vocabulary.target_model:
        return config
    run = open_run(Path(other))
    target = "" if config.vocabulary.shared else str(run.path / "target.model")
    vocabulary = dataclasses.replace(
        config.vocabulary, source_model=str(run.path / "source.model"), target_model=target
    )
    return dataclasses.replace(config, vocabulary=vocabulary)


def keep_vocabularies(config: Config, folder: Path) -> Config:
    """The same for the run that `folder` has already: where a vocabulary it was given is gone, such as that of a run
    which was removed since, its own copy."""
    other = config.training.init_from or config.distillation.teacher
    if not other or (Path(other) / "source.model").exists():
        config = adopt_vocabularies(config)
    named = config.vocabulary.source_model, config.vocabulary.target_model
    if other and not any(named):
        named = other, "" if config.vocabulary.shared else other
    source, target = (
        str(folder / own) if name and not Path(name).is_file() else name
        for own, name in zip(("source.model", "target.model"), named, strict=True)
    )
    vocabulary = dataclasses.replace(config.vocabulary, source_model=source, target_model=target)
    return dataclasses.replace(config, vocabulary=vocabulary)


def require_fit(config: Config, source: Vocabulary | None, target: Vocabulary | None) -> None:
    """CheckpointError where the run in `training.init_from` does not fit, before anything is made or prepared.

    Args:
        source, target: the vocabularies, None where they are not chosen yet.
    """
    start = open_run(Path(config.training.init_from))
    require_same_vocabularies(start, source or start.source, target or start.target)
    with torch.device("meta"):
        ours, theirs = (dataclasses.replace(start, config=each).build_model() for each in (config, start.config))
        load_weights(ours, weights_of(theirs), str(start.path))


def inherit_weights(model: Transformer, run: Run, note: Callable[[str], None]) -> None:
    """Give `model` of `run` the best weights of the run it starts from, and say so; CheckpointError unless they fit.

    Vocabularies must be the same, since rows of the embeddings stand for subwords; dropout and all of [training] may
    differ.
    """
    start = open_run(Path(run.config.training.init_from))
    require_same_vocabularies(start, run.source, run.target)
    trained, step = load_model(start, notice=note)
    load_weights(model, weights_of(trained), str(start.path))
    note(f"started from {start.path}, step {step:,}")


def require_same_vocabularies(start: Run, source: Vocabulary, target: Vocabulary) -> None:
    """CheckpointError where a run has other vocabularies than these."""
    for side, theirs, ours in (("source", start.source, source), ("target", start.target, target)):
        if theirs.sha256 != ours.sha256:
            raise CheckpointError(
                f"cannot start from {start.path}: its {side} vocabulary has hash {theirs.sha256[:12]}, but that of the "
                f"data is {ours.sha256[:12]}; leave out vocabulary.source_model and target_model, or prepare the data "
                f"with those of {start.path}"
            )
