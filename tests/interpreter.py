"""Our kernels as Triton's interpreter sees them: Python on any machine.

Triton decides at import whether it interprets. On a machine with a GPU it must not: tests/gpu wants it compiled.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()
KERNELS = sorted((Path(__file__).parent.parent / "rectiformer" / "ops" / "gpu").glob("[a-z]*.py"))

if INTERPRETED:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        import triton.language as tl
        from triton.runtime import interpreter

        for path in KERNELS:
            import_module(f"rectiformer.ops.gpu.{path.stem}")
    assert isinstance(tl.sum, interpreter.InterpretedFunction), "Triton was imported before, without its interpreter"

    # The interpreter keeps NaN in every maximum; a GPU's plain one takes the number, and so must a test of kernels.
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        """numpy 2.4 makes no number of an array with one axis, which Triton 3.6 asks of it for the ends of a range."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
