"""The same code as where Triton is not installed: attention, norms and decoding by torch's own operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from rectiformer.ops import add_norm, fused_norm, launching


@contextmanager
def without_kernels() -> Iterator[None]:
    """While open, no fused kernel is taken."""
    with ExitStack() as stack:
        for module in (launching, fused_norm, add_norm):
            stack.enter_context(patch.object(module, "TRITON", False))
        yield
