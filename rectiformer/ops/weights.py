"""Looking at attention: the weights of a call, dense or sparse, and row statistics that never hold M x N of them."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError
from rectiformer.ops.activations import Value
from rectiformer.ops.attention import WEIGHT_ARGUMENTS, Window, check_call, transform_obstacle
from rectiformer.ops.call import AttentionCall
from rectiformer.ops.gpu import row_sums_obstacle
from rectiformer.ops.plain import by_rows
from rectiformer.ops.reference import (
    clear_padding,
    mix_values,
    reference_weights,
    scale_rows,
    without_autocast,
    working_dtype,
)
from rectiformer.ops.variants import find_variant

Statistics = TypeVar("Statistics", "AttentionStats", "RowStatistics")
BLOCK_CELLS = 1 << 20
"""Weights computed at once where not all are kept."""
HIDDEN_SCORE = -1e30
"""Of a key that a query does not see: finite, since it is multiplied with 0."""


@dataclass(frozen=True)
class AttentionStats:
    """What each query's row of weights looks like; every field is [B, H, M]."""

    visible: Tensor
    """Keys the query sees."""
    nonzero: Tensor
    """Keys with a weight other than exactly 0."""
    mass: Tensor
    """Sum of the weights: 1 for softmax and its kin, anything for rectified rows."""
    entropy: Tensor
    """Entropy in nats of the absolute weights divided by their sum; 0 for a row without weights."""

    def __repr__(self) -> str:
        """What people ask first instead of four whole tensors: [B, H, M], and the zeros and null rows of each head."""
        shares = (
            f"{name} {[round(float(each), 4) for each in getattr(self, name)]}" for name in ("sparsity", "null_rate")
        )
        return f"AttentionStats({list(self.visible.shape)}, per head: {', '.join(shares)})"

    @property
    def null(self) -> Tensor:
        """True where a query sees keys and attends to none of them."""
        return (self.nonzero == 0) & (self.visible > 0)

    @property
    def sparsity(self) -> Tensor:
        """Share of exact zeros among the visible cells of each head: [H]."""
        visible = self.visible.sum((0, 2))
        return (visible - self.nonzero.sum((0, 2))) / visible.clamp_min(1)

    @property
    def null_rate(self) -> Tensor:
        """Share of each head's queries that attend to nothing, of those that see any key: [H]."""
        return self.null.sum((0, 2)) / (self.visible > 0).sum((0, 2)).clamp_min(1)


def attention_weights(
    q: Tensor,
    k: Tensor,
    variant: str = "rela",
    *,
    sparse: bool = False,
    causal: bool = False,
    key_lengths: Tensor | Sequence[int] | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    window_size: Window | None = None,
    scale: float | None = None,
    **options: Value,
) -> Tensor:
    """The weights that `attention` mixes values with, before dropout; the arguments are those of `attention`.

    Dense: [B, H, M, N], with gradients. Sparse: a `torch.sparse_csr` matrix of B * H * M rows and N columns that holds
    the non-zero weights only, without gradients, built from a few rows at a time.
    """
    call = _check(
        q, k, variant, causal=causal, key_lengths=key_lengths, attn_mask=attn_mask, attn_bias=attn_bias,
        window_size=window_size, scale=scale, **options,
    )  # fmt: skip
    if not sparse:
        return _weights(q, k, call)
    with torch.no_grad():
        return _compress(q, k, call)


def attention_stats(q: Tensor, k: Tensor, variant: str = "rela", **arguments: Any) -> AttentionStats:
    """Zeros, null rows, row mass and entropy of the weights of a call, from a few query rows at a time.

    The arguments are those of `attention_weights`; nothing receives a gradient.
    """
    call = _check(q, k, variant, **arguments)
    with torch.no_grad():
        return join([_describe(part, block) for _, part, block in _row_blocks(q, k, call)])


def weight_blocks(
    q: Tensor, k: Tensor, variant: str = "rela", *, cells: int = BLOCK_CELLS, **arguments: Any
) -> Iterator[tuple[slice, Tensor]]:
    """The weights of a call, a few queries at a time: which queries, and their weights [B, H, m, N].

    The arguments are those of `attention_weights`; `cells` is how many weights are computed at once.
    """
    call = _check(q, k, variant, **arguments)
    for rows, _, block in _row_blocks(q, k, call, cells):
        yield rows, block


def visible_keys(q: Tensor, k: Tensor, variant: str = "rela", **arguments: Any) -> Tensor:
    """How many keys each query sees; broadcasts to [B, H, M]. The arguments are those of `attention_weights`."""
    call = _check(q, k, variant, **arguments)
    return call.seen.counts(q.device)


