"""Peak learning rate and warm-up of each variant, by norm placement: what the comparisons of other studies rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rectiformer.studies.figures import Lines, draw_panels
from rectiformer.studies.measures import curve_of, training_speed
from rectiformer.studies.plan import Scale, Study, Trained, Training, configure, seeded
from rectiformer.studies.recipes import GRAMMAR_TINY, attention_settings, to_the_end
from rectiformer.studies.results import Results, Table

NORMS = ("post", "pre")
VARIANTS = ("softmax", "rela-g")
STEPS = {"smoke": 30, "small": 4_000, "paper": 4_000}
RATES = {"post": (4e-4, 8e-4, 1.6e-3), "pre": (7.5e-4, 1.5e-3, 3e-3)}
WARMUP = {"post": 0.25, "pre": 0.15}
"""Share of the updates over which the rate rises."""
LONGER = 0.5
"""The longer warm-up, tried in post-norm, which is known to need one."""
TO_THE_END = 10_000
"""Updates of the rows that show whether the order of short trainings is that of long ones."""


class Setting(NamedTuple):
    """One row: everything that is varied."""

    norm: str
    variant: str
    rate: float
    warmup: float
    steps: int

    @property
    def name(self) -> str:
        return f"{self.norm}-{self.variant}-{self.rate:g}-warmup{self.warmup:g}-{self.steps}"


def settings_of(scale: Scale) -> list[Setting]:
    """Every row, short trainings first."""
    steps = STEPS[scale.name]
    if scale.name == "smoke":
        return [Setting("post", variant, 8e-4, 0.25, steps) for variant in VARIANTS]
    swept = [(norm, rate, WARMUP[norm]) for norm in NORMS for rate in RATES[norm]]
    short = [*swept, ("post", RATES["post"][1], LONGER)]
    found = [Setting(norm, variant, rate, warmup, steps) for norm, rate, warmup in short for variant in VARIANTS]
    return [*found, Setting("post", "softmax", RATES["post"][0], WARMUP["post"], TO_THE_END)]


def trainings(scale: Scale) -> list[Training]:
    found = []
    for setting in settings_of(scale):
        norm, variant, rate, warmup, steps = setting
        base = GRAMMAR_TINY if scale.name == "smoke" else to_the_end(norm)
        own = (f"training.learning_rate={rate}", f"training.warmup={round(warmup * steps)}")
        length = (f"training.steps={steps}", f"validation.every={min(500, steps)}", f"checkpoint.every={steps}")
        ends = (f"model.norm={norm}", "training.schedule=linear", "validation.metric=loss")
        config = configure(base, scale, *attention_settings(variant), *ends, *length, *own)
        form = "" if scale.name == "smoke" else "words"
        found += seeded(setting.name, (1,), config, form=form, **setting._asdict())
    return found


def measure(run: Trained) -> dict[str, Any]:
    """Loss on validation text while training and at its end; nothing is translated."""
    curve = curve_of(run.folder, "valid_loss")
    return {
        "valid_loss": curve[-1][1],
        "curve": curve,
        "training_tokens_per_second": training_speed(run.folder),
    }


def tables(results: Results) -> list[Table]:
    """Validation loss at the end, one row per norm placement, variant, rate, warm-up and number of updates."""
    rows = []
    for norm in NORMS:
        for variant in VARIANTS:
            names = [name for name in results.names() if is_of(results, name, norm, variant)]
            for name in names:
                labels, loss = results.labels(name), results.values(name, "valid_loss")[0]
                cells = (f"{int(labels['steps']):,}", f"{labels['rate']:g}", f"{float(labels['warmup']):.0%}")
                rows.append((norm, variant, *cells, f"{loss:.3f}"))
    columns = ("norm", "variant", "updates", "peak rate", "warm-up, share of updates", "validation loss")
    note = "At the end of each training, the rate falling linearly to 0; one seed."
    return [Table("Peak rate and warm-up", columns, rows, (note,))]


def is_of(results: Results, name: str, norm: str, variant: str) -> bool:
    labels = results.labels(name)
    return labels["norm"] == norm and labels["variant"] == variant


def figures(results: Results, folder: Path) -> list[Path]:
    """Validation loss of short trainings with the best rate of each variant, one panel per norm placement."""
    panels: list[Lines] = []
    for norm in NORMS:
        lines = {}
        for variant in VARIANTS:
            known = [entry for entry in results.finished if is_of(results, entry.name, norm, variant)]
            if entries := [entry for entry in known if entry.labels["steps"] == STEPS[results.scale]]:
                best = min(entries, key=lambda entry: float(entry.measures["valid_loss"]))
                lines[variant] = {step: [loss] for step, loss in best.measures["curve"]}
        panels.append(lines)
    shown = [(f"{norm}-norm", lines) for norm, lines in zip(NORMS, panels, strict=True) if lines]
    if not shown:
        return []
    titles, curves = zip(*shown, strict=True)
    return draw_panels(folder / "learning-speed.svg", list(titles), list(curves), "updates", "validation loss")


LEARNING_RATE = Study(
    name="learning-rate",
    title="Learning rate and warm-up",
    question="Which peak rate and warm-up does each variant need, in post-norm and in pre-norm?",
    paper="Zhang et al. 2021 train all variants in post-norm with one schedule: Noam, 4,000 updates of warm-up [S].",
    folders={"small": "data/europarl-doc-ende", "paper": "data/europarl-doc-ende"},
    trainings=trainings,
    measure=measure,
    tables=tables,
    figures=figures,
)
