"""The one rule for closeness, and the inputs it is applied to.

A fast path may err from float64 at most twice as much as plain eager torch does in the same dtype, plus one rounding of
the largest result. Inputs lie on a grid of quarters: their products and short sums are exact in every dtype, so no
score changes sign by rounding, and gradients, which jump where one does, can be compared at all.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from rectiformer.ops.attention import attention, check_call, run
from rectiformer.ops.call import UNBOUNDED
from rectiformer.ops.reference import reference_attention
from rectiformer.ops.variants import VARIANTS

OPTIONS = {"threshold": {"beta": torch.tensor(0.25)}, "threshold-diff": {"beta": torch.tensor(0.25)}}
"""What variants are compared with unless a test says otherwise: so low a threshold leaves sums of many terms."""


def grid(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random multiples of 1/4 between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype)


def grid_inputs(B: int, H: int, K: int, M: int, N: int, D: int, Dv: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and an upstream gradient, all on the grid."""
    shapes = (B, H, M, D), (B, K, N, D), (B, K, N, Dv), (B, H, M, Dv)
    return [grid(*shape, seed=seed + index) for index, shape in enumerate(shapes)]


def outputs_and_gradients(inputs: list[Tensor], dtype: torch.dtype, how: str, variant: str, **arguments) -> dict:
    """Output and gradients of one call. `how`: a backend, or "eager" for plain torch without wider inner sums."""
    q, k, v, upstream = (tensor.to(dtype) for tensor in inputs)
    leaves = {"d_q": q, "d_k": k, "d_v": v}
    if arguments.get("attn_bias") is not None:
        arguments["attn_bias"] = leaves["d_bias"] = arguments["attn_bias"].to(dtype)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    q, k, v = leaves["d_q"], leaves["d_k"], leaves["d_v"]
    if "d_bias" in leaves:
        arguments["attn_bias"] = leaves["d_bias"]
    options = {name: arguments.pop(name) for name in VARIANTS[variant].options if name in arguments}
    call = check_call(q, k, v, variant, options=options, **arguments)
    out = reference_attention(q, k, v, call, precision=dtype) if how == "eager" else run(q, k, v, call, how)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream, allow_unused=True)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_no_worse(name: str, fast: Tensor, eager: Tensor, exact: Tensor) -> None:
    assert fast.dtype == eager.dtype, f"{name}: {fast.dtype} instead of {eager.dtype}"
    assert fast.shape == exact.shape, f"{name}: {list(fast.shape)} instead of {list(exact.shape)}"
    assert fast.isfinite().all(), f"{name} is not finite"
    if not exact.numel():
        return
    error = (fast.double() - exact).abs().max().item()
    eager_error = (eager.double() - exact).abs().max().item()
    allowed = 2 * eager_error + torch.finfo(fast.dtype).eps * exact.abs().max().item()
    assert error <= allowed, f"{name}: error {error:.3g}, eager torch's is {eager_error:.3g}, allowed {allowed:.3g}"


def assert_matches_reference(inputs: list[Tensor], dtype: torch.dtype, backend: str, variant: str, **arguments) -> None:
    """Output and every gradient of `backend` in `dtype` against the float64 reference, by the rule above."""
    arguments = OPTIONS.get(variant, {}) | arguments
    exact = outputs_and_gradients(inputs, torch.float64, "reference", variant, **arguments)
    eager = outputs_and_gradients(inputs, dtype, "eager", variant, **arguments)
    fast = outputs_and_gradients(inputs, dtype, backend, variant, **arguments)
    for name in exact:
        assert_no_worse(f"{variant} {name}", fast[name], eager[name], exact[name])


def assert_beta_gets_its_gradients(inputs: list[Tensor], backend: str = "fused", **arguments) -> None:
    """First and second derivatives through `threshold` by a backend against the reference in float64."""
    found = []
    for how, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        q, k, v, upstream = (tensor.to(dtype).requires_grad_() for tensor in inputs)
        beta = torch.linspace(0.1, 0.5, q.shape[1], dtype=dtype).requires_grad_()
        out = attention(q, k, v, "threshold", beta=beta, backend=how, **arguments)
        first = torch.autograd.grad(out, (beta, q), upstream, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), (beta, q, k, v))
        found.append([out, *first, *second])
    for ours, exact in zip(*found, strict=True):
        # A hundred float32 roundings: a norm, a root, and sums of up to a hundred products.
        assert (ours.double() - exact).abs().max() <= 100 * torch.finfo(torch.float32).eps * exact.abs().max()


def peak_allocation(work: Callable[[], object]) -> int:
    """Most bytes held at once by tensors that `work` allocates, from the profiler's record of every allocation."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        work()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def kernel_arguments(q, k, v, **given):
    """Arguments of the operators of the short and long kernels, in order; what is not given is off."""
    from rectiformer.ops.gpu.common import KernelCall

    off = dict.fromkeys(field.name for field in fields(KernelCall))
    off |= {"function": "relu", "power": 1, "shift": "", "shift_factor": 0.0}
    off |= {"scale": 0.5, "dropout_p": 0.0, "row_exponent": 0.0, "row_factor": 1.0}
    off |= {"window_left": UNBOUNDED, "window_right": UNBOUNDED, "max_queries": q.shape[2], "max_keys": k.shape[2]}
    assert given.keys() <= off.keys()
    return list((off | {"q": q, "k": k, "v": v} | given).values())
