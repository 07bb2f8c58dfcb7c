"""Which implementation a call takes, and why not another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rectiformer.ops.activations import Value
from rectiformer.ops.dispatch import MOST_SCORES, OBSTACLES, Window, check_call, choose
from rectiformer.ops.long_launch import describable
from rectiformer.ops.reference import AttentionCall
from rectiformer.ops.short import short_obstacle
from rectiformer.ops.tilings import Tiling, find_tiling

FASTEST = ("fused", "sdpa", "blocked", "products", "reference")
"""Implementations, the fastest first."""
REASONS = {
    "fused": "one kernel on the GPU, scores never leave it",
    "sdpa": "softmax in torch's own kernels",
    "blocked": "a rectified variant on the CPU, in blocks of scores that fit the cache",
    "products": "two matrix products on the GPU, with the scores in device memory",
    "reference": "plain operations, which can do every call",
}
"""Why `auto` takes an implementation."""


@dataclass(frozen=True)
class Explanation:
    """What `attention` does with a call, and why. Printed, it reads as a few lines."""

    backend: str
    """The implementation taken."""
    kernel: str
    """The kernels it runs: "short" or "long" for fused ones, empty for others."""
    tilings: dict[str, Tiling]
    """Tiles of the long kernels, by kernel."""
    declined: dict[str, str]
    """Every faster implementation, and why it is not taken."""
    reason: str = ""
    """Why this one is taken."""
    notes: tuple[str, ...] = ()
    """What keeps the taken one from being faster."""

    def __str__(self) -> str:
        kernel = f", kernels for {self.kernel} sequences" if self.kernel else ""
        lines = [f"backend {self.backend}{kernel}: {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.declined.items()]
        for name, tiling in self.tilings.items():
            lines.append(
                f"  {name}: tiles of {tiling.queries} queries x {tiling.keys} keys, {tiling.warps} warps, "
                f"{tiling.stages} in flight"
            )
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def explain(
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
) -> Explanation:
    """Which implementation `attention` takes for these arguments, and why; nothing is computed."""
    call = check_call(
        q,
        k,
        v,
        variant,
        causal=causal,
        key_lengths=key_lengths,
        attn_mask=attn_mask,
        attn_bias=attn_bias,
        window_size=window_size,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        options=options,
    )
    taken = choose(q, k, v, call, backend)
    auto = backend == "auto"
    reason = REASONS[taken] if auto else f"asked for by backend={backend!r}"
    faster = FASTEST[: FASTEST.index(taken)] if auto else ()
    declined = {name: why for name in faster if (why := why_not(name, q, k, v, call))}
    if taken != "fused":
        return Explanation(taken, "", {}, declined, reason)
    long_instead = short_obstacle(q, k, v, call)
    if not long_instead:
        return Explanation(taken, "short", {}, declined, reason)
    declined |= {"short": long_instead}
    return Explanation(taken, "long", tilings(q, v, call), declined, reason, notes(q, k, v, call))


def why_not(name: str, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why `auto` does not take an implementation; empty for one that is not meant for this device."""
    on_cpu = q.device.type == "cpu"
    if name == ("products" if on_cpu else "blocked"):
        return ""
    if obstacle := OBSTACLES[name](q, k, v, call):
        return obstacle
    if on_cpu:
        return f"it runs on a GPU, and q is on {q.device}"
    return f"in float32, two matrix products are faster for up to {MOST_SCORES:,} scores"


def tilings(q: Tensor, v: Tensor, call: AttentionCall) -> dict[str, Tiling]:
    """Tiles of the kernels that a call and its gradient run."""
    edges = call.visibility.banded
    names = ["forward", "keys", "queries", *(["bias"] if call.attn_bias is not None else [])]
    return {name: find_tiling(name, q, v, edges and name != "bias") for name in names}


def notes(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[str, ...]:
    found = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor):
            found.append(f"{name} is read without the tensor copy engine: its rows are not whole units of 16 bytes")
    if call.counts_cells:
        found.append("every tile of bias or mask is read: causal, window and key_lengths cost less than a mask")
    if call.counts_cells and call.variant.row_scale is not None:
        found.append(f"the row scale of {call.variant.name!r} counts the keys of a mask or bias in a pass of its own")
    return tuple(found)
