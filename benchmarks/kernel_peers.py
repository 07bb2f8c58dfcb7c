"""The peers of the fused kernels: SDPA's backends, torch's packed attention, FlexAttention, AdaSplash, plain torch.

A peer that is not there or does not run on this device raises; the benchmark says so and goes on without it.
"""

from __future__ import annotations

import inspect
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_timing import Attend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ReLU attention as a user writes it."""
    return F.relu(q @ k.mT * q.shape[-1] ** -0.5) @ v


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


def compile_together(tuner: Any) -> None:
    """Let a tuner's first run compile all its configurations in threads."""
    from triton.runtime._async_compile import AsyncCompileMode

    run = tuner.run

    def first_run(*args: object, **kwargs: object) -> object:
        tuner.run = run
        settings = {name: value for name, value in kwargs.items() if name != "warmup"}
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            tuner.warmup(*args, **settings)
        return run(*args, **kwargs)

    tuner.run = first_run
