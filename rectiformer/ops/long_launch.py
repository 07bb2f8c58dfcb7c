"""One call of the kernels for long sequences: what they are told, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rectiformer.ops.call import Visibility
from rectiformer.ops.launching import block, heads_last, interpreting, table
from rectiformer.ops.tilings import SCALING, Tiling, find_tiling


@dataclass(frozen=True)
class LongCall:
    """What the operators of `long.py` are given."""

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    v: Tensor  # [B, K, N, Dv]
    bias: Tensor | None  # broadcasts to [B, H, M, N]
    mask: Tensor | None  # bool, likewise
    factors: Tensor | None  # [H]
    key_lengths: Tensor | None  # [B]
    seed: Tensor | None
    bounds_q: Tensor | None  # [sequences + 1]
    bounds_k: Tensor | None
    numbers: Sequence[float]
    sizes: Sequence[int]

    def forward(self, rows: Tensor | None = None) -> Tensor:
        """Mixed values [B, H, M, Dv]. In `rows` [B, H, M, 2] are left the sum of each row's rectified powers and the
        entropy of the row divided by it."""
        from rectiformer.ops.kernels.forward import forward

        out = heads_last(self.q, self.v.shape[3])
        name = "forward" if rows is None else "rows"
        self._launch(forward, name, [self.q, self.k, self.v], [out], [self.gain], rows)
        return out

    def backward(self, d_out: Tensor, slopes: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. With `slopes` a, b [B, H, M, 2], x has a + b log x more."""
        from rectiformer.ops.kernels.backward import key_gradients, query_gradients

        read = [self.q, self.k, self.v]
        d_q, d_k, d_v = (heads_last(tensor, tensor.shape[3]) for tensor in read)
        scaled = self._scale_gradients(d_out, d_q) if self.numbers[2] and any(self.edges()) else d_out
        gains, group = [self.gain, self.score_gain], self.q.shape[1] // self.k.shape[1]
        self._launch(key_gradients, "keys", [*read, scaled], [d_k, d_v], gains, slopes, GROUP=group)
        self._launch(query_gradients, "queries", [*read, d_out], [d_q], [self.score_gain], slopes)
        return d_q, d_k, d_v

    def _scale_gradients(self, d_out: Tensor, d_q: Tensor) -> Tensor:
        """`d_out` with each row scaled by its count of keys: where `d_q` will be, if it fits there."""
        from rectiformer.ops.kernels.backward import scale_gradients

        scaled = d_q if d_q.shape == d_out.shape else heads_last(d_out, d_out.shape[3])
        H, _, M, N, _, Dv = self._sizes()
        numbers = [tuple(d_out.stride()), tuple(scaled.stride()), tuple(self.sizes[1:3]), H, M, N, Dv, self.numbers[2]]
        known = self._flags(SCALING, [d_out])
        flags = {name: known[name] for name in ("ROW_SCALE", "RAGGED", "PACKED", "BLOCK_M", "BLOCK_DV", "num_warps")}
        with torch.cuda.device_of(self.q):
            scale_gradients[self._grid(self.sizes[5], SCALING.queries, H)](
                d_out, scaled, self._tables()[1], *self._tables()[3:], *numbers, **flags
            )
        return scaled

    def bias_gradient(self, d_out: Tensor) -> Tensor:
        """The gradient of the bias, in its shape, without ever holding what it is broadcast to."""
        from rectiformer.ops.kernels.bias import bias_gradients

        assert self.bias is not None
        shape = self.bias.shape
        d_bias = self.bias.new_empty(shape, dtype=torch.float32)
        tiling = find_tiling("bias", self.q, self.v, edges=False)
        flags = self._flags(tiling, [self.q])
        for fixed in ("PACKED", "BIAS", "INNER", "TMA", "ASM"):
            del flags[fixed]
        read = [self.q, self.k, self.v, d_out]
        strides = [tuple(tensor.stride()) for tensor in (*read, d_bias)]
        tables = [*self._tables()[:3], *self._cells(), *strides, tuple(self.sizes[1:3]), tuple(shape)]
        numbers = [self.q.shape[0], *self._sizes(), self.numbers[0], self.gain, *self._hidden()]
        grid = (-(-shape[2] // tiling.queries), -(-shape[3] // tiling.keys), shape[0] * shape[1])
        with torch.cuda.device_of(self.q):
            bias_gradients[grid](*read, d_bias, *tables, *numbers, **flags)
        return d_bias.to(self.bias.dtype)

    @property
    def inner(self) -> bool:
        """Whether scores are scaled before the ReLU: a bias asks for it."""
        return self.bias is not None or scales_inside(self.q)

    @property
    def gain(self) -> float:
        """What rectified powers are multiplied with in the end."""
        scale, dropout, _, factor = self.numbers
        return factor * (1.0 if self.inner else scale ** self.sizes[0]) / (1 - dropout)

    @property
    def score_gain(self) -> float:
        """What gradients of queries and keys are multiplied with in the end."""
        return self.gain * (self.numbers[0] if self.inner else 1.0)

    def edges(self) -> tuple[bool, bool]:
        """Whether causal order or a window hides later keys from some query, and whether it hides earlier ones."""
        _, left, right, _, _, most_q, most_k = self.sizes
        if self.bounds_q is not None:  # wherever the queries of a sequence stand among its keys
            return right < max(most_q, most_k) - 1, left < most_k - 1
        seen = Visibility(most_q, most_k, left, right, first=most_k - most_q)
        return seen.hides_later, seen.hides_earlier

    def _launch(
        self,
        kernel: Any,
        name: str,
        read: list[Tensor],
        written: list[Tensor],
        gains: list[float],
        rows: Tensor | None,
        **more: int,
    ) -> None:
        """One program for each tile of keys ("keys") or of queries, head and sequence."""
        tiling = find_tiling(name, self.q, self.v, any(self.edges()))
        flags = self._flags(tiling, read)
        heights = [tiling.queries, tiling.keys, tiling.keys, tiling.queries]
        sources = [source(tensor, size, flags["TMA"]) for tensor, size in zip(read, heights, strict=False)]
        strides = [tuple(tensor.stride()) for tensor in (*read, *written)]
        tables = [*self._tables(), table(rows, self.q), *self._cells(), *strides]
        most, size, owners = (
            (self.sizes[6], tiling.keys, self.k) if name == "keys" else (self.sizes[5], tiling.queries, self.q)
        )
        with torch.cuda.device_of(self.q):  # Triton launches on the current device
            kernel[self._grid(most, size, owners.shape[1])](
                *sources,
                *read,
                *written,
                *tables,
                tuple(self.sizes[1:3]),
                *self._sizes(),
                self.numbers[0],
                *gains,
                *self._hidden(),
                **flags,
                **more,
                STATS=rows is not None,
            )

    def _grid(self, most: int, size: int, heads: int) -> tuple[int, int]:
        """Tiles of `size` rows of the longest sequence, times heads of all sequences."""
        sequences = self.q.shape[0] if self.bounds_q is None else len(self.bounds_q) - 1
        return -(-most // size), sequences * heads

    def _tables(self) -> list[Tensor]:
        """Pointers to factors, key lengths, seed and bounds."""
        tables = (self.factors, self.key_lengths, self.seed, self.bounds_q, self.bounds_k)
        return [table(tensor, self.q) for tensor in tables]

    def _cells(self) -> list[Any]:
        """Pointers to bias and mask, and their strides; broadcast axes have stride 0."""
        shape = (*self.q.shape[:3], self.k.shape[2])
        held = [self.q if tensor is None else tensor.expand(shape) for tensor in (self.bias, self.mask)]
        held = [tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in held]
        return [*held, *(tuple(tensor.stride()) for tensor in held)]

    def _sizes(self) -> list[int]:
        (_, H, M, D), (_, K, N, _) = self.q.shape, self.k.shape
        return [H, H // K, M, N, D, self.v.shape[3]]

    def _hidden(self) -> tuple[float, int]:
        """Exponent of the row scale, and the threshold of the dropout hash."""
        return self.numbers[2], round(self.numbers[1] * 2**32) - 2**31

    def _flags(self, tiling: Tiling, read: list[Tensor]) -> dict[str, Any]:
        """Compile-time arguments. No length is among them."""
        later, earlier = self.edges()
        return {
            "POWER": self.sizes[0],
            "ROW_SCALE": {0.0: 0, 0.5: 1, 1.0: 2}.get(self.numbers[2], 3),
            "PER_HEAD": self.factors is not None,
            "LATER": later,
            "EARLIER": earlier,
            "RAGGED": self.key_lengths is not None,
            "PACKED": self.bounds_q is not None,
            "BIAS": self.bias is not None,
            "MASK": self.mask is not None,
            "DROPS": self.seed is not None and self.numbers[1] > 0,
            "INNER": self.inner,
            "TMA": all(describable(tensor) for tensor in read),
            "ASM": not interpreting(),
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else "tf32",
            "BLOCK_M": tiling.queries,
            "BLOCK_N": tiling.keys,
            "BLOCK_D": block(self.q.shape[3]),
            "BLOCK_DV": block(self.v.shape[3]),
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }


def scales_inside(q: Tensor) -> bool:
    """Whether the dtype asks for scores to be scaled before the ReLU: unscaled ones may overflow in float16."""
    return q.dtype == torch.float16


def describable(tensor: Tensor) -> bool:
    """Whether the tensor copy engine can read it: rows of whole 16-byte units that begin at such a unit."""
    unit = 16 // tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in tensor.stride()[:-1])
    return aligned and tensor.stride(-1) == 1 and tensor.shape[-1] >= unit


def source(tensor: Tensor, rows: int, described: bool) -> Any:
    """What a kernel loads tiles of `rows` rows from: a descriptor for the tensor copy engine, or a pointer."""
    if not described:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, block(tensor.shape[3])])
