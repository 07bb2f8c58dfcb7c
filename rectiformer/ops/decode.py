"""Decoding as one operator of torch, `rectiformer::decode`: queries against a cache of keys and values, Triton only.

It has no gradient. Results lie in memory as [R, Q, H, D], so that joining the heads afterwards moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rectiformer.ops.call import AttentionCall
from rectiformer.ops.fused_norm import fused_rms_norm, kernels_suit, plain_rms_norm
from rectiformer.ops.launching import block, heads_last, kernel_obstacle, row_scale_parts

LARGEST_HEAD = 256
MOST_QUERIES = 64
"""Query rows that may share a key head."""
SHORT_ROOM = 128
"""Most keys for which one program takes all heads of a row, as its norm needs; longer rows want more programs."""
WIDEST_ROW = 1024
"""Most numbers of all heads that one program holds, filled up to powers of two."""
TILE = 4096
"""Numbers of keys that a program without matrix products holds at once, 16 or 32 for each of its threads."""
MOST_KEYS = 64
"""Keys that a program holds at once, at most."""
KEYS_A_SPLIT = 128
"""Least keys that are worth a split."""
MOST_SPLITS = 64
FEW_KEYS = 32
"""Up to here grouped heads of a beam take small blocks: the rows of the next are looked up while one is used."""
PROGRAMS = 4
"""Programs that a multiprocessor runs at once, with what each has asked for on its way from memory."""


@dataclass(frozen=True)
class OutputNorm:
    """The norm of `plain_rms_norm` over all heads of a row, together."""

    gain: Tensor  # [H * Dv]
    gate: Tensor | None
    epsilon: float


def decode_obstacle(q: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> str:
    """Why the kernels cannot take this call; empty when they can."""
    obstacle = kernel_obstacle(q, keys, values, call)
    if obstacle:
        return obstacle
    if max(q.shape[3], values.shape[3]) > LARGEST_HEAD:
        return f"it takes head sizes up to {LARGEST_HEAD}"
    if queries_a_key_head(q, keys) > MOST_QUERIES:
        return f"it takes up to {MOST_QUERIES} query rows a key head"
    if max(keys.stride(0), values.stride(0)) >= 2**31:
        return "it counts the numbers of one cache row in 32 bits"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, keys, values)):
        return "it has no gradient, and one is asked for"
    return ""


def fused_decoding(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    call: AttentionCall,
    new: tuple[Tensor, Tensor] | None,
    ancestors: Tensor | None,
    norm: OutputNorm | None,
    splits: int | None,
    skip: bool | None,
) -> Tensor:
    """`decode_attention` by the kernels; `splits` and `skip` of None leave the choice to the shapes."""
    if call.scale < 0:  # a positive scale leaves the ReLU, a negative one must not
        q, call = -q, replace(call, scale=-call.scale)
    exponent, factor, factors = row_scale_parts(q, call)
    together = splits in (None, 1) and holds_all_heads(q, keys, values) and (norm is not None or fills_device(q))
    splits = 1 if together else splits or count_splits(q, keys)
    skip = (keys.shape[2] > SHORT_ROOM if skip is None else skip) and call.variant.rectified
    inside = norm if together else None
    numbers = [call.scale, exponent, factor, 0.0 if inside is None else inside.epsilon]
    sizes = [call.variant.power, call.visibility.left, splits, int(skip), int(together)]
    assert call.visibility.key_lengths is not None
    out = decode(
        q,
        keys,
        values,
        *(new or (None, None)),
        call.visibility.key_lengths,
        None if ancestors is None else ancestors.contiguous(),
        factors,
        *((None, None) if inside is None else (inside.gain, inside.gate)),
        numbers,
        sizes,
    )
    return out if norm is None or together else norm_heads(out, norm)


def norm_heads(out: Tensor, norm: OutputNorm) -> Tensor:
    """The norm of [R, H, Q, Dv] over all heads, in the same memory order."""
    joined = out.transpose(1, 2).flatten(2)
    apply = fused_rms_norm if kernels_suit(joined, norm.gain, norm.gate) else plain_rms_norm
    normed = apply(joined, norm.gain, norm.gate, norm.epsilon)
    return normed.unflatten(2, (out.shape[1], -1)).transpose(1, 2)


def queries_a_key_head(q: Tensor, keys: Tensor) -> int:
    return q.shape[1] // keys.shape[1] * q.shape[2]


def holds_all_heads(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether one program should take all heads of a row: short rows with one query each."""
    width = power_of_two(q.shape[1]) * max(block(q.shape[3]), block(values.shape[3]))
    return queries_a_key_head(q, keys) == 1 and keys.shape[2] <= SHORT_ROOM and width <= WIDEST_ROW


def fills_device(q: Tensor) -> bool:
    """Whether one program a row is enough."""
    return len(q) > 2 * processors(q)


