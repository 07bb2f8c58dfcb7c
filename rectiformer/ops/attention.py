"""The public function `attention`: check the arguments, choose an implementation, call it, and explain the choice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectiformer.errors import ArgumentError, ShapeError, unknown_name
from rectiformer.ops.activations import Value
from rectiformer.ops.call import UNBOUNDED, AttentionCall, Run, Visibility, run_views
from rectiformer.ops.cpu import choose_blocked
from rectiformer.ops.dropout import drop_seed
from rectiformer.ops.gpu import choose_kernels, on_device, transforms_active, wants_gradients
from rectiformer.ops.gpu.plans import DifferencePlan, PlanCache, is_aligned, is_intercepted, layout
from rectiformer.ops.plain import by_rows, choose_products, choose_sdpa, rows_at_once
from rectiformer.ops.reference import reference_attention, repeat_heads, without_autocast
from rectiformer.ops.shapes import match_broadcast, match_floating, match_heads, match_shapes
from rectiformer.ops.variants import Variant, find_variant, is_finite, is_readable

if TYPE_CHECKING:
    from rectiformer.ops.gpu.common import AttentionPlan  # which imports Triton
    from rectiformer.ops.gpu.decode import GrowingPlan
    from rectiformer.ops.gpu.long import Tiling

MOST_SCORES = 1 << 28
"""Scores of float32 that a GPU may hold at once: 1 GiB."""
LEAST_ROWWISE = {"sparsemax": 512, "entmax15": 256}
"""Queries and keys from which `auto` takes the fused kernels of rows with a threshold: below, kernels that hold whole
rows are as fast on an H200. Those of rows with a normalizer have no such rival."""
SHORTCUTS: PlanCache[AttentionPlan | GrowingPlan | DifferencePlan | None] = PlanCache()
"""Plans by all that decides them: an eager call that was checked once, and differs in its numbers only, goes straight
to its kernels."""
NUMBERS = {str, bool, int, float, tuple, type(None)}
"""Types of arguments that say all by their value: neither tensors nor what may change later."""
Window = int | tuple[int, int]
WEIGHT_ARGUMENTS = ("causal", "key_lengths", "attn_mask", "attn_bias", "window_size", "scale")
"""Arguments of `attention` that decide the weights and are no options of a variant."""
ARGUMENT_WORDS = {
    "is_causal": "causal",
    "mask": "attn_mask",
    "attention_mask": "attn_mask",
    "key_padding_mask": "key_lengths",
    "lengths": "key_lengths",
    "cache_seqlens": "key_lengths",
    "bias": "attn_bias",
    "window": "window_size",
    "sliding_window": "window_size",
    "dropout": "dropout_p",
    "softmax_scale": "scale",
}
"""Argument words of other libraries, and ours."""
NOT_ARGUMENTS = {
    "enable_gqa": "k and v may have fewer heads than q, with no argument for it",
    "heads": "the number of heads is an axis of q, [B, H, M, D]",
    "num_heads": "the number of heads is an axis of q, [B, H, M, D]",
    "need_weights": "attention_weights() returns the weights",
}
"""What other libraries have an argument for, and how it goes here."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str = "rela",
    *,
    causal: bool = False,
    key_lengths: Tensor | Sequence[int] | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    window_size: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **options: Value,
) -> Tensor:
    """The values that each query sees, weighted as `variant` says and summed: [B, H, M, Dv].

    Row m of the output is the sum over visible keys n of weight(m, n) * v[n]. A row that sees no key is zero, and so is
    a rectified row whose scores are all negative: it attends to nothing. The output norm of the ReLA variants spans all
    heads, so it belongs to `rectiformer.RectifiedAttention`, not here.

    With `causal`, the last query is aligned with the last key, as in flash-attention. 1 is a key that a query sees:

        M = 2, N = 5      M = 5, N = 2
        1 1 1 1 0         0 0
        1 1 1 1 1         0 0
                          0 0
                          1 0
                          1 1

    Args:
        q: [B, H, M, D]. The layout is that of `torch.nn.functional.scaled_dot_product_attention`.
        k: [B, K, N, D] with K dividing H: query head h reads key head h // (H / K).
        v: [B, K, N, Dv]; Dv may differ from D.
        variant: a name from `rectiformer.VARIANTS`; `rectiformer variants` prints them.
        causal: query m sees keys up to its own position m + (N - M).
        key_lengths: [B], how many leading keys of each sequence are real; the rest is padding. Checked against N where
            it costs nothing, that is on the CPU and outside `torch.compile`.
        attn_mask: boolean, True where a query may see a key; broadcasts to [B, H, M, N].
        attn_bias: added to the scaled scores, with a gradient; broadcasts to [B, H, M, N]. -5,000 or less hides a key,
            as a mask does: it weighs exactly 0 and does not count in n, whatever the variant.
        window_size: (left, right): query m sees keys from left before to right after its own position. One number
            stands for both.
        scale: factor of the scores, 1 / sqrt(D) unless given. "threshold-diff" weighs the halves of q and k apart:
            there D must be even, and the scale is 1 / sqrt(D / 2).
        dropout_p: probability that a weight is set to zero; the others grow by 1 / (1 - dropout_p).
        seed: decides which weights are dropped, the same for every backend; drawn from torch's generator unless given.
        backend: "auto", or one of the implementations the variant has.
        options: the variant's own (`gamma`, `alpha`, `beta`, `lam`, `exponent`, `power`, `keep`, `degree`); `gamma`,
            `alpha`, `beta` and `lam` may be tensors, one number or one per head, and receive gradients. A number out of
            range is refused; in a tensor on a GPU or under `torch.compile`, where checking would wait for it, it makes
            NaN of what it weighs.
    """
    chosen = (variant, causal, window_size, scale, dropout_p, backend)
    key = None
    if (attn_mask is None or attn_mask.dim() == 4) and (attn_bias is None or attn_bias.dim() == 4):
        key = shortcut_key(chosen, options, q, k, v, key_lengths, attn_mask, attn_bias)
    if key is not None and (plan := SHORTCUTS.get(key)) is not None:
        drop = drop_seed(seed, q.device) if dropout_p else None
        return plan.attend(q, k, v, attn_bias, attn_mask, key_lengths, drop)  # type: ignore[arg-type]
    call = check_call(
        q, k, v, variant, causal=causal, key_lengths=key_lengths, attn_mask=attn_mask, attn_bias=attn_bias,
        window_size=window_size, scale=scale, dropout_p=dropout_p, seed=seed, options=options,
    )  # fmt: skip
    if key is not None and key not in SHORTCUTS:
        SHORTCUTS.keep(key, find_plan(q, k, v, call, backend))
    return run(q, k, v, call, backend)


