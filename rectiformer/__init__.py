"""Attention with the softmax replaced by a ReLU: exact zeros, heads that can attend to nothing."""

import importlib
import typing

from rectiformer import interrupts as _interrupts  # noqa: F401 (before torch, whose import takes seconds)
from rectiformer.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    DivergedError,
    NoSpaceError,
    RectiformerError,
    ShapeError,
)
from rectiformer.errors import missing_package as _missing_package
from rectiformer.model.attention import Observation, RectifiedAttention
from rectiformer.model.cache import KeyValueCache
from rectiformer.model.memory import MEMORIES, KeyValueMemory
from rectiformer.model.multihead import MultiheadAttention
from rectiformer.model.projection import LearnedOption
from rectiformer.ops.attention import Explanation, attention, explain
from rectiformer.ops.decode import decode_attention
from rectiformer.ops.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from rectiformer.ops.variants import VARIANTS
from rectiformer.ops.varlen import attention_varlen
from rectiformer.ops.weights import AttentionStats, attention_stats, attention_weights

if typing.TYPE_CHECKING:
    from rectiformer.analyze.observe import observe
    from rectiformer.translate.options import SearchOptions
    from rectiformer.translate.translator import Translator

__version__ = "0.2.0"
__all__ = [
    "MEMORIES",
    "VARIANTS",
    "ArgumentError",
    "AttentionStats",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceMemoryError",
    "DivergedError",
    "Explanation",
    "KeyValueCache",
    "KeyValueMemory",
    "LearnedOption",
    "MultiheadAttention",
    "NoSpaceError",
    "Observation",
    "RectifiedAttention",
    "RectiformerError",
    "SearchOptions",
    "ShapeError",
    "Translator",
    "attention",
    "attention_stats",
    "attention_varlen",
    "attention_weights",
    "context_parallel_attention",
    "decode_attention",
    "explain",
    "observe",
    "shard_sequence",
    "unshard_sequence",
]

_ON_DEMAND = {
    "SearchOptions": "rectiformer.translate.options",
    "Translator": "rectiformer.translate.translator",
    "observe": "rectiformer.analyze.observe",
}
"""Names of the translator and the instrument, whose modules need packages that the attention library does not."""


def __getattr__(name: str) -> typing.Any:
    """Import a name of `_ON_DEMAND` when it is first used; ImportError says which extra is missing."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'rectiformer' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_ON_DEMAND[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"rectiformer.{name}: {_missing_package(error) or error}") from error
