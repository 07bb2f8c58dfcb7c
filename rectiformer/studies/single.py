"""One training of a study, from its configuration to its result on disk; begun, resumed or only measured."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rectiformer
from rectiformer.errors import ArgumentError, DeviceMemoryError, unknown_name
from rectiformer.files import parse_object, read_regular, remove, replace_file
from rectiformer.runs.checkpoint import best_checkpoint, save_checkpoint, step_folders
from rectiformer.runs.folder import WEIGHTS
from rectiformer.studies.corpora import in_form
from rectiformer.studies.measures import SIGNATURE
from rectiformer.studies.plan import RUN, Scale, Study, Trained, Training, hash_config, hash_text, locate_start
from rectiformer.studies.results import RESULT, Result
from rectiformer.text.prepared import Prepared, prepare
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import StopRequest
from rectiformer.train.start import tell_unless_asked, train
from rectiformer.translate.translator import find_device

SMALL_FILE = 2**16
FULL = ("out of memory", "ALLOC_FAILED")
"""What CUDA, Triton and cuBLAS say of a full device in errors that are not torch's OutOfMemoryError."""


@dataclass(frozen=True)
class Places:
    """Where everything of a study at a scale lies under one folder."""

    study: Study
    scale: Scale
    out: Path

    @property
    def root(self) -> Path:
        """The folder of all trainings."""
        return self.out / self.study.name / self.scale.name

    def folder(self, training: Training) -> Path:
        """That of one training: its result and, unless another study trains it, the run."""
        return self.root / training.key

    def owner(self, training: Training) -> Path:
        """The folder of the study that trains it."""
        return self.out / (self.study.reads or self.study.name) / self.scale.name / training.key

    def run(self, training: Training) -> Path:
        return self.owner(training) / RUN

    def data(self, training: Training) -> Path:
        """Prepared data, shared by all trainings on the same text with the same subwords."""
        form = f"-{training.form}" if training.form else ""
        return self.out / "data" / f"{hash_text(training.config)}{form}"


def run_single(places: Places, key: str, reporter: Reporter) -> Result:
    """Prepare, train what is left, measure, write the result, keep the best weights and nothing else."""
    training = find_training(places, key)
    folder = places.folder(training)
    folder.mkdir(parents=True, exist_ok=True)
    prepare_text(places, training, reporter)
    with needing_memory(f"{key} cannot be trained"):
        cost = train_rest(places, training, reporter)
    data = places.data(training)
    trained = Trained(training, places.scale, places.run(training), data, cost["peak_bytes"])
    with needing_memory(f"{key} cannot be measured"):
        measures = places.study.measure(trained)
    result = dataclasses.replace(
        describe(places, training),
        data=Prepared.open(data, verify=False).hash,
        seconds=cost["seconds"],
        signature=measures.pop(SIGNATURE, ""),
        measures=measures,
    )
    result.write(folder)
    if not places.study.reads:
        keep_best_weights(places.run(training))
    return result


@contextmanager
def needing_memory(failure: str) -> Iterator[None]:
    """DeviceMemoryError, in one line that begins with `failure`, where the device has too little memory for this."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"{failure}: the device has no memory left; lower --jobs, so that fewer trainings share it"
        ) from error


def is_of_memory(error: BaseException | None) -> bool:
    """Whether a full device is behind it: a graph whose capture ran out of memory ends in an error of its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in FULL):
            return True
        error = error.__context__
    return False


def prepare_text(places: Places, training: Training, reporter: Reporter) -> None:
    """Prepare the text of a training, unless that is done."""
    data = places.data(training)
    if data.exists():
        return
    data.parent.mkdir(parents=True, exist_ok=True)
    located = locate_start(training.config, places.out, places.scale)
    with StopRequest() as stop, in_form(located, training.form) as config:
        prepare(config, data, partial(tell_unless_asked, reporter, stop))


def find_training(places: Places, key: str) -> Training:
    """The training of this key; ArgumentError where the study has none."""
    known = {training.key: training for training in places.study.trainings(places.scale)}
    if key not in known:
        raise ArgumentError(unknown_name(f"training of {places.study.name}", key, known))
    return known[key]


def is_trained(places: Places, training: Training) -> bool:
    """Whether it is trained to the end, be it measured or not."""
    return cost_path(places, training).exists()


def cost_path(places: Places, training: Training) -> Path:
    """What the training has cost, written when it has ended."""
    return places.owner(training) / "cost.json"


def train_rest(places: Places, training: Training, reporter: Reporter) -> dict[str, Any]:
    """Train to the end, unless that is done; what it cost the process that ended it."""
    path = cost_path(places, training)
    if is_trained(places, training):
        return parse_object(path, read_regular(path, SMALL_FILE))
    start = time.monotonic()
    config = locate_start(training.config, places.out, places.scale)
    train(config, places.run(training), resume=True, data=places.data(training), reporter=reporter)
    cost = {"seconds": round(time.monotonic() - start, 3), "peak_bytes": peak_bytes(training.config.training.device)}
    replace_file(path, json.dumps(cost).encode())
    gc.collect()  # the graphs of training hold memory that measuring, and trainings side by side, can use
    torch.cuda.empty_cache()
    return cost


def peak_bytes(device: str) -> int:
    """Most memory this process has used: of the GPU, or where it trained on none of the machine."""
    if find_device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe(places: Places, training: Training) -> Result:
    """A result without numbers: what was to be trained, and by what on which machine."""
    return Result(
        study=places.study.name,
        scale=places.scale.name,
        key=training.key,
        name=training.name,
        seed=training.seed,
        labels=dict(training.labels),
        config=hash_config(training.config),
        commit=commit(),
        device=device_name(training.config.training.device),
        torch=str(torch.__version__),
        rectiformer=rectiformer.__version__,
    )


def commit() -> str:
    """The commit of this code; where there is no git, RECTIFORMER_COMMIT says it."""
    if said := os.environ.get("RECTIFORMER_COMMIT"):
        return said
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def device_name(device: str) -> str:
    """The GPU, or the kind of CPU."""
    if find_device(device).type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").split("\n") if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def keep_best_weights(run: Path) -> None:
    """Of a finished run, keep the weights to translate with: a study of a hundred models fits a disk that way."""
    best = best_checkpoint(run)
    assert best is not None
    name = next(name for name in WEIGHTS if best.holds(name))
    tensors, state = {name: best.tensors(name)}, best.state()
    for step, path in step_folders(run / "checkpoints").items():
        if step != best.step:
            remove(path)
    save_checkpoint(run, best.step, tensors, state, best.manifest["identity"], best=True)


def is_finished(places: Places, training: Training) -> bool:
    return (places.folder(training) / RESULT).exists()
