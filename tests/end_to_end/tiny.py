"""Runs of some seconds, in processes that can be stopped and killed, and what has to be the same however they went."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rectiformer.runs.checkpoint import best_checkpoint, newest_checkpoints
from rectiformer.runs.metrics import read_metrics

TINY = {
    "data.sentences": 150,
    "data.valid_sentences": 10,
    "vocabulary.size": 300,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "model.ffn_size": 32,
    "training.steps": 16,
    "training.batch_tokens": 200,
    "training.grad_accumulation": 2,
    "training.warmup": 20,
    "training.device": "cpu",
    "validation.every": 6,
    "validation.sentences": 4,
    "checkpoint.every": 4,
    "log.every": 1,
}
"""Dropout is on by default. An epoch has 11 updates."""

TIMES = ("tokens_per_second", "valid_seconds")


def overrides(**changes):
    """`section.key=value` strings of a tiny run; `training_learning_rate=2` changes training.learning_rate."""
    changed = {key.replace("_", ".", 1): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in {**TINY, **changed}.items()]


@dataclass
class Ended:
    """How a process ended, and what it reported."""

    exit: int = 0
    notes: list[str] = field(default_factory=list)
    error: str = ""


class Launcher:
    """Trains in child processes of driver.py, one at a time."""

    script = "driver.py"

    def __init__(self):
        self.driver = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(self.script))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.running = 0

    def start(self, folder, *, data=None, moments=None, failpoint="", **changes):
        """Begin or resume the run in `folder`; the process id."""
        job = {
            "folder": str(folder),
            "data": data and str(data),
            "moments": moments or {},
            "failpoint": failpoint,
            "overrides": overrides(**changes),
        }
        self._send(job)
        self.running = self._receive()["pid"]
        return self.running

    def finish(self):
        """Wait for the end of what was started."""
        ended = Ended()
        while self.running:
            [(event, value)] = self._receive().items()
            if event == "note":
                ended.notes.append(value)
            elif event == "error":
                ended.error = value
            else:
                ended.exit, self.running = value, 0
        return ended

    def train(self, *args, **options):
        self.start(*args, **options)
        return self.finish()

    def close(self):
        if self.running:
            os.kill(self.running, signal.SIGKILL)
        self.driver.communicate()

    def _send(self, job):
        self.driver.stdin.write(json.dumps(job) + "\n")
        self.driver.stdin.flush()

    def _receive(self):
        line = self.driver.stdout.readline()
        assert line, "the driver has died"
        return json.loads(line)


def outcome(folder):
    """Everything a finished run has found out: tensors bit for bit, counters, digest of all batches, log, best step."""
    (newest,) = newest_checkpoints(folder, 1, refuse)
    best = best_checkpoint(folder)
    log = read_metrics(folder / "metrics.jsonl")
    return {
        "tensors": hashes(newest),
        "state": newest.state(),
        "best": best and (best.step, hashes(best)),
        "log": [{key: value for key, value in record.items() if key not in TIMES} for record in log],
    }


def hashes(checkpoint):
    files = checkpoint.manifest["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def steps_on_disk(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def refuse(message):
    raise AssertionError(f"warned: {message}")
