"""Rows over long sequences: ours vs. SDPA, FlexAttention, plain torch, and published entmax, sigmoid and threshold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from kernel_errors import Errors, part_errors
from kernel_peers import (
    BETA,
    compiled,
    entmax_attention,
    flex_emulation,
    plain,
    sdpa,
    sigmoid_attention,
    threshold_attention,
)
from kernel_setup import Bench, Case, Row, Scale, Trial, enter
from kernel_timing import Attend, backward_work, both_work, extra_percent, forward_work
from torch import Tensor

from rectiformer import attention

WORKS = {"forward": forward_work, "backward": backward_work, "forward+backward": both_work}


def dense_case(direction: str, size: int, causal: bool, length: int, scale: Scale) -> Case:
    heads, batch = scale.width // size, scale.tokens // length
    mask = "causal" if causal else "full"
    return {"pass": direction, "size": size, "mask": mask, "length": length, "batch": batch, "heads": heads}


def count_flops(bench: Bench, direction: str, causal: bool, length: int) -> float:
    """Two products forward, five backward; half of them where half is hidden."""
    forward = 4 * bench.scale.tokens * length * bench.scale.width / (2 if causal else 1)
    return {"forward": 1, "backward": 2.5, "forward+backward": 3.5}[direction] * forward


def matmul_rows(bench: Bench) -> Iterator[Row]:
    """The rate of a large matrix product: the ceiling of the forward pass."""
    n = bench.scale.matrix

    def build() -> Trial:
        a, b = (bench.draw(n, n, seed=seed).detach() for seed in range(2))
        return Trial({"cublas": lambda: lambda: a @ b}, bench.eagerly, flops=2.0 * n**3)

    yield Row("matmul", {"size": n}, build)


def dense_rows(bench: Bench, direction: str) -> Iterator[Row]:
    """Ours vs. SDPA's two fastest backends."""
    if direction == "forward":
        yield from matmul_rows(bench)
    for size, causal, length in product(bench.scale.sizes, (False, True), bench.scale.lengths):
        case = dense_case(direction, size, causal, length, bench.scale)
        yield Row(direction, case, partial(dense_trial, bench, direction, size, causal, length))


def dense_trial(bench: Bench, direction: str, size: int, causal: bool, length: int) -> Trial:
    tensors, ours = bench.draw_dense(size, length), bench.ours(causal=causal)
    entered = enter(
        WORKS[direction],
        tensors,
        ours=lambda: ours,
        cudnn=lambda: sdpa("cudnn", is_causal=causal),
        flash=lambda: sdpa("flash", is_causal=causal),
    )
    flops = count_flops(bench, direction, causal, length)
    return Trial(
        entered,
        bench.eagerly,
        flops=flops,
        checks={"ours": lambda: part_errors(ours, tensors, direction, "rela", causal=causal)},
    )


