"""What happens to one score on the device: the pointwise functions of the table of variants, and their slopes.

A function is two device functions, its value at x and d times its slope there, and a row of `DEVICE_FUNCTIONS`. Kernels
get both as compile-time arguments, WEIGHT and SLOPE. Scores come scaled, biased and shifted; only a plain ReLU gets
them unscaled, since a positive factor may leave it.

Hidden cells weigh exactly 0 and have no slope. A ReLU makes that of a score of 0 by itself, which is what hidden cells
hold (RECTIFIED), unless its rows are shifted upward. Any other function has its results cleared where cells were tested
at all (TESTED); elsewhere every cell is seen, or belongs to a key that was loaded as zeros together with its value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from rectiformer.ops.activations import RMS_EPSILON
from rectiformer.ops.gpu import interpreting

SHIFT_FLAGS = {"": 0, "log n": 1, "sqrt(2 log n)": 2, "1": 3}
"""The flag SHIFT of each key of `SHIFTS` in ops/activations.py; 0 where rows are not shifted."""
EPSILON = tl.constexpr(RMS_EPSILON)
LN2 = tl.constexpr(0.6931471805599453)
ROOT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_ROOT_2PI = tl.constexpr(0.3989422804014327)
MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
RECIPROCAL_BITS = tl.constexpr(0x7EB50000)
RECIPROCAL_STEP = tl.constexpr(1.4355202)
RECIPROCAL_UNIT = tl.constexpr(0.5151220)
"""Found by a search over the first for the smallest relative error of `quick_sigmoid`'s reciprocal."""
COMPILED = tl.constexpr(not interpreting())
"""Whether these functions will be machine code: Triton's interpreter has no assembler."""


@triton.jit
def relu(x):
    """[x]+ in which NaN stays NaN, as in torch: the plain maximum of a GPU takes the number, 0."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu_slope(x, d):
    return tl.where(x <= 0.0, 0.0, d)  # 0 at 0 and passed at NaN, as torch has it


@triton.jit
def identity(x):
    return x


@triton.jit
def identity_slope(x, d):
    return d


@triton.jit
def leaky_relu(x):
    return tl.where(x > 0.0, x, 0.01 * x)


@triton.jit
def leaky_relu_slope(x, d):
    return tl.where(x > 0.0, d, 0.01 * d)


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * ROOT_HALF))


@triton.jit
def gelu_slope(x, d):
    below = 0.5 * (1.0 + tl.erf(x * ROOT_HALF))
    return d * (below + x * INVERSE_ROOT_2PI * tl.exp(-0.5 * x * x))


@triton.jit
def sigmoid(x):
    """1 / u by the root of 1 / u^2: that takes one instruction of the special function unit, a division several.
    Where u^2 overflows, below -44, the result is 0."""
    u = 1.0 + tl.exp(-x)
    return tl.rsqrt(u * u)


@triton.jit
def sigmoid_slope(x, d):
    s = sigmoid(x)
    return d * (s - s * s)


@triton.jit
def quick_sigmoid(x):
    """`sigmoid` for weights of 16 bits, right to 1.2e-4 of itself.

    The special function unit, an eighth as fast as multiplication, bounds these kernels, so it makes the power of 2
    only. The reciprocal starts from subtracted bits, which halve an exponent's distance to 1 as a quotient does, and
    one step of Newton's, whose constants make its error the same on both sides, ends it. Powers stay below 2^126,
    where bits still subtract; NaN stays NaN.
    """
    power = tl.minimum(x * MINUS_LOG2_E, 126.0, propagate_nan=tl.PropagateNan.ALL)
    if COMPILED:  # without the care for numbers below 2^-126 that tl.exp2 has: 1 is added next
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, True, 1)
    else:
        power = tl.exp2(power)
    u = power * RECIPROCAL_UNIT + RECIPROCAL_UNIT
    guess = (RECIPROCAL_BITS - u.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return guess * (RECIPROCAL_STEP - u * guess)


@triton.jit
def quick_sigmoid_slope(x, d):
    s = quick_sigmoid(x)
    return d * (s - s * s)


@triton.jit
def sigmoid_parts(x):
    """Pairs of s = 1 / (1 + e) and e = 2 ** x in bfloat16: of scores that come in units of -ln 2.

    As `quick_sigmoid`, but only the power of 2 is made one by one, in float32; what follows takes two numbers per
    instruction. The reciprocal's error is that of a rounded number, 1.7e-3 in the mean, and as often up as down: with
    u = (1 + e) / 2 it is guess (1.4140625 - u guess), where the bits of guess are 0x7EB5 less those of u, constants
    found by trying all. The code has -u instead, whose sign meets the one in 0xFEB5.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, u, guess, half, step, most; "
        "mov.b32 half, 0xBF00BF00; mov.b32 step, 0x3FB53FB5; mov.b32 most, 0x7D807D80; "
        "ex2.approx.ftz.f32 a, $2; ex2.approx.ftz.f32 b, $3; cvt.rn.bf16x2.f32 $1, b, a; min.NaN.bf16x2 $1, $1, most; "
        "fma.rn.bf16x2 u, $1, half, half; sub.u32 guess, 0xFEB5FEB5, u; "
        "fma.rn.bf16x2 u, u, guess, step; mul.rn.bf16x2 $0, guess, u; }",
        "=&r,=&r,r,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def paired_sigmoid(x):
    s, _e = sigmoid_parts(x)
    return s


