"""The demonstration: a rectified and a softmax translator learn the built-in grammar in parallel, then are compared.

Both are trained by `rectiformer train` in processes of their own, each on its share of the cores, so that the second
model costs no time. What is printed and drawn comes from sentences that neither of them has seen.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rectiformer.analyze.findings import AlignmentFindings, Findings, analyze
from rectiformer.analyze.html_report import write_report
from rectiformer.analyze.record import AttentionRecord, Example
from rectiformer.analyze.recording import record_pairs
from rectiformer.config import Config
from rectiformer.errors import RectiformerError
from rectiformer.measure.alignment import Links, rows_for
from rectiformer.measure.words import merge_weights, pieces_to_words
from rectiformer.runs.metrics import read_metrics
from rectiformer.terminal import Terminal
from rectiformer.text.grammar import Pair, draw_sentences
from rectiformer.text.prepared import prepare
from rectiformer.toml import load_config, to_toml
from rectiformer.translate.align import AVERAGE, ordinal
from rectiformer.translate.translator import Translator

VARIANTS = ("rela-g", "softmax")
# Chosen on validation sentences: with rates that fall to 0 (linear, wsd; post- and pre-norm) both models end at a
# higher loss in the same time; the moving average of the weights does what the fall would do (docs/log.md, 2026-11-18).
SETTINGS = (
    "data.sentences=30000",
    "data.valid_sentences=200",
    "model.attention_dropout=0",
    "training.steps=1050",
    "training.ema=0.99",
    "training.batch_tokens=1200",
    "training.warmup=300",
    "validation.every=350",
    "checkpoint.every=1050",
    "log.every=10",
)
TEST_SENTENCES = 300
TEST_SEED = 7


@dataclass(frozen=True)
class Look:
    """What one trained model does on sentences it has not seen."""

    findings: Findings
    record: AttentionRecord
    """Of some of the sentences, those that show most first."""

    @property
    def best(self) -> AlignmentFindings:
        """The layer, head and induction whose links are nearest to the gold ones."""
        assert self.findings.alignment is not None
        return min(self.findings.alignment, key=lambda row: row.aer)

    def by_layer(self, name: str) -> list[float]:
        """A measure of cross-attention, one number per layer: the mean of its heads, which see the same cells."""
        heads = [getattr(site, name) for site in self.findings.sites if site.kind == "cross"]
        return [float(np.mean(layer)) for layer in heads]


def run_demo(folder: Path, terminal: Terminal) -> list[Look]:
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
    looks = []
    for variant in VARIANTS:
        with terminal.console.status(f"translating and aligning {TEST_SENTENCES} unseen sentences with {variant}"):
            looks.append(look(Translator.from_run(folder / variant, device="cpu"), variant, pairs))
    print_looks(looks, terminal)
    findings = [each.findings.to_json() for each in looks]
    page = write_report(folder / "report.html", [each.record for each in looks], findings, " vs. ".join(VARIANTS))
    terminal.note(f"\nreport: {page}    runs: {', '.join(str(folder / name) for name in VARIANTS)}")
    terminal.note(f"try: echo {pairs[0].source!r} | rectiformer translate {folder / VARIANTS[0]}")
    terminal.note(f"took {time.monotonic() - start:.0f} s")
    return looks


def train_side_by_side(folder: Path, config: Config, terminal: Terminal) -> None:
    """One training process per variant, followed through the metrics it writes."""
    threads = max(1, torch.get_num_threads() // len(VARIANTS))  # those that this process may use, not all there are
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for variant in VARIANTS:
            settings = folder / f"{variant}.toml"
            settings.write_text(to_toml(load_config(None, [*SETTINGS, f"model.variant={variant}"])), encoding="utf-8")
            command = [sys.executable, "-m", "rectiformer", "train", str(settings), "--out", str(folder / variant)]
            command += ["--resume", "--data", str(folder / "data")]
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            with (folder / f"{variant}.log").open("wb") as log:
                processes[variant] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
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
    bleu = [f"  BLEU {record['valid_bleu']:.1f}" for record in records if "valid_bleu" in record][-1:]
    loss, rate, speed = last["loss"], last["learning_rate"], last["tokens_per_second"]
    return int(last["step"]), f"loss {loss:.3f}  rate {rate:.1e}  {speed:,.0f} tokens/s{''.join(bleu)}"


def look(translator: Translator, variant: str, pairs: list[Pair]) -> Look:
    """Measure all the sentences, record some."""
    texts = [(pair.source, pair.target) for pair in pairs]
    gold = [Links(pair.sure, pair.possible) for pair in pairs]
    shown = choose_examples(pairs)
    return Look(
        analyze(translator, texts, gold=gold, name="unseen sentences of the built-in grammar", model_name=variant),
        record_pairs(translator, [texts[i] for i in shown], [gold[i] for i in shown], name=variant, translate=True),
    )


def choose_examples(pairs: list[Pair], count: int = 20) -> list[int]:
    """Sentences that show something: some length, and words that no word of the other side stands for."""
    unlinked = [len(pair.target_words) - len({j for _, j in pair.sure | pair.possible}) for pair in pairs]
    fit = [i for i, pair in enumerate(pairs) if 8 <= len(pair.target_words) <= 12]
    return sorted(fit, key=lambda i: -unlinked[i])[:count]


def print_looks(looks: list[Look], terminal: Terminal) -> None:
    """A table of both models, then how each reads one sentence."""
    sentences, quality = looks[0].findings.data.sentences, looks[0].findings.quality
    terminal.note(f"\n{sentences} unseen sentences, beam 4, cross-attention (layers and heads from 1):\n")
    terminal.table(*findings_table(looks), numbers=("BLEU", "AER"))
    assert quality is not None
    terminal.note(f"\nBLEU: {quality.signature}")
    terminal.note(f"\n{looks[0].record.examples[0].source.text}\n")
    for each in looks:
        example = each.record.examples[0]
        terminal.note(f"{each.findings.model.name}: {example.translation}")
        terminal.table(("generated", "attends to", "row sum"), read_words(example, each.best), numbers=("row sum",))
        terminal.note("")


def findings_table(looks: list[Look]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and one row per model."""
    columns = ("model", "BLEU", "AER", "aligned by", "exact zeros per layer", "null rows per layer")
    rows: list[tuple[str, ...]] = []
    for each in looks:
        best, quality = each.best, each.findings.quality
        assert quality is not None
        head = "mean of heads" if best.head == AVERAGE else f"head {ordinal(best.head)}"
        head_name = f"layer {ordinal(best.layer)}, {head}, {best.induction}"
        zeros, nulls = (" ".join(f"{value:.1%}" for value in each.by_layer(name)) for name in ("sparsity", "null_rate"))
        rows.append((each.findings.model.name, f"{quality.bleu:.1f}", f"{best.aer:.3f}", head_name, zeros, nulls))
    return columns, rows


