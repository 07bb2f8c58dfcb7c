"""Peak learning rate and warm-up of each variant, by norm placement: what the comparisons of other studies rest on."""

from itertools import product
from pathlib import Path
from typing import Any

from rectiformer.studies import recipes
from rectiformer.studies.figures import Lines, draw_panels
from rectiformer.studies.measures import curve_of, training_speed
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.results import Results, Table

NORMS = ("post", "pre")
VARIANTS = ("softmax", "rela-g")
STEPS = {"smoke": 30, "small": 4_000, "paper": 4_000}
RATES = {"post": (4e-4, 8e-4, 1.6e-3), "pre": (7.5e-4, 1.5e-3, 3e-3)}
WARMUP = {"post": 0.25, "pre": 0.15}
"""Share of the updates over which the learning rate rises."""
LONGER = 0.5
"""The longer warm-up, tried in post-norm, which is known to need one."""
TO_THE_END = 10_000
"""Updates of the rows that show whether the order of short trainings is that of long ones."""


def settings_of(scale: Scale) -> list[tuple[str, str, float, float, int]]:
    """Norm placement, variant, learning rate, warm-up and updates of every row, short trainings first."""
    steps = STEPS[scale.name]
    if scale.name == "smoke":
        return [("post", variant, 8e-4, 0.25, steps) for variant in VARIANTS]
    swept = [(norm, rate, WARMUP[norm]) for norm in NORMS for rate in RATES[norm]]
    short = [*swept, ("post", RATES["post"][1], LONGER)]
    found = [(norm, variant, rate, warmup, steps) for norm, rate, warmup in short for variant in VARIANTS]
    return [*found, ("post", "softmax", RATES["post"][0], WARMUP["post"], TO_THE_END)]


def trainings(scale: Scale) -> list[Training]:
    smoke = scale.name == "smoke"
    form = "" if smoke else "words"
    found = []
    for norm, variant, rate, warmup, steps in settings_of(scale):
        name = f"{norm}-{variant}-{rate:g}-warmup{warmup:g}-{steps}"
        config = configure(
            recipes.GRAMMAR_TINY if smoke else recipes.TO_THE_END[norm],
            scale,
            *recipes.attention_settings(variant),
            *recipes.model(norm=norm),
            *recipes.training(schedule="linear", learning_rate=rate, warmup=round(warmup * steps), steps=steps),
            *recipes.validation(metric="loss", every=min(500, steps)),
            *recipes.checkpoint(every=steps),
        )
        found += seeded(
            name, (1,), config, form=form, norm=norm, variant=variant, learning_rate=rate, warmup=warmup, steps=steps
        )
    return found


def measure(task: Task) -> dict[str, Any]:
    """Loss on validation text while training and at its end; nothing is translated."""
    curve = curve_of(task.run, "valid_loss")
    return {"valid_loss": curve[-1][1], "curve": curve, "training_tokens_per_second": training_speed(task.run)}


def tables(results: Results) -> list[Table]:
    """Final validation loss, one row per norm placement, variant, learning rate, warm-up and number of updates."""
    rows = []
    for norm, variant in product(NORMS, VARIANTS):
        for entry in results.select(norm=norm, variant=variant).finished:
            steps, rate, warmup = (entry.labels[label] for label in ("steps", "learning_rate", "warmup"))
            loss = entry.measures["valid_loss"]
            rows.append((norm, variant, f"{steps:,}", f"{rate:g}", f"{warmup:.0%}", f"{loss:.3f}"))
    columns = ("norm", "variant", "updates", "peak learning rate", "warm-up, share of updates", "validation loss")
    note = "At the end of each training, when the learning rate has fallen linearly to 0; one seed."
    return [Table("Peak learning rate and warm-up", columns, rows, (note,))]


def figures(results: Results, folder: Path) -> list[Path]:
    """Validation loss of short trainings with the best learning rate of each variant, one panel per norm placement."""
    panels: dict[str, Lines] = {}
    for norm, variant in product(NORMS, VARIANTS):
        if short := results.select(norm=norm, variant=variant, steps=STEPS[results.scale]).finished:
            best = min(short, key=lambda entry: float(entry.measures["valid_loss"]))
            curve = {step: [loss] for step, loss in best.measures["curve"]}
            panels.setdefault(f"{norm}-norm", {})[variant] = curve
    return draw_panels(folder / "learning-speed.svg", list(panels), list(panels.values()), "updates", "validation loss")


LEARNING_RATE = Study(
    name="learning-rate",
    title="Learning rate and warm-up",
    question="Which peak learning rate and warm-up does each variant need, in post-norm and in pre-norm?",
    paper="Zhang et al. 2021 train all variants in post-norm with one schedule: Noam, 4,000 updates of warm-up [S].",
    folders={"small": "europarl-doc-ende", "paper": "europarl-doc-ende"},
    trainings=trainings,
    measure=measure,
    tables=tables,
    figures=figures,
)
