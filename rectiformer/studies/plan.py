"""What a study is: a question, the trainings that answer it, what is measured of each, and how it is shown."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rectiformer.config import Config, DataConfig, Files
from rectiformer.errors import ArgumentError, unknown_name
from rectiformer.files import parse_object, read_regular
from rectiformer.runs.folder import adopt_vocabularies, changed_keys, value_of
from rectiformer.studies.results import RESULT, Figure, Results, Table
from rectiformer.toml import load_config

RUN = "run"
"""The folder of a run inside that of its training."""
COST, SMALL_FILE = "cost.json", 2**16
FILE_KEYS = tuple(item.name for item in fields(DataConfig) if item.type == Files)
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
    tier: int = 0
    """How soon it runs, whatever its study: the lowest first."""
    measuring: int = 10
    """About how many seconds measuring it takes on a GPU."""

    @property
    def key(self) -> str:
        """The name of its folder."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One question; `STUDIES` in catalog.py holds them all."""

    name: str
    title: str
    question: str
    paper: str
    """What the paper says, and how we know it."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """The folder of the corpus under that of all data, by scale; none at smoke, whose text is built in."""
    trainings: Callable[[Scale], list[Training]] = lambda scale: []
    """In the order they run: what matters most comes first, in case the study is stopped."""
    measure: Callable[[Task], dict[str, Any]] = lambda task: {}
    """Measures a task that is trained."""
    tables: Callable[[Results], list[Table]]
    figures: Callable[[Results, Path], list[Figure]] = lambda results, folder: []
    """Draws what the results allow into a folder."""
    reads: str = ""
    """The study whose models it measures, where it trains none of its own."""
    alone: bool = False
    """Whether it measures time, so that nothing may run next to it."""
    shows: Study | None = None
    """The study whose results its tables show too."""

    @property
    def trains(self) -> bool:
        """Whether it has results of its own, and does not only show another study's."""
        return any(self.trainings(Scale(scale)) for scale in SCALES)

    @property
    def sources(self) -> str:
        """The names of the studies to run for what its tables show, as the command takes them."""
        own = self.name if self.trains else ""
        return ",".join(filter(None, (own, self.shows.sources if self.shows else "")))

    def at(self, scale: str, data: Path | None = None, root: Path = Path("data")) -> Scale:
        """The scale of this name, with the corpus in `data` or in its folder under `root`."""
        folder = self.folders.get(scale)
        return Scale(scale, root / folder if data is None and folder else data)


@dataclass(frozen=True)
class Task:
    """A training of a study at a scale, and its folders under `out`."""

    study: Study
    scale: Scale
    out: Path
    training: Training

    @property
    def name(self) -> str:
        return f"{self.study.name}/{self.training.key}"

    @property
    def config(self) -> Config:
        return self.training.config

    @property
    def root(self) -> Path:
        """The folder of all trainings of the study at this scale."""
        return self.out / self.study.name / self.scale.name

    @property
    def folder(self) -> Path:
        """The folder of its result and, unless another study trains it, its run."""
        return self.root / self.training.key

    @property
    def owner(self) -> Path:
        """The same folder in the study that trains it."""
        return self.out / (self.study.reads or self.study.name) / self.scale.name / self.training.key

    @property
    def run(self) -> Path:
        return self.owner / RUN

    @property
    def data(self) -> Path:
        """Prepared data, shared by all trainings on the same text with the same subwords."""
        form = f"-{self.training.form}" if self.training.form else ""
        return self.out / "data" / f"{hash_text(self.config)}{form}"

    @property
    def start(self) -> Path | None:
        """The folder of the training that it starts from, if any."""
        if not self.config.training.init_from:
            return None
        study, key = self.config.training.init_from.split("/")
        return self.out / study / self.scale.name / key

    @property
    def is_trained(self) -> bool:
        """Whether it is trained to the end, measured or not."""
        return (self.owner / COST).exists()

    @property
    def is_finished(self) -> bool:
        return (self.folder / RESULT).exists()

    def read_cost(self) -> dict[str, Any]:
        """`seconds` and `peak_bytes` of the process that ended the training."""
        return parse_object(self.owner / COST, read_regular(self.owner / COST, SMALL_FILE))

    def locate_start(self) -> Config:
        """The configuration, starting from the folder of that run and with its subwords.

        ArgumentError where that run is not trained.
        """
        if self.start is None:
            return self.config
        if not (self.start / COST).exists():
            study, key = self.config.training.init_from.split("/")
            raise ArgumentError(
                f"it starts from {key} of {study}, which is not trained in {self.out}; first run "
                f"`rectiformer study {study} --only {key}` with the same --scale and --out"
            )
        training = replace(self.config.training, init_from=str(self.start / RUN))
        return adopt_vocabularies(replace(self.config, training=training))


def find_task(study: Study, scale: Scale, out: Path, key: str) -> Task:
    """The training of this key; ArgumentError where the study has none."""
    known = {training.key: training for training in study.trainings(scale)}
    if key not in known:
        raise ArgumentError(unknown_name(f"training of {study.name}", key, known))
    return Task(study, scale, out, known[key])


def configure(settings: tuple[str, ...], scale: Scale, *more: str) -> Config:
    """A configuration from `section.key=value` strings, its files in the folder of the scale."""
    config = load_config(None, (*settings, *more))
    if scale.data is None:
        return config
    folder = scale.data
    return replace(config, data=rename_files(config.data, lambda name: str(folder / name)))


def rename_files(data: DataConfig, rename: Callable[[str], str]) -> DataConfig:
    """The same with all its files renamed."""
    files: dict[str, Any] = {key: tuple(map(rename, getattr(data, key))) for key in FILE_KEYS}
    return replace(data, **files)


def seeded(
    name: str,
    seeds: tuple[int, ...],
    config: Config,
    *,
    form: str = "",
    tier: int = 0,
    measuring: int = 10,
    **labels: str | int | float,
) -> list[Training]:
    """The same training once per seed."""
    return [
        Training(
            name, seed, replace(config, training=replace(config.training, seed=seed)), labels, form, tier, measuring
        )
        for seed in seeds
    ]


def portable(config: Config) -> Config:
    """The configuration without what may differ between machines: folders, device, compilation."""
    found = replace(
        config,
        data=rename_files(config.data, lambda name: Path(name).name),
        training=replace(config.training, device="auto", compile="auto"),
    )
    start = Path(config.training.init_from)
    if start.name != RUN:
        return found
    named = f"{start.parts[-4]}/{start.parts[-2]}"  # as before `locate_start`
    return replace(
        found,
        training=replace(found.training, init_from=named),
        vocabulary=replace(found.vocabulary, source_model="", target_model=""),
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
