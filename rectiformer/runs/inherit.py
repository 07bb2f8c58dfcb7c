"""What a run takes over from another one, as `training.init_from` asks: its best weights and its subwords."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from rectiformer.config import Config
from rectiformer.errors import CheckpointError
from rectiformer.model.transformer import Transformer
from rectiformer.runs.folder import Run, load_model, load_weights, open_run, weights_of
from rectiformer.text.vocabulary import Vocabulary


def adopt_subwords(config: Config) -> Config:
    """The same, with the vocabularies of the run that it starts from, unless it starts from none or names its own."""
    if not config.training.init_from or config.vocabulary.source_model or config.vocabulary.target_model:
        return config
    run = open_run(Path(config.training.init_from))
    target = "" if config.vocabulary.shared else str(run.path / "target.model")
    vocabulary = dataclasses.replace(
        config.vocabulary, source_model=str(run.path / "source.model"), target_model=target
    )
    return dataclasses.replace(config, vocabulary=vocabulary)


def require_fit(config: Config, source: Vocabulary | None, target: Vocabulary | None) -> None:
    """CheckpointError where the run that it starts from does not fit, before anything is made or prepared.

    Args:
        source, target: the vocabularies, None where they are not chosen yet.
    """
    start = open_run(Path(config.training.init_from))
    require_same_subwords(start, source or start.source, target or start.target)
    with torch.device("meta"):
        ours, theirs = (dataclasses.replace(start, config=each).build_model() for each in (config, start.config))
        load_weights(ours, weights_of(theirs), str(start.path))


def inherit_weights(model: Transformer, run: Run, note: Callable[[str], None]) -> None:
    """Give `model` of `run` the best weights of the run it starts from, and say so; CheckpointError unless they fit.

    Subwords must be the same, since rows of the embeddings stand for them; dropout and all of [training] may differ.
    """
    start = open_run(Path(run.config.training.init_from))
    require_same_subwords(start, run.source, run.target)
    trained, step = load_model(start, notice=note)
    load_weights(model, weights_of(trained), str(start.path))
    note(f"started from {start.path}, step {step:,}")


def require_same_subwords(start: Run, source: Vocabulary, target: Vocabulary) -> None:
    """CheckpointError where a run has others than these."""
    for side, theirs, ours in (("source", start.source, source), ("target", start.target, target)):
        if theirs.sha256 != ours.sha256:
            raise CheckpointError(
                f"cannot start from {start.path}: its {side} vocabulary has hash {theirs.sha256[:12]}, but that of the "
                f"data is {ours.sha256[:12]}; leave out vocabulary.source_model and target_model, or prepare the data "
                f"with those of {start.path}"
            )
