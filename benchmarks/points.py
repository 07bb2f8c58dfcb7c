"""The machine that a measurement comes from, and the JSON lines it is kept in."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch


def add_result_options(parser: argparse.ArgumentParser, out: Path | None = None) -> None:
    """Where points go, and the commit they say: the options of every script that keeps points."""
    parser.add_argument("--out", type=Path, default=out, help="JSON lines to append to")
    parser.add_argument("--commit", action=NameCommit, help="what was measured, where git does not know it")


class NameCommit(argparse.Action):
    """Names the commit for this process and those it starts."""

    def __call__(self, parser: object, namespace: object, commit: object, option: str | None = None) -> None:
        os.environ["RECTIFORMER_COMMIT"] = str(commit)


def describe_machine(device: str = "cpu") -> dict[str, object]:
    """Command, commit (of --commit, RECTIFORMER_COMMIT or git), device and versions."""
    commit = os.environ.get("RECTIFORMER_COMMIT")
    if commit is None:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = git.stdout.strip()
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        info = Path("/proc/cpuinfo")
        models = (
            [line for line in info.read_text().split("\n") if line.startswith("model name")] if info.exists() else []
        )
        name = models[0].partition(":")[2].strip() if models else platform.processor()
    return {
        "command": " ".join(["python", *name_command(sys.argv)]),
        "commit": commit,
        "device": name,
        "threads": torch.get_num_threads(),
        "bf16": device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def name_command(words: list[str]) -> list[str]:
    """The command without --out, a path of this machine, and --commit, which every point says anyway."""
    left_out = ("--out", "--commit")
    return [
        word
        for word, before in zip(words, ["", *words], strict=False)
        if word.partition("=")[0] not in left_out and before not in left_out
    ]


def append_point(path: Path | None, point: dict[str, object]) -> None:
    """Add one line to `path`, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
