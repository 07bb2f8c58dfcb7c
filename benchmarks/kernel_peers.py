"""The peers of our kernels: SDPA's backends, torch's packed attention, FlexAttention, plain torch, published kernels.

A peer that is not there or does not run on this device raises; the benchmark says so and goes on without it.
"""

from __future__ import annotations

import inspect
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_timing import Attend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rectiformer.ops.activations import RMS_EPSILON

RowTerm = Callable[[Tensor, int], Tensor]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def add_wheels(folder: Path, target: Path) -> None:
    """Unpack pure Python wheels into `target` and let them be imported: Triton reads the sources of its kernels."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    sys.path.insert(0, str(target))


def sdpa(backend: str, **arguments: object) -> Attend:
    """SDPA by one backend, or with "sdpa" by the one it picks itself."""
    if backend == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **arguments)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    return attend


def packed(bounds_q: Tensor, bounds_k: Tensor, longest: tuple[int, int], causal: bool) -> Attend:
    """torch's own attention over packed sequences, whose way to say causal has changed."""
    from torch.nn.attention.varlen import varlen_attn

    says_causal = "is_causal" in inspect.signature(varlen_attn).parameters
    order = {"is_causal": causal} if says_causal else {"window_size": (-1, 0 if causal else -1)}
    bounds = bounds_q.to(torch.int32), bounds_k.to(torch.int32)
    return lambda q, k, v: varlen_attn(q, k, v, *bounds, *longest, **order)


def require_cuda(device: str) -> None:
    """On a CPU compiling takes a minute and Triton kernels do not run."""
    if device != "cuda":
        raise NotImplementedError("measured on CUDA devices only")


BETA = 0.5
"""Of "threshold". At its paper's 1, random rows of 4,096 keys see next to nothing, and speed would say little."""
PLAIN: dict[str, tuple[RowTerm | None, Callable[[Tensor, Tensor | None], Tensor]]] = {
    "rela": (None, lambda x, _: F.relu(x)),
    "relu2": (lambda n, D: 1 / n, lambda x, row: F.relu(x).square() * row),
    "sigmoid": (lambda n, D: n.log(), lambda x, row: torch.sigmoid(x - row)),
    "threshold": (lambda n, D: BETA * (2 * n.log()).sqrt(), lambda x, row: F.relu(x - row).square()),
}
"""What a row that sees n keys of size D adds or multiplies with, and the weights made of it and of scores x."""


@cache
def row_terms(variant: str, causal: bool, keys: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The terms of all rows [N, 1], or of any [1, 1]; kept, so that plain torch does not pay for them in every call."""
    count = torch.arange(1 if causal else keys, keys + 1, device=device, dtype=torch.float32)[:, None]
    return PLAIN[variant][0](count, size).to(dtype)


def plain(variant: str = "rela", causal: bool = False) -> Attend:
    """Attention as a user writes it, which holds all scores."""
    term, weigh = PLAIN[variant]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if variant == "threshold":
            q, k = (F.rms_norm(tensor, tensor.shape[-1:], eps=RMS_EPSILON) for tensor in (q, k))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        row = None if term is None else row_terms(variant, causal, *k.shape[2:], q.dtype, q.device)
        weights = weigh(scores, row)
        return (weights.tril() if causal else weights) @ v

    return attend


def compiled(function: Attend, device: str) -> Attend:
    """`function` through torch.compile, in a form whose graph can be kept for several backward passes."""
    require_cuda(device)
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def log_score(score: Tensor, *_: Tensor) -> Tensor:
    return torch.log(torch.relu(score) + 1)


def flex_emulation(length: int, causal: bool, device: str) -> Attend:
    """ReLU attention through FlexAttention's softmax: weights relu + 1, less the sum of visible values.

    The idea is attention-gym's. Compiled on a GPU; on a CPU FlexAttention has no backward pass.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, length, length, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, aux = flex_attention(q, k, v, score_mod=log_score, block_mask=mask, return_aux=AuxRequest(lse=True))
        values = v.to(torch.promote_types(v.dtype, torch.float32))
        seen = values.cumsum(2) if causal else values.sum(2, keepdim=True)
        return (out.to(values.dtype) * aux.lse.to(values.dtype).exp()[..., None] - seen).to(q.dtype)

    return compiled(attend, device) if device == "cuda" else attend


def entmax_attention() -> Attend:
    """Causal entmax-1.5 attention by AdaSplash 2.

    It would try 60 configurations of its kernels at every length; it does so at the first, keeps what was best there,
    and compiles them in threads.
    """
    import adasplash.adasplash_v2 as module
    from triton.runtime.autotuner import Autotuner

    for tuner in vars(module).values():
        if isinstance(tuner, Autotuner):
            if hasattr(tuner, "best_config"):
                tuner.configs = [tuner.best_config]
            else:
                compile_together(tuner)
    return module.sparse_attn


def sigmoid_attention(causal: bool) -> Attend:
    """Sigmoid attention by triton-sigmoid, of [B, N, H, D]. Causal or not, it subtracts log N from every score."""
    import triton_sigmoid.sigmoid_triton_dense as module
    from triton.runtime.autotuner import Autotuner

    for tuner in vars(module).values():
        if isinstance(tuner, Autotuner) and "run" not in vars(tuner):
            compile_together(tuner)
    return lambda q, k, v: module.sigmoid_attention(q, k, v, is_causal=causal)


def threshold_attention() -> Attend:
    """Causal threshold attention by the kernel of its paper, of [B, H, N, D]; its file is in --peer-folder.

    It takes cosines: the norms of q and k, which are a part of ours, are made by others and not timed.
    """
    from triton_threshold_attention import threshold_rela_triton

    return lambda q, k, v: threshold_rela_triton(q, k, v, BETA, 2.0)


def compile_together(tuner: Any) -> None:
    """Let a tuner's next run compile all its configurations in threads."""
    from triton.runtime._async_compile import AsyncCompileMode

    run = tuner.run

    def first_run(*args: object, **kwargs: object) -> object:
        del tuner.run  # its class has the method that stood here
        settings = {name: value for name, value in kwargs.items() if name != "warmup"}
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            tuner.warmup(*args, **settings)
        return run(*args, **kwargs)

    tuner.run = first_run
