"""What a study is: a question, the trainings that answer it, what is measured of each, and how it is shown."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rectiformer.config import Config, DataConfig
from rectiformer.errors import ArgumentError
from rectiformer.runs.folder import adopt_vocabularies, changed_keys, is_created, value_of
from rectiformer.studies.results import Results, Table
from rectiformer.toml import load_config

RUN = "run"
"""The folder of a run inside that of its training."""
FILE_KEYS = tuple(item.name for item in dataclasses.fields(DataConfig) if item.type == "Files")
"""The keys of [data] that name files."""


@dataclass(frozen=True)
class Scale:
    """How much is trained, and where the text is."""

    name: str
    """One of `SCALES`."""
    data: Path | None = None
    """Folder of the corpus; none for the built-in grammar."""


SCALES = {
    "smoke": "the built-in grammar, seconds per training on a CPU: shows that everything runs",
    "small": "a real corpus of some megabytes, a minute or two per training on one GPU",
    "paper": "the recipe of the paper, on files that you provide",
}


@dataclass(frozen=True)
class Training:
    """One model to train."""

    name: str
    """Shared by all seeds: a row of a table."""
    seed: int
    config: Config
    """To start from a training of another study, `training.init_from` is that one's `study/key`."""
    labels: Mapping[str, str | int | float] = field(default_factory=dict)
    """What the tables and figures sort it by."""
    form: str = ""
    """How its text is rewritten first, one of `FORMS` in corpora.py; empty for text as it is."""

    @property
    def key(self) -> str:
        """The name of its folder."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True)
class Trained:
    """A finished training, to be measured."""

    training: Training
    scale: Scale
    folder: Path
    """The run."""
    data: Path
    """Its prepared data."""
    peak_bytes: int
    """Peak memory of the training process: on the GPU, or in RAM where there is none."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One question; `STUDIES` in catalog.py holds them all."""

    name: str
    title: str
    question: str
    paper: str
    """What the paper says, and how we know it."""
    folders: Mapping[str, str]
    """The default folder of the corpus, by scale; none at smoke, whose text is built in."""
    trainings: Callable[[Scale], list[Training]] = lambda scale: []
    """In the order they run: what matters most comes first, in case the study is stopped."""
    measure: Callable[[Trained], dict[str, Any]] = lambda run: {}
    tables: Callable[[Results], list[Table]]
    figures: Callable[[Results, Path], list[Path]] = lambda results, folder: []
    """Draws what the results allow into a folder, and returns the files."""
    reads: str = ""
    """The study whose models it measures, where it trains none of its own."""
    alone: bool = False
    """Whether it measures time, so that nothing may run next to it."""
    shows: Study | None = None
    """The study whose results it shows in other tables, where it neither trains nor measures."""

    @property
    def source(self) -> Study:
        """The study whose results its tables show."""
        return self.shows or self

    def at(self, scale: str, data: Path | None = None) -> Scale:
        """The scale of this name, with the corpus in `data` or in the default folder."""
        default = self.folders.get(scale)
        return Scale(scale, data if data is not None else Path(default) if default else None)

    def under(self, scale: str, root: Path) -> Scale:
        """The scale of this name, with the default folder under `root` instead of `data`."""
        default = self.folders.get(scale)
        return Scale(scale, root / Path(default).relative_to("data") if default else None)


def configure(settings: tuple[str, ...], scale: Scale, *more: str) -> Config:
    """A configuration from `section.key=value` strings, its files in the folder of the scale."""
    config = load_config(None, (*settings, *more))
    if scale.data is None:
        return config
    folder = scale.data
    return dataclasses.replace(config, data=rename_files(config.data, lambda name: str(folder / name)))


def rename_files(data: DataConfig, rename: Callable[[str], str]) -> DataConfig:
    """The same with all its files renamed."""
    files: dict[str, Any] = {key: tuple(map(rename, getattr(data, key))) for key in FILE_KEYS}
    return dataclasses.replace(data, **files)


def seeded(
    name: str, seeds: tuple[int, ...], config: Config, *, form: str = "", **labels: str | int | float
) -> list[Training]:
    """The same training once per seed."""

    def with_seed(seed: int) -> Config:
        return dataclasses.replace(config, training=dataclasses.replace(config.training, seed=seed))

    return [Training(name, seed, with_seed(seed), labels, form) for seed in seeds]


def start_folder(config: Config, out: Path, scale: Scale) -> Path | None:
    """The folder in `out` of the training that this one starts from, if any."""
    if not config.training.init_from:
        return None
    study, key = config.training.init_from.split("/")
    return out / study / scale.name / key


def locate_start(config: Config, out: Path, scale: Scale) -> Config:
    """The same, starting from the folder in `out` of that run and with its subwords.

    ArgumentError where that run is not trained.
    """
    folder = start_folder(config, out, scale)
    if folder is None:
        return config
    (study, key), run = config.training.init_from.split("/"), folder / RUN
    if not is_created(run):
        raise ArgumentError(
            f"it starts from {key} of {study}, which is not trained in {out}; first run "
            f"`rectiformer study {study} --only {key}` with the same --scale and --out"
        )
    return adopt_vocabularies(
        dataclasses.replace(config, training=dataclasses.replace(config.training, init_from=str(run)))
    )


def portable(config: Config) -> Config:
    """The configuration without what may differ between machines: folders, device, compilation."""
    found = dataclasses.replace(
        config,
        data=rename_files(config.data, lambda name: Path(name).name),
        training=dataclasses.replace(config.training, device="auto", compile="auto"),
    )
    start = Path(config.training.init_from)
    if start.name != RUN:
        return found
    named = f"{start.parts[-4]}/{start.parts[-2]}"  # what `locate_start` was given
    return dataclasses.replace(
        found,
        training=dataclasses.replace(found.training, init_from=named),
        vocabulary=dataclasses.replace(found.vocabulary, source_model="", target_model=""),
    )


def hash_config(config: Config) -> str:
    """A hash of the experiment, the same wherever it runs."""
    return hash_settings(portable(config))


def hash_text(config: Config) -> str:
    """A short hash of what decides the prepared data: the sections [data] and [vocabulary]."""
    return hash_settings(Config(data=config.data, vocabulary=config.vocabulary))[:16]


def hash_settings(config: Config) -> str:
    """A hash of all settings that are not defaults, so that new keys change nothing."""
    settings = [f"{key} = {value_of(config, key)!r}" for key in changed_keys(Config(), config)]
    return hashlib.sha256("\n".join(settings).encode()).hexdigest()