def variant_cases(bench: Bench) -> dict[str, tuple[str, Case]]:
    """Every argument that makes another kernel, with its variant and arguments."""
    length = bench.scale.one_length
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(length // 2, length + 1, (bench.scale.tokens // length,), generator=generator)
    heads = bench.scale.width // bench.scale.sizes[0]
    return {
        "relu2": ("relu2", {}),
        "reluformer, a gamma per head": ("reluformer", {"gamma": torch.linspace(0.5, 2, heads, device=bench.device)}),
        "relu-seqlen": ("relu-seqlen", {}),
        "dropout 0.1": ("rela", {"dropout_p": 0.1, "seed": 1}),
        "key lengths": ("rela", {"key_lengths": lengths.to(bench.device)}),
        "causal window": ("rela", {"causal": True, "window_size": length // 8}),
    }


def variant_rows(bench: Bench) -> Iterator[Row]:
    size, length = bench.scale.sizes[0], bench.scale.one_length
    for (name, (variant, arguments)), direction in product(variant_cases(bench).items(), ("forward", "backward")):
        causal = bool(arguments.get("causal"))
        case = {"variant": name, **dense_case(direction, size, causal, length, bench.scale)}
        yield Row("variants", case, partial(variant_trial, bench, direction, variant, arguments))


def variant_trial(bench: Bench, direction: str, variant: str, arguments: Case) -> Trial:
    """Beside the same attention without the argument, and SDPA; a learned gamma has its gradient in the pass."""
    causal = bool(arguments.get("causal"))
    *inputs, upstream = bench.draw_dense(bench.scale.sizes[0], bench.scale.one_length)
    fixed = dict(arguments)
    learned = [fixed.pop("gamma").requires_grad_()] if "gamma" in fixed else []

    def attend(q: Tensor, k: Tensor, v: Tensor, *gamma: Tensor) -> Tensor:
        options = {"gamma": gamma[0]} if gamma else {}
        return attention(q, k, v, variant, backend=bench.backend, **fixed, **options)

    work, tensors = WORKS[direction], [*inputs, upstream]
    entered = enter(work, [*inputs, *learned, upstream], ours=lambda: attend)
    entered |= enter(work, tensors, rela=lambda: bench.ours(causal=causal))
    entered |= enter(work, tensors, cudnn=lambda: sdpa("cudnn", is_causal=causal))
    return Trial(
        entered,
        bench.eagerly,
        checks={
            "ours": lambda: part_errors(bench.ours(variant, **arguments), tensors, direction, variant, **arguments)
        },
    )


def entmax_rows(bench: Bench) -> Iterator[Row]:
    """Ours, both powers, vs. fused entmax attention."""
    size = bench.scale.sizes[0]
    for length in bench.scale.entmax_lengths:
        case = dense_case("forward+backward", size, True, length, bench.scale)
        yield Row("entmax", case, partial(entmax_trial, bench, size, length))


def entmax_trial(bench: Bench, size: int, length: int) -> Trial:
    tensors = bench.draw_dense(size, length)
    entered = enter(
        both_work,
        tensors,
        ours=lambda: bench.ours(causal=True),
        ours_relu2=lambda: bench.ours("relu2", causal=True),
        adasplash=entmax_attention,
    )
    return Trial(entered, bench.eagerly, flops=count_flops(bench, "forward+backward", True, length))


def sigmoid_rows(bench: Bench) -> Iterator[Row]:
    """Sigmoid attention vs. its published Triton kernel."""
    for size, causal, length in product(bench.scale.sizes, (False, True), bench.scale.lengths[1:]):
        for direction in ("forward", "forward+backward"):
            case = dense_case(direction, size, causal, length, bench.scale)
            yield Row("sigmoid", case, partial(sigmoid_trial, bench, direction, size, causal, length))


def sigmoid_trial(bench: Bench, direction: str, size: int, causal: bool, length: int) -> Trial:
    tensors = bench.draw_dense(size, length)
    turned = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in tensors]
    peer = cache(lambda: sigmoid_attention(causal))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, "sigmoid", causal=causal)

    def turned_peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return peer()(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)

    entered = enter(WORKS[direction], tensors, ours=lambda: ours)
    entered |= enter(WORKS[direction], turned, triton_sigmoid=peer)
    checked = direction.removeprefix("forward+")
    checks = {"ours": lambda: part_errors(ours, tensors, checked, "sigmoid", causal=causal)}
    if not causal:  # where it is, the peer's weights are others
        checks["triton sigmoid"] = lambda: part_errors(turned_peer, tensors, checked, "sigmoid")
    return Trial(entered, bench.eagerly, flops=count_flops(bench, direction, causal, length), checks=checks)


def threshold_rows(bench: Bench) -> Iterator[Row]:
    """Causal threshold attention, power 2, vs. the kernel of its paper."""
    for size, length in product(bench.scale.sizes, bench.scale.lengths[1:]):
        for direction in ("forward", "forward+backward"):
            case = dense_case(direction, size, True, length, bench.scale)
            yield Row("threshold", case, partial(threshold_trial, bench, direction, size, length))


def as_cosines(tensors: list[Tensor]) -> list[Tensor]:
    """The same with q and k of length 1, whose products are cosines, as the peer expects them."""
    q, k, *others = tensors
    return [*(F.normalize(tensor.detach(), dim=-1).requires_grad_() for tensor in (q, k)), *others]


def threshold_arguments() -> Case:
    """The call that the peer computes, but for a factor: its scores are cosines, ours sqrt(D) times as large."""
    return {"causal": True, "beta": BETA, "power": 2}


def threshold_trial(bench: Bench, direction: str, size: int, length: int) -> Trial:
    tensors, arguments = as_cosines(bench.draw_dense(size, length)), threshold_arguments()
    peer = cache(threshold_attention)
    checked = direction.removeprefix("forward+")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, "threshold", **arguments)

    def errors(attend: Attend) -> Errors:
        return part_errors(attend, tensors, checked, "threshold", **arguments)

    return Trial(
        enter(WORKS[direction], tensors, ours=lambda: ours, tda=peer),
        bench.eagerly,
        flops=count_flops(bench, direction, True, length),
        checks={"ours": lambda: errors(ours), "tda": lambda: errors(lambda *qkv: size * peer()(*qkv))},
    )


