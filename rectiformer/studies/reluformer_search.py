"""Hyperparameter search for a ReLUFormer that trains: few updates per row, validation data only."""

from pathlib import Path
from typing import Any

from rectiformer.studies import measures
from rectiformer.studies.figures import collect_lines, draw_panels
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import GRAMMAR_TINY, SENTENCE_FOLDERS, SENTENCES
from rectiformer.studies.results import Results, Table

SHORT = {
    "smoke": (*GRAMMAR_TINY, "validation.every=10", "checkpoint.every=10"),
    "small": ("training.steps=800", "training.ema=0.99", "validation.every=200", "checkpoint.every=800"),
    "paper": (),
}
"""What the search changes in the recipe of a scale."""
SEEDS = (1,)
WEIGHTS = (0.01, 0.1, 1.0)
RELUFORMER = ("model.variant=reluformer", "model.center_keys=yes", "model.gamma_init=1")
PAPER = ("model.variant=reluformer", "model.center_keys=no", "model.gamma_init=1")
"""The paper's formula as it stands."""
SQUARED = ("model.variant=relu2", "model.output_norm=gated-rms")
"""ReLA-g with weights squared."""
FAST = "training.learning_rate=2e-3"


def penalties(mass: float, entropy: float) -> tuple[str, ...]:
    """Weights for both of ReLUFormer's penalties."""
    return (f"training.mass_penalty={mass}", f"training.entropy_penalty={entropy}")


GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "others and the formula as it stands": {
        "softmax": ("model.variant=softmax",),
        "rela-g": ("model.variant=rela-g",),
        "rela-centered": ("model.variant=rela-g", "model.center_keys=yes"),
        "paper": PAPER,
        **{f"paper-penalties-{weight:g}": (*PAPER, *penalties(weight, weight)) for weight in WEIGHTS},
    },
    "centered, with penalties": {
        "centered": RELUFORMER,
        **{f"penalties-{weight:g}": (*RELUFORMER, *penalties(weight, weight)) for weight in WEIGHTS},
        "mass-alone": (*RELUFORMER, *penalties(0.1, 0)),
        "entropy-alone": (*RELUFORMER, *penalties(0, 0.1)),
        "raw-entropy": (*RELUFORMER, *penalties(0.1, 0.1), "training.entropy_of=raw"),
        **{
            f"warmdown-{weight:g}": (*RELUFORMER, *penalties(weight, weight), "training.penalty_warmdown=0.5")
            for weight in (0.1, 1.0)
        },
    },
    "gamma": {
        **{f"gamma-{learn}": (*RELUFORMER, f"model.gamma_sharing={learn}") for learn in ("layer", "model", "fixed")},
        **{f"start-{gamma:g}": (*RELUFORMER, f"model.gamma_init={gamma}") for gamma in (0.25, 0.5, 2.0, 4.0, 8.0)},
    },
    "norm placement": {
        **{f"post-{name}": (f"model.variant={name}", "model.norm=post") for name in ("softmax", "rela-g")},
        "post-reluformer": (*RELUFORMER, "model.norm=post"),
        "post-paper": (*PAPER, "model.norm=post"),
    },
    "learning rate and warm-up": {
        **{f"rate-{rate:g}": (*RELUFORMER, f"training.learning_rate={rate}") for rate in (3e-4, 2e-3)},
        **{f"warmup-{steps}": (*RELUFORMER, f"training.warmup={steps}") for steps in (400, 1600)},
        "start-4-entropy": (*RELUFORMER, "model.gamma_init=4", *penalties(0, 0.1)),
        **{f"start-{gamma:g}-fast": (*RELUFORMER, f"model.gamma_init={gamma}", FAST) for gamma in (2.0, 4.0)},
        **{f"{name}-fast": (f"model.variant={name}", FAST) for name in ("softmax", "rela-g")},
        "threshold-4-fast": (*RELUFORMER, "model.gamma_init=4", "model.score_bias=zero", FAST),
    },
    "squared, and open at first": {
        **{
            f"open-{gamma:g}": (*RELUFORMER, f"model.gamma_init={gamma}", "model.score_bias=open")
            for gamma in (1.0, 4.0)
        },
        "rela-open": ("model.variant=rela-g", "model.score_bias=open"),
        "rela-centered-open": ("model.variant=rela-g", "model.center_keys=yes", "model.score_bias=open"),
        "squared": (*SQUARED, "model.center_keys=no"),
        "squared-centered": (*SQUARED, "model.center_keys=yes"),
        "squared-open": (*SQUARED, "model.center_keys=no", "model.score_bias=open"),
        "squared-centered-open": (*SQUARED, "model.center_keys=yes", "model.score_bias=open"),
    },
}
"""Rows by what they vary; name of a row: its settings."""
ROWS = {name: overrides for rows in GROUPS.values() for name, overrides in rows.items()}
BASELINE = "softmax"
"""The row that every figure has."""
SMOKE_ROWS = ("rela-g", "post-rela-g")


def trainings(scale: Scale) -> list[Training]:
    found = []
    for name, overrides in ROWS.items():
        if scale.name == "smoke" and name not in SMOKE_ROWS:
            continue
        config = configure(SENTENCES[scale.name], scale, "model.norm=pre", *SHORT[scale.name], *overrides)
        found += seeded(name, SEEDS, config, settings=", ".join(overrides))
    return found


def measure(task: Task) -> dict[str, Any]:
    """BLEU, its curve while training, measures of attention and speed, all on validation data."""
    translator = measures.open_model(task)
    return {
        **measures.measure_translation(translator, measures.valid_pairs(task), "valid_"),
        **measures.measure_attention(translator, task),
        "curve": measures.curve_of(task.run, "valid_bleu"),
        "training_tokens_per_second": measures.training_speed(task.run),
    }


def tables(results: Results) -> list[Table]:
    """All rows, the best first: BLEU, and what the heads do."""
    names = sorted(results.names(), key=lambda name: -max(results.values(name, "valid_bleu"), default=-1.0))
    reached = [(name, results.cell(name, "valid_bleu"), results.labels(name)["settings"]) for name in names]
    return [
        Table("Settings, the best first", ("row", "validation BLEU", "settings"), reached, ("Beam 4.",)),
        measures.heads_table(results, names),
    ]


def figures(results: Results, folder: Path) -> list[Path]:
    """Validation BLEU against updates, one figure per group, each with softmax."""
    curves = collect_lines(
        (entry.name, step, bleu) for entry in results.finished for step, bleu in entry.measures["curve"]
    )
    found: list[Path] = []
    for number, (title, rows) in enumerate(GROUPS.items(), 1):
        names = [name for name in dict.fromkeys((BASELINE, *rows)) if name in curves]
        if any(name in rows for name in names):
            lines = {name: curves[name] for name in names}
            path = folder / f"curves-{number}.svg"
            found += draw_panels(path, [title], [lines], "updates", "validation BLEU (greedy)")
    return found


RELUFORMER_SEARCH = Study(
    name="reluformer-search",
    title="ReLUFormer that trains",
    question="Which hyperparameters let heads with ReLU and a variance factor select keys early?",
    paper="Shen et al. 2023 give variance factor and two penalties, but neither their weights nor how gamma is held "
    "[T b,h,i: second hand]; IWSLT14 De-En: softmax 34.22, factor alone 33.19, with penalties 34.56 [T i].",
    folders=SENTENCE_FOLDERS,
    trainings=trainings,
    measure=measure,
    tables=tables,
    figures=figures,
)
