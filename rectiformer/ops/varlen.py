"""Attention over packed sequences of different lengths, with no padding between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError
from rectiformer.ops.activations import Value
from rectiformer.ops.attention import Window, cannot_run, check_call, run, shortcut_key, transform_obstacle
from rectiformer.ops.call import AttentionCall, Packing, Visibility, run_views
from rectiformer.ops.dropout import drop_seed
from rectiformer.ops.gpu import FusedKernels, choose_kernels
from rectiformer.ops.gpu.plans import PlanCache
from rectiformer.ops.shapes import match_shapes

if TYPE_CHECKING:
    from rectiformer.ops.gpu.common import PackedPlan  # which imports Triton

SHORTCUTS: PlanCache[PackedPlan | None] = PlanCache()
"""As for `attention`."""


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    variant: str = "rela",
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **options: Value,
) -> Tensor:
    """`attention` within each of several sequences laid end to end.

    Sequence s owns queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] and the keys likewise; it may be empty on either
    side. Each is attended as if it were alone: causal order and window align its last query with its last key.

    Args:
        q: [total queries, H, D].
        k: [total keys, K, D] with K dividing H.
        v: [total keys, K, Dv].
        cu_seqlens_q: [sequences + 1] whole numbers from 0 up to the total, never falling.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: no sequence has more queries than this. With both given, and up to 128 (64 in float32), a GPU
            does all sequences at once and never waits for their lengths. What comes out for a longer sequence is
            undefined; on the CPU and outside `torch.compile` it is refused.
        max_seqlen_k: the same for keys.
    """
    chosen = (variant, causal, window_size, scale, dropout_p, backend, max_seqlen_q, max_seqlen_k)
    key = shortcut_key(chosen, options, q, k, v, cu_seqlens_q, cu_seqlens_k)
    if key is not None and (plan := SHORTCUTS.get(key)) is not None:
        return plan.attend(q, k, v, (cu_seqlens_q, cu_seqlens_k), drop_seed(seed, q.device) if dropout_p else None)
    match_shapes(q=(q, "M H D"), k=(k, "N K D"), v=(v, "N K Dv"))
    check_cu_seqlens("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    check_cu_seqlens("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ShapeError(
            f"cu_seqlens_q is {list(cu_seqlens_q.shape)} but cu_seqlens_k is {list(cu_seqlens_k.shape)}; "
            "both need one entry more than there are sequences"
        )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, total, D]
    call = check_call(
        q, k, v, variant, causal=causal, window_size=window_size, scale=scale, dropout_p=dropout_p, seed=seed,
        options=options, function=attention_varlen,
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if key is not None and key not in SHORTCUTS:
        SHORTCUTS.keep(key, find_plan(q, k, v, call, packing, backend))
    return run_packed(q, k, v, call, packing, backend)[0].transpose(0, 1)


def find_plan(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing, backend: str
) -> PackedPlan | None:
    """The plan that later calls of this layout may go straight to: that of the fused kernels, if these are chosen."""
    kernels = choose_packed(q, k, v, call, packing, backend)
    plan = None if isinstance(kernels, str) else kernels.plan(q, k, v, call, packing)
    if plan is None:
        return None
    from rectiformer.ops.gpu.common import AttentionPlan, PackedPlan

    assert isinstance(plan, AttentionPlan)
    return PackedPlan(plan, [q, k, v, call.seed, packing.cu_seqlens_q, packing.cu_seqlens_k])


def choose_packed(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing, backend: str
) -> FusedKernels | str:
    """The kernels that take all sequences at once, or why none do."""
    if backend == "fused" or (backend == "auto" and q.device.type == "cuda"):
        return transform_obstacle() or choose_kernels(q, k, v, call, packing)
    return "another backend is asked for"


def run_packed(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing, backend: str) -> Tensor:
    """Hand a checked call over [1, H, total, D] to the implementation that `backend` names or that suits it best."""
    if call.variant.difference_of:
        return run_views(lambda q, k, view: run_packed(q, k, v, view, packing, backend), q, k, call)
    kernels = choose_packed(q, k, v, call, packing, backend)
    if not isinstance(kernels, str):
        return kernels.run(q, k, v, call, packing)
    if backend == "fused":
        raise ArgumentError(cannot_run(backend, kernels))
    if torch.compiler.is_compiling():  # lengths are not known while compiling: one call, other sequences hidden
        seen = Visibility(q.shape[2], k.shape[2], attn_mask=own_keys(call, packing), first=k.shape[2] - q.shape[2])
        return run(q, k, v, replace(call, visibility=seen), backend)
    return torch.cat([run(*alone, backend) for alone in packing.split(q, k, v, call)], dim=2)


def check_cu_seqlens(side: str, cu_seqlens: Tensor, total: int, max_seqlen: int | None) -> None:
    """Refuse what are not whole numbers from 0 to the total that never fall, nor rise by more than `max_seqlen`."""
    whole = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not whole:
        raise ShapeError(
            f"cu_seqlens_{side} is {list(cu_seqlens.shape)} of {cu_seqlens.dtype}; it needs whole numbers, "
            "[sequences + 1]"
        )
    if torch.compiler.is_compiling() or cu_seqlens.device.type != "cpu":
        return
    first, last, lengths = cu_seqlens[0], cu_seqlens[-1], cu_seqlens.long().diff()
    if first != 0 or last != total or (lengths < 0).any():
        raise ArgumentError(
            f"cu_seqlens_{side} runs from {first} to {last}; it must rise from 0 to the {total} rows packed"
        )
    if max_seqlen is not None and max_seqlen < lengths.max():
        raise ArgumentError(
            f"max_seqlen_{side} = {max_seqlen}, but a sequence has {lengths.max()} rows; give at least the longest "
            "length"
        )


def own_keys(call: AttentionCall, packing: Packing) -> Tensor:
    """True where a query and a key belong to one sequence, within its window: [1, 1, total queries, total keys]."""
    starts_q, starts_k, seen = packing.cu_seqlens_q, packing.cu_seqlens_k, call.visibility
    query = torch.arange(seen.queries, dtype=starts_q.dtype, device=starts_q.device)
    key = torch.arange(seen.keys, dtype=starts_k.dtype, device=starts_k.device)
    owner = torch.searchsorted(starts_q, query, right=True)
    key_owner = torch.searchsorted(starts_k, key, right=True)
    # A sequence's last query is aligned with its last key.
    position = query - starts_q[owner] + starts_k[owner]
    near = (key <= position[:, None] + seen.right) & (key >= position[:, None] - seen.left)
    return ((owner[:, None] == key_owner) & near)[None, None]
