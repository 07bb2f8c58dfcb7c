"""Kernel launches that are prepared once and repeated at little cost.

Triton binds, specializes and looks up a kernel at every launch: 16 us for 20 arguments on the host of an H200, longer
than many of our kernels run. Everything but the addresses is the same for all calls of one layout, so a `Launch` lets
Triton do that once and hands later calls to the compiled kernel, 5 us.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rectiformer.ops.gpu.plans import ALIGNMENT


class Launch:
    """One launch of a kernel with everything fixed but the addresses: for tensors of one layout on one device.

    Every kernel takes its tensors first, then numbers, then compile-time flags. `slots` says which of the tensors given
    is which of the kernel's; where a flag keeps one unread, that may be any. With `tiles`, the first of the kernel's
    tensors come twice: before all others they are descriptors for the tensor copy engine, which loads tiles of these
    shapes, or, for None, addresses once more.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        tensors: Sequence[Tensor],
        slots: Sequence[int],
        numbers: Sequence[Any],
        flags: Mapping[str, Any],
        tiles: Sequence[list[int] | None] = (),
    ) -> None:
        self.kernel, self.grid, self.slots, self.numbers, self.flags = kernel, tuple(grid), slots, tuple(numbers), flags
        self.device = tensors[0].get_device()
        self.sources = [
            (slot, tile, list(tensors[slot].shape), list(tensors[slot].stride()))
            for slot, tile in zip(slots, tiles, strict=False)
        ]
        self.compiled: Any = None
        """The compiled kernel, once Triton has launched it with aligned addresses."""
        self.flag_values: tuple[Any, ...] = ()
        """Flags in the kernel's own order."""

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any] | None = None) -> None:
        """Launch for these tensors. Other `numbers` than the launch was made with must be alike to Triton, which tells
        1 and multiples of 16 from the rest."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        low_bits = 0
        for address in addresses:
            low_bits |= address
        if self.compiled is None or low_bits & ALIGNMENT or is_watched():
            self.launch_by_triton(tensors, numbers or self.numbers, bool(low_bits & ALIGNMENT))
        elif torch._C._cuda_getDevice() == self.device:
            self.launch_compiled(tensors, numbers or self.numbers, addresses)
        else:
            with torch.cuda.device(self.device):
                self.launch_compiled(tensors, numbers or self.numbers, addresses)

    def launch_compiled(self, tensors: Sequence[Tensor], numbers: Sequence[Any], addresses: list[int]) -> None:
        """What Triton's own `run` ends with; nothing is looked up, and addresses are not checked again."""
        compiled, (x, y, z) = self.compiled, (*self.grid, 1, 1)[:3]
        sources = [
            addresses[slot] if tile is None else Described(tensors[slot], shape, strides)
            for slot, tile, shape, strides in self.sources
        ]
        compiled.run(
            x, y, z, torch._C._cuda_getCurrentRawStream(self.device), compiled.function, compiled.packed_metadata,
            None, None, None, *sources, *[addresses[slot] for slot in self.slots], *numbers, *self.flag_values,
        )  # fmt: skip

    def launch_by_triton(self, tensors: Sequence[Tensor], numbers: Sequence[Any], unaligned: bool) -> None:
        """Launch, compiling if need be, and keep the compiled kernel if later calls may go straight to it."""
        # Of booleans Triton would make single bits.
        given = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in tensors]
        sources = [
            given[slot] if tile is None else TensorDescriptor(given[slot], shape, strides, tile)
            for slot, tile, shape, strides in self.sources
        ]
        read = [given[slot] for slot in self.slots]
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            compiled = self.kernel[self.grid](*sources, *read, *numbers, **self.flags)
        if compiled is not None and not unaligned and not launch_obstacle():
            names = self.kernel.arg_names[len(sources) + len(read) + len(numbers) :]
            self.flag_values = tuple(self.flags[name] for name in names)
            self.compiled = compiled


class Described:
    """As much of a `TensorDescriptor` as a compiled kernel's launcher reads, without the checks of its layout."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


def is_watched() -> bool:
    """Whether a profiler asks Triton to tell it of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@cache
def launch_obstacle() -> str:
    """Why compiled kernels cannot be launched without Triton's own `run`; empty where its private parts are those that
    this file knows (Triton 3.6). Without them every launch goes through Triton: slower, and as right."""
    try:
        from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
        from triton.compiler.compiler import CompiledKernel
        from triton.knobs import HookChain

        found = list(inspect.signature(CudaLauncher.__call__).parameters)
        if found != ["self", "gridX", "gridY", "gridZ", "stream", "function", "args"]:
            return f"CudaLauncher takes {', '.join(found)}"
        source = inspect.getsource(CompiledKernel.__getitem__)
        passed = "stream, self.function, self.packed_metadata, launch_metadata"
        if passed not in " ".join(source.split()):
            return f"CompiledKernel no longer passes {passed}"
        read = set(re.findall(r"\barg\.(\w+)", inspect.getsource(make_tensordesc_arg)))
        if unknown := read - set(Described.__slots__):
            return f"a descriptor's {', '.join(sorted(unknown))} is read"
        return "" if hasattr(HookChain(), "calls") else "HookChain has no list of calls"
    except (ImportError, AttributeError, TypeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
