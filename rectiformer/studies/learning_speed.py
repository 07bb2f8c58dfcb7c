"""Learning speed: validation loss against updates of softmax and rela-g, in both norm placements."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from rectiformer.studies.corpora import CORPORA
from rectiformer.studies.figures import Lines, draw_panels
from rectiformer.studies.learning_rate import LEARNING_RATE, STEPS, VARIANTS, peak_of, steps_of, tried
from rectiformer.studies.plan import Study
from rectiformer.studies.recipes import NORMS
from rectiformer.studies.results import Figure, Result, Results, Table

QUARTERS = ("25 %", "50 %", "75 %", "the end")
LEVEL = 0.01
"""Losses that differ by less are called level."""


def compared(results: Results) -> dict[tuple[str, int], dict[str, list[Result]]]:
    """By norm placement and number of updates, where both variants have them: all seeds of each.

    Of trainings to the end those at the chosen learning rate, of short ones the best of each variant.
    """
    found: dict[tuple[str, int], dict[str, list[Result]]] = {}
    entries = [entry for entry in tried(results, "europarl") if entry.measures.get("curve")]
    for norm in NORMS:
        for steps in sorted({steps_of(entry) for entry in entries}):
            like = [entry for entry in entries if (entry.labels["norm"], steps_of(entry)) == (norm, steps)]
            own = {
                variant: representatives([entry for entry in like if entry.labels["variant"] == variant])
                for variant in VARIANTS
            }
            if all(own.values()):
                found[norm, steps] = own
    return found


def curves(results: Results) -> dict[tuple[str, int], Lines]:
    """Their validation loss against updates."""
    return {
        key: {variant: join_curves(entries) for variant, entries in own.items()}
        for key, own in compared(results).items()
    }


def representatives(entries: list[Result]) -> list[Result]:
    """Those at the chosen learning rate; of short trainings those at the best one."""
    if entries and steps_of(entries[0]) == STEPS["small"]:
        best = min(entries, key=lambda entry: float(entry.measures["valid_loss"]))
        return [entry for entry in entries if peak_of(entry) == peak_of(best)]
    corpora = {corpus.name: corpus for corpus in CORPORA["small"]}
    return [
        entry
        for entry in entries
        if entry.labels.get("corpus") in corpora and corpora[entry.labels["corpus"]].is_chosen(entry.labels)
    ]


def join_curves(entries: list[Result]) -> dict[float, list[float]]:
    line: dict[float, list[float]] = {}
    for entry in entries:
        for step, loss in entry.measures["curve"]:
            line.setdefault(step, []).append(loss)
    return line


def tables(results: Results) -> list[Table]:
    """Losses after every quarter of the updates, and what they say in words."""
    rows, notes = [], []
    for (norm, steps), own in compared(results).items():
        lines = {variant: join_curves(entries) for variant, entries in own.items()}
        quarters = [steps * quarter // 4 for quarter in (1, 2, 3, 4)]
        for variant, entries in own.items():
            cells = [f"{fmean(lines[variant][step]):.3f}" if step in lines[variant] else "" for step in quarters]
            rows.append((f"{norm}-norm, {steps:,}", variant, str(peak_of(entries[0])), f"{len(entries)}", *cells))
        notes.append(describe(norm, steps, lines))
    columns = ("norm, updates", "variant", "peak learning rate", "seeds", *QUARTERS)
    notes.append(
        "Validation loss on Europarl en-de in words, mean over seeds; every training at the best learning rate "
        "[tried for its variant](learning-rate.md), which falls to 0 at its last update. How fast a model learns says "
        "nothing about how good it is in the end."
    )
    return [Table("Validation loss while training", columns, rows, tuple(notes))] if rows else []


def describe(norm: str, steps: int, lines: Lines) -> str:
    """In one sentence per fact: who leads when, how late the other one is, and how they end."""
    softmax, ours = ({step: fmean(values) for step, values in lines[variant].items()} for variant in VARIANTS)
    shared = sorted(softmax.keys() & ours.keys())
    ahead = [step for step in shared if ours[step] < softmax[step] - LEVEL]
    behind = [step for step in shared if ours[step] > softmax[step] + LEVEL]
    lead, trail = ("rela-g", "softmax") if len(ahead) > len(behind) else ("softmax", "rela-g")
    first, second = (softmax, ours) if lead == "softmax" else (ours, softmax)
    widest = max(shared, key=lambda step: second[step] - first[step])
    text = (
        f"{norm.capitalize()}-norm, {steps:,} updates: {lead} learns faster. The difference is largest after "
        f"{widest:,} updates ({first[widest]:.2f} vs. {second[widest]:.2f})."
    )
    reached = first_below(first, second[shared[-1]])
    if reached and reached < steps:
        text += f" It has the final loss of {trail} after {reached:,}."
    last = ours[shared[-1]] - softmax[shared[-1]]
    end = f"rela-g's loss is {abs(last):.2f} {'above' if last > 0 else 'below'} softmax's"
    return f"{text} At the end {'they are level' if abs(last) <= LEVEL else end}."


def first_below(curve: Mapping[float, float], loss: float) -> int | None:
    """The first update of a curve at which it is at most `loss`, if any."""
    return next((int(step) for step in sorted(curve) if curve[step] <= loss), None)


def figures(results: Results, folder: Path) -> list[Figure]:
    found = curves(results)
    titles = [f"{norm}-norm, {steps:,} updates" for norm, steps in found]
    path, about = folder / "learning-speed.svg", "Validation loss while training: Europarl en-de in words"
    return draw_panels(path, about, titles, list(found.values()), "updates", "validation loss")


LEARNING_SPEED = Study(
    name="learning-speed",
    title="Learning speed",
    question="Does rectified attention learn faster or slower than softmax, in post-norm and in pre-norm?",
    paper="Neither paper shows losses while training.",
    tables=tables,
    figures=figures,
    shows=LEARNING_RATE,
)
