"""What a run is refused for before anything of it is made: what its configuration says, and the files that it names.

Preparing text may take hours, and a folder that a refused run has left would be in the way of the next try.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rectiformer.config import Config
from rectiformer.distributed.sharding import require_parallel, require_shares
from rectiformer.errors import ConfigError
from rectiformer.model.transformer import Transformer
from rectiformer.runs.folder import adopt_vocabularies, require_fit
from rectiformer.text.corpus import check_files, has_documents, has_split
from rectiformer.text.prepared import Prepared, require_text
from rectiformer.text.stream import require_stream
from rectiformer.text.vocabulary import Vocabulary, load_named
from rectiformer.train.loss import require_weights
from rectiformer.train.validation import require_validation

Subwords = tuple[Vocabulary | None, Vocabulary | None]  # of source and target; None where they are yet to be chosen


def require_ranks(config: Config, ranks: int) -> None:
    """ConfigError where so many ranks cannot train a run, be it new or resumed."""
    require_shares(config.training.grad_accumulation, ranks)
    require_parallel(config.training, ranks)
    require_stream(config, ranks)


def require_trainable(config: Config, data: Path | None) -> None:
    """Raise what a new run would end in whatever its text says.

    Args:
        data: a folder written by `prepare`; otherwise the text named in `config` will be prepared.
    """
    config = adopt_vocabularies(config)
    if data is None:
        check_files(config.data)
        require_text(config)
        require_validation(config, has_split(config.data, "valid"))
        subwords = load_named(config.vocabulary, config.data.segment_length > 0)
    else:
        prepared = Prepared.open(data, verify=False)  # all of it is read when it is opened to be trained on
        require_same_segments(config, prepared)
        require_training_text(config, prepared)
        require_validation(config, prepared.valid is not None)
        subwords = prepared.source, prepared.target
    require_model(config, subwords)
    if config.training.init_from:
        require_fit(config, *subwords)


def require_model(config: Config, subwords: Subwords) -> None:
    """ConfigError, or the model's own, where it cannot be built; here it is built without memory."""
    source, target = subwords
    if config.model.tie_embeddings == "all" and not are_one(config, subwords):
        raise ConfigError(
            'model.tie_embeddings = "all" needs one vocabulary, but source and target each have their own; use '
            'model.tie_embeddings = "target" or vocabulary.shared = true'
        )
    sizes = [config.vocabulary.size if each is None else each.size for each in (source, target)]
    chosen = Vocabulary.EOS + 1 if has_documents(config.data) else None
    separators = [chosen if each is None else each.separator for each in (source, target)]
    with torch.device("meta"):
        model = Transformer(config.model, sizes[0], sizes[1], separators=(separators[0], separators[1]))
    require_weights(model, config.training)


def are_one(config: Config, subwords: Subwords) -> bool:
    """Whether source and target have the same vocabulary."""
    source, target = subwords
    return source.sha256 == target.sha256 if source and target else config.vocabulary.shared


def require_same_segments(config: Config, prepared: Prepared) -> None:
    """ConfigError where data was cut into other segments than those to train on."""
    if prepared.segment != config.data.segment_length:
        raise ConfigError(
            f"{prepared.folder} was prepared with data.segment_length = {prepared.segment}, but here it is "
            f"{config.data.segment_length}; use the same for both"
        )


def require_training_text(config: Config, prepared: Prepared) -> None:
    """ConfigError where data has no pairs to train on, or not those that are weighed."""
    if config.data.stream:
        return
    if not prepared.train:
        raise ConfigError(
            f"{prepared.folder} was prepared for a stream and has no text to train on; set data.stream = true, or "
            "prepare it without"
        )
    prepared.weigh(config.data.weights)
