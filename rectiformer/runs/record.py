"""RUN/run.json: the configuration and the hashes that a run was created with, sealed by a hash of its own.

The record decides how a run is configured. RUN/config.toml repeats it for people, and is compared with it, key by key,
whenever the run is opened: a value that was edited or damaged there is refused, never trained with. What a resumed run
may change comes from the command line or the file given to it, and goes into the record first, then into config.toml.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rectiformer
from rectiformer.config import Config
from rectiformer.errors import CheckpointError, ConfigError
from rectiformer.files import damaged, failpoint, replace_file, writing
from rectiformer.runs.checkpoint_format import read_sealed, seal
from rectiformer.toml import build, load_config, to_toml

FORMAT = 2
RECORD_LIMIT = 2**26  # bytes of run.json; ours have some thousands, and one for each letter of a file name
IDENTITY = ("config", "data", "source_vocabulary", "target_vocabulary")
KEYS_NAMED = 3
"""At most so many are named in an error."""


@dataclass(frozen=True)
class Record:
    """What run.json says."""

    identity: dict[str, str]
    config: Config
    replaced: Config | None = None
    """The configuration before the latest change. config.toml still says this where the process was killed between the
    two writes, or where a reader came between them; what is meant is `config` all the same."""


def write_record(folder: Path, record: Record) -> None:
    """Seal `record` as that of the run in `folder`."""
    with writing(folder / "run.json"):
        replace_file(folder / "run.json", seal(to_json(record)))


def repeat_config(folder: Path, config: Config) -> None:
    """Have config.toml say what the record does, unless it does; comments that somebody added then stay."""
    if read_copy(folder) != config:
        with writing(folder / "config.toml"):
            replace_file(folder / "config.toml", to_toml(config).encode())


def change_record(folder: Path, old: Record, new: Record) -> None:
    """Replace the record of a run, then config.toml; a kill at any moment leaves one that opens as the old or new."""
    repeat_config(folder, old.config)  # which may be missing, or older than the record, after a kill
    if new.config != old.config:
        write_record(folder, dataclasses.replace(new, replaced=old.config))
        failpoint("before-config")
        repeat_config(folder, new.config)


def to_json(record: Record) -> dict[str, Any]:
    """The record as JSON holds it: every key of every section, defaults too."""
    sealed: dict[str, Any] = {"format": FORMAT, "identity": record.identity, "rectiformer": rectiformer.__version__}
    sealed["config"] = dataclasses.asdict(record.config)
    if record.replaced is not None:
        sealed["replaced"] = dataclasses.asdict(record.replaced)
    return json.loads(json.dumps(sealed))  # lists for tuples, as they are read back


def read_record(folder: Path) -> Record:
    """The record of a run; CheckpointError where it is damaged, or where config.toml says anything else."""
    # In this order: who finds a new config.toml finds the new record too, and who finds the old one may find either.
    found = read_copy(folder)
    record = read_sealed_record(folder / "run.json")
    if found is not None and found not in (record.config, record.replaced):
        keys = changed_keys(record.config, found)
        changes = [
            f"{key} = {value_of(found, key)!r} (saved: {value_of(record.config, key)!r})" for key in keys[:KEYS_NAMED]
        ]
        changes += [f"and {len(keys) - KEYS_NAMED} more"] if len(keys) > KEYS_NAMED else []
        raise refused(folder, f"not as it was saved: {', '.join(changes)}")
    return record


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


def read_sealed_record(path: Path) -> Record:
    sealed = read_sealed(path, RECORD_LIMIT, FORMAT)
    identity = sealed.get("identity")
    if not isinstance(identity, dict) or not all(isinstance(identity.get(name), str) for name in IDENTITY):
        raise damaged(path, f"it lacks a hash of {', '.join(IDENTITY)}")
    try:
        replaced = build(Config, sealed["replaced"], "") if "replaced" in sealed else None
        return Record(identity, build(Config, sealed.get("config"), ""), replaced)
    except ConfigError as error:
        raise damaged(path, f"its configuration is of another version of rectiformer ({error})") from error


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
