"""convert(): a trained softmax model to rectified attention, as a training that learns from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from rectiformer.config import SITES, Config
from rectiformer.distributed.ranks import is_rank0
from rectiformer.errors import ArgumentError, CheckpointError
from rectiformer.files import replace_file, writing
from rectiformer.ops.variants import find_variant
from rectiformer.runs.folder import Run, adopt_vocabularies, find_weights, is_created, load_model, open_run
from rectiformer.text.prepared import Prepared
from rectiformer.toml import override_config
from rectiformer.train.fitting import inherit
from rectiformer.train.heads import HeadComparison, compare_heads, some_batches
from rectiformer.train.reporting import Reporter
from rectiformer.train.saving import State
from rectiformer.train.start import train
from rectiformer.train.teacher import load_teacher
from rectiformer.translate.evaluate import symbols_of
from rectiformer.translate.translator import find_device

REPORT = "conversion.json"
SITE_RESISTS = 0.3
"""The share of its output that a site's heads may have wrong, in the mean, before keeping its softmax is advised."""
DEFAULTS = (
    "model.center_keys=yes", "model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0",
    "training.steps=2000", "training.schedule=linear", "training.learning_rate=1e-3", "training.warmup=100",
    "training.optimizer=adam", "training.weight_decay=0", "training.clip_grad_norm=1", "training.ema=0",
    "training.average_checkpoints=1", "training.mass_penalty=0", "training.entropy_penalty=0",
    "training.balance_penalty=0", "training.init_from=", "training.compile=auto",
    "validation.every=500", "validation.patience=0", "checkpoint.every=500",
)  # fmt: skip
"""What a conversion changes in the configuration of the run, before --set."""


@dataclass(frozen=True)
class Conversion:
    """How a conversion ended."""

    state: State
    heads: list[HeadComparison]

    @property
    def resisting(self) -> list[str]:
        """The sites that have lost much, in the mean over their heads."""
        found = {kind: [head.error for head in self.heads if head.kind == kind] for kind in SITES}
        return [kind for kind, errors in found.items() if errors and fmean(errors) > SITE_RESISTS]


def convert(
    run_folder: Path,
    variant: str,
    out: Path,
    *,
    keep_softmax: Collection[str] = (),
    overrides: Sequence[str] = (),
    resume: bool = False,
    data: Path | None = None,
    reporter: Reporter | None = None,
) -> Conversion:
    """Make `out` a run like the softmax one in `run_folder`, with attention of another variant that has learned to do
    what its softmax does.

    Args:
        keep_softmax: sites that stay as they are.
        overrides: `section.key=value` strings, over what is inherited and over `DEFAULTS`.
        resume: go on with what is in `out`.
        data: prepared text to learn on; by default the run's own, or that named in its configuration, prepared again.
    """
    run, reporter = open_run(run_folder), reporter or Reporter()
    if resume and is_created(out):
        config = override_config(open_run(out).config, map(as_toml, overrides))
        require_same_conversion(config, run_folder, variant, keep_softmax, out)
    else:
        config = conversion_config(run, variant, keep_softmax, overrides)
    own = run.path / "data"
    data = own if data is None and own.is_dir() else data
    state = train(config, out, resume=resume, data=data, reporter=reporter)
    if not is_rank0():
        return Conversion(state, [])
    reporter.note("comparing each head with its teacher")
    prepared = Prepared.open(data or out / "data", verify=False)
    found = Conversion(state, measure_heads(open_run(out), prepared, reporter))
    write_report(out, found)
    return found


def conversion_config(run: Run, variant: str, keep_softmax: Collection[str], overrides: Sequence[str]) -> Config:
    """The configuration of a run that learns from `run`; ArgumentError where that is not possible."""
    row = find_variant(variant)
    if variant == "softmax" or not row.has_weights:
        why = "it is what the run has" if variant == "softmax" else "it has no weights that could learn from a softmax"
        raise ArgumentError(f"cannot convert to variant {variant!r}: {why}; choose another --variant")
    converted = [site for site in SITES if site not in keep_softmax]
    if not converted:
        raise ArgumentError(
            f"--keep-softmax names {', '.join(SITES)}, so there is nothing left to convert; leave out one"
        )
    for site in converted:
        if (found := run.config.model.variant_at(site)) != "softmax":
            raise ArgumentError(
                f"cannot convert {run.path}: its {site} attention is {found!r}, and only a softmax can be converted; "
                "name a softmax run"
            )
    step = find_weights(run, "best", lambda line: None).step
    settings = [f"model.{site}_variant={'softmax' if site in keep_softmax else ''}" for site in SITES]
    settings.append(f"model.variant={variant}")
    if row.opening is not None:  # rectified: rows have no sum of 1 that would hold their size
        norm = row.output_norm if row.output_norm != "none" else "gated-rms"
        settings += ["model.score_bias=open", f"model.output_norm={norm}"]
    settings += [f"distillation.teacher={json.dumps(str(run.path))}", f"distillation.teacher_step={step}"]
    cleared = ["vocabulary.source_model=", "vocabulary.target_model="]  # those of the run are taken instead
    config = override_config(run.config, map(as_toml, (*DEFAULTS, *settings, *cleared, *overrides)))
    every = min(config.validation.every, config.training.steps)  # so that the end is validated in short ones too
    return adopt_vocabularies(replace(config, validation=replace(config.validation, every=every)))


def as_toml(setting: str) -> str:
    """`section.key=` with an empty string, which a setting of the command line cannot have, as TOML has it."""
    return f'{setting}""' if setting.endswith("=") else setting


def require_same_conversion(
    config: Config, run_folder: Path, variant: str, keep_softmax: Collection[str], out: Path
) -> None:
    """CheckpointError where `out` is not this conversion, and cannot go on as such."""
    teacher, own = config.distillation.teacher, config.model.variant
    if not teacher or Path(teacher).resolve() != run_folder.resolve() or own != variant:
        what = f"a conversion of {teacher} to {own!r}" if teacher else "not a conversion"
        raise CheckpointError(f"cannot resume {out}: it is {what}; name that run and variant, or another --out")
    if changed := [site for site in keep_softmax if config.model.variant_at(site) != "softmax"]:
        raise CheckpointError(
            f"cannot resume {out} with --keep-softmax {changed[0]}: its {changed[0]} attention is converted already; "
            "leave that out, or name another --out"
        )


def measure_heads(run: Run, prepared: Prepared, reporter: Reporter) -> list[HeadComparison]:
    """What each head of the teacher became in the best weights of `run`."""
    device = find_device(run.config.training.device)
    teacher, (student, _) = load_teacher(run, device), load_model(run, device=device, notice=reporter.note)
    with torch.random.fork_rng(devices=[]):  # a norm that the teacher lacks is drawn, whatever was drawn before alike
        torch.manual_seed(run.config.training.seed)
        swapped = replace(run, config=without_changes(run.config)).build_model().to(device).eval()
    inherit(swapped, teacher)
    return compare_heads(teacher, swapped, student, some_batches(prepared, symbols_of(prepared), device))


def without_changes(config: Config) -> Config:
    """The same with nothing but the variant changed: no bias of scores and no centered keys."""
    model = replace(config.model, score_bias="none", center_keys="no")
    return replace(config, model=model)


def write_report(out: Path, found: Conversion) -> None:
    """Write every number of the comparison into the run folder."""
    heads = [{**asdict(head), "resists": head.resists} for head in found.heads]
    with writing(out / REPORT):
        replace_file(out / REPORT, json.dumps({"heads": heads, "resisting_sites": found.resisting}, indent=1).encode())
