"""Kernel launches that are prepared once and repeated at little cost.

Triton binds, specializes and looks up a kernel at every launch, and its launcher parses every argument: 20 us for the
short kernels and 50 for the long ones on the host of an H200, longer than many of them run. Everything but the
addresses is the same for all calls of one layout. So a `Launch` lets Triton launch once, packs the arguments of the
compiled kernel, and from then on fills in addresses and calls the driver, which takes 4 us.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rectiformer.ops.gpu.plans import ALIGNMENT

NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""How the compiled kernel takes numbers of each of Triton's types."""
INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT."""
MAX_MAPS = 256
"""Descriptors that a launch keeps; beyond that all are made anew."""
MAP_OFFSET = 128
"""Where a `PyCUtensorMap` of Triton holds the descriptor itself."""


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
        self.packed: PackedArguments | None = None
        """What the driver is called with, once Triton has launched the kernel with aligned addresses."""

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any] | None = None) -> None:
        """Launch for these tensors. Other `numbers` than the launch was made with must be alike to Triton, which tells
        1 and multiples of 16 from the rest."""
        launch_all((self,), tensors, numbers)

    def launch_by_triton(self, tensors: Sequence[Tensor], numbers: Sequence[Any], unaligned: bool) -> None:
        """Launch, compiling if need be, and pack the arguments if later calls may go straight to the driver."""
        # Of booleans Triton would make single bits.
        given = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in tensors]
        sources = [
            given[slot] if tile is None else TensorDescriptor(given[slot], shape, strides, tile)
            for slot, tile, shape, strides in self.sources
        ]
        read = [given[slot] for slot in self.slots]
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
            compiled = self.kernel[self.grid](*sources, *read, *numbers, **self.flags)
        if compiled is not None and not unaligned and not launch_obstacle() and is_ordinary(compiled):
            self.packed = PackedArguments(compiled, self, numbers)


def launch_all(launches: Sequence[Launch], tensors: Sequence[Tensor], numbers: Sequence[Any] | None = None) -> None:
    """Launch one after the other for the same tensors, whose addresses are read once.

    A backward pass runs in a thread of autograd's own, where every object that Python touches comes from another core:
    all that is done there takes three times as long as in a loop (docs/log.md).
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    low_bits = 0
    for address in addresses:
        low_bits |= address
    by_triton = low_bits & ALIGNMENT or is_watched()
    for launch in launches:
        if launch.packed is None or by_triton:
            launch.launch_by_triton(tensors, numbers or launch.numbers, bool(low_bits & ALIGNMENT))
        elif torch._C._cuda_getDevice() == launch.device:
            launch.packed.launch(addresses, numbers)
        else:
            with torch.cuda.device(launch.device):
                launch.packed.launch(addresses, numbers)


class PackedArguments:
    """The arguments of a compiled kernel, laid out in memory as the driver wants them.

    One for all threads: a lock is held from the first address that is filled in until the driver has copied them all.
    """

    def __init__(self, compiled: Any, launch: Launch, numbers: Sequence[Any]) -> None:
        metadata = compiled.metadata
        self.compiled, self.device, self.lock = compiled, launch.device, threading.Lock()
        signature = list(compiled.src.signature.values())
        first = len(launch.sources) + len(launch.slots)
        self.kinds = signature[first : first + len(numbers)]
        sources, self.maps = expand_sources(launch, metadata.tensordesc_meta or ())
        arguments = [*sources, *(("address", slot) for slot in launch.slots)]
        begin = len(arguments)
        arguments += typed_numbers(self.kinds, numbers)
        end = len(arguments)
        arguments += [("i64", 0), ("i64", 0)]  # no scratch memory
        self.slots = [slot for kind, slot in arguments if kind == "address"]
        """Of which tensor each address is."""
        # One piece of memory for all but descriptors, addresses first: few lines of the cache to read.
        memory = (ctypes.c_uint64 * len(arguments))()
        self.addresses = (ctypes.c_uint64 * len(self.slots)).from_buffer(memory)
        self.pointers = (ctypes.c_void_p * len(arguments))()
        of_addresses, of_others = count(0, 8), count(8 * len(self.slots), 8)
        cells: list[Any] = [None] * len(arguments)
        for index, (kind, value) in enumerate(arguments):
            offset = next(of_addresses if kind == "address" else of_others)
            self.pointers[index] = ctypes.addressof(memory) + offset
            if kind in NUMBERS:
                cells[index] = NUMBERS[kind].from_buffer(memory, offset)
                cells[index].value = value
        self.numbers = cells[begin:end]
        self.original, self.current = launch.numbers, numbers
        self.where = ctypes.addressof(self.pointers)
        x, y, z = (*launch.grid, 1, 1)[:3]
        self.shape = (compiled.function, x, y, z, 32 * metadata.num_warps, 1, 1, metadata.shared)
        self.call_driver = driver().cuLaunchKernel
        self.fill_map: Any = map_filler() if self.maps else None
        self.made: dict[tuple[int, int], Any] = {}
        """Descriptors by argument and address: torch's allocator gives the same addresses again and again."""

    def launch(self, addresses: list[int], numbers: Sequence[Any] | None) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self.lock:
            self.addresses[:] = [addresses[slot] for slot in self.slots]
            if len(self.made) > MAX_MAPS:
                self.made.clear()
            for index, slot, description in self.maps:
                address = addresses[slot]
                tensor_map = self.made.get((index, address))
                if tensor_map is None:
                    tensor_map = self.made[index, address] = self.fill_map(address, *description, 0)
                self.pointers[index] = id(tensor_map) + MAP_OFFSET
            given = self.original if numbers is None else numbers
            if given is not self.current and given != self.current:  # the layers of a model differ in nothing
                for cell, number in zip(self.numbers, flatten_numbers(self.kinds, given), strict=True):
                    cell.value = number
                self.current = given
            error = self.call_driver(*self.shape, stream, self.where, None)
            if error == INVALID_CONTEXT:  # a thread's first call: it has no context yet
                torch.cuda.set_device(self.device)
                error = self.call_driver(*self.shape, stream, self.where, None)
        if error and all(self.shape[1:4]):  # the driver refuses to launch nothing
            raise RuntimeError(f"the CUDA driver cannot launch {self.compiled.name}: error {error}")


