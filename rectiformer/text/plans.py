"""Which plan a run gets its batches from: prepared text, weighed or not, or a stream."""

from __future__ import annotations

from collections.abc import Callable

from rectiformer.config import Config
from rectiformer.errors import ConfigError
from rectiformer.text.batches import BatchPlan, Symbols
from rectiformer.text.lines import standard_input
from rectiformer.text.prepared import Prepared
from rectiformer.text.stream import StreamPlan


def plan_batches(
    config: Config, prepared: Prepared, symbols: Symbols, check: Callable[[], None], ranks: int = 1
) -> BatchPlan | StreamPlan:
    """The batches that `config` trains on.

    Args:
        check: called while a stream is read or waited for; what it raises ends that.
        ranks: how many processes train together.
    """
    require_stream(config, ranks)
    name, tokens = f"{prepared.hash}|{config.training.seed}", config.training.batch_tokens
    if not config.data.stream:
        prepared.weigh(config.data.weights)
        return BatchPlan(prepared.train, tokens, symbols, name)
    return StreamPlan(
        standard_input().fileno(), (prepared.source, prepared.target), config.data, tokens, symbols, name, check
    )


def require_stream(config: Config, ranks: int) -> None:
    """ConfigError where a stream is asked for what it cannot do."""
    if not config.data.stream:
        return
    for key, value in {"segment_length": config.data.segment_length, "weights": config.data.weights}.items():
        if value:
            raise ConfigError(f"data.{key} needs prepared text, but data.stream = true; leave one of them out")
    if config.vocabulary.sampling:
        raise ConfigError(
            f"vocabulary.sampling = {config.vocabulary.sampling} needs prepared text, but data.stream = true: sampled "
            "again, a stream would not be the same"
        )
    if ranks > 1:
        raise ConfigError(f"data.stream = true, but {ranks} ranks cannot share standard input; train on one")
