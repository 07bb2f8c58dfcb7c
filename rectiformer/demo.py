"""The demonstration: a rectified and a softmax translator learn the built-in grammar side by side, then are looked at.

Both are trained by `rectiformer train` in processes of their own, each on its share of the cores, so that the second
model costs no time. What is printed and drawn comes from sentences that neither of them has seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rectiformer.config import Config
from rectiformer.demo_page import Example, write_page
from rectiformer.errors import RectiformerError
from rectiformer.measure.alignment import Links
from rectiformer.measure.words import merge_weights, pieces_to_words, word_spans
from rectiformer.runs.metrics import read_metrics
from rectiformer.terminal import Terminal
from rectiformer.text.grammar import Pair, draw_sentences
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config, to_toml
from rectiformer.translate.align import AVERAGE, PairWeights, Row, alignment_table, choose, cross_weights
from rectiformer.translate.evaluate import evaluate
from rectiformer.translate.options import SearchOptions
from rectiformer.translate.translator import Translator

VARIANTS = ("rela-g", "softmax")
SETTINGS = (
    "data.sentences=30000",
    "data.valid_sentences=200",
    "model.attention_dropout=0",
    "training.steps=1050",
    "training.ema=0.99",
    "training.tokens=1200",
    "training.warmup=300",
    "validation.every=350",
    "checkpoint.every=1050",
    "log.every=10",
)
TEST_SENTENCES = 300
TEST_SEED = 7


@dataclass(frozen=True)
class Finding:
    """What one trained model does on sentences it has not seen."""

    variant: str
    bleu: float
    signature: str
    translations: list[str]
    alignment: Row
    """The layer, head and induction whose links are nearest to the gold ones."""
    sparsity: list[float]
    """Share of exactly zero weights in attention to the source, a number a layer."""
    null_rate: list[float]
    """Share of rows without any weight, a number a layer."""
    weights: list[PairWeights]


def run_demo(folder: Path, terminal: Terminal) -> list[Finding]:
    """Train both models in `folder` (or go on with them), print what they do, write a page about it."""
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    terminal.note(
        "A German-English grammar of our own: verb-final clauses, separable verbs, compounds, gender and case."
    )
    config = load_config(None, SETTINGS)
    if not (folder / "data" / "manifest.json").exists():
        prepare(config, folder / "data", terminal.preparing)
        terminal.end()
    train_side_by_side(folder, config, terminal)
    pairs = list(draw_sentences(TEST_SENTENCES, TEST_SEED, "test"))
    findings = []
    for variant in VARIANTS:
        with terminal.console.status(f"translating and aligning {TEST_SENTENCES} unseen sentences with {variant}"):
            findings.append(examine(Translator.from_run(folder / variant, device="cpu"), variant, pairs))
    print_findings(findings, pairs, terminal)
    page = write_page(folder / "report.html", findings_table(findings), examples_of(findings, pairs))
    terminal.note(f"\nreport: {page}    runs: {', '.join(str(folder / name) for name in VARIANTS)}")
    terminal.note(f"try: echo {pairs[0].source!r} | rectiformer translate {folder / VARIANTS[0]}")
    terminal.note(f"took {time.monotonic() - start:.0f} s")
    return findings


def train_side_by_side(folder: Path, config: Config, terminal: Terminal) -> None:
    """One training process a variant, watched through the metrics it writes."""
    threads = max(1, (os.cpu_count() or 1) // len(VARIANTS))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for variant in VARIANTS:
            settings = folder / f"{variant}.toml"
            settings.write_text(to_toml(load_config(None, [*SETTINGS, f"model.variant={variant}"])), encoding="utf-8")
            command = [sys.executable, "-m", "rectiformer", "train", str(settings), "--out", str(folder / variant)]
            command += ["--resume", "--data", str(folder / "data")]
            log = (folder / f"{variant}.log").open("wb")
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            processes[variant] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
            log.close()
        watch(folder, processes, config.training.steps, terminal)
    finally:
        for process in processes.values():
            process.terminate()
    for variant, process in processes.items():
        if process.wait():
            last = (folder / f"{variant}.log").read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1]
            raise RectiformerError(f"training {variant} ended with exit code {process.returncode}: {last}")


def watch(folder: Path, processes: dict[str, subprocess.Popen[bytes]], steps: int, terminal: Terminal) -> None:
    """Bars on a terminal, a line every now and then elsewhere, until all processes have ended."""
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}", style="cyan"),
        TimeRemainingColumn(),
    )
    live = terminal.console.is_terminal
    with Progress(*columns, console=terminal.console, transient=True, disable=not live) as bars:
        tasks = {name: bars.add_task(name, total=steps, numbers="starting") for name in processes}
        said = dict.fromkeys(processes, 0)
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.5)
            for name, task in tasks.items():
                step, numbers = latest(folder / name / "metrics.jsonl")
                bars.update(task, completed=step, numbers=numbers)
                if not live and step >= said[name] + steps // 4:
                    said[name] = step
                    terminal.note(f"{name}: step {step:,} of {steps:,}, {numbers}")
            if any(process.poll() for process in processes.values()):  # one failed: the other need not go on
                return


def latest(path: Path) -> tuple[int, str]:
    """The last step that a run logged, and its loss, speed and BLEU in words."""
    records = read_metrics(path)
    trained = [record for record in records if "loss" in record]
    if not trained:
        return 0, "starting"
    last = trained[-1]
    bleu = [f"BLEU {record['valid_bleu']:.1f}" for record in records if "valid_bleu" in record][-1:]
    numbers = [f"loss {last['loss']:.3f}", f"rate {last['rate']:.1e}", f"{last['tokens_per_second']:,.0f} tokens/s"]
    return int(last["step"]), "  ".join([*numbers, *bleu])


def examine(translator: Translator, variant: str, pairs: list[Pair]) -> Finding:
    texts = [(pair.source, pair.target) for pair in pairs]
    result = evaluate(translator, [s for s, _ in texts], [t for _, t in texts], SearchOptions(beam=4), ("bleu",))
    gold = [Links(pair.sure, pair.possible) for pair in pairs]
    weights = list(cross_weights(translator, texts))
    layers = range(len(weights[0].weights))
    return Finding(
        variant,
        result.scores["bleu"].value,
        result.scores["bleu"].signature,
        result.hypotheses,
        choose(alignment_table(translator, texts, gold)),
        [share(weights, layer, lambda w: w == 0) for layer in layers],
        [share(weights, layer, lambda w: (w == 0).all(-1)) for layer in layers],
        weights,
    )


def share(weights: list[PairWeights], layer: int, holds) -> float:  # type: ignore[no-untyped-def]
    """Share of what `holds` is true of, over all sentences and heads of a layer."""
    found = [holds(pair.weights[layer]) for pair in weights]
    return float(sum(part.sum() for part in found) / sum(part.size for part in found))


def findings_table(findings: list[Finding]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = ("model", "BLEU", "AER", "aligned by", "exact zeros a layer", "rows of nothing a layer")
    rows: list[tuple[str, ...]] = []
    for each in findings:
        best = each.alignment
        head = "mean of heads" if best.head == AVERAGE else f"head {best.head}"
        place = f"layer {best.layer}, {head}, {best.induction}"
        zeros, nulls = (" ".join(f"{value:.1%}" for value in values) for values in (each.sparsity, each.null_rate))
        rows.append((each.variant, f"{each.bleu:.1f}", f"{best.score.aer:.3f}", place, zeros, nulls))
    return columns, rows


def print_findings(findings: list[Finding], pairs: list[Pair], terminal: Terminal) -> None:
    columns, rows = findings_table(findings)
    terminal.note(f"\n{len(pairs)} unseen sentences, beam 4, attention to the source (layers and heads from 0):\n")
    terminal.table(columns, rows, numbers=("BLEU", "AER"))
    terminal.note(f"\nBLEU: {findings[0].signature}")
    index = example_indices(pairs)[0]
    terminal.note(f"\n{pairs[index].source}\n")
    for example in [example_of(each, pairs, index) for each in findings]:
        terminal.note(f"{example.model}: {example.translation}")
        lines = []
        for word, row in zip(example.target_words, example.weights, strict=True):
            order = [int(key) for key in np.argsort(-row, kind="stable") if row[key] != 0]
            shown = ", ".join(f"{example.source_words[key]} {row[key]:.2f}" for key in order[:3])
            more = f" and {len(order) - 3} more" if len(order) > 3 else ""
            lines.append((word, shown + more if order else "nothing", f"{row.sum():.2f}"))
        terminal.table(("writing", "looks at", "row sum"), lines, numbers=("row sum",))
        terminal.note("")


def example_indices(pairs: list[Pair], count: int = 6) -> list[int]:
    """Sentences that show something: some length, and words that no word of the other side stands for."""
    unlinked = [len(pair.target_words) - len({j for _, j in pair.sure | pair.possible}) for pair in pairs]
    fit = [i for i, pair in enumerate(pairs) if 8 <= len(pair.target_words) <= 12]
    return sorted(fit, key=lambda i: -unlinked[i])[:count]


def examples_of(findings: list[Finding], pairs: list[Pair]) -> list[list[Example]]:
    return [[example_of(each, pairs, index) for each in findings] for index in example_indices(pairs)]


def example_of(finding: Finding, pairs: list[Pair], index: int) -> Example:
    """How a model reads one sentence while it writes the reference, at the head that aligns best, word by word."""
    pair, seen, best = pairs[index], finding.weights[index], finding.alignment
    layer = seen.weights[best.layer]
    head = layer.mean(0) if best.head == AVERAGE else layer[int(best.head)]
    rows = head[:-1] if best.induction == "normal" else head[1:]
    spans = [word_spans(text) for text in (seen.source, seen.target)]
    source, target = (
        pieces_to_words([(piece.start, piece.end) for piece in pieces], own)
        for pieces, own in zip((seen.source_pieces, seen.target_pieces), spans, strict=True)
    )
    words = merge_weights(rows[:, : len(source)], source, target, len(spans[0]), len(spans[1]))
    return Example(
        finding.variant,
        finding.translations[index],
        [seen.source[a:b] for a, b in spans[0]],
        [seen.target[a:b] for a, b in spans[1]],
        words,
        {(i, j) for i, j in pair.sure | pair.possible},
    )
