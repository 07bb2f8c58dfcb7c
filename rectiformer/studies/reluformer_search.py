"""ReLUFormer's hyperparameters in the paper's norm placement: short trainings with a rate that falls to 0, each on
validation data only; the best settings are then trained to the end in `translation-quality`."""

from itertools import product
from pathlib import Path
from typing import Any

from rectiformer.studies import measures
from rectiformer.studies.figures import collect_lines, draw_panels
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import ENDING, GRAMMAR_TINY, SENTENCE_FOLDERS, SENTENCES
from rectiformer.studies.results import Figure, Results, Table

SHORT = {
    "smoke": (*GRAMMAR_TINY, "validation.every=10", "checkpoint.every=10"),
    "small": (
        *("training.steps=2000", "training.learning_rate=7e-4", "training.warmup=500", "training.ema=0.99"),
        *("validation.every=200", "checkpoint.every=2000"),
    ),
    "paper": (),
}
"""What the search changes in the recipe of a scale."""
PENALTIES, GAMMAS = (0.0, 0.05, 0.5), (1.0, 4.0)
CENTERED = {"paper": "no", "centered": "yes"}
"""Keys as the paper has them, and with the mean over a sentence subtracted."""
SMOKE_ROWS = ("paper-gamma1-penalty0", "centered-gamma4-penalty0")


def settings_of(keys: str, gamma: float, penalty: float) -> tuple[str, ...]:
    """The settings of a row; both penalties have the same weight."""
    return (
        "model.variant=reluformer",
        f"model.center_keys={CENTERED[keys]}",
        f"model.gamma_init={gamma:g}",
        f"training.mass_penalty={penalty:g}",
        f"training.entropy_penalty={penalty:g}",
    )


ROWS = {
    f"{keys}-gamma{gamma:g}-penalty{penalty:g}": (keys, gamma, penalty)
    for keys, gamma, penalty in product(CENTERED, GAMMAS, PENALTIES)
}


def trainings(scale: Scale) -> list[Training]:
    found = []
    for name, (keys, gamma, penalty) in ROWS.items():
        if scale.name == "smoke" and name not in SMOKE_ROWS:
            continue
        settings = (*SHORT[scale.name], *ENDING, "model.norm=post", *settings_of(keys, gamma, penalty))
        config = configure(SENTENCES[scale.name], scale, *settings)
        found += seeded(name, (1,), config, tier=3, keys=keys, gamma=gamma, penalty=penalty)
    return found


def measure(task: Task) -> dict[str, Any]:
    """BLEU, losses while training, measures of attention and speed, all on validation data."""
    translator = measures.open_model(task)
    return {
        **measures.measure_translation(translator, measures.valid_pairs(task), "valid_"),
        **measures.measure_attention(translator, task),
        **measures.measure_losses(task),
        "training_tokens_per_second": measures.training_speed(task.run),
    }


def tables(results: Results) -> list[Table]:
    """All rows, the best first: validation loss, and what the heads do."""
    names = sorted(results.names(), key=lambda name: min(results.values(name, "valid_loss"), default=1e9))
    rows = []
    for name in names:
        labels = results.labels(name)
        cells = (results.cell(name, "valid_loss", 3), results.cell(name, "valid_bleu"))
        rows.append((str(labels["keys"]), f"{labels['gamma']:g}", f"{labels['penalty']:g}", *cells))
    columns = ("keys", "gamma at the start", "weight of both penalties", "validation loss", "validation BLEU")
    note = "Short trainings of one seed, beam 4: they choose settings and say nothing about quality."
    heads = measures.heads_tables(results, names, ("keys", "gamma", "penalty"))
    return [Table("Settings, the best first", columns, rows, (note,)), *heads]


def figures(results: Results, folder: Path) -> list[Figure]:
    """Validation loss against updates, one panel per keys and penalty."""
    panels = {
        f"{keys} keys, gamma {gamma:g}": collect_lines(
            (f"penalty {entry.labels['penalty']:g}", step, loss)
            for entry in results.select(keys=keys, gamma=gamma).finished
            for step, loss in entry.measures["curve"]
        )
        for keys, gamma in product(CENTERED, GAMMAS)
        if results.select(keys=keys, gamma=gamma).finished
    }
    path, lines = folder / "losses.svg", list(panels.values())
    return draw_panels(path, "Loss while training", list(panels), lines, "updates", "validation loss")


RELUFORMER_SEARCH = Study(
    name="reluformer-search",
    title="ReLUFormer's hyperparameters",
    question="Which penalties, which gamma, and centered keys or not?",
    paper="Shen et al. 2023 give variance factor and two penalties, but neither their weights nor how gamma is held "
    "[T]; IWSLT14 De-En: softmax 34.22, factor alone 33.19, with penalties 34.56 [T].",
    folders=SENTENCE_FOLDERS,
    trainings=trainings,
    measure=measure,
    tables=tables,
    figures=figures,
)
