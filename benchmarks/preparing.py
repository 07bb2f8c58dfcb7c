"""Data at scale: memory and speed of preparing a large corpus and of the first updates of a training on it.

    python benchmarks/preparing.py --lines 20000000 --out benchmarks/results/preparing.jsonl

The corpus is generated: sentences of the built-in grammar, each with a number before it. Commands run as users run
them, each in a process of its own whose memory is read from /proc ten times per second, children included. For
comparison sentencepiece alone encodes lines of the same files right after, with as many threads. All files go to a
folder in TMPDIR, which is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from points import add_result_options, append_point, describe_machine

from rectiformer.text.grammar import draw_sentences
from rectiformer.text.vocabulary import Vocabulary

SENTENCES = 20_000
"""Distinct sentences; the number before each makes more of them."""
SPEED_LINES = 200_000
"""Lines per side from which sentencepiece's own speed is measured."""
BATCH = 4_096
TRAINING = ["model.hidden_size=64", "model.ffn_size=128", "training.steps=30", "log.every=10", "training.device=cpu"]


def write_corpus(folder: Path, lines: int) -> None:
    """train.de and train.en of so many lines, valid.de and valid.en of 200."""
    pairs = [(pair.source, pair.target) for pair in draw_sentences(SENTENCES, 1, "train")]
    for name, count in (("train", lines), ("valid", 200)):
        for side, ending in enumerate(("de", "en")):
            with (folder / f"{name}.{ending}").open("w", encoding="utf-8") as file:
                for start in range(0, count, 10_000):
                    numbers = range(start, min(start + 10_000, count))
                    file.writelines(
                        f"{n * 7 % 997} {pairs[(n * 31 + n // SENTENCES) % SENTENCES][side]}\n" for n in numbers
                    )


def memory_of(process: int) -> tuple[int, int]:
    """Bytes that a process and its children hold: all, and without file pages, which can be dropped at any time."""
    total = alone = 0
    waiting = [process]
    while waiting:
        current = waiting.pop()
        try:
            status = Path(f"/proc/{current}/status").read_text()
            for task in Path(f"/proc/{current}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        sizes = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("VmRSS", "RssAnon")))
        total += int(sizes.get("VmRSS", "0 kB").split()[0]) * 1024
        alone += int(sizes.get("RssAnon", "0 kB").split()[0]) * 1024
    return total, alone


def measure(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command: its seconds, CPU seconds and peak memory in MiB."""
    start, worked = time.perf_counter(), cpu_seconds(resource.RUSAGE_CHILDREN)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        peaks = (0, 0)
        while process.poll() is None:
            peaks = tuple(map(max, peaks, memory_of(process.pid)))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[2:4])} failed: {(folder / 'output').read_text()}")
    times = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu_seconds(resource.RUSAGE_CHILDREN) - worked,
    }
    return {**times, "peak_mib": peaks[0] / 2**20, "peak_without_files_mib": peaks[1] / 2**20}


def cpu_seconds(of: int) -> float:
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


def sentencepiece_speed(folder: Path, lines: int) -> tuple[float, float]:
    """Pairs that sentencepiece alone encodes per second and per CPU second, from lines in memory."""
    vocabulary = Vocabulary.load(folder / "data/source.model")
    seconds, worked, done = 0.0, 0.0, 0
    for ending in ("de", "en"):
        with (folder / f"train.{ending}").open(encoding="utf-8", newline="\n") as file:
            texts = [line.rstrip("\n") for line in islice(file, min(lines, SPEED_LINES))]
        start, before = time.perf_counter(), cpu_seconds(resource.RUSAGE_SELF)
        for first in range(0, len(texts), BATCH):
            vocabulary._processor.encode(texts[first : first + BATCH])
        seconds += time.perf_counter() - start
        worked += cpu_seconds(resource.RUSAGE_SELF) - before
        done += len(texts)
    return done / 2 / seconds, done / 2 / worked


def run(lines: int, folder: Path, out: Path | None) -> None:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free < lines * 400:
        raise SystemExit(f"{lines:,} lines need about {lines * 400 / 1e9:.0f} GB, but {folder} has {free / 1e9:.0f} GB")
    start = time.perf_counter()
    write_corpus(folder, lines)
    print(f"generated {lines:,} pairs in {time.perf_counter() - start:.0f} s", flush=True)
    files = [
        f'data.{key}{side}="{name}.{ending}"'
        for key, name in (("", "train"), ("valid_", "valid"))
        for side, ending in (("source", "de"), ("target", "en"))
    ]
    settings = [*files, "vocabulary.size=2000", "vocabulary.sentences=50000"]
    program = [sys.executable, "-m", "rectiformer"]
    prepared = measure([*program, "data", "prepare", "--out", "data", *options(settings)], folder)
    alone, alone_cpu = sentencepiece_speed(folder, lines)
    manifest = json.loads((folder / "data/manifest.json").read_text())
    report(
        "prepare",
        lines,
        prepared,
        out,
        {
            "pairs": manifest["splits"]["train-0"]["pairs"],
            "tokens": sum(manifest["splits"]["train-0"][f"{side}_tokens"] for side in ("source", "target")),
            "pairs_per_second": lines / prepared["seconds"],
            "sentencepiece_pairs_per_second": alone,
            "pairs_per_cpu_second": lines / prepared["cpu_seconds"],
            "sentencepiece_pairs_per_cpu_second": alone_cpu,
        },
    )
    trained = measure([*program, "train", "--data", "data", "--out", "run", *options([*settings, *TRAINING])], folder)
    report("first 30 updates", lines, trained, out, {})


def options(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def report(what: str, lines: int, found: dict[str, float], out: Path | None, more: dict[str, float]) -> None:
    point = {"benchmark": "preparing", "what": what, "lines": lines, **found, **more, **describe_machine()}
    append_point(out, {**point, "cores": os.cpu_count(), "load": os.getloadavg()[0]})
    print(f"{what}: " + ", ".join(f"{name} {value:,.0f}" for name, value in {**found, **more}.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000_000)
    add_result_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(arguments.lines, Path(folder), arguments.out and arguments.out.absolute())


if __name__ == "__main__":
    main()