def read_words(example: Example, best: AlignmentFindings) -> list[tuple[str, str, str]]:
    """What a model attends to while it generates each word of the reference, at the head that aligns best."""
    source, target = example.source, example.target
    assert target is not None
    words = [[side.text[start:stop] for _, _, start, stop in side.words] for side in (source, target)]
    lines = []
    for word, row in zip(words[1], word_weights(example, best), strict=True):
        order = [int(key) for key in np.argsort(-row, kind="stable") if row[key] != 0]
        shown = ", ".join(f"{words[0][key]} {row[key]:.2f}" for key in order[:3])
        more = f" and {len(order) - 3} more" if len(order) > 3 else ""
        lines.append((word, shown + more if order else "nothing", f"{row.sum():.2f}"))
    return lines


def word_weights(example: Example, best: AlignmentFindings) -> np.ndarray:
    """Weights [target words, source words] of the head that aligns best."""
    assert example.target is not None
    heads = example.site("cross", best.layer).dense()
    weights = heads.mean(0) if best.head == AVERAGE else heads[int(best.head)]
    words = []
    for side in (example.source, example.target):
        pieces = [(piece.start, piece.stop) for piece in side.pieces[:-1]]
        words.append(pieces_to_words(pieces, [(start, stop) for *_, start, stop in side.words]))
    rows = rows_for(weights, best.induction, len(words[0]))
    return merge_weights(rows, words[0], words[1], len(example.source.words), len(example.target.words))