def expand_sources(
    launch: Launch, metadata: Iterable[dict[str, Any]]
) -> tuple[list[tuple[str, Any]], list[tuple[int, int, tuple[Any, ...]]]]:
    """The arguments that a launch's sources become, kind and value; and of each descriptor among them its place, its
    tensor, and what besides the address decides it."""
    arguments: list[tuple[str, Any]] = []
    maps = []
    of_descriptors = iter(metadata)
    for slot, tile, shape, strides in launch.sources:
        if tile is None:
            arguments.append(("address", slot))
            continue
        maps.append((len(arguments), slot, describe(next(of_descriptors), shape, strides)))
        arguments += [("descriptor", None), *(("i32", size) for size in shape), *(("i64", step) for step in strides)]
    return arguments, maps


def describe(metadata: dict[str, Any], shape: list[int], strides: list[int]) -> tuple[Any, ...]:
    """What Triton makes the descriptor of a tensor from, apart from its address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    kind = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    return metadata["swizzle"], metadata["elem_size"], kind, metadata["block_size"], shape, strides


def flatten_numbers(kinds: Sequence[Any], numbers: Sequence[Any]) -> Iterator[Any]:
    """Numbers that the compiled kernel takes, those in tuples one by one; what was compiled in is left out."""
    for kind, number in zip(kinds, numbers, strict=True):
        if isinstance(kind, tuple):
            yield from flatten_numbers(kind, number)
        elif kind != "constexpr":
            yield number


def typed_numbers(kinds: Sequence[Any], numbers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each number that the compiled kernel takes, with its type."""
    return zip(flatten_numbers(kinds, kinds), flatten_numbers(kinds, numbers), strict=True)


def is_ordinary(compiled: Any) -> bool:
    """Whether a kernel takes nothing but what is packed here: no memory of its own, no blocks that cooperate."""
    metadata = compiled.metadata
    wants = metadata.global_scratch_size or metadata.profile_scratch_size or metadata.launch_cooperative_grid
    known = all(kind in NUMBERS or kind[0] == "*" or "tensordesc" in kind for kind in flat_kinds(compiled))
    return known and not (wants or metadata.launch_pdl or metadata.num_ctas != 1)


def flat_kinds(compiled: Any) -> Iterator[str]:
    """The types of all arguments that a compiled kernel takes."""
    kinds = list(compiled.src.signature.values())
    return flatten_numbers(kinds, kinds)


@cache
def driver() -> Any:
    """The CUDA driver. Its calls are short and never wait for the device, so Python's lock is kept meanwhile."""
    library = ctypes.PyDLL("libcuda.so.1")
    sizes = [ctypes.c_uint] * 7
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def map_filler() -> Any:
    """Triton's own function that makes a descriptor for the tensor copy engine."""
    return triton.runtime.driver.active.utils.fill_tma_descriptor


def is_watched() -> bool:
    """Whether a profiler asks Triton to tell it of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@cache
def launch_obstacle() -> str:
    """Why the driver cannot be called with Triton's kernels; empty where its private parts are those that this file
    knows, of Triton 3.6. Without them every launch goes through Triton: slower, and as right."""
    try:
        from triton.backends.nvidia.driver import make_launcher, make_tensordesc_arg
        from triton.knobs import HookChain

        source = inspect.getsource(make_launcher) + inspect.getsource(make_tensordesc_arg)
        missing = [line for line in KNOWN_LINES if line not in source]
        if missing:
            return f"Triton {triton.__version__} launches kernels in another way: no {missing[0]!r}"
        return "" if hasattr(HookChain(), "calls") else "HookChain has no list of calls"
    except (ImportError, AttributeError, TypeError, OSError) as error:
        return f"{type(error).__name__}: {error}"


KNOWN_LINES = (
    'output.append("nvTmaDesc")\n\n                for _ in range(ndim):\n                    output.append("i32")\n'
    '                for _ in range(ndim):\n                    output.append("i64")\n',
    'params.append("&global_scratch")\n    params.append("&profile_scratch")\n',
    "PyObject_HEAD;\n  _Alignas(128) CUtensorMap tensorMap;\n",
    "cuLaunchKernelExHandle(&config, function, params, 0)",
    "TMA_DTYPE_DEVICE_TO_HOST[elem_type],\n        block_size,\n        shape,\n        strides,\n        padding,\n",
)
"""What Triton's launcher does, in its own words: how descriptors are expanded, what follows the arguments, where a
descriptor lies, and what it is made of."""
