"""Which Triton kernels can take a call, and the way to them.

Triton may be absent, and `import rectiformer` must stay light. So whether a kernel can take a call is decided here,
without Triton, and the files next to this one, which import it, are loaded when the first call needs them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rectiformer.ops.activations import cosine_scores, unit_rms
from rectiformer.ops.call import AttentionCall, Packing
from rectiformer.ops.gpu.plans import open_plan
from rectiformer.ops.reference import clear_padding

if TYPE_CHECKING:
    from rectiformer.ops.gpu.common import AttentionPlan  # which imports Triton
    from rectiformer.ops.gpu.decode import GrowingPlan

TRITON = find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_SHORT = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
"""Queries, keys and head size of the short kernels: what one program can hold and, in float32, compile in seconds."""
MAX_HEAD_DIM = 256
"""Of the long and the decoding kernels."""
MAX_DECODE_QUERIES = 64
"""Query rows that may share a key head in decoding."""
FLOAT16_POWER = 2
"""The largest p of [p + x]+^p for which float16 holds the weights of all scores that are in use."""
MAX_ROW = 8192
"""Longest row that one program of the norm and simplex kernels can hold."""
SIMPLEX_POWERS = {"sparsemax": 1, "entmax15": 2}
"""Kinds of `Variant.rowwise` whose weights are [x / power - tau]+ ** power, with a tau such that a row sums to 1."""


@dataclass(frozen=True)
class FusedKernels:
    """The kernels that were chosen for a call, and the way to run it."""

    name: str
    """"short", "long", "decode" or, for rows with a threshold or a normalizer, "rowwise"."""
    not_short: str = ""
    """Why the short kernels do not take the call."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> Tensor:
        """`reference_attention` by kernels that never hold M x N of anything in device memory."""
        if self.name == "decode":
            from rectiformer.ops.gpu.decode import fused_decoding

            return fused_decoding(q, k, v, call)
        if self.name == "short":
            from rectiformer.ops.gpu.short import short_attention

            return short_attention(q, k, v, call, packing)
        if call.variant.score is cosine_scores:
            q, k = unit_rms(q), unit_rms(clear_padding(k, call.visibility))
        if self.name == "rowwise":
            from rectiformer.ops.gpu.rowwise import rowwise_attention

            return rowwise_attention(q, k, v, call)
        from rectiformer.ops.gpu.long import long_attention

        return long_attention(q, k, v, call, packing)

    def plan(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None
    ) -> AttentionPlan | GrowingPlan | None:
        """The plan of all calls of this layout; None where kernels are not all that a call takes."""
        row, pointwise = call.variant.row_scale, call.variant.pointwise
        cosine = call.variant.score is cosine_scores and self.name != "short"  # which takes them as they are
        counts = row is not None or (pointwise is not None and pointwise.shift is not None)
        padded = packing is not None or call.visibility.key_lengths is not None
        if (call.counts_cells and counts) or call.scale < 0 or (cosine and (padded or self.name == "decode")):
            return None
        if self.name == "rowwise" or any(isinstance(value, Tensor) for value in call.options.values()):
            return None
        if self.name == "decode":
            from rectiformer.ops.gpu.decode import GrowingPlan

            return None if padded else GrowingPlan(call)
        if not cosine:
            return self.open(q, k, v, call, packing)[0]
        from rectiformer.ops.gpu.common import empty_heads_last
        from rectiformer.ops.gpu.cosine import CosinePlan

        q, k = empty_heads_last(q, q.shape[3]), empty_heads_last(k, k.shape[3])
        inner, held = self.open(q, k, v, call, packing)
        return CosinePlan(inner, inner.restore(held))

    def open(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None
    ) -> tuple[AttentionPlan, list[Tensor]]:
        """The plan of a call of short or long kernels, and its tensors."""
        from rectiformer.ops.gpu.long import LongPlan, long_inputs
        from rectiformer.ops.gpu.short import ShortPlan, short_inputs

        if self.name == "short":
            return open_plan(ShortPlan, short_inputs(q, k, v, call, packing))
        return open_plan(LongPlan, long_inputs(q, k, v, call, packing))