def shortcut_key(
    chosen: tuple[Any, ...], options: dict[str, Value], q: Tensor, k: Tensor, v: Tensor, *tables: Any
) -> Hashable:
    """All that decides how an eager call on a GPU runs and whether it is refused; None where a look is not enough.

    `tables` are lengths, masks and the like, None for each that is not given.
    """
    given = [table for table in tables if table is not None]
    if not isinstance(q, Tensor) or not on_device(q) or is_intercepted(q, k, v, *given) or transforms_active():
        return None
    for table in given:
        if is_readable(table) or table.device != q.device or (table.dim() < 4 and not table.is_contiguous()):
            return None  # what can be checked is, and kernels take tables of their own device without gaps
    if not (NUMBERS.issuperset(map(type, chosen)) and NUMBERS.issuperset(map(type, options.values()))):
        return None
    if given:
        return chosen, *options.items(), is_aligned(q, k, v), layout(q), layout(k), layout(v), *map(layout, tables)
    # In generation keys grow from call to call.
    if q.dim() == k.dim() == v.dim() == 4 and q.shape[2] == 1 and not wants_gradients(q, k, v):
        (B, K, N, D), (*others, values, Dv) = k.shape, v.shape
        grown = (B, K, D, *others, Dv, k.stride()[2:], v.stride()[2:], k.dtype, v.dtype, k.device, v.device)
        return chosen, *options.items(), layout(q), grown, 0 != N == values
    return chosen, *options.items(), is_aligned(q, k, v), layout(q), layout(k), layout(v)


def find_plan(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, backend: str
) -> AttentionPlan | GrowingPlan | DifferencePlan | None:
    """The plan that later calls of this layout may go straight to: that of the fused kernels, if these are chosen."""
    if call.variant.difference_of:
        plans = [find_plan(view_q, view_k, v, view, backend) for view_q, view_k, view in call.views(q, k)]
        # The halves of aligned tensors always lie alike; of others, alignment says nothing of the second half.
        return DifferencePlan(plans, float(call.options["lam"])) if all(plans) and is_aligned(q, k, v) else None
    taken, _ = choose(q, k, v, call, backend)
    kernels = choose_kernels(q, k, v, call) if taken.name == "fused" else ""
    return None if isinstance(kernels, str) else kernels.plan(q, k, v, call)


