"""Settings that a run was given and that nothing in it reads: each deserves a warning, none an error."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rectiformer.config import SITES, Config
from rectiformer.model.projection import LearnedOption
from rectiformer.ops.variants import VARIANTS


@dataclass(frozen=True)
class Unread:
    """Keys that do nothing while `holds` is true of the configuration."""

    keys: tuple[str, ...]
    because: str
    holds: Callable[[Config], bool]


def learns_no(option: str) -> Callable[[Config], bool]:
    """Whether no variant of a model learns this option."""

    def holds(config: Config) -> bool:
        rows = (VARIANTS[config.model.variant_at(site)] for site in SITES)
        return not any(option in LearnedOption.names_in(row) for row in rows)

    return holds


def has_no_norm(config: Config) -> bool:
    rows = (VARIANTS[config.model.variant_at(site)] for site in SITES)
    return all((config.model.output_norm or row.output_norm) == "none" for row in rows)


UNREAD = (
    Unread(
        ("data.links", "training.guided_layer", "training.guided_head"),
        "training.guided_alignment = 0",
        lambda config: not config.training.guided_alignment,
    ),
    Unread(("data.mixed",), "data.segment_length = 0", lambda config: not config.data.segment_length),
    Unread(("vocabulary.copies",), "vocabulary.sampling = 0", lambda config: not config.vocabulary.sampling),
    Unread(("model.norm_epsilon",), "no attention of this model has an output norm", has_no_norm),
    Unread(("model.gamma_sharing", "model.gamma_init"), "no variant of this model learns a gamma", learns_no("gamma")),
    Unread(("model.alpha_sharing", "model.alpha_init"), "no variant of this model learns an alpha", learns_no("alpha")),
    Unread(("model.beta_sharing", "model.beta_init"), "no variant of this model learns a beta", learns_no("beta")),
    Unread(
        ("training.decay_fraction",),
        'training.schedule is not "wsd"',
        lambda config: config.training.schedule != "wsd",
    ),
    Unread(("training.anneal_fraction",), "training.anneal_from = 0", lambda config: not config.training.anneal_from),
    Unread(
        ("training.penalty_warmdown",),
        "training.mass_penalty and training.entropy_penalty are 0",
        lambda config: not (config.training.mass_penalty or config.training.entropy_penalty),
    ),
    Unread(
        ("training.entropy_of",), "training.entropy_penalty = 0", lambda config: not config.training.entropy_penalty
    ),
    Unread(
        ("distillation.teacher_step", "distillation.align"),
        "distillation.teacher names no run",
        lambda config: not config.distillation.teacher,
    ),
)
"""A new setting that depends on another is a row here."""


def find_unread(config: Config) -> Iterator[str]:
    """One warning for each reason why something is not read that differs from its default."""
    usual = Config()
    for row in UNREAD:
        given = [key for key in row.keys if value_of(config, key) != value_of(usual, key)]
        if given and row.holds(config):
            verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
            yield f"warning: {', '.join(given)} {verb} given, but {row.because}, so nothing is done with {them}"


def value_of(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