def choose_kernels(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None
) -> FusedKernels | str:
    """The fused kernels that take this call, or why none can."""
    if call.variant.rowwise:
        not_short = f"variant {call.variant.name!r} has no fused kernel for short sequences"
        return rowwise_obstacle(q, k, v, call, packing) or FusedKernels("rowwise", not_short)
    if obstacle := kernel_obstacle(q, k, v, call):
        return obstacle
    if packing is None and not step_obstacle(q, k, v, call):
        return FusedKernels("decode")
    not_short = short_obstacle(q, v, call, packing)
    if not not_short:
        return FusedKernels("short")
    return long_obstacle(q, v, call) or FusedKernels("long", not_short)


def kernel_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why no fused attention kernel can take this call; empty when one may."""
    if call.variant.pointwise is None and call.variant.name != "softmax":
        return f"variant {call.variant.name!r} has no fused kernel"
    if call.variant.anneals and q.dtype == torch.float16 and call.options[call.variant.anneals] > FLOAT16_POWER:
        return f"a power of more than {FLOAT16_POWER} makes weights too large for {q.dtype}, until rows are scaled"
    return device_obstacle(q, k, v, call)


def device_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why no fused attention kernel can run on these tensors, whatever the variant; empty when one may."""
    if q.device.type != "cuda" and not interpreting():
        return f"it runs on CUDA devices, and q is on {q.device}"
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"it takes one of float32, bfloat16 and float16, and q is {q.dtype}, k {k.dtype}, v {v.dtype}"
    if not (q.shape[0] and call.visibility.queries and call.visibility.keys):
        return "nothing is to be computed"
    return "" if TRITON else "Triton is not installed"


def short_obstacle(q: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> str:
    """Why the short kernels cannot take a call that has no `kernel_obstacle`; empty when they can."""
    if call.counts_cells:
        return "it has no bias or mask"
    queries, keys = call.visibility.queries, call.visibility.keys
    if packing is not None:
        if packing.max_seqlen_q is None or packing.max_seqlen_k is None:
            return "it needs max_seqlen_q and max_seqlen_k"
        queries, keys = packing.max_seqlen_q, packing.max_seqlen_k
    elif call.dropout_p and call.origin != (0, 0):
        return "its dropout begins at the first query and key"
    if max(queries, keys, q.shape[3], v.shape[3]) > MAX_SHORT[q.dtype]:
        return f"in {q.dtype} it takes up to {MAX_SHORT[q.dtype]} queries and keys, and head sizes up to that"
    return ""


def step_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why the decoding kernels cannot take a call that has no `kernel_obstacle`; empty when they can."""
    seen = call.visibility
    if q.shape[2] != 1 or call.counts_cells or call.dropout_p:
        return "it takes one query, without bias, mask or dropout"
    if seen.key_lengths is not None and seen.hides_earlier:
        return "its window ends at a row's last key"
    if wants_gradients(*call.options.values()):
        return "it has no gradient, and one is asked for"
    return decode_obstacle(q, k, v, call)


def long_obstacle(q: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why the long kernels cannot take a call that has no `kernel_obstacle`; empty when they can."""
    if call.variant.pointwise is None:
        return f"variant {call.variant.name!r} has no fused kernel for long sequences"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        return f"it takes head sizes up to {MAX_HEAD_DIM}, and they are {q.shape[3]} and {v.shape[3]}"
    if call.origin != (0, 0):
        return "its dropout begins at the first query and key"
    return ""


def rowwise_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, packing: Packing | None = None) -> str:
    """Why the kernels of rows with a threshold or a normalizer cannot take this call; empty when they can."""
    if obstacle := device_obstacle(q, k, v, call):
        return obstacle
    lacks = {"bias or mask": call.counts_cells, "dropout": call.dropout_p, "packed sequences": packing is not None}
    if found := [name for name, asked in lacks.items() if asked]:
        return f"variant {call.variant.name!r} has no fused kernel for {found[0]}"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        return f"it takes head sizes up to {MAX_HEAD_DIM}, and they are {q.shape[3]} and {v.shape[3]}"
    return ""