def flex_rows(bench: Bench) -> Iterator[Row]:
    size, length = bench.scale.sizes[0], bench.scale.one_length
    for causal, direction in product((False, True), ("forward", "backward")):
        case = dense_case(direction, size, causal, length, bench.scale)
        yield Row("flex", case, partial(flex_trial, bench, direction, size, causal, length))


def flex_trial(bench: Bench, direction: str, size: int, causal: bool, length: int) -> Trial:
    tensors, ours = bench.draw_dense(size, length), bench.ours(causal=causal)
    emulation = cache(lambda: flex_emulation(length, causal, bench.device))  # compiled once, timed and checked
    return Trial(
        enter(WORKS[direction], tensors, ours=lambda: ours, flex=emulation),
        bench.eagerly,
        flops=count_flops(bench, direction, causal, length),
        checks={
            "ours": lambda: part_errors(ours, tensors, direction, "rela", causal=causal),
            "flex": lambda: part_errors(emulation(), tensors, direction, "rela", causal=causal),
        },
    )


def plain_rows(bench: Bench) -> Iterator[Row]:
    """Ours vs. what a user writes, which holds all scores."""
    size = bench.scale.sizes[0]
    for length, direction in product(bench.scale.lengths[:2], ("forward", "backward")):
        case = dense_case(direction, size, False, length, bench.scale)
        yield Row("plain", case, partial(plain_trial, bench, direction, size, length))


def plain_trial(bench: Bench, direction: str, size: int, length: int) -> Trial:
    tensors = bench.draw_dense(size, length)
    entered = enter(
        WORKS[direction], tensors, ours=bench.ours, eager=plain, compiled=lambda: compiled(plain(), bench.device)
    )
    return Trial(entered, bench.eagerly, flops=count_flops(bench, direction, False, length))


def memory_rows(bench: Bench) -> Iterator[Row]:
    """What a forward and a backward pass hold at once besides inputs, output and gradients, at the longest length."""
    length = bench.scale.lengths[-1]
    for size, causal in product(bench.scale.sizes, (False, True)):
        case = dense_case("forward+backward", size, causal, length, bench.scale)
        yield Row("memory", case, partial(memory_trial, bench, size, causal, length))


def memory_trial(bench: Bench, size: int, causal: bool, length: int) -> Trial:
    tensors = bench.draw_dense(size, length)
    entered = enter(
        both_work,
        tensors,
        ours=lambda: bench.ours(causal=causal),
        cudnn=lambda: sdpa("cudnn", is_causal=causal),
        flash=lambda: sdpa("flash", is_causal=causal),
    )
    return Trial(entered, lambda work: extra_percent(work, tensors, bench.device), unit="extra_percent")