@dataclass(frozen=True)
class Backend:
    """One implementation of attention."""

    name: str
    """What `backend=` calls it."""
    choose: Callable[[Tensor, Tensor, Tensor, AttentionCall], Run | str]
    """The function that runs a call or, in a few words, why there is none."""
    reason: str
    """Why `auto` takes it."""
    plain: bool = False
    """Whether it is made of torch's own operations: torch.func transforms and forward-mode duals pass through it, and
    autograd would keep all scores, so that long calls go by rows."""


def choose_fused(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Run | str:
    """The Triton kernels that take this call, or why none can."""
    kernels = choose_kernels(q, k, v, call)
    return kernels if isinstance(kernels, str) else kernels.run


BACKENDS = (
    Backend("fused", choose_fused, "one kernel on the GPU, scores never leave it"),
    Backend("sdpa", choose_sdpa, "softmax in torch's own kernels"),
    Backend("blocked", choose_blocked, "a pointwise variant on the CPU, in blocks of scores that fit the cache"),
    Backend(
        "products", choose_products, "two matrix products on the GPU, with the scores in device memory", plain=True
    ),
    Backend("reference", lambda *_: reference_attention, "plain operations, which can do every call", plain=True),
)
"""All implementations, the fastest first."""
NAMES = ("auto", *(backend.name for backend in BACKENDS))


def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, backend: str) -> Tensor:
    """Hand a checked call to the implementation that `backend` names or that suits it best."""
    if k.shape[2] == 0:
        with without_autocast(q.device):  # empty sums: zeros that still lead back to q, k and v
            return q @ repeat_heads(k, q.shape[1]).mT @ repeat_heads(v, q.shape[1])
    if call.variant.difference_of:
        return run_views(lambda q, k, view: run(q, k, v, view, backend), q, k, call)
    taken, run_call = choose(q, k, v, call, backend)
    if taken.plain and (step := rows_at_once(q, v, call)) < q.shape[2]:
        return torch.cat(by_rows(run_call, q, k, v, call, step), 2)
    return run_call(q, k, v, call)


def choose(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, backend: str) -> tuple[Backend, Run]:
    """The implementation to use and what it runs; a forced one that cannot do the call is refused with the reason."""
    found: Run | str = ""
    for each in candidates(q, call, backend):
        found = try_backend(each, q, k, v, call)
        if not isinstance(found, str):
            return each, found
    raise ArgumentError(cannot_run(backend, found))


def candidates(q: Tensor, call: AttentionCall, backend: str) -> Sequence[Backend]:
    """Implementations in the order in which they are tried."""
    if backend not in NAMES:
        raise ArgumentError(unknown_name("backend", backend, NAMES))
    if backend != "auto":
        return [each for each in BACKENDS if each.name == backend]
    fused, sdpa, blocked, products, reference = BACKENDS
    if q.device.type == "cpu":
        return blocked, reference
    queries, keys = call.visibility.queries, call.visibility.keys
    if min(queries, keys) < LEAST_ROWWISE.get(call.variant.rowwise, 0):
        return products, reference
    scores = q.shape[0] * q.shape[1] * queries * keys
    if q.dtype == torch.float32 and scores <= MOST_SCORES:  # fused products of float32 are slow, and exact
        return products, reference
    return fused, sdpa, products, reference


def try_backend(backend: Backend, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Run | str:
    """What an implementation runs for this call, or why it cannot."""
    found = backend.choose(q, k, v, call)
    return found if isinstance(found, str) or backend.plain else transform_obstacle() or found


def cannot_run(backend: str, obstacle: object) -> str:
    return f"backend {backend!r} cannot run this call: {obstacle}; use 'auto' or 'reference'"


def transform_obstacle() -> str:
    if transforms_active():
        return "forward-mode differentiation and torch.func transforms go through plain operations"
    return ""


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    variant: str,
    *,
    causal: bool = False,
    key_lengths: Tensor | Sequence[int] | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    window_size: Window | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    options: dict[str, Value] | None = None,
    function: Callable[..., Any] | None = None,
) -> AttentionCall:
    """The call that these arguments stand for; what does not fit is refused in one line that names it.

    `function` is the public one that was called, whose words a message uses: `attention` unless given.
    """
    row = find_variant(variant)
    sizes = check_tensors(q, k, v)
    B, H, M, N, D = (sizes[axis] for axis in "BHMND")
    cells = (B, H, M, N)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            raise ArgumentError(
                f"attn_mask holds {attn_mask.dtype}, not booleans; a term to add to scores goes in attn_bias"
            )
        attn_mask = match_broadcast("attn_mask", attn_mask, cells)
    if attn_bias is not None:
        match_floating(attn_bias=attn_bias)
        attn_bias = match_broadcast("attn_bias", attn_bias, cells)
    left, right = check_window(window_size, causal)
    lengths = None if key_lengths is None else check_lengths(key_lengths, B, N, q.device)
    visibility = Visibility(M, N, left, right, lengths, attn_mask, first=N - M)
    row.check_head_size(D)
    scale = (D // row.views) ** -0.5 if scale is None else check_number("scale", scale)
    if not 0 <= check_number("dropout_p", dropout_p) < 1:
        raise ArgumentError(f"dropout_p = {dropout_p}, but it is a probability below 1")
    resolved = check_options(row, options or {}, H, function or attention)
    drop = drop_seed(seed, q.device) if dropout_p else None
    return AttentionCall(row, visibility, resolved, scale, attn_bias, float(dropout_p), drop)


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None) -> dict[str, int]:
    """The sizes B, H, M, N, D of a call. Without v, the weights alone are asked for."""
    named = {"q": (q, "B H M D"), "k": (k, "B K N D")}
    if v is not None:
        named["v"] = (v, "B K N Dv")
    sizes = match_shapes(**named)
    match_floating(**{name: tensor for name, (tensor, _) in named.items()})
    match_heads(sizes, "k", named)
    return sizes


