"""The definition: every variant in plain torch, readable, exact, differentiable as often as you like.

Whatever is faster elsewhere is compared with this file, value and gradients, over the whole table.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rectiformer.ops.activations import RowContext
from rectiformer.ops.call import AttentionCall, Visibility, run_views
from rectiformer.ops.dropout import keep_cells


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """16-bit inputs are computed in float32; wider ones in their own dtype."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast; None where it is off, and on devices that have none, such as meta."""
    available = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if available else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, operations keep the dtypes of their inputs, on devices that have no autocast, such as meta, as well."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def repeat_heads(kv: Tensor, heads: int) -> Tensor:
    """Keys or values [B, K, N, D] once for each of `heads` query heads: query head h reads head h // (heads / K)."""
    B, K, N, D = kv.shape
    if heads == K:
        return kv
    # In the sizes of the queries: where sizes are symbolic, K * (heads // K) is not known to be `heads`.
    return kv[:, :, None].expand(B, K, heads // K, N, D).reshape(B, heads, N, D)


def clear_padding(kv: Tensor, visibility: Visibility) -> Tensor:
    """Keys or values with zeros beyond each sequence's length, so that no NaN in the padding can reach a sum."""
    if visibility.key_lengths is None:
        return kv
    real = torch.arange(kv.shape[2], device=kv.device) < visibility.key_lengths.to(kv.device)[:, None]
    return torch.where(real[:, None, :, None], kv, 0)


def reference_weights(q: Tensor, k: Tensor, call: AttentionCall, precision: torch.dtype | None = None) -> Tensor:
    """Weights [B, H, M, N] before dropout, in `precision` (the working dtype of q unless given), whatever autocast."""
    precision = precision or working_dtype(q.dtype)
    if call.variant.difference_of:
        return run_views(lambda q, k, view: reference_weights(q, k, view, precision), q, k, call)
    k = repeat_heads(clear_padding(k, call.visibility), q.shape[1])
    with without_autocast(q.device):
        return weigh(call.variant.score(q.to(precision), k.to(precision)) * call.scale, call)


def weigh(x: Tensor, call: AttentionCall) -> Tensor:
    """Weights of scaled scores [B, H, M, N] by the variant's own formula, the bias added and hidden keys left out."""
    if call.attn_bias is not None:
        x = x + call.attn_bias.to(x.dtype)
    visibility = call.seen
    seen = visibility.mask(x.device)
    count = visibility.counts(x.device).clamp_min(1).to(x.dtype)[..., None]
    if seen is None:
        return call.variant.weights(x, RowContext(None, count, call.options))
    rows = RowContext(seen | ~seen.any(-1, keepdim=True), count, call.options)
    return torch.where(seen, call.variant.weights(torch.where(seen, x, 0), rows), call.variant.hidden)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, precision: torch.dtype | None = None
) -> Tensor:
    """Mixed values [B, H, M, Dv] in the dtype of q."""
    return mix_values(reference_weights(q, k, call, precision), v, call).to(q.dtype)


def mix_values(weights: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """The values as `weights` [B, H, M, N] mix them, after dropout: [B, H, M, Dv] in the dtype of the weights."""
    v = repeat_heads(clear_padding(v, call.visibility), weights.shape[1]).to(weights.dtype)
    with without_autocast(weights.device):
        return call.variant.mix(weights, v, dropout_factor(call, weights))


def dropout_factor(call: AttentionCall, weights: Tensor) -> Tensor | None:
    """0 for dropped cells and 1 / (1 - dropout) for the rest, or None without dropout."""
    if not call.dropout_p:
        return None
    assert call.seed is not None
    cells = (slice(0, size) for size in weights.shape)
    keep = keep_cells(call.seed, call.dropout_p, cells, weights.shape[1], call.origin)
    return keep.to(weights.dtype) / (1 - call.dropout_p)


def scale_rows(out: Tensor, call: AttentionCall, counts: Tensor | None = None) -> Tensor:
    """The mixed values times the variant's row scale: it is linear, so it can come last.

    `counts` broadcasts to [B, H, M]: the keys that each query sees, where the call alone does not say.
    """
    if call.variant.row_scale is None:
        return out
    counts = call.seen.counts(out.device) if counts is None else counts
    count = counts.clamp_min(1)[..., None].to(torch.promote_types(out.dtype, torch.float32))
    return out * call.variant.row_scale(count, call.options)
