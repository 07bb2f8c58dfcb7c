"""Ablations of ReLA on a narrow model in the paper's norm placement: norms, activations, sites, number of heads."""

from dataclasses import replace
from typing import Any

from rectiformer.studies import measures
from rectiformer.studies.plan import Scale, Study, Task, Training, configure, seeded
from rectiformer.studies.recipes import GRAMMAR_TINY, IWSLT14, MULTI30K_NARROW, SENTENCE_FOLDERS
from rectiformer.studies.results import Claim, Results, Table, claims_table, judge_rows

SETTINGS = {"smoke": GRAMMAR_TINY, "small": MULTI30K_NARROW, "paper": IWSLT14}
SEEDS = {"smoke": (1,), "small": (1, 2, 3), "paper": (1, 2, 3)}
SMOKE_ROWS = 2
RELA = "model.variant=rela-g"
HEADS = (2, 4, 8, 16)
DIVERGES = "no-norm"
"""So the paper says, without a number."""

ROWS: dict[str, tuple[str, ...]] = {
    "softmax": ("model.variant=softmax",),
    "rela-g": (RELA,),
    "rela-i": ("model.variant=rela-i",),
    "rms-alone": ("model.variant=rela",),
    DIVERGES: (RELA, "model.output_norm=none"),
    "layer-norm": (RELA, "model.output_norm=layer"),
    "head-norm": (RELA, "model.output_norm=head-rms"),
    **{name: (f"model.variant={name}",) for name in ("identity", "gelu", "leaky-relu")},
    **{f"{site}-alone": ("model.variant=softmax", f"model.{site}_variant=rela-g") for site in measures.SITE_TITLES},
    **{
        f"{name}-{heads}-heads": (f"model.variant={name}", f"model.num_heads={heads}")
        for name in ("softmax", "rela-g")
        for heads in HEADS
    },
}
"""Name of a row: its settings."""
TITLES = {
    "rms-alone": "rela (plain RMSNorm)",
    DIVERGES: "rela-g without a norm",
    "layer-norm": "rela-g with LayerNorm",
    "head-norm": "rela-g with RMSNorm per head",
    **{f"{site}-alone": f"rela-g in {title} only" for site, title in measures.SITE_TITLES.items()},
    **{f"{name}-{heads}-heads": f"{name}, {heads} heads" for name in ("softmax", "rela-g") for heads in HEADS},
}
"""What a reader is told that a row is, where its name does not say it."""
CLAIMS = (
    Claim("rela-i", "rela-g", "equal", "about equal [R]"),
    Claim("rms-alone", "rela-g", "below", "mostly works, sometimes fails [R+]"),
    Claim("identity", "rela-g", "below", "clearly worse [R-]"),
    Claim(DIVERGES, "rela-g", "below", "diverges [R]"),
    *(Claim(f"{site}-alone", "softmax", "equal", "about equal [R]") for site in measures.SITE_TITLES),
)


def trainings(scale: Scale) -> list[Training]:
    """Without rows that equal an earlier one; all first seeds come first."""
    found: list[Training] = []
    for name, overrides in list(ROWS.items())[: SMOKE_ROWS if scale.name == "smoke" else None]:
        config = configure(SETTINGS[scale.name], scale, *overrides)
        if config not in (training.config for training in found if training.seed == config.training.seed):
            found += seeded(name, seeds_of(scale, name), config, tier=6, settings=", ".join(overrides))
    return sorted(found, key=lambda training: training.seed)


def seeds_of(scale: Scale, name: str) -> tuple[int, ...]:
    """The seeds of a row: at small only one, unless the paper claims something of it."""
    claimed = any(name in (claim.first, claim.second) for claim in CLAIMS)
    return SEEDS[scale.name] if claimed or scale.name != "small" else SEEDS[scale.name][:1]


def measure(task: Task) -> dict[str, Any]:
    """BLEU on test and validation data, and measures of attention on validation data."""
    translator = measures.open_model(task)
    quality, losses = measures.measure_quality(translator, task), measures.measure_losses(task)
    return {**quality, **losses, **measures.measure_attention(translator, task)}


def tables(results: Results) -> list[Table]:
    own = results.rename(lambda entry: TITLES.get(entry.name, entry.name))
    claims = [
        replace(claim, first=TITLES.get(claim.first, claim.first), second=TITLES.get(claim.second, claim.second))
        for claim in CLAIMS
    ]
    rows = [(name, own.cell(name, "bleu"), own.cell(name, "valid_bleu")) for name in own.names()]
    return [
        claims_table(judge_rows(claims, own, "bleu", "BLEU")),
        Table("Ablations", ("row", "test BLEU", "validation BLEU"), rows, ("Beam 4.",)),
        *measures.heads_tables(own, own.names()),
    ]


ABLATIONS = Study(
    name="ablations",
    title="Ablations of ReLA",
    question="Which parts of ReLA matter: its norm, its activation, its sites, the number of heads?",
    paper="Zhang et al. 2021: without a norm training diverges; a plain RMSNorm mostly works, -i and -g always; "
    "identity in place of ReLU is clearly worse; rectified attention works at each site [R: recalled].",
    folders=SENTENCE_FOLDERS,
    trainings=trainings,
    measure=measure,
    tables=tables,
)