def row_sums_obstacle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Why the long kernels cannot sum up the rows of weights on the way; empty when they can."""
    if not call.variant.rectified:
        return f"rows of variant {call.variant.name!r} are not rectified, and only such are summed up"
    if call.attn_bias is not None:
        return "a bias gets no gradient from the sums of rows"
    if obstacle := kernel_obstacle(q, k, v, call) or long_obstacle(q, v, call):
        return obstacle
    return "" if call.scale else "a scale of 0 leaves no weights to sum up"


def decode_obstacle(q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> str:
    """Why the decoding kernels cannot take this call; empty when they can."""
    if obstacle := kernel_obstacle(q, keys, values, call):
        return obstacle
    if max(q.shape[3], values.shape[3]) > MAX_HEAD_DIM:
        return f"it takes head sizes up to {MAX_HEAD_DIM}"
    if queries_per_key_head(q, keys) > MAX_DECODE_QUERIES:
        return f"it takes up to {MAX_DECODE_QUERIES} query rows per key head"
    if max(keys.stride(0), values.stride(0)) >= 2**31:
        return "it counts the numbers of one cache row in 32 bits"
    if wants_gradients(q, keys, values, *call.options.values()):
        return "it has no gradient, and one is asked for"
    return ""


def cached_products_suit(q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> bool:
    """Whether kernels can make the two products of a decoding step where the cache lies, for a variant between them."""
    if not TRITON or "products" not in call.variant.implementations or transforms_active():
        return False
    if not on_device(q) or q.dtype not in DTYPES or not q.dtype == keys.dtype == values.dtype:
        return False
    if wants_gradients(q, keys, values, *call.options.values()):
        return False
    fits = max(q.shape[3], values.shape[3]) <= MAX_HEAD_DIM and queries_per_key_head(q, keys) <= MAX_DECODE_QUERIES
    return fits and 0 not in (*q.shape, *values.shape)


def simplex_suits(q: Tensor, call: AttentionCall) -> bool:
    """Whether kernels can make the weights of this call's rows: sparsemax and 1.5-entmax."""
    if call.variant.rowwise not in SIMPLEX_POWERS or not TRITON or q.dtype not in DTYPES:
        return False
    return on_device(q) and 0 < call.visibility.keys <= MAX_ROW


def rms_norm_suits(z: Tensor, gain: Tensor, gate: Tensor | None) -> bool:
    """Whether kernels can take this norm: on a CUDA device, no wider than float32 and `MAX_ROW`."""
    if not TRITON or z.device.type != "cuda" or not 0 < z.shape[-1] <= MAX_ROW:
        return False
    parts = [gain] if gate is None else [gain, gate]
    fit = all(part.device == z.device and part.shape == z.shape[-1:] for part in parts)
    return fit and all(tensor.dtype in DTYPES for tensor in (z, *parts))


def add_norm_suits(x: Tensor, added: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether one kernel can add and norm; it has no gradient, and torch.compile makes a kernel of its own."""
    if not TRITON or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    fit = x.shape == added.shape and 0 < x.shape[-1] <= MAX_ROW and on_device(x)
    return fit and all(tensor.dtype in DTYPES and tensor.device == x.device for tensor in (x, added, weight, bias))


def queries_per_key_head(q: Tensor, keys: Tensor) -> int:
    return q.shape[1] // keys.shape[1] * q.shape[2]


def wants_gradients(*values: object) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def on_device(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" or interpreting()


def interpreting() -> bool:
    """Whether Triton runs kernels in Python, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def transforms_active() -> bool:
    """Whether torch.func transforms or forward-mode duals are around, which custom operators do not support."""
    if torch.compiler.is_compiling():
        return False
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