def check_window(window_size: Window | None, causal: bool) -> tuple[int, int]:
    """How many keys before and after its own position a query sees."""
    if window_size is None:
        return UNBOUNDED, 0 if causal else UNBOUNDED
    sides = (window_size, window_size) if isinstance(window_size, int) else window_size
    pair = isinstance(sides, tuple | list) and len(sides) == 2
    if not pair or any(side is None or isinstance(side, float) for side in sides):
        raise ArgumentError(f"window_size = {window_size}, but it must be a whole number or two of them, (left, right)")
    left, right = sides
    if left < 0 or right < 0:
        raise ArgumentError(f"window_size = {window_size}, but a query cannot see a negative number of keys to a side")
    return left, 0 if causal else right


def check_lengths(key_lengths: Tensor | Sequence[int], batch: int, keys: int, device: torch.device) -> Tensor | None:
    """Key lengths as a tensor on `device`, each from 0 to the number of keys; None where all are seen to be full."""
    lengths = key_lengths if isinstance(key_lengths, Tensor) else torch.as_tensor(key_lengths, device="cpu")
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ArgumentError(f"key_lengths holds {lengths.dtype}, but lengths are whole numbers")
    if lengths.shape != (batch,):
        raise ShapeError(f"key_lengths is {list(lengths.shape)}, but a batch of {batch} needs [{batch}]")
    if is_readable(lengths) and batch:
        least, most = int(lengths.min()), int(lengths.max())
        if least < 0:
            raise ArgumentError(f"key_lengths has {least}; a length cannot be negative")
        if most > keys:
            raise ArgumentError(f"key_lengths has {most}, beyond the {keys} keys there are")
        if least == keys:
            return None
    return lengths.to(device).contiguous()  # kernels read them by address


def check_number(name: str, value: float) -> float:
    if isinstance(value, Tensor) or not is_finite(value):
        raise ArgumentError(f"{name} = {value}, but it must be a finite number")
    return float(value)


def check_options(
    variant: Variant, options: dict[str, Value], heads: int, function: Callable[..., Any]
) -> dict[str, Value]:
    """The variant's options, defaults included; a word that is no option of any is refused with the right one."""
    for name in options:
        if name not in variant.options:
            refuse_word(name, function)
    resolved = variant.resolve_options(options)
    for name, value in resolved.items():
        if isinstance(value, Tensor) and value.shape not in ((), (1,), (heads,)):
            raise ShapeError(f"{name} is {list(value.shape)}, but it is one number or one for each of {heads} heads")
    return resolved


def refuse_word(name: str, function: Callable[..., Any]) -> None:
    """Raise an error where `name` is an argument word of other libraries or of another function here."""
    own = inspect.signature(function).parameters
    word = ARGUMENT_WORDS.get(name, name)
    if word != name and word in own:
        way = f"use {word}="
    elif word in inspect.signature(attention).parameters:
        way = f"only attention() has {word}="
    elif name in NOT_ARGUMENTS:
        way = NOT_ARGUMENTS[name]
    else:
        return
    raise ArgumentError(f"{function.__name__}() has no argument {name!r}; {way}")


KERNELS = {"short": "kernels for short sequences", "long": "kernels for long sequences", "decode": "decoding kernels"}