@triton.jit
def paired_sigmoid_slope(x, d):
    """d s (1 - s), where 1 - s is s e: a difference would lose what s is rounded by."""
    s, e = sigmoid_parts(x)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 slope, grad; cvt.rn.bf16x2.f32 grad, $4, $3; mul.rn.bf16x2 slope, $1, $2; "
        "mul.rn.bf16x2 slope, slope, $1; mul.rn.bf16x2 $0, slope, grad; }",
        "=r,r,r,r,r", [s, e, d], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


DEVICE_FUNCTIONS = {
    "relu": (relu, relu_slope),
    "identity": (identity, identity_slope),
    "leaky-relu": (leaky_relu, leaky_relu_slope),
    "gelu": (gelu, gelu_slope),
    "sigmoid": (sigmoid, sigmoid_slope),
}
QUICK_FUNCTIONS = {"sigmoid": (quick_sigmoid, quick_sigmoid_slope)}
"""What weights of 16 bits are made by instead: faster, and wrong by less than their rounding."""
PAIRED_FUNCTIONS = {"sigmoid": {"WEIGHT": paired_sigmoid, "SLOPE": paired_sigmoid_slope}}
"""What weights of bfloat16 are made by where each thread holds pairs of scores, in units of `PAIRED_UNITS`. Machine
code only, as Triton's interpreter has no assembler."""
PAIRED_UNITS = {"sigmoid": -1 / math.log(2)}
"""What the scale and the shift of scores are multiplied with."""


