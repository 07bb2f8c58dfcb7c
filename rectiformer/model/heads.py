"""How heads share a width."""

from __future__ import annotations

from torch import Tensor

from rectiformer.errors import ConfigError


def check_heads(width: int, heads: int, key_heads: int) -> None:
    """ConfigError where the heads cannot share the width, or the key heads, equally."""
    if width < 1 or heads < 1 or key_heads < 1:
        raise ConfigError(f"width = {width}, heads = {heads}, key_heads = {key_heads}; each must be at least 1")
    if width % heads:
        raise ConfigError(f"heads = {heads} does not divide width = {width}")
    if heads % key_heads:
        raise ConfigError(f"key_heads = {key_heads} does not divide heads = {heads}")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, length, E] to [B, heads, length, E / heads]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
