"""How num_heads share a embed_dim."""

from __future__ import annotations

from torch import Tensor

from rectiformer.errors import ConfigError


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """ConfigError where the heads cannot share the width, or the key heads, equally."""
    if embed_dim < 1 or num_heads < 1 or num_kv_heads < 1:
        raise ConfigError(
            f"embed_dim = {embed_dim}, num_heads = {num_heads}, num_kv_heads = {num_kv_heads}; each must be at least 1"
        )
    if embed_dim % num_heads:
        raise ConfigError(f"num_heads = {num_heads} does not divide embed_dim = {embed_dim}")
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads = {num_kv_heads} does not divide num_heads = {num_heads}")


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, length, E] to [B, num_heads, length, E / num_heads]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
