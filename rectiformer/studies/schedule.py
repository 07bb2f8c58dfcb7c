"""What runs next and how long it takes: the order of trainings across studies, and estimates of their time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rectiformer.config import Config
from rectiformer.runs.folder import is_created
from rectiformer.studies.plan import Task, hash_config
from rectiformer.studies.results import read_saved

BASE_MILLISECONDS, UPDATE_MILLISECONDS = 15.5, 1.5
"""Of an H200 that five trainings share: an update of 16,384 tokens of Transformer-base (17 ms, docs/log.md), of which
the second number does not depend on size."""
BASE_WORK = 16_384 * 44.0e6
"""Tokens times weights, embeddings left out, of such an update."""
LONG = 30.0
"""Seconds of the GPU from which on a training has a line of its own in the queue."""
SLOWER = {"sparsemax": 1.4, "entmax15": 1.4}
"""Updates compared with softmax's, from the study `efficiency`."""


def gpu_seconds(config: Config) -> float:
    """About how much of an H200 a training takes, compiling and measuring left out."""
    model, updates = config.model, config.training
    attention, memory = 4 * model.hidden_size**2, 2 * model.hidden_size * model.ffn_size
    weights = model.encoder_layers * (attention + memory) + model.decoder_layers * (2 * attention + memory)
    tokens = updates.batch_tokens * updates.grad_accumulation
    work = weights * tokens / BASE_WORK * SLOWER.get(model.variant, 1.0)
    return updates.steps * (UPDATE_MILLISECONDS + BASE_MILLISECONDS * work) / 1000


def list_left(chosen: Sequence[Task], every: Sequence[Task]) -> list[Task]:
    """Those without a result, made here or saved here, and the missing models of `every` that they start from.

    Trainings that have begun come first; then the lowest tier, whatever the study, and in it models that others start
    from.
    """
    saved = {task.root: read_saved(task.out, task.study.name, task.scale.name) for task in chosen}

    def is_done(task: Task) -> bool:
        result = saved[task.root].get(task.training.key)
        known = result is not None and not result.failed and result.config == hash_config(task.config)
        return known or task.is_finished

    left = [task for task in chosen if not is_done(task)]
    starts, undone = {task.start for task in left}, {task.folder for task in left}
    missing = [task for task in every if task.folder in starts - undone and not task.is_trained]
    tiers = {task.folder: task.training.tier for task in missing + left}
    for task in left:
        if task.start in tiers:
            tiers[task.start] = min(tiers[task.start], task.training.tier)
    return sorted(
        [*missing, *left],
        key=lambda task: (not is_created(task.run), tiers[task.folder], task.folder not in starts),
    )


@dataclass(frozen=True)
class QueueLine:
    """Trainings of one study that follow each other."""

    study: str
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    """Estimated, of the GPU, measuring included."""

    def describe(self) -> str:
        """The study and its rows, of many the first and the last."""
        shown = self.rows if len(self.rows) < 3 else (self.rows[0], "...", self.rows[-1])
        return f"{self.study}: {' '.join(shown)}"


def describe_queue(tasks: Sequence[Task], every: Sequence[Task]) -> list[QueueLine]:
    """What is left of these trainings, in the order in which it runs."""

    def together(task: Task) -> tuple[str, str]:
        """Long trainings are shown row by row, short ones study by study."""
        return task.study.name, task.training.name if gpu_seconds(task.config) > LONG else ""

    lines = []
    for (study, _), group in groupby(list_left(tasks, every), key=together):
        own = list(group)
        rows = tuple(dict.fromkeys(task.training.name for task in own))
        seeds = tuple(dict.fromkeys(task.training.seed for task in own))
        seconds = sum(gpu_seconds(task.config) * (not task.study.reads) + task.training.measuring for task in own)
        lines.append(QueueLine(study, rows, seeds, seconds / 60))
    return lines
