"""Peak learning rate and warm-up of each variant, by norm placement: what the comparisons of other studies rest on."""

from dataclasses import replace
from itertools import product
from typing import Any

from rectiformer.studies import measures, recipes
from rectiformer.studies.corpora import CORPORA
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import CHOICES, NORMS, Peak
from rectiformer.studies.results import Result, Results, Table
from rectiformer.studies.translation_quality import TRANSLATION_QUALITY

TEXT = "europarl"
VARIANTS = ("softmax", "rela-g")
STEPS = {"smoke": 30, "small": 4_000, "paper": 4_000}
WARMUP = {"post": 0.25, "pre": 0.15}
"""Share of the updates over which the learning rate rises."""
FIRST = ("post", "softmax", 4e-4, WARMUP["post"], 10_000)
"""The training that showed that short ones choose wrongly for softmax in post-norm; it was not translated with."""
FORGOTTEN = 3.0
"""A validation loss above this after all updates is that of a model which does not read the source."""
NOTE = (
    "Validation loss after the last update, when the learning rate has fallen linearly to 0: one number per seed. "
    "Chosen: for all comparisons on this text. Failed: trained to the end, but never learned to read the source."
)


def settings_of(scale: Scale) -> list[tuple[str, str, float, float, int]]:
    """Norm placement, variant, learning rate, warm-up and updates of every row."""
    steps = STEPS[scale.name]
    if scale.name == "smoke":
        return [("post", variant, 8e-4, 0.25, steps) for variant in VARIANTS]
    found = [
        (norm, variant, rate, WARMUP[norm], steps)
        for norm in NORMS
        for index in range(3)  # every variant has three rates, and none waits for the other's sweep
        for variant in VARIANTS
        for rate in CHOICES[TEXT, norm, variant].short[index : index + 1]
    ]
    return [*found, FIRST]


def trainings(scale: Scale) -> list[Training]:
    smoke = scale.name == "smoke"
    found = []
    for norm, variant, rate, warmup, steps in settings_of(scale):
        name = f"{norm}-{variant}-{rate:g}-warmup{warmup:g}-{steps}"
        config = configure(
            recipes.GRAMMAR_TINY if smoke else recipes.EUROPARL_WORDS,
            scale,
            *recipes.attention_settings(variant),
            *recipes.model(norm=norm, attention_dropout=0.1 if norm == "post" else 0),
            *recipes.training(schedule="linear", learning_rate=rate, warmup=round(warmup * steps), steps=steps),
            *recipes.validation(metric="loss", every=min(500, steps)),
            *recipes.checkpoint(every=steps),
        )
        labels: dict[str, Any] = {
            "norm": norm,
            "variant": variant,
            "learning_rate": rate,
            "warmup": warmup,
            "steps": steps,
        }
        found += seeded(name, (1,), config, form="" if smoke else "words", tier=1, **labels)
    return found


def measure(task: Task) -> dict[str, Any]:
    """Loss on validation text while training and at its end; nothing is translated."""
    return {**measures.measure_losses(task), "training_tokens_per_second": measures.training_speed(task.run)}


def tables(results: Results) -> list[Table]:
    """Every learning rate that was tried, by text, norm and updates: short trainings here, long ones of
    `translation-quality`."""
    found = []
    titles = {corpus.text: corpus.title for corpus in reversed(CORPORA[results.scale])}
    for text, norm in product(("europarl", "multi30k"), NORMS):
        entries = [
            each for each in tried(results, text) if each.labels["norm"] == norm and "valid_loss" in each.measures
        ]
        for steps in sorted({steps_of(entry) for entry in entries}, reverse=True):
            title = ", ".join(filter(None, (titles.get(text), f"{norm}-norm", f"{steps:,} updates")))
            found.append(table_of(title, [entry for entry in entries if steps_of(entry) == steps], text, norm))
    return [*found[:-1], *(replace(table, notes=(NOTE,)) for table in found[-1:])]