@dataclass(frozen=True)
class Explanation:
    """What `attention` does with a call, and why. Printed, it reads as a few lines."""

    backend: str
    """The implementation taken."""
    kernel: str
    """The kernels it runs: "short", "long" or "decode" for fused ones, empty for others."""
    tilings: dict[str, Tiling]
    """Tiles of the long kernels, by kernel."""
    declined: dict[str, str]
    """Every faster implementation, and why it is not taken."""
    reason: str = ""
    """Why this one is taken."""
    notes: tuple[str, ...] = ()
    """What keeps the taken one from being faster."""

    def __str__(self) -> str:
        kernel = f", {KERNELS[self.kernel]}" if self.kernel else ""
        lines = [f"backend {self.backend}{kernel}: {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.declined.items()]
        for name, tiling in self.tilings.items():
            lines.append(
                f"  {name}: tiles of {tiling.queries} queries x {tiling.keys} keys, {tiling.warps} warps, "
                f"{tiling.stages} in flight"
            )
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def explain(
    q: Tensor, k: Tensor, v: Tensor, variant: str = "rela", *, backend: str = "auto", **arguments: Any
) -> Explanation:
    """Which implementation `attention` takes for these arguments, which are its own, and why; nothing is computed."""
    shared = {name: arguments.pop(name) for name in (*WEIGHT_ARGUMENTS, "dropout_p", "seed") if name in arguments}
    call = check_call(q, k, v, variant, options=arguments, **shared)
    if call.variant.difference_of:  # both views run alike
        q, k, call = call.views(q, k)[0]
    taken, _ = choose(q, k, v, call, backend)
    auto = backend == "auto"
    reason = taken.reason if auto else f"asked for by backend={backend!r}"
    faster = BACKENDS[: BACKENDS.index(taken)] if auto else ()
    declined = {each.name: why for each in faster if (why := why_not(each, q, k, v, call))}
    kernels = choose_kernels(q, k, v, call) if taken.name == "fused" else ""
    if isinstance(kernels, str):
        return Explanation(taken.name, "", {}, declined, reason)
    if kernels.name in ("short", "decode"):
        return Explanation(taken.name, kernels.name, {}, declined, reason)
    declined |= {"short": kernels.not_short}
    if kernels.name == "rowwise":
        return Explanation(taken.name, "long", rowwise_tilings(q, v, call), declined, reason)
    return Explanation(taken.name, "long", tilings(q, v, call), declined, reason, notes(q, k, v, call))


def why_not(backend: Backend, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why `auto` does not take an implementation; empty for one that is not meant for this device."""
    on_cpu = q.device.type == "cpu"
    if backend.name == ("products" if on_cpu else "blocked"):
        return ""
    found = try_backend(backend, q, k, v, call)
    if isinstance(found, str):
        return found
    if on_cpu:
        return f"it runs on a GPU, and q is on {q.device}"
    least = LEAST_ROWWISE.get(call.variant.rowwise, 0)
    if min(call.visibility.queries, call.visibility.keys) < least:
        return f"for fewer than {least:,} queries or keys, two matrix products are taken"
    return f"in float32, two matrix products are faster for up to {MOST_SCORES:,} scores"


def tilings(q: Tensor, v: Tensor, call: AttentionCall) -> dict[str, Tiling]:
    """Tiles of the kernels that a call and its gradient run."""
    from rectiformer.ops.gpu.long import find_tiling

    edges, function = call.visibility.banded, call.variant.pointwise.function if call.variant.pointwise else "relu"
    names = ["forward", "keys", "queries", *(["bias"] if call.attn_bias is not None else [])]
    return {name: find_tiling(name, q, v, function, edges and name != "bias") for name in names}


def rowwise_tilings(q: Tensor, v: Tensor, call: AttentionCall) -> dict[str, Tiling]:
    from rectiformer.ops.gpu.rowwise import ROW_FUNCTIONS, find_tiling

    return {name: find_tiling(name, q, v) for name in ROW_FUNCTIONS[call.variant.rowwise].kernels}


def notes(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[str, ...]:
    from rectiformer.ops.gpu.long import copy_engine_reads

    found = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not copy_engine_reads(tensor):
            found.append(f"{name} is read without the tensor copy engine: its rows are not whole units of 16 bytes")
    if call.counts_cells:
        found.append("every tile of bias or mask is read: causal, window and key_lengths cost less than a mask")
    if call.counts_cells and call.variant.row_scale is not None:
        found.append(f"the row scale of {call.variant.name!r} counts the keys of a mask or bias in a pass of its own")
    return tuple(found)
