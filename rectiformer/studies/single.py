"""One training of a study, from its configuration to its result on disk: begun, resumed or only measured."""

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
from rectiformer.train.start import report_or_stop, train
from rectiformer.translate.translator import find_device

SMALL_FILE = 2**16
FULL = ("out of memory", "ALLOC_FAILED")
"""What CUDA, Triton and cuBLAS say of a full device in errors other than torch's OutOfMemoryError."""


@dataclass(frozen=True)
class StudyPaths:
    """The folders of a study at a scale, all under `out`."""

    study: Study
    scale: Scale
    out: Path

    @property
    def root(self) -> Path:
        """The folder of all trainings."""
        return self.out / self.study.name / self.scale.name

    def folder(self, training: Training) -> Path:
        """The folder of a training: its result and, unless another study trains it, its run."""
        return self.root / training.key

    def owner(self, training: Training) -> Path:
        """The folder of the training in the study that trains it."""
        return self.out / (self.study.reads or self.study.name) / self.scale.name / training.key

    def run(self, training: Training) -> Path:
        return self.owner(training) / RUN

    def data(self, training: Training) -> Path:
        """Prepared data, shared by all trainings on the same text with the same subwords."""
        form = f"-{training.form}" if training.form else ""
        return self.out / "data" / f"{hash_text(training.config)}{form}"


def run_single(paths: StudyPaths, key: str, reporter: Reporter) -> Result:
    """Prepare the text, train or resume, measure, save the result, and keep only the best weights."""
    training = find_training(paths, key)
    folder = paths.folder(training)
    folder.mkdir(parents=True, exist_ok=True)
    prepare_text(paths, training, reporter)
    with naming_full_device(f"{key} cannot be trained"):
        cost = train_rest(paths, training, reporter)
    data = paths.data(training)
    trained = Trained(training, paths.scale, paths.run(training), data, cost["peak_bytes"])
    with naming_full_device(f"{key} cannot be measured"):
        measures = paths.study.measure(trained)
    result = dataclasses.replace(
        describe(paths, training),
        data=Prepared.open(data, verify=False).hash,
        seconds=cost["seconds"],
        signature=measures.pop(SIGNATURE, ""),
        measures=measures,
    )
    result.write(folder)
    if not paths.study.reads:
        keep_best_weights(paths.run(training))
    return result


@contextmanager
def naming_full_device(failure: str) -> Iterator[None]:
    """DeviceMemoryError, in one line that begins with `failure`, where the device runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"{failure}: the device has no memory left; lower --jobs, so that fewer trainings share it"
        ) from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a full device is the cause: a graph whose capture ran out of memory ends in an error of its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in FULL):
            return True
        error = error.__context__
    return False


def prepare_text(paths: StudyPaths, training: Training, reporter: Reporter) -> None:
    """Prepare the text of a training, unless it is there."""
    data = paths.data(training)
    if data.exists():
        return
    data.parent.mkdir(parents=True, exist_ok=True)
    located = locate_start(training.config, paths.out, paths.scale)
    with StopRequest() as stop, in_form(located, training.form) as config:
        prepare(config, data, partial(report_or_stop, reporter, stop))


def find_training(paths: StudyPaths, key: str) -> Training:
    """The training of this key; ArgumentError where the study has none."""
    known = {training.key: training for training in paths.study.trainings(paths.scale)}
    if key not in known:
        raise ArgumentError(unknown_name(f"training of {paths.study.name}", key, known))
    return known[key]


def is_trained(paths: StudyPaths, training: Training) -> bool:
    """Whether it is trained to the end, measured or not."""
    return cost_path(paths, training).exists()


def cost_path(paths: StudyPaths, training: Training) -> Path:
    """Time and memory of the training, saved when it ends."""
    return paths.owner(training) / "cost.json"


def train_rest(paths: StudyPaths, training: Training, reporter: Reporter) -> dict[str, Any]:
    """Train to the end, unless that is done; time and memory of the process that ended it."""
    path = cost_path(paths, training)
    if is_trained(paths, training):
        return parse_object(path, read_regular(path, SMALL_FILE))
    start = time.monotonic()
    config = locate_start(training.config, paths.out, paths.scale)
    train(config, paths.run(training), resume=True, data=paths.data(training), reporter=reporter)
    cost = {"seconds": round(time.monotonic() - start, 3), "peak_bytes": peak_bytes(training.config.training.device)}
    replace_file(path, json.dumps(cost).encode())
    gc.collect()  # graphs of training hold memory that measuring and other trainings can use
    torch.cuda.empty_cache()
    return cost


def peak_bytes(device: str) -> int:
    """Peak memory of this process: on the GPU, or in RAM where it trained on a CPU."""
    if find_device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe(paths: StudyPaths, training: Training) -> Result:
    """A result without measures: what is trained, by which code, on which machine."""
    return Result(
        study=paths.study.name,
        scale=paths.scale.name,
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
    """The commit of this code, from RECTIFORMER_COMMIT or git."""
    if said := os.environ.get("RECTIFORMER_COMMIT"):
        return said
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def device_name(device: str) -> str:
    """The model of the GPU or CPU."""
    if find_device(device).type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").split("\n") if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def keep_best_weights(run: Path) -> None:
    """Remove all but the weights to translate with, so that a study of a hundred models fits a disk."""
    best = best_checkpoint(run)
    assert best is not None
    name = next(name for name in WEIGHTS if best.holds(name))
    tensors, state = {name: best.tensors(name)}, best.state()
    for step, path in step_folders(run / "checkpoints").items():
        if step != best.step:
            remove(path)
    save_checkpoint(run, best.step, tensors, state, best.manifest["identity"], best=True)


def is_finished(paths: StudyPaths, training: Training) -> bool:
    return (paths.folder(training) / RESULT).exists()
