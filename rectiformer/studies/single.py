"""One training of a study, from its configuration to its result on disk: begun, resumed or only measured."""

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
from functools import partial
from pathlib import Path

import torch

import rectiformer
from rectiformer.errors import DeviceMemoryError
from rectiformer.files import remove, replace_file
from rectiformer.runs.checkpoint import best_checkpoint, save_checkpoint, step_folders
from rectiformer.runs.folder import WEIGHTS
from rectiformer.studies.corpora import in_form
from rectiformer.studies.measures import SIGNATURE
from rectiformer.studies.plan import COST, Task, hash_config
from rectiformer.studies.results import Result
from rectiformer.text.prepared import Prepared, prepare
from rectiformer.train.reporting import Reporter
from rectiformer.train.signals import StopRequest
from rectiformer.train.start import report_or_stop, train
from rectiformer.translate.translator import find_device

FULL = ("out of memory", "ALLOC_FAILED")
"""What CUDA, Triton and cuBLAS say of a full device in errors other than torch's OutOfMemoryError."""


def run_single(task: Task, reporter: Reporter) -> Result:
    """Prepare the text, train or resume, measure, save the result, and keep only the best weights."""
    key = task.training.key
    task.folder.mkdir(parents=True, exist_ok=True)
    prepare_text(task, reporter)
    with naming_full_device(f"{key} cannot be trained"):
        train_rest(task, reporter)
    with naming_full_device(f"{key} cannot be measured"):
        measures = task.study.measure(task)
    result = dataclasses.replace(
        describe(task),
        data=Prepared.open(task.data, verify=False).hash,
        seconds=task.read_cost()["seconds"],
        signature=measures.pop(SIGNATURE, ""),
        measures=measures,
    )
    result.write(task.folder)
    if not task.study.reads:
        keep_best_weights(task.run)
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


def prepare_text(task: Task, reporter: Reporter) -> None:
    """Prepare the text of a training, unless it is there."""
    if task.data.exists():
        return
    task.data.parent.mkdir(parents=True, exist_ok=True)
    with StopRequest() as stop, in_form(task.locate_start(), task.training.form) as config:
        prepare(config, task.data, partial(report_or_stop, reporter, stop))


def train_rest(task: Task, reporter: Reporter) -> None:
    """Train to the end, unless that is done, and record time and memory of this process."""
    if task.is_trained:
        return
    start = time.monotonic()
    train(task.locate_start(), task.run, resume=True, data=task.data, reporter=reporter)
    cost = {"seconds": round(time.monotonic() - start, 3), "peak_bytes": peak_bytes(task.config.training.device)}
    replace_file(task.owner / COST, json.dumps(cost).encode())
    gc.collect()  # graphs of training hold memory that measuring and other trainings can use
    torch.cuda.empty_cache()


def peak_bytes(device: str) -> int:
    """Peak memory of this process: on the GPU, or in RAM where it trained on a CPU."""
    if find_device(device).type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe(task: Task) -> Result:
    """A result without measures: what is trained, by which code, on which machine."""
    return Result(
        study=task.study.name,
        scale=task.scale.name,
        key=task.training.key,
        name=task.training.name,
        seed=task.training.seed,
        labels=dict(task.training.labels),
        config=hash_config(task.config),
        commit=commit(),
        device=device_name(task.config.training.device),
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
