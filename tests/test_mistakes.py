"""Extremes, hostile names and interruptions: one line and an exit code, never a traceback."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_main

from rectiformer.cli import is_out_of_memory


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("vocabulary.size=2147483648", 2, "vocabulary.size = 2147483648, but it must be at least 8 and below "),
        ("training.seed=1e30", 2, "training.seed = 1e+30, but it must be an int"),
        (f"training.seed={10**30}", 2, f"training.seed = {10**30}, but it must be at least 0 and below "),
        (
            "training.learning_rate=1e308",
            2,
            "training.learning_rate = 1e+308, but it must be at least 0 and below 1e+30",
        ),
        ("training.learning_rate=9e29", 5, "step 2: loss or gradient is not a finite number"),
        ("model.encoder_layers=1000000", 2, "model.encoder_layers = 1000000, but it must be at least 1 and below 1025"),
        ("training.device=mps", 2, "unknown value of training.device 'mps'"),
        ('data.source="a\\u0000b"', 2, "data.source = 'a\\x00b', but no name can have a NUL character in it"),
    ],
)
def test_extreme_settings_of_a_training(tiny_run, rectiformer, tmp_path, setting, code, words):
    arguments = ["train", tiny_run / "config.toml", "--data", tiny_run / "data", "--out", tmp_path / "new"]
    found = rectiformer(*arguments, "--set", setting)
    assert (found.code, found.err.count("\n")) == (code, 1), found.err
    assert found.err.startswith(f"rectiformer: {words}")


def test_a_device_that_is_not_supported(tiny_run, rectiformer):
    found = rectiformer("translate", tiny_run, "--device", "mps", stdin=b"Der Hund.\n")
    assert found.code == 2
    assert found.err == "rectiformer: device 'mps' is not supported; use auto, cpu or cuda\n"


def test_no_memory_is_told_from_other_errors():
    for allocate in (lambda: torch.empty(1 << 60), lambda: np.empty(1 << 55), lambda: bytearray(1 << 60)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", [["train", "--help"], ["--help"], ["variants"]], ids=" ".join)
def test_terminals_without_unicode_show_what_they_can(monkeypatch, encoding, command):
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding=encoding))
    assert run_main(*command) == 0
    assert len(screen.getvalue().decode(encoding)) > 300


def test_json_is_utf8_on_every_terminal(monkeypatch, tmp_path):
    name = tmp_path / "schön.en"
    name.write_bytes(b"The dog sleeps.\n")
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    assert run_main("evaluate", "--hypothesis", name, "--reference", name, "--metrics", "bleu", "--json") == 0
    assert json.loads(screen.getvalue())["system"] == str(name)


def test_interrupting_the_import_of_torch_is_quiet():
    process = subprocess.Popen(
        [sys.executable, "-m", "rectiformer", "variants"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130