def pointwise_flags(function: str, power: int, shift: str, per_head: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments of all attention kernels, for queries of `dtype`; a softmax, of power 0, has no function
    and no shift."""
    functions = DEVICE_FUNCTIONS if dtype == torch.float32 else DEVICE_FUNCTIONS | QUICK_FUNCTIONS
    weight, slope = functions[function if power else "relu"]
    return {
        "POWER": power,
        "WEIGHT": weight,
        "SLOPE": slope,
        "RECTIFIED": weight is relu and shift != "1",
        "SHIFT": SHIFT_FLAGS[shift],
        "SHIFT_PER_HEAD": per_head,
    }


@triton.jit
def whole_power(x, POWER: tl.constexpr):
    product = x
    for _ in tl.static_range(POWER - 1):
        product = product * x
    return product


@triton.jit
def weigh(
    scores, seen, DTYPE: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, RECTIFIED: tl.constexpr,
    TESTED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """WEIGHT(scores) ** POWER in DTYPE, 0 for hidden cells.

    ASM folds a ReLU into the conversion, which Triton does not find by itself; it keeps NaN too. A square is then taken
    of pairs. The interpreter has no assembler, so it takes the other way.
    """
    if ASM and RECTIFIED and POWER == 1 and tl.bfloat16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [scores], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif ASM and RECTIFIED and POWER == 1 and tl.float16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [scores], dtype=tl.float16, is_pure=True, pack=2
        )
    elif ASM and RECTIFIED and POWER == 2 and tl.bfloat16 == DTYPE:
        weights = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.relu.bf16x2.f32 pair, $2, $1; mul.rn.bf16x2 $0, pair, pair; }",
            "=r,r,r", [scores], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights = whole_power(WEIGHT(scores), POWER)
        if TESTED and not RECTIFIED:
            weights = tl.where(seen, weights, 0.0)
        weights = weights.to(DTYPE)
    return weights


@triton.jit
def score_gradients(
    scores, seen, d_weights, DTYPE: tl.constexpr, POWER: tl.constexpr, WEIGHT: tl.constexpr, SLOPE: tl.constexpr,
    RECTIFIED: tl.constexpr, TESTED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradients in DTYPE of what `weigh` was given, from those of the weights, but for the factor POWER; 0 for hidden
    cells.

    ASM takes pairs here too. Where a weight of 16 bits is 0, so is its slope; NaN is unlike 0, and passes.
    """
    if ASM and RECTIFIED and POWER == 1 and tl.bfloat16 == DTYPE:
        d_scores = tl.inline_asm_elementwise(
            "{ .reg .b32 pair, grad, zero; mov.b32 zero, 0; cvt.rn.relu.bf16x2.f32 pair, $2, $1; "
            "cvt.rn.bf16x2.f32 grad, $4, $3; set.neu.u32.bf16x2 pair, pair, zero; and.b32 $0, pair, grad; }",
            "=r,r,r,r,r", [scores, d_weights], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and RECTIFIED and POWER == 2 and tl.bfloat16 == DTYPE:
        d_scores = tl.inline_asm_elementwise(
            "{ .reg .b32 pair, grad; cvt.rn.relu.bf16x2.f32 pair, $2, $1; cvt.rn.bf16x2.f32 grad, $4, $3; "
            "mul.rn.bf16x2 $0, pair, grad; }",
            "=r,r,r,r,r", [scores, d_weights], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        if POWER > 1:
            d_weights = whole_power(WEIGHT(scores), POWER - 1) * d_weights
        d_scores = d_weights if RECTIFIED and POWER > 1 else SLOPE(scores, d_weights)  # such a power is 0 below 0
        if TESTED and not RECTIFIED:
            d_scores = tl.where(seen, d_scores, 0.0)
        d_scores = d_scores.to(DTYPE)
    return d_scores


@triton.jit
def shift_unit(count, SHIFT: tl.constexpr):
    """What a row that sees `count` keys is shifted by, but for its factor.

    In the gradient of keys, threads make it for every query of a tile: so by the one instruction each that the special
    function unit has for logarithms and roots, whose error, 2^-22, is that of a rounded score.
    """
    if SHIFT == 3:
        unit = tl.where(count > 0.0, 1.0, 1.0)  # in the shape of the counts, which nothing reads then
    elif COMPILED:
        unit = LN2 * tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [count], tl.float32, True, 1)
    else:
        unit = LN2 * tl.log2(count)
    if SHIFT == 2:
        unit = tl.sqrt(2.0 * unit)
    return unit


@triton.jit
def inverse_rms(x, D, AXIS: tl.constexpr):
    """What divides vectors of size D by their root mean square, as `unit_rms` in ops/activations.py does."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, AXIS) / D + EPSILON))


@triton.jit
def unit_rows(x, D):
    """Rows of a block divided by their root mean square, in their own dtype."""
    wide = x.to(tl.float32)
    return (wide * inverse_rms(wide, D, 1)[:, None]).to(x.dtype)


@triton.jit
def unit_rows_gradient(d_unit, x, D):
    """The gradient of what `unit_rows` was given: with u = x r it is r (d_unit - u mean(d_unit u))."""
    wide = x.to(tl.float32)
    r = inverse_rms(wide, D, 1)[:, None]
    unit = wide * r
    return r * (d_unit - unit * (tl.sum(d_unit * unit, 1) / D)[:, None])


@triton.jit
def key_gains(k, D, AXIS: tl.constexpr, UNIT_KEYS: tl.constexpr):
    """What divides keys by their root mean square; their scores are multiplied with it."""
    return inverse_rms(k.to(tl.float32), D, AXIS) if UNIT_KEYS else 1.0


@triton.jit
def scale_scores(
    scores, gains, scale, shift, SCALE_INSIDE: tl.constexpr, SHIFT: tl.constexpr, UNIT_KEYS: tl.constexpr
):  # fmt: skip
    """Scores times what their keys ask for, scaled and shifted: as functions other than a plain ReLU take them."""
    if UNIT_KEYS:
        scores = scores * gains
    if SCALE_INSIDE:
        scores = scores * scale
    return scores - shift if SHIFT > 0 else scores