def table_of(title: str, entries: list[Result], text: str, norm: str) -> Table:
    """Learning rates of one norm placement and number of updates, one column per variant."""
    cells: dict[Peak, dict[str, list[str]]] = {}
    for entry in sorted(entries, key=lambda entry: entry.seed):
        seeds = cells.setdefault(peak_of(entry), {}).setdefault(entry.labels["variant"], [])
        seeds.append(describe_loss(entry))
    rows = []
    for peak, own in sorted(cells.items()):
        chosen = [variant for variant in VARIANTS if CHOICES[text, norm, variant].chosen == peak]
        shown = {variant: ", ".join(losses) + ": chosen" * (variant in chosen) for variant, losses in own.items()}
        rows.append((str(peak), f"{peak.warmup:,}", *(shown.get(variant, "") for variant in VARIANTS)))
    columns = ("peak learning rate", "warm-up", *(f"loss of {variant}" for variant in VARIANTS))
    return Table(title, columns, rows)


def tried(results: Results, text: str) -> list[Result]:
    """Finished trainings of the two variants on the corpora of a text, one variant and rate each."""
    corpora = {corpus.name for corpus in CORPORA[results.scale] if corpus.text == text}
    first = next((corpus.name for corpus in CORPORA[results.scale] if corpus.name in corpora), "")
    own = text == TEXT  # short trainings have one text
    return [
        entry
        for entry in results.finished
        if entry.labels.get("norm") and (entry.labels["corpus"] == first if "corpus" in entry.labels else own)
    ]


def steps_of(entry: Result) -> int:
    """The updates of a training; those of `translation-quality` name only what differs from 10,000 or 6,000."""
    corpus = entry.labels.get("corpus", "")
    return int(entry.labels.get("steps", 6_000 if corpus.startswith("multi30k") else 10_000))


def peak_of(entry: Result) -> Peak:
    """The peak learning rate of a training."""
    warmup = entry.labels["warmup"]
    updates = warmup if warmup > 1 else round(warmup * steps_of(entry))
    return Peak(entry.labels["learning_rate"], int(updates), float(entry.labels.get("clip", 0)))


def describe_loss(entry: Result) -> str:
    """Its final validation loss, and whether it failed."""
    loss = float(entry.measures["valid_loss"])
    failed = loss > FORGOTTEN and steps_of(entry) > STEPS["small"]
    return f"{loss:.3f}" + " (failed)" * failed


def tried_losses(results: Results, text: str, norm: str, variant: str) -> dict[Peak, float]:
    """The validation loss of each learning rate from which one is chosen.

    Of rates that are tried to the end, with the seed that decides; else of short trainings.
    """
    choice = CHOICES[text, norm, variant]
    losses: dict[Peak, float] = {}
    for entry in tried(results, text):
        if (entry.labels["norm"], entry.labels["variant"], entry.seed) == (norm, variant, choice.seed):
            peak = peak_of(entry)
            if choice.tried and "corpus" in entry.labels and "steps" not in entry.labels:
                losses[peak] = float(entry.measures["valid_loss"])
            if not choice.tried and steps_of(entry) == STEPS["small"]:
                losses[Peak(peak.rate, round(WARMUP[norm] * 10_000))] = float(entry.measures["valid_loss"])
    return losses


def best_tried(results: Results, text: str, norm: str, variant: str) -> tuple[Peak, float] | None:
    """The learning rate with the lowest validation loss, and that loss, once all that is to be tried is trained."""
    choice, losses = CHOICES[text, norm, variant], tried_losses(results, text, norm, variant)
    peaks = choice.tried or [Peak(rate, round(WARMUP[norm] * 10_000)) for rate in choice.short]
    if not set(peaks) <= losses.keys():
        return None
    best = min(peaks, key=losses.__getitem__)
    return best, losses[best]


def describe_choices(results: Results) -> list[str]:
    """One line for every learning rate that is still to be chosen, and what to write where all is there."""
    lines = []
    for (text, norm, variant), choice in CHOICES.items():
        if choice.chosen is None:
            best = best_tried(results, text, norm, variant)
            known = (
                f"{best[0]!r} has the lowest validation loss, {best[1]:.3f}" if best else "its sweep is not finished"
            )
            lines.append(
                f"to be chosen in CHOICES of rectiformer/studies/recipes.py: {text}, {norm}, {variant}: {known}"
            )
    return lines


LEARNING_RATE = Study(
    name="learning-rate",
    title="Learning rate and warm-up",
    question="Which peak learning rate and warm-up does each variant need, in post-norm and in pre-norm?",
    paper="Zhang et al. 2021 train all variants in post-norm with one schedule: Noam, 4,000 updates of warm-up [S].",
    folders={"small": "europarl-doc-ende", "paper": "europarl-doc-ende"},
    trainings=trainings,
    measure=measure,
    tables=tables,
    shows=TRANSLATION_QUALITY,
)
