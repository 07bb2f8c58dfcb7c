"""Efficiency: the speed of training and decoding of every variant vs. softmax, and of training by length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rectiformer.studies.corpora import EVERY
from rectiformer.studies.plan import Scale, Study, Trained, Training, configure, seeded
from rectiformer.studies.recipes import DOCUMENT_FOLDERS, DOCUMENTS
from rectiformer.studies.results import Results
from rectiformer.studies.speed import Load, measure_speed, measure_updates
from rectiformer.studies.tables import Table
from rectiformer.translate.translator import find_device

LENGTHS = (128, 256, 512, 1024, 2048)
UNUSED = (
    "data.segment_length=64",
    "training.batch_tokens=1024",
    "training.steps=10",
    "validation.every=10",
    "checkpoint.every=10",
)
"""What is trained before timing, in ten updates: every study trains something, and here nothing reads it."""
CAPTURED = "training.compile=capture"
"""Compiling would take a minute for each of two dozen timed models."""
LOADS = {
    "smoke": Load(vocabulary=50, length=6, sentences=4, searched=2, repeats=1, turns=1),
    "small": Load(vocabulary=8000, length=32, sentences=384, searched=128, repeats=5, turns=3),
    "paper": Load(vocabulary=32_000, length=32, sentences=768, searched=32, repeats=10, turns=5),
}
BY_LENGTH = ("softmax", "rela-g", "reluformer", "sparsemax", "entmax15")
"""What is timed at every length of documents."""
UPDATE = {"smoke": 64, "small": 16_384, "paper": 16_384}
"""Subwords of such an update on each side, whatever the length."""
TIMED = {"smoke": ("softmax", "rela-g"), "small": EVERY, "paper": EVERY}
BASE = (
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.encoder_layers=6",
    "model.decoder_layers=6",
    "model.ffn_size=2048",
)
"""The size of the models that are timed, but at smoke."""
PAPER = {
    "softmax": ("1.00x", "1.00x"),
    "sparsemax": ("0.26x", "0.54x"),
    "entmax15": ("0.27x", "0.49x"),
    "rela-g": ("0.93x", "0.98x"),
}
"""Training and decoding beside softmax [S]."""


def trainings(scale: Scale) -> list[Training]:
    """One process in which everything is timed: nothing else may run on the GPU meanwhile."""
    return seeded("alone", (1,), configure(DOCUMENTS[scale.name], scale, *UNUSED, CAPTURED))


def measure(run: Trained) -> dict[str, Any]:
    """Milliseconds of an update and of decoding for each variant, and of updates by length."""
    config, device = run.training.config, find_device(run.training.config.training.device)
    timed = replace(config, model=replace(config.model, positions="sequence"))  # random words have no separators
    if run.scale.name != "smoke":
        sized = configure(BASE, Scale("smoke"), f"model.norm={config.model.norm}").model
        timed = replace(config, model=sized, training=replace(config.training, grad_accumulation=1))
    # Documents are trained without attention dropout, with which softmax has no kernel for more than 128 keys.
    documents = replace(timed, model=replace(timed.model, attention_dropout=0.0))
    return {
        "speed": measure_speed(timed, TIMED[run.scale.name], LOADS[run.scale.name], device),
        "updates": measure_updates(documents, BY_LENGTH, loads_by_length(run.scale), device),
    }


def loads_by_length(scale: Scale) -> dict[int, Load]:
    """Updates of as many subwords, in ever longer segments."""
    lengths = [length // 64 for length in LENGTHS] if scale.name == "smoke" else LENGTHS
    tokens = UPDATE[scale.name]
    return {length: replace(LOADS[scale.name], length=length, sentences=tokens // length) for length in lengths}


def tables(results: Results) -> list[Table]:
    return [make(entry.measures) for entry in results.finished for make in (speed_table, lengths_table)]


def speed_table(measures: dict[str, Any]) -> Table:
    """Each kind of attention relative to softmax with the same kernels."""
    speed: dict[str, dict[str, float]] = measures["speed"]
    rows = []
    for name, found in speed.items():
        variant, _, kernels = name.partition(" ")
        base = speed[f"softmax {kernels}"]
        paper = PAPER.get(variant, ("", "")) if kernels == "plain" else ("", "")
        ratios = [f"{base[what] / found[what]:.2f}x" for what in ("update", "search")]
        rows.append(
            (variant, kernels, paper[0], ratios[0], paper[1], ratios[1], *(f"{found[what]:.2f}" for what in found))
        )
    columns = (
        "attention", "kernels", "paper, training", "ours, training", "paper, decoding", "ours, decoding",
        "ms an update", "ms a search",
    )  # fmt: skip
    notes = (
        "Speed relative to softmax with the same kernels; above 1, faster. plain: torch's own operators, as in the "
        "paper; fused: our kernels, where the variant has any. Random text and weights; search with beam 4.",
    )
    return Table("Training and decoding beside softmax", columns, rows, notes)


def lengths_table(measures: dict[str, Any]) -> Table:
    """Milliseconds of an update at each length, and how much faster than softmax that is."""
    updates: dict[str, dict[str, float]] = measures["updates"]
    base = updates["softmax"]
    rows = [
        (variant, *(f"{ms:.1f} ({base[length] / ms:.2f}x)" for length, ms in found.items()))
        for variant, found in updates.items()
    ]
    note = (
        "Milliseconds, and speed relative to softmax: above 1, faster. As many subwords an update at every length, "
        "with our kernels where the variant has any; random text and weights, nothing compiled."
    )
    return Table("Updates by length of a segment", ("attention", *base), rows, (note,))


EFFICIENCY = Study(
    name="efficiency",
    title="Efficiency",
    question="How fast are training and decoding compared with softmax?",
    paper="Zhang et al. 2021, WMT14 En-De, TensorFlow 1.13, relative to softmax: training 0.26x sparsemax, 0.27x "
    "1.5-entmax, 0.93x ReLA; decoding 0.54x, 0.49x, 0.98x [S].",
    folders=DOCUMENT_FOLDERS,
    trainings=trainings,
    measure=measure,
    tables=tables,
    alone=True,
)