def count_splits(q: Tensor, keys: Tensor) -> int:
    """Enough programs to fill the device, as long as each has keys enough to be worth it."""
    programs = max(1, len(q) * keys.shape[1])
    return max(1, min(PROGRAMS * processors(q) // programs, keys.shape[2] // KEYS_A_SPLIT, MOST_SPLITS))


def processors(q: Tensor) -> int:
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@torch.library.custom_op("rectiformer::decode", mutates_args=("keys", "values"))
def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    new_key: Tensor | None,
    new_value: Tensor | None,
    lengths: Tensor,
    ancestors: Tensor | None,
    factors: Tensor | None,
    gain: Tensor | None,
    gate: Tensor | None,
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> Tensor:
    """Sum over a row's keys of factors[h] factor n^-exponent [scale q k]+ ** power v; power 0 is a softmax.

    numbers: scale, exponent, factor, epsilon. sizes: power, left, splits, skip, all heads together. The norm,
    which gain and gate describe, asks for all heads together.
    """
    from rectiformer.ops.kernels.decode import decode_merge

    (R, H, Q, _), Dv = q.shape, values.shape[3]
    power, splits = sizes[0], sizes[2]
    out = heads_last(q, Dv)
    # Rows of parts and sums lie in the order of the output's memory.
    parts = out[None] if splits == 1 else q.new_empty(splits, R, Q, H, Dv, dtype=torch.float32).transpose(2, 3)
    sums = q.new_empty(2, splits, R * Q * H if power == 0 and splits > 1 else 0, dtype=torch.float32)
    flat = [sums[0], sums[1], lengths, ancestors, factors, gain, gate]
    with torch.cuda.device_of(q):  # Triton launches on the current device
        launch((q, keys, values), parts, [new_key, new_value], flat, numbers, sizes)
        if splits > 1:
            held = power_of_two(splits) * block(Dv)
            shape = {"SPLITS": power_of_two(splits), "ROWS": max(1, 2048 // held), "BLOCK_DV": block(Dv)}
            programs = -(-R * Q * H // shape["ROWS"])
            decode_merge[(programs,)](parts, sums[0], sums[1], out, R * Q * H, Dv, splits, SOFTMAX=power == 0, **shape)
    return out


def launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    parts: Tensor,
    new: list[Tensor | None],
    flat: list[Tensor | None],
    numbers: Sequence[float],
    sizes: Sequence[int],
) -> None:
    """Run the kernel that suits the shapes, one program a (row, key head, split) or, with all heads, a row.

    `flat`: highest scores and sums of a split softmax, lengths, ancestors, factors, gain, gate.
    """
    from rectiformer.ops.kernels.decode import decode_groups, decode_heads

    q, keys, values = qkv
    (R, H, Q, D), (_, K, room, Dv) = q.shape, values.shape
    (scale, exponent, factor, epsilon), (power, left, splits, _, together) = numbers, sizes
    # All that scales a rectified weight is one number. A softmax is taken in base 2.
    gain, scale = factor * scale**power if power else 1.0, scale * math.log2(math.e)
    strided = [*qkv, parts[0], *(q if tensor is None else tensor for tensor in new)]  # those of None are never read
    strides = [stride for tensor in strided for stride in tensor.stride()]
    flat = [None if tensor is None else tensor.contiguous() for tensor in flat]  # read by address
    steps = [0 if tensor is None or len(tensor) == 1 else tensor.stride(0) for tensor in flat[2:4]]
    (decode_heads if queries_a_key_head(q, keys) == 1 else decode_groups)[(R, 1 if together else K, splits)](
        *strided,
        *(q if tensor is None else tensor for tensor in flat),
        *strides,
        *steps,
        *[parts.stride(0), R, H, K, Q, room, D, Dv, left, scale, gain, exponent, epsilon],
        POWER=power,
        ROW_SCALE={0.0: 0, 0.5: 1, 1.0: 2}.get(exponent, 3),
        PER_HEAD=flat[4] is not None,
        APPEND=new[0] is not None,
        INDEXED=flat[3] is not None,
        SPLIT=splits > 1,
        **choose_blocks(*qkv, flat, sizes),
    )


def choose_blocks(
    q: Tensor, keys: Tensor, values: Tensor, flat: list[Tensor | None], sizes: Sequence[int]
) -> dict[str, int]:
    """Sizes of a program's blocks and its warps, such that registers hold them; and what only `decode_heads` has."""
    *_, skip, together = sizes
    blocks = {"BLOCK_D": block(q.shape[3]), "BLOCK_DV": block(values.shape[3])}
    width, rows = max(blocks.values()), queries_a_key_head(q, keys)
    blocks["SKIP"] = skip
    if rows == 1:
        heads = power_of_two(q.shape[1]) if together else 1
        blocks |= {"HEADS": heads, "NORM": (flat[5] is not None) + (flat[6] is not None)}
        keys_held = min(MOST_KEYS, TILE // (heads * width), block(keys.shape[2]))
        warps = 8 if together else 4
    else:
        blocks["BLOCK_M"] = block(rows)
        wide = width > 128 or q.dtype == torch.float32
        keys_held, warps = MOST_KEYS if width <= 64 else 32, 8 if wide else 4
        keys_held = 16 if q.dtype == torch.float32 else keys_held
        blocks["STAGES"] = 3
        if flat[3] is not None and keys.shape[2] <= FEW_KEYS and width == 128 and q.dtype != torch.float32:
            keys_held, warps, blocks["STAGES"] = 16, 2, 2
    return blocks | {"BLOCK_N": keys_held, "num_warps": warps}


@decode.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return heads_last(q, values.shape[3])