def head_scores(q: Tensor, k: Tensor, head: int, variant: str = "rela", **arguments: Any) -> Tensor:
    """The scores [B, M, N] of one head, from which its weights are computed: float32 at least, all with gradients.

    What the variant subtracts from a row is subtracted, so that a rectified weight is above 0 where its score is. The
    score of a hidden key is -1e30. The other arguments are those of `attention_weights`.
    """
    row = find_variant(variant)
    if row.difference_of:
        raise ArgumentError(f"variant {variant!r} has two scores for each weight, so a head has no single ones")
    group = q.shape[1] // k.shape[1]
    own = [name for name in row.options if isinstance(value := arguments.get(name), Tensor) and value.numel() > 1]
    alone = {**arguments, **{name: arguments[name][head : head + 1] for name in own}}
    for name in ("attn_mask", "attn_bias"):
        if (cells := arguments.get(name)) is not None and cells.dim() > 2 and cells.shape[-3] > 1:
            alone[name] = cells[..., head : head + 1, :, :]
    q, k = q[:, head : head + 1], k[:, head // group : head // group + 1]
    call = _check(q, k, variant, **alone)
    with without_autocast(q.device):
        dtype = working_dtype(q.dtype)
        x = row.score(q.to(dtype), clear_padding(k, call.visibility).to(dtype)) * call.scale
    if call.attn_bias is not None:
        x = x + call.attn_bias
    if row.pointwise is not None and row.pointwise.shift is not None:
        count = call.seen.counts(x.device).clamp_min(1).to(x.dtype)[..., None]
        x = x - row.pointwise.shift(count, call.options)
    seen = call.seen.mask(x.device)
    return (x if seen is None else torch.where(seen, x, HIDDEN_SCORE)).squeeze(1)


def _check(q: Tensor, k: Tensor, variant: str, **arguments: Any) -> AttentionCall:
    """The call whose weights are asked for, with the arguments of `attention_weights`."""
    shared = {name: arguments.pop(name) for name in WEIGHT_ARGUMENTS if name in arguments}
    call = check_call(q, k, None, variant, options=arguments, function=attention_weights, **shared)
    if not call.variant.has_weights:
        raise ArgumentError(f"variant {variant!r} subtracts instead of weighing, so it has no weights to look at")
    return call


def _weights(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    if k.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], 0)
    return reference_weights(q, k, call).to(q.dtype)


def _row_blocks(
    q: Tensor, k: Tensor, call: AttentionCall, cells: int = BLOCK_CELLS
) -> Iterator[tuple[slice, AttentionCall, Tensor]]:
    """The weights a few query rows at a time: which rows, the call for those rows, weights [B, H, m, N]."""
    for rows, part in call.blocks(_step(q, k, cells)):
        yield rows, part, _weights(q[:, :, rows], k, part)


def _step(q: Tensor, k: Tensor, cells: int) -> int:
    """How many query rows have about `cells` weights."""
    return max(1, cells // max(1, q.shape[0] * q.shape[1] * k.shape[2]))


def _compress(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """All non-zero weights as one CSR matrix whose rows run over (sequence, head, query)."""
    B, H, M, _ = q.shape
    found = []
    for rows, _, block in _row_blocks(q, k, call):
        b, h, m, column = block.nonzero(as_tuple=True)
        found.append(((b * H + h) * M + rows.start + m, column, block[b, h, m, column]))
    row, column, value = (torch.cat(part) for part in zip(*found, strict=True))
    order = row.argsort(stable=True)  # blocks came by query; the matrix wants sequence and head first
    ends = torch.bincount(row, minlength=B * H * M).cumsum(0)
    row_starts = torch.cat([ends.new_zeros(1), ends])
    size = (B * H * M, k.shape[2])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR tensor support is in beta|invariant checks)", UserWarning)
        return torch.sparse_csr_tensor(row_starts, column[order], value[order], size, check_invariants=False)


def _describe(call: AttentionCall, weights: Tensor) -> AttentionStats:
    shape = weights.shape[:3]
    size = weights.float().abs()
    share = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
    return AttentionStats(
        visible=call.seen.counts(weights.device).expand(shape),
        nonzero=(weights != 0).sum(-1),
        mass=weights.float().sum(-1),
        entropy=-torch.special.xlogy(share, share).sum(-1),
    )


@dataclass(frozen=True)
class RowStatistics:
    """Each row of weights w before dropout, of their size where they are signed, with gradients: float32 [B, H, M]."""

    mass: Tensor
    """The sum of w."""
    entropy: Tensor
    """Entropy in nats of the row divided by its sum; 0 for a row without weights."""
    visible: Tensor
    """Keys the query sees; broadcasts to the others."""

    @property
    def raw_entropy(self) -> Tensor:
        """-sum of w log w, of the weights as they are: a row of mass m has m (entropy - log m)."""
        return self.mass * (self.entropy - nonzero(self.mass).log())


def attention_with_rows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, RowStatistics]:
    """What `attention.run` returns, and the statistics of each row of weights; both are differentiable.

    Rectified variants on a GPU get both from one pass of the long kernels, whatever the length. Others, and the CPU,
    get them from the reference, a few rows at a time, which are computed again for the gradients.
    """
    if not call.variant.has_weights:
        raise ArgumentError(f"variant {call.variant.name!r} subtracts instead of weighing, so its rows have no sums")
    if not (row_sums_obstacle(q, k, v, call) or transform_obstacle()):
        from rectiformer.ops.gpu.long import row_sums_attention

        out, total, entropy = row_sums_attention(q, k, v, call)
        visible = call.seen.counts(q.device)
        return out, RowStatistics(scale_rows(total[..., None], call, visible).squeeze(-1), entropy, visible)
    step = _step(q, k, BLOCK_CELLS)
    if step >= q.shape[2]:
        return plain_rows(q, k, v, call)
    outs, rows = zip(*by_rows(plain_rows, q, k, v, call, step), strict=True)
    return torch.cat(outs, 2), join(rows)


def plain_rows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, RowStatistics]:
    """By the reference, from all weights at once, in the dtype the reference works in."""
    weights = reference_weights(q, k, call)
    out = mix_values(weights, v, call).to(q.dtype)
    size = weights.abs()
    mass = size.sum(-1)
    share = size / nonzero(mass)[..., None]
    entropy = -(share * nonzero(share).log()).sum(-1)
    return out, RowStatistics(mass, entropy, call.seen.counts(q.device))


def nonzero(values: Tensor) -> Tensor:
    """The values with 1 for 0: its logarithm is 0 and has no slope."""
    return torch.where(values > 0, values, 1)


def join(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of rows that follow each other as one."""
    names = [field.name for field in fields(parts[0])]
    return type(parts[0])(**{name: torch.cat([getattr(part, name) for part in parts], 2) for name in names})
