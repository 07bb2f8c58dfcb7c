"""Attention with the softmax replaced by a ReLU: exact zeros, heads that can attend to nothing."""

import typing

from rectiformer import interrupts as _interrupts  # noqa: F401 (before torch, whose import takes seconds)
from rectiformer.errors import ArgumentError, ConfigError, RectiformerError, ShapeError
from rectiformer.model.attention import RectifiedAttention
from rectiformer.model.cache import KeyValueCache
from rectiformer.model.learned import LearnedOption
from rectiformer.model.memory import MEMORIES, KeyValueMemory
from rectiformer.model.observation import Observation
from rectiformer.ops.dispatch import attention
from rectiformer.ops.explain import Explanation, explain
from rectiformer.ops.packed import attention_varlen
from rectiformer.ops.parallel import context_parallel_attention
from rectiformer.ops.ranks import shard_sequence, unshard_sequence
from rectiformer.ops.variants import VARIANTS
from rectiformer.ops.weights import AttentionStats, attention_stats, attention_weights

if typing.TYPE_CHECKING:
    from rectiformer.analyze.observe import observe

__version__ = "0.1.0"
__all__ = [
    "MEMORIES",
    "VARIANTS",
    "ArgumentError",
    "AttentionStats",
    "ConfigError",
    "Explanation",
    "KeyValueCache",
    "KeyValueMemory",
    "LearnedOption",
    "Observation",
    "RectifiedAttention",
    "RectiformerError",
    "ShapeError",
    "attention",
    "attention_stats",
    "attention_varlen",
    "attention_weights",
    "context_parallel_attention",
    "explain",
    "observe",
    "shard_sequence",
    "unshard_sequence",
]


def __getattr__(name: str) -> typing.Any:
    """`observe` brings the translator along, so it is imported when it is asked for."""
    if name == "observe":
        from rectiformer.analyze.observe import observe

        return observe
    raise AttributeError(f"module 'rectiformer' has no attribute {name!r}")
