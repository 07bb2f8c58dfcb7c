"""The search for a rectified variant that learns as softmax does in pre-norm: few updates, validation loss only."""

from pathlib import Path
from typing import Any

from rectiformer.studies import recipes
from rectiformer.studies.figures import draw_panels
from rectiformer.studies.measures import curve_of, measure_losses, training_speed
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.results import Figure, Results, Table

BASELINE = "softmax"
QK, GATE = "model.qk_norm=true", ("model.output_norm=rms", "model.output_gate=head")
OPEN = recipes.attention_settings(recipes.OPEN)
EXP = ("model.variant=relu-exp", "model.output_norm=gated-rms", "model.score_bias=open")
FALLING = "training.anneal_from=16"
FLOOR = "model.norm_epsilon=0.01"

CANDIDATES: dict[str, tuple[str, ...]] = {
    BASELINE: ("model.variant=softmax",),
    "relu-exp-falling-qk-gate": (*EXP, FALLING, QK, *GATE),
    "relu2-open": OPEN,
    "softmax-qk": ("model.variant=softmax", QK),
    "relu2-open-gate": (*OPEN, *GATE),
    "rela-open-gate-floor": ("model.variant=rela", "model.center_keys=yes", "model.score_bias=open", *GATE, FLOOR),
    "relu-exp-falling-qk": (*EXP, FALLING, QK),
    "relu2-open-qk-gate": (*OPEN, QK, *GATE),
    "softpick-qk": ("model.variant=softpick", QK),
    "relu-exp-falling": (*EXP, FALLING),
    "softpick": ("model.variant=softpick",),
    "relu2-open-qk": (*OPEN, QK),
    "rela-g": ("model.variant=rela-g",),
    "rela-g-open": ("model.variant=rela-g", "model.center_keys=yes", "model.score_bias=open"),
    "entmax15": ("model.variant=entmax15",),
    "softpick-gate": ("model.variant=softpick", "model.output_gate=head"),
    "relu2-gate-alone": (*OPEN, "model.output_norm=none", "model.output_gate=head"),
    "threshold-low-gate": ("model.variant=threshold", "model.beta_init=0.01", "model.output_gate=head"),
    "rela-gate": ("model.variant=rela", *GATE),
    "rela-gate-floor": ("model.variant=rela", *GATE, FLOOR),
    "rela-g-floor": ("model.variant=rela-g", FLOOR),
    "threshold-low-floor": ("model.variant=threshold", "model.beta_init=0.01", "model.norm_epsilon=1e-6"),
    "rela-g-qk": ("model.variant=rela-g", QK),
    "threshold-low": ("model.variant=threshold", "model.beta_init=0.01"),
}
"""Name of a row: its settings. Trained in this order: softmax, then whatever learned fast on toy models, then the rest.
To combine the two best, add a row."""
SMOKE_ROWS = (BASELINE, "relu-exp-falling-qk-gate")
FINALISTS = (BASELINE, "relu-exp-falling-qk-gate", "relu2-open")
"""The rows of the paper's scale, which are trained to the end."""
SEEDS = {"smoke": (1,), "small": (1,), "paper": (1, 2, 3)}
UPDATES, WARMUP = 3_000, 450
TIER = 8
"""After the claims of the papers."""
SHOWN = 3
"""Rows drawn next to the baseline."""
PRE_NORM = (
    *recipes.EUROPARL_WORDS,
    *recipes.model(norm="pre", attention_dropout=0),
    *recipes.training(learning_rate=1.5e-3, warmup=1_500),
)


def trainings(scale: Scale) -> list[Training]:
    """Row by row: at small all candidates, few updates each; at paper the finalists, to the end."""
    rows = {"smoke": SMOKE_ROWS, "small": tuple(CANDIDATES), "paper": FINALISTS}[scale.name]
    settings = {
        "smoke": recipes.GRAMMAR_TINY,
        "small": (
            *PRE_NORM,
            *recipes.training(steps=UPDATES, warmup=WARMUP, ema=0.99, compile="capture"),
            *recipes.validation(every=500, sentences=8),
            *recipes.checkpoint(every=UPDATES),
        ),
        "paper": (*PRE_NORM, *recipes.training(compile="capture")),
    }[scale.name]
    found = []
    for name in rows:
        config = configure(settings, scale, *recipes.validation(metric="loss"), *CANDIDATES[name])
        form = "" if scale.name == "smoke" else "words"
        found += seeded(name, SEEDS[scale.name], config, form=form, tier=TIER, settings=", ".join(CANDIDATES[name]))
    return found


def measure(task: Task) -> dict[str, Any]:
    """Validation loss while training and at its end, and zeros and null rows of one batch."""
    last = {name: curve_of(task.run, f"valid_{name}")[-1][1] for name in ("zeros", "null_rate")}
    return {**measure_losses(task), **last, "training_tokens_per_second": training_speed(task.run)}


def tables(results: Results) -> list[Table]:
    """Final validation loss, the least first, and what it cost."""
    names = sorted(results.names(), key=lambda name: min(results.values(name, "valid_loss"), default=float("inf")))
    rows = [
        (
            name,
            results.cell(name, "valid_loss", digits=3),
            results.cell(name, "zeros", digits=3),
            results.cell(name, "null_rate", digits=3),
            results.cell(name, "training_tokens_per_second", digits=0),
            results.labels(name)["settings"],
        )
        for name in names
    ]
    columns = ("row", "validation loss", "zeros", "null rows", "tokens/s", "settings")
    note = "Short trainings show how fast a variant learns, not where it ends; zeros and null rows are of one batch."
    return [Table("Candidates, the least loss first", columns, rows, (note,))]


def figures(results: Results, folder: Path) -> list[Figure]:
    """Validation loss against updates: of the baseline and of the best."""
    ranked = sorted(results.finished, key=lambda entry: entry.measures["valid_loss"])
    best = [entry for entry in ranked if entry.name != BASELINE][:SHOWN]
    chosen = [*(entry for entry in ranked if entry.name == BASELINE), *best]
    lines = {entry.name: {step: [loss] for step, loss in entry.measures["curve"]} for entry in chosen}
    if not lines:
        return []
    path, about = folder / "learning-speed.svg", f"Loss while training: {BASELINE} and the best"
    return draw_panels(path, about, ["pre-norm"], [lines], "updates", "validation loss")


VARIANT_SEARCH = Study(
    name="variant-search",
    title="A variant to choose",
    question="Which rectified variant learns as softmax does in pre-norm, on few updates?",
    paper="None of the papers trains in pre-norm. Ours (docs/log.md): rela-g trails softmax there, relu2-open less so.",
    folders={"small": "europarl-doc-ende", "paper": "europarl-doc-ende"},
    trainings=trainings,
    measure=measure,
    tables=tables,
    figures=figures,
)
